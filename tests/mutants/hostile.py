"""Mutants that break promises about files and packages."""

from __future__ import annotations

from mutants.mutant import Mutant

DATA = "data/test_hostile_data.py::"
DISKS = "kfac/test_checkpoint_files.py::"
TOOLS = "test_tools.py::"

HOSTILE = [
    Mutant(
        "nothing is unpickled",
        "detectors/torch_file.py",
        "raise ForeignCodeError(name)",
        "pass",
        "test_fuzz.py::test_a_checkpoint_cannot_run_code",
    ),
    Mutant(
        "no constructor is called",
        "detectors/ultralytics/checkpoints.py",
        "found.append(_NotCallable(kind.__name__, (kind,), own_name))",
        "found.append(kind)",
        "detectors/ultralytics/test_ultralytics_code.py::test_constructors_are_not_called",
    ),
    Mutant(
        "nothing is pickled",
        "detections.py",
        "import numpy as np\n",
        "import pickle\n\nimport numpy as np\n",
        "test_fuzz.py::test_nothing_unpickles",
    ),
    Mutant(
        "damage is refused by name",
        "_files/input_file.py",
        "*(SafetensorError, LookupError, ",
        "*(SafetensorError, ",
        "test_fuzz.py::test_damaged_files_are_refused_by_name",
    ),
    Mutant(
        "sizes before memory",
        "detectors/weight_file.py",
        '    with torch.device("meta"):\n        own = build()',
        "    if True:\n        own = build()",
        "test_fuzz.py::test_sizes_are_compared_before_memory_is_taken",
    ),
    Mutant(
        "sizes of a checkpoint",
        "kfac/checkpoint.py",
        'if found != (shape, "F64"):',
        "if False:",
        f"{DISKS}test_a_damaged_checkpoint_is_refused_by_name",
    ),
    Mutant(
        "no way out of nuScenes",
        "data/nuscenes/index.py",
        "if leads_out(name):",
        "if False:",
        "data/test_nuscenes.py::test_file_names_may_not_leave_the_root",
    ),
    Mutant(
        "no way out of COCO",
        "data/coco/sequence.py",
        "if leads_out(name):",
        "if False:",
        "data/test_coco.py::test_file_names_cannot_lead_out_of_the_folder",
    ),
    Mutant(
        "four image formats",
        "data/coco/images.py",
        "BytesIO(data), formats=FORMATS)",
        "BytesIO(data))",
        f"{DATA}test_an_eps_named_jpg_starts_no_program",
    ),
    Mutant(
        "pixels before memory",
        "data/coco/images.py",
        "if width * height > MAX_PIXELS:",
        "if False:",
        f"{DATA}test_an_image_of_too_many_pixels_is_refused",
    ),
    Mutant(
        "few scans",
        "data/coco/images.py",
        "if scans > MAX_SCANS:",
        "if False:",
        f"{DATA}test_a_jpeg_of_many_scans_is_refused",
    ),
    Mutant(
        "base files have a limit",
        "detectors/centerpoint/config_file.py",
        "if bases.files > MAX_FILES:",
        "if False:",
        "detectors/centerpoint/test_centerpoint_claims.py::"
        "test_base_files_that_multiply_are_refused",
    ),
    Mutant(
        "names that can be paths",
        "data/nuscenes/tables.py",
        "self._entry(row, key, is_text, _TEXT)",
        "self._entry(row, key, lambda value: isinstance(value, str), _TEXT)",
        f"{DATA}test_odd_file_names_of_nuscenes_are_refused",
    ),
    Mutant(
        "no compressed records",
        "detectors/torch_file.py",
        "if packed:",
        "if False:",
        "detectors/test_torch_file.py::test_compressed_records_are_refused",
    ),
    Mutant(
        "numbers that are there",
        "detectors/torch_file.py",
        "if prod(size) > len(storage):",
        "if False:",
        "detectors/test_torch_file.py::test_lying_sizes_of_tensors_are_refused",
    ),
    Mutant(
        "candidates have a limit",
        "detectors/centerpoint/config.py",
        "(rules.candidates, 1, MAX_CANDIDATES)",
        "(rules.candidates, 1, 10**18)",
        "detectors/centerpoint/test_centerpoint_claims.py::test_counts_are_compared_with_the_tensors",
    ),
    Mutant(
        "no box is dropped",
        "detection_meta.py",
        "if frames < boxes_until:",
        "if False:",
        "test_detection_meta.py::test_metadata_of_other_types_is_refused",
    ),
    Mutant(
        "files are read in one place",
        "data/points.py",
        "data = read_bytes(path, MAX_BYTES)",
        "data = path.read_bytes()",
        "_files/test_input_file.py::test_no_module_reads_files_by_itself",
    ),
]


CROWDS = [
    Mutant(
        "suppressed boxes are compared with no other",
        "detectors/nms.py",
        "alive = alive.flatten().index_fill(0, second, False).view(G, K)",
        "pass",
        "detectors/centerpoint/test_centerpoint_claims.py::"
        "test_nms_of_boxes_at_one_place_is_not_quadratic",
    ),
    Mutant(
        "enough boxes end the comparison",
        "detectors/nms.py",
        "alive = alive & (kept[:, : rows.stop].sum(1, keepdim=True) < most)",
        "pass",
        "detectors/centerpoint/test_centerpoint_claims.py::"
        "test_nms_stops_after_the_boxes_that_are_reported",
    ),
    Mutant(
        "neighbours of a crowd in parts",
        "error_model/inputs.py",
        "step = max(_MOST * _MOST // len(found), 1)",
        "step = len(found)",
        "test_many_boxes.py::test_ten_thousand_boxes_in_one_frame",
    ),
]


PACKAGES = [
    Mutant(
        "a changed file in the wheel",
        "tools/wheel.py",
        "missing + foreign + changed",
        "missing + foreign",
        f"{TOOLS}test_missing_unexpected_and_different_files_in_a_wheel",
    ),
    Mutant(
        "a file that the wheel lacks",
        "tools/wheel.py",
        "missing + foreign + changed",
        "foreign + changed",
        f"{TOOLS}test_missing_unexpected_and_different_files_in_a_wheel",
    ),
    Mutant(
        "copyleft is refused",
        "tools/licences.py",
        "bool(tokens) and tokens[0] in known",
        "bool(tokens)",
        f"{TOOLS}test_licence_expressions",
    ),
    Mutant(
        "no licence is refused",
        "tools/licences.py",
        "if licence is None or not",
        "if licence is not None and not",
        f"{TOOLS}test_refused_distributions",
    ),
    Mutant(
        "a hash for everything",
        "tools/hashes.py",
        '["hashes"]["sha256"]',
        ".get('hashes', {}).get('sha256')",
        f"{TOOLS}test_every_archive_has_a_hash_and_folders_are_left_out",
    ),
]
