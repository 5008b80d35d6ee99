"""Mutants that break promises about files and packages."""

from __future__ import annotations

from mutants.mutant import Mutant

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
        "nothing is pickled",
        "detections.py",
        "import numpy as np\n",
        "import pickle\n\nimport numpy as np\n",
        "test_fuzz.py::test_nothing_unpickles",
    ),
    Mutant(
        "damage is refused by name",
        "input_file.py",
        "DAMAGE = (SafetensorError, LookupError, ",
        "DAMAGE = (SafetensorError, ",
        "test_fuzz.py::test_damaged_files_are_refused_by_name",
    ),
    Mutant(
        "sizes before memory",
        "detectors/centerpoint/checkpoints.py",
        "    _check_fit(planned, state, {name: name for name in planned}, path, state)\n",
        "",
        "test_fuzz.py::test_sizes_are_compared_before_memory_is_taken",
    ),
    Mutant(
        "sizes of a checkpoint",
        "kfac/factors.py",
        'if header.get_shape() != shape or header.get_dtype() != "F64":',
        "if False:",
        f"{DISKS}test_a_damaged_checkpoint_is_refused_by_name",
    ),
    Mutant(
        "no way out of nuScenes",
        "data/nuscenes/index.py",
        ' or ".." in name.split("/")',
        "",
        "data/test_nuscenes.py::test_file_names_may_not_leave_the_root",
    ),
    Mutant(
        "no way out of COCO",
        "data/coco/annotations.py",
        ' or ".." in parts.parts',
        "",
        "data/test_coco.py::test_file_names_cannot_lead_out_of_the_folder",
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
