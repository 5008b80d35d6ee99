"""Mutants that break promises about streams, threads and memory."""

from __future__ import annotations

from mutants.mutant import Mutant

UNWRITABLE = "cli/test_unwritable.py::"
POSTERIOR = "posterior/test_posterior.py::"
STREAM = "cli/test_stream.py::"
SOAK = {"BOXCOV_SOAK": "1010", "BOXCOV_SOAK_SECONDS": "900"}

ONLINE = [
    Mutant(
        "draws are a sequence",
        "posterior/posterior.py",
        "[torch.randn(shape, generator=layer_generator, dtype=like.dtype, device=source) "
        "for _ in range(count)]",
        "torch.randn((count, *shape), generator=layer_generator, dtype=like.dtype, device=source)"
        ".unbind()",
        f"{POSTERIOR}test_fewer_samples_are_the_first_of_more",
    ),
    Mutant(
        "a layer's draws are its own",
        "posterior/posterior.py",
        "layer_generator = torch.Generator(source).manual_seed(_layer_seed(seed, name))",
        "layer_generator = generator",
        f"{POSTERIOR}test_samples_of_a_layer_do_not_depend_on_other_layers",
    ),
    Mutant(
        "threads wait for each other",
        "predict/predictor.py",
        "with self._lock:",
        "with torch.inference_mode(False):",
        "predict/test_threads.py::test_one_model_on_a_centerpoint",
    ),
    Mutant(
        "another precision waits",
        "_torch/process_state.py",
        "while any(used != tf32 for used in _holders.values()):",
        "while False:",
        "predict/test_threads.py::test_a_thread_that_wants_another_precision_waits",
    ),
    Mutant(
        "flags are given back",
        "_torch/process_state.py",
        "_set(_outside.pop())",
        "pass",
        "predict/test_threads.py::test_threads_that_overlap_leave_the_flags_as_they_were",
    ),
    Mutant(
        "a compiled frame does not wait",
        "predict/compile.py",
        "is_finite = given[0].isfinite().all()",
        "is_finite = torch.tensor(bool(given[0].isfinite().all()))",
        "predict/test_no_synchronisation.py::test_batches[ExactGLM-pillar]",
    ),
    Mutant(
        "a compiled frame copies nothing",
        "static_selection.py",
        "torch.arange(len(self.selection), device=self.count.device)",
        "torch.arange(len(self.selection))",
        "predict/test_no_synchronisation.py::test_batches[ExactGLM-pillar]",
    ),
    Mutant(
        "no tensor is kept",
        "predict/predictor.py",
        "        with self._lock:\n",
        '        self.__dict__.setdefault("_left", []).append(torch.zeros(1))\n'
        "        with self._lock:\n",
        "predict/test_soak.py::test_memory_is_flat[mcglm]",
        SOAK,
    ),
    Mutant(
        "no memory is kept",
        "predict/predictor.py",
        "        with self._lock:\n",
        '        self.__dict__.setdefault("_left", []).append(bytes(range(256)) * 256)\n'
        "        with self._lock:\n",
        "predict/test_soak.py::test_memory_is_flat[mcglm]",
        SOAK,
    ),
    Mutant(
        "a bad frame is a line",
        "pipeline/stream.py",
        "except FAILURES as error:",
        "except ZeroDivisionError as error:",
        f"{STREAM}test_bad_frame_gives_an_error_line",
    ),
    Mutant(
        "boxes with a NaN are an error line",
        "pipeline/stream.py",
        "if not bool(np.isfinite(arrays[name]).all()) and name not in _UNKNOWN:",
        "if False:",
        f"{STREAM}test_nonfinite_boxes_give_an_error_line",
    ),
    Mutant(
        "an output that exists stays",
        "pipeline/paths.py",
        "if output_exists(out) and not may_replace:",
        "if False:",
        "cli/test_unwritable.py::test_existing_files_stay_without_force",
    ),
    Mutant(
        "wrong numbers are refused before the work",
        "pipeline/options/option.py",
        "is_number and value not in self.within:",
        "False:",
        "cli/test_app.py::test_wrong_values_are_refused_before_any_work[fit --out x --count 0]",
    ),
    Mutant(
        "Ctrl-C is clean",
        "cli/stream.py",
        "except KeyboardInterrupt:\n        sys.exit(130)",
        "except KeyboardInterrupt:\n        sys.exit(1)",
        f"{STREAM}test_ctrl_c_prints_the_latencies",
    ),
    Mutant(
        "a reader that goes away",
        "pipeline/terminal.py",
        "return SystemExit(141)",
        "return error",
        f"{STREAM}test_closed_pipe_ends_the_stream",
    ),
    Mutant(
        "a stream into a full disk",
        "pipeline/terminal.py",
        "if isinstance(error, BrokenPipeError):",
        "if True:",
        f"{UNWRITABLE}test_stream_to_a_full_disk_ends_with_one_line",
    ),
    Mutant(
        "a slow process is noticed",
        "examples/watchdog.py",
        "queue.get(timeout=limit)",
        "queue.get()",
        "test_watchdog.py::test_an_alarm_for_a_late_result",
    ),
    Mutant(
        "one that never speaks is noticed",
        "examples/watchdog.py",
        "number, limit = 0, grace",
        "number, limit = 0, 1e6",
        "test_watchdog.py::test_an_alarm_for_a_model_without_results",
    ),
    Mutant(
        "a graph that differs is not written",
        "export/onnx/write.py",
        "if not difference <= _TOLERANCE:",
        "if False:",
        "export/test_onnx.py::test_a_graph_that_differs_is_not_written",
    ),
    Mutant(
        "a graph gives the same",
        "predict/static_frame.py",
        "return sample_covariance(found) if head.has_directions",
        "return 1.01 * sample_covariance(found) if head.has_directions",
        "export/test_onnx.py::test_centerpoint_agrees_with_torch[4]",
    ),
]
