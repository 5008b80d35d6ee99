"""Mutants that break promises about what is written, printed and locked."""

from __future__ import annotations

from mutants.mutant import Mutant

UNWRITABLE = "cli/test_unwritable.py::"
TERMINAL = "pipeline/test_terminal.py::"
LEAVE = "export/test_numbers_that_leave.py::"
POSTERIOR = "posterior/test_posterior_numbers.py::"

OUTPUTS = [
    Mutant(
        "only regular files are replaced",
        "_files/output_file.py",
        "    check_replaceable(path)\n    with _writing(path):",
        "    with _writing(path):",
        f"{UNWRITABLE}test_special_files_of_the_library_stay",
    ),
    Mutant(
        "special outputs are refused before the work",
        "_files/output_file.py",
        "    check_replaceable(path)\n    with _writing(path), tempfile",
        "    with _writing(path), tempfile",
        f"{UNWRITABLE}test_special_outputs_are_refused",
    ),
    Mutant(
        "blocks are kept in an own folder",
        "pipeline/block_store.py",
        "if self.folder.is_symlink() or (",
        "if False and (",
        f"{UNWRITABLE}test_blocks_are_kept_in_an_own_folder",
    ),
    Mutant(
        "a training keeps its weights",
        "pipeline/train.py",
        "if options.out == report_path:",
        "if False:",
        f"{UNWRITABLE}test_the_report_of_a_training_is_checked_first",
    ),
    Mutant(
        "one process writes an output",
        "_files/output_file.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        f"{UNWRITABLE}test_an_output_that_is_held_is_refused",
    ),
    Mutant(
        "control characters are escaped",
        "_files/plain_text.py",
        "category(c) in _HARMFUL",
        'category(c) == "Zl"',
        f"{TERMINAL}test_control_characters_are_escaped",
    ),
    Mutant(
        "an error is one line",
        "cli/app.py",
        'say(f"boxcov: {error}", sys.stderr, one_line=True)',
        'say(f"boxcov: {error}", sys.stderr)',
        f"{TERMINAL}test_errors_are_one_escaped_line",
    ),
    Mutant(
        "names are no formulas",
        "export/tables.py",
        '_FORMULA = ("=", ',
        "_FORMULA = (",
        f"{TERMINAL}test_names_are_no_formulas_in_csv",
    ),
    Mutant(
        "names are no mathematics",
        "report/frame_plot.py",
        '    return short_name(name).replace("$", r"\\$")',
        "    return short_name(name)",
        f"{TERMINAL}test_figures_draw_names_as_they_are",
    ),
    Mutant(
        "names cannot turn a page around",
        "report/page.py",
        "_embed_json(_printable_values(data))",
        "_embed_json(data)",
        "report/test_hostile.py::test_names_cannot_change_the_page",
    ),
    Mutant(
        "long names stay short in figures",
        "_files/plain_text.py",
        "shown if len(shown) <= length else",
        "shown if shown else",
        "report/test_hostile.py::test_labels_of_rerun_are_short_lines",
    ),
    Mutant(
        "JSON files hold no NaN",
        "_files/output_file.py",
        "allow_nan=False",
        "allow_nan=True",
        f"{LEAVE}test_ros_files_are_valid_json",
    ),
    Mutant(
        "boxes for supervision are checked",
        "export/supervision.py",
        '    check_result(detections, "these detections cannot be exported")\n',
        "",
        f"{LEAVE}test_numbers_out_of_range_do_not_leave",
    ),
    Mutant(
        "outlines hold what the regions promise",
        "outlines.py",
        "    grown[:, 3] += 2 * (c * x + s * y) + length\n",
        "    grown[:, 3] += c * x + s * y + length\n",
        "report/test_frame_plot.py::test_the_outline_holds_every_box_within_the_region",
    ),
    Mutant(
        "messages are checked",
        "export/ros.py",
        '    check_result(detections, "these detections cannot be exported")\n',
        "",
        f"{LEAVE}test_numbers_out_of_range_do_not_leave",
    ),
    Mutant(
        "files of detections are checked when read",
        "detections.py",
        '            check_result(found, "it holds numbers out of range")\n',
        "",
        f"{LEAVE}test_files_out_of_range_are_refused",
    ),
    Mutant(
        "eigenvectors are orthonormal",
        "posterior/file.py",
        "if not error <= _ORTHONORMAL:",
        "if False:",
        f"{POSTERIOR}test_vectors_that_are_not_orthonormal_are_refused",
    ),
    Mutant(
        "inputs of an error model are known",
        "error_model/model_file.py",
        "    _check_inputs(model)\n",
        "",
        f"{POSTERIOR}test_error_models_out_of_range_are_refused",
    ),
    Mutant(
        "locks after a fork",
        "_torch/process_state.py",
        "if self._process != os.getpid():",
        "if False:",
        "_torch/test_process_state.py::test_a_forked_child_does_not_wait_for_its_parent",
    ),
]
