"""Mutants that break promises of the error model."""

from __future__ import annotations

from mutants.mutant import Mutant

TRAINING = "error_model/test_training.py::"
REGIONS = "error_model/test_regions.py::"
WIDENING = "error_model/test_unusual_frames.py::"
MONITOR = "test_monitor.py::"

ERROR_MODELS = [
    Mutant(
        "the noise is that of the class",
        "error_model/student_t.py",
        "((labels == label) + _POOLED / len(labels))",
        "((labels >= 0) + _POOLED / len(labels))",
        "error_model/test_student_t.py::test_noise_is_that_of_the_class_and_a_rare_one_borrows",
    ),
    Mutant(
        "members are clipped apart",
        "error_model/network.py",
        "squares.sum(0).sqrt()",
        "squares.sum().sqrt().expand(squares.shape[1])",
        f"{TRAINING}test_frames_of_a_fold_never_reach_its_member[8]",
    ),
    Mutant(
        "a member never sees its fold",
        "error_model/network.py",
        "(folds != k).nonzero()",
        "(folds >= 0).nonzero()",
        f"{TRAINING}test_frames_of_a_fold_never_reach_its_member[0]",
    ),
    Mutant(
        "held-out losses are those of frames as they are",
        "error_model/network.py",
        "(folds[:own] == k).nonzero()",
        "(folds == k).nonzero()",
        f"{TRAINING}test_copies_that_mislead_are_left_out",
    ),
    Mutant(
        "networks are tried without copies",
        "error_model/network.py",
        "sorted({len(x), own})",
        "sorted({len(x)})",
        f"{TRAINING}test_copies_that_mislead_are_left_out",
    ),
    Mutant(
        "regions are those of frames as they are",
        "error_model/calibrate.py",
        "targets[:own], folds[:own]  #",
        "targets, folds  #",
        "error_model/test_labelled_frames.py::test_only_the_network_learns_from_copies",
    ),
    Mutant(
        "a copy is in the fold of its frame",
        "error_model/calibrate.py",
        "frame = torch.cat([frame, copies.source])",
        "frame = torch.cat([frame, copies.found.frame])",
        "error_model/test_labelled_frames.py::test_copies_share_the_fold_of_their_frame",
    ),
    Mutant(
        "conformal quantiles count the new box",
        "error_model/regions.py",
        "ceil((len(values) + 1) * level - 1e-9)",
        "ceil(len(values) * level - 1e-9)",
        f"{REGIONS}test_quantiles_are_order_statistics[19]",
    ),
    Mutant(
        "a member's quantiles are those of its fold",
        "error_model/regions.py",
        "rows = group & (folds == k)",
        "rows = group & (folds >= 0)",
        f"{REGIONS}test_each_member_is_ranked_on_its_own_fold",
    ),
    Mutant(
        "groups are large in every fold",
        "error_model/regions.py",
        ".min()) >= MIN_GROUP",
        ".max()) >= MIN_GROUP",
        f"{REGIONS}test_a_group_that_one_fold_lacks_is_small",
    ),
    Mutant(
        "neighbours are of the same frame",
        "error_model/inputs.py",
        "other = same_frame & (",
        "other = (",
        "error_model/test_inputs.py::test_a_batch_equals_its_frames[fields0]",
    ),
    Mutant(
        "degrees of freedom come from the errors",
        "error_model/calibrate.py",
        "dof, factor = fit_student(ratios)",
        "dof, factor = 4 * unit / unit, unit / unit",
        "error_model/test_calibrate.py::test_the_degrees_of_freedom_are_those_of_the_errors[20.0]",
    ),
    Mutant(
        "an error beyond the image border is unknown",
        "evaluate/records.py",
        "difference[self.clipped & ",
        "difference[self.clipped[:0].any() & ",
        "evaluate/test_clipped_sides.py::test_an_error_is_censored_if_the_object_reaches_the_border",
    ),
    Mutant(
        "a box without any spread is not clipped",
        "box_layout.py",
        "(~fixed.all(1) | fills_image)",
        "(fixed.any(1) | fills_image)",
        "evaluate/test_clipped_sides.py::test_a_box_without_any_spread_is_not_clipped",
    ),
    Mutant(
        "the share of unusual frames counts the new frame",
        "error_model/unusual_frames.py",
        "floor(GATE * (len(frames) + 1) + 1e-9)",
        "floor(GATE * len(frames) + 1e-9)",
        f"{WIDENING}test_the_bound_is_an_order_statistic[19-1]",
    ),
    Mutant(
        "usual frames are not widened",
        "error_model/unusual_frames.py",
        "is_unusual = frame_certainty(found) < self.bound",
        "is_unusual = frame_certainty(found) < 2 * self.bound",
        f"{WIDENING}test_factors_make_stress_regions_hold",
    ),
    Mutant(
        "the frame itself counts in its p-value",
        "monitor.py",
        "(values >= values[-1] - 1e-9 * abs(values[-1])).mean()",
        "(values > values[-1]).mean()",
        f"{MONITOR}test_ties_never_raise_the_alarm_rate",
    ),
]
