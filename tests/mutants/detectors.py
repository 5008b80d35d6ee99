"""Promises about checkpoints and detectors: no file is read under a silent guess."""

from __future__ import annotations

from mutants.mutant import Mutant

CENTERPOINT = "detectors/centerpoint/"
NETWORK = "detectors/centerpoint/test_centerpoint_network.py::"
CONFIGS = "detectors/centerpoint/test_centerpoint_configs.py::"
LOOKS = "checks/test_plausibility.py::"
BOUND = "posterior/test_configuration.py::"

DETECTORS = [
    Mutant(
        "OpenPCDet's pillars hold points of any height",
        f"{CENTERPOINT}config.py",
        "max_cells=None, any_height=True",
        "max_cells=None",
        f"{NETWORK}test_openpcdets_pillars_take_points_of_any_height",
    ),
    Mutant(
        "an undecided generation is asked for",
        f"{CENTERPOINT}frameworks.py",
        '_BRANCH_BEGUN, _BRANCH_VERSION = "202104", 16',
        '_BRANCH_BEGUN, _BRANCH_VERSION = "202204", 15',
        f"{CONFIGS}test_an_undecided_generation_is_asked_for",
    ),
    Mutant(
        "the grid is never guessed",
        f"{CENTERPOINT}upstream_config.py",
        " or _config_beside(path, framework)\n",
        ' or (named_config("voxel01", framework), "a guess")\n',
        f"{CONFIGS}test_weights_alone_do_not_tell_the_grid",
    ),
    Mutant(
        "a given configuration is compared with the one in the file",
        f"{CENTERPOINT}upstream_config.py",
        "        _warn_if_other(chosen[0], *stored)\n",
        "        pass\n",
        f"{CONFIGS}test_a_given_config_that_contradicts_the_file",
    ),
    Mutant(
        "another order of the classes is seen by the boxes of labelled objects",
        "checks/plausibility.py",
        "(reported != torch.arange(len(classes)))",
        "(reported == torch.arange(len(classes)))",
        f"{LOOKS}test_another_order_of_classes_is_seen",
    ),
    Mutant(
        "commands that need labels refuse frames without",
        "pipeline/frames.py",
        'if not getattr(frames, "has_labels", True):',
        "if False:",
        "pipeline/test_frames.py::test_commands_that_need_labels_refuse_splits_without",
    ),
    Mutant(
        "OpenPCDet's points are shuffled before a limit",
        f"{CENTERPOINT}config.py",
        'shuffled=framework == "openpcdet"',
        "shuffled=False",
        f"{NETWORK}test_openpcdet_shuffles_before_its_limit",
    ),
    Mutant(
        "a limit that was hit is said",
        f"{CENTERPOINT}voxels.py",
        "if not bool(early.all()):",
        "if False:",
        f"{NETWORK}test_openpcdet_shuffles_before_its_limit",
    ),
    Mutant(
        "a configuration that contradicts itself is refused",
        f"{CENTERPOINT}upstream_config.py",
        "if again is not None and again != expected:",
        "if False:",
        f"{CONFIGS}test_a_file_that_contradicts_itself_is_refused",
    ),
    Mutant(
        "a posterior of another grid is refused",
        "detector.py",
        "if differences := configuration_differences(_of_network(saved), _of_network(current)):",
        "if False:",
        f"{BOUND}test_another_grid_is_refused_by_name",
    ),
    Mutant(
        "an error model of another NMS is refused",
        "error_model/model.py",
        "if self.configuration and differences:",
        "if False:",
        f"{BOUND}test_another_selection_binds_only_the_error_model",
    ),
    Mutant(
        "results of two detectors are not mixed",
        "concatenation.py",
        '"weights_sha256", "configuration")',
        ")",
        f"{BOUND}test_results_hold_it_and_are_not_mixed",
    ),
    Mutant(
        "a checkpoint of another grid is seen by its boxes",
        "checks/plausibility.py",
        "losses[best] > 0.85 * losses[1.0]",
        "True",
        f"{LOOKS}test_another_grid_is_seen_by_its_loss",
    ),
    Mutant(
        "files are looked at before the first frame",
        "pipeline/frame_files.py",
        "is_needed = is_foreign(detector)",
        "is_needed = False",
        f"{LOOKS}test_files_are_looked_at_before_the_first_frame",
    ),
    Mutant(
        "points of another layout are refused",
        "pipeline/frame_files.py",
        "check_layout(cloud, self.points, path)",
        "pass",
        "cli/test_stream.py::test_points_of_another_layout_are_refused",
    ),
    Mutant(
        "images get the size of the network",
        "pipeline/detectors.py",
        "@{size}",
        "@416",
        "pipeline/test_source.py::test_images_get_the_size_of_the_network",
    ),
    Mutant(
        "the image size of an own YOLOX is asked for",
        "detectors/yolox/checkpoints.py",
        "if _is_released(found, path):",
        "if True:",
        "detectors/yolox/test_yolox_weights.py::test_80_classes_without_names_are_warned_about",
    ),
    Mutant(
        "normalised images of an old YOLOX are seen",
        "detectors/yolox/checkpoints.py",
        "_NORMALISED = 50.0",
        "_NORMALISED = 0.0",
        "detectors/yolox/test_yolox_weights.py::test_a_network_for_normalised_images_is_seen",
    ),
    Mutant(
        "clipped sides are censored in the metrics",
        "box_layout.py",
        "fixed = variances[:, index] == 0  # (m, 4)",
        "fixed = variances[:, index] < 0",
        "evaluate/test_clipped_sides.py::test_metrics_of_clipped_gaussian_errors_are_known",
    ),
    Mutant(
        "clipped sides are inputs of the error model",
        "error_model/inputs.py",
        'inputs |= {f"clipped {name}": columns[name] for name in IMAGE}',
        "pass",
        "error_model/test_clipped_sides.py::test_a_clipped_side_is_an_input_and_hides_no_variance",
    ),
]
