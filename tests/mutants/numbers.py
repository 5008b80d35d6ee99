"""Mutants that break promises about numbers."""

from __future__ import annotations

from mutants.mutant import Mutant

FIT = "kfac/fit.py"
NONFINITE = "kfac/test_nonfinite.py::"
GUARD = "test_result_check.py::"
WEIGHTS = "predict/test_changed_weights.py::"
NAMED = "kfac/test_nonfinite.py::test_a_frame_that_is_not_finite_is_fatal_and_named"
SAME = "predict/test_covariance.py::test_same_seed_same_bytes"
CARRY = "test_provenance.py::test_results_carry_version_seed_fingerprint_and_settings"
BORDER = "predict/head/test_kernel_sizes.py::test_kernels_at_the_border"

NUMBERS = [
    Mutant(
        "inputs that are not finite",
        "_torch/modules.py",
        "if not _have_finite_sums([leaf for _, leaf in leaves]):",
        "if False:",
        f"{NAMED}[inputs]",
    ),
    Mutant(
        "gradients that are not finite",
        "kfac/accumulate.py",
        "    if bad:\n        raise NotFiniteFrameError",
        "    if False:\n        raise NotFiniteFrameError",
        f"{NAMED}[gradient]",
    ),
    Mutant(
        "frames named as the data set does",
        "kfac/passes.py",
        "{error}{_tokens(item[1])}",
        "{error}",
        f"{NONFINITE}test_frames_are_named_as_the_data_set_has_them",
    ),
    Mutant(
        "skipped frames are counted",
        "kfac/passes.py",
        "self.skipped.append(number)",
        "pass",
        f"{NONFINITE}test_skipped_frames_leave_no_trace_but_their_number[loss-0]",
    ),
    Mutant(
        "a covariance is positive semi-definite",
        "result_check.py",
        "failed == 0",
        "failed == failed",
        f"{GUARD}test_the_check_agrees_with_the_eigenvalues[0]",
    ),
    Mutant(
        "a covariance is finite",
        "result_check.py",
        "_is_finite(C).flatten(1).all(1)",
        "_is_finite(C).flatten(1).any(1)",
        f"{GUARD}test_the_violated_property_is_named",
    ),
    Mutant(
        "a covariance is symmetric",
        "result_check.py",
        ".abs() <= slack)",
        ".abs() <= 1)",
        f"{GUARD}test_the_violated_property_is_named",
    ),
    Mutant(
        "every method is guarded",
        "predict/predictor.py",
        "            found,\n            self.method,",
        "            found[:0],\n            self.method,",
        "predict/test_covariance.py::test_every_method_checks_its_covariances[ExactGLM]",
    ),
    Mutant(
        "stages are compared for every kind of box",
        "predict/route/verification.py",
        "(None, *kind.unique().tolist())",
        "(None,)",
        "predict/head/test_first_frame.py::test_wrong_stages_of_a_rare_kind_are_refused[MCGLM]",
    ),
    Mutant(
        "stages are compared in every frame",
        "predict/route/exact.py",
        "            if not self.stages_check.same_boxes(staged, point):",
        "            if False:",
        "predict/head/test_wrong_later.py::test_the_first_frame_of_a_batch_for_all",
    ),
    Mutant(
        "instances are compared in every frame",
        "predict/route/instances.py",
        "if bool((box_errors(z, point.z, point.shadow) <= tolerance).all()):",
        "if True:",
        "predict/head/test_wrong_later.py::test_a_wrong_border_is_seen_when_a_box_reaches_it",
    ),
    Mutant(
        "a variance is never below 0",
        "predict/predictor.py",
        ".clamp_(min=0)",
        ".clamp_(min=-1)",
        "predict/test_covariance.py::test_a_variance_below_zero_by_rounding_is_zero",
    ),
    Mutant(
        "the predictive covariance is checked",
        "result_check.py",
        "if found.predictive is not None:",
        "if False:",
        f"{GUARD}test_a_number_out_of_range_is_named",
    ),
    Mutant(
        "probabilities lie between 0 and 1",
        "result_check.py",
        "share.clamp(0, 1)",
        "share.clamp(min=0)",
        f"{GUARD}test_a_number_out_of_range_is_named",
    ),
    Mutant(
        "every share of the weights is checked",
        "_torch/snapshot.py",
        "(self._next + 1) % max(1, len(self._shares))",
        "self._next",
        f"{WEIGHTS}test_a_change_is_noticed_within_the_delay",
    ),
    Mutant(
        "the weights are checked before a result leaves",
        "predict/predictor.py",
        "return self._checksum.next_share()",
        "return torch.ones((), dtype=torch.bool, device=self.device)",
        f"{WEIGHTS}test_always_notices_at_once",
    ),
    Mutant(
        "a degenerate evidence gives way to the weights' RMS",
        "posterior/prior.py",
        " and evidence_rises([block], posterior.n_data, precisions[name] / 2)",
        "",
        "posterior/test_prior.py::test_few_frames_give_the_rms_of_the_weights",
    ),
    Mutant(
        "same seed, same draws",
        "predict/predictor.py",
        "torch.Generator().manual_seed(self.seed)",
        "torch.Generator().manual_seed(torch.seed())",
        SAME,
    ),
    Mutant(
        "same seed, same dropout",
        "predict/mci.py",
        "self._generator.manual_seed(self.seed)",
        "self._generator.seed()",
        SAME,
    ),
    Mutant(
        "curvature in float32",
        "_torch/process_state.py",
        "else x.float()",
        "else x",
        "kfac/test_fit.py::test_sums_of_half_precision_detectors_are_not_in_half",
    ),
    Mutant(
        "no autocast in the algebra",
        "_torch/process_state.py",
        "torch.autocast(kind, enabled=False)",
        "torch.autocast(kind)",
        "predict/test_autocast.py::test_autocast_does_not_change_the_algebra",
    ),
    Mutant(
        "detections say the version",
        "detections.py",
        '"version": __version__',
        '"version": ""',
        CARRY,
    ),
    Mutant("a posterior says its seed", FIT, '"seed": str(options.seed), ', "", CARRY),
    Mutant(
        "results say the weights",
        "predict/predictor.py",
        '"weights_sha256": self._fingerprint',
        '"weights_sha256": ""',
        CARRY,
    ),
    Mutant(
        "boxes return in their own order",
        "predict/head/stages.py",
        "back = order.argsort()",
        "back = order",
        BORDER,
    ),
    Mutant(
        "every stage reads zeros beyond the border",
        "predict/head/branches.py",
        "if on_map.shape[2] > 1:",
        "if False:",
        BORDER,
    ),
    Mutant(
        "a frame that overflows float16 is computed again",
        "predict/predictor.py",
        "if not changes:",
        "if True:",
        "predict/cuda/test_float16_routes.py::test_an_overflow_of_float16_ends_its_use",
    ),
    Mutant(
        "float16 is compared with its oracle",
        "predict/route/base.py",
        "in_half and self.tangents_check.contradicts(fast, slow)",
        "False",
        "predict/cuda/test_float16_routes.py::test_wrong_float16_is_refused",
    ),
    Mutant(
        "zeros are no measure of tangents",
        "predict/forward_mode/storage.py",
        "if is_size else None",
        "if is_size else 1.0",
        "predict/forward_mode/test_float16.py::test_tangents_of_any_size_follow_zeros",
    ),
    Mutant(
        "layers of one product do not mix",
        "kfac/input_gram.py",
        "sums[:, :, :pieces].sum(2)",
        "sums.sum(2)",
        "kfac/test_input_gram.py::test_a_nan_stays_in_its_own_group",
    ),
    Mutant(
        "without a compiler plain torch is used",
        "_torch/triton_kernels.py",
        "except Exception as error:",
        "except ImportError as error:",
        "_torch/test_triton_kernels.py::test_a_failure_gives_one_warning",
    ),
]
