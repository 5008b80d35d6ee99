from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.mutations import mutated

SOURCES = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))
# The places that unpickle: items that worker processes of the same run wrote into a folder that
# only the user can access (tests/data/test_loader.py checks the folder), and networks of
# Ultralytics, without any call (tests/detectors/ultralytics/test_ultralytics_code.py).
OWN_ITEMS = {
    "data/loader.py": "torch.load(path, weights_only=False)",
    "detectors/ultralytics/checkpoints.py": (
        'torch.load(path, map_location="cpu", weights_only=True)'
    ),
}


def fuzzed(folder: Path, cases: int, seed: int) -> dict:
    """Return the report of ``tests/helpers/fuzz.py``, run in a separate process that may crash."""
    words = [sys.executable, "-m", "helpers.fuzz", str(folder), str(cases), str(seed)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=3000, cwd=Path(__file__).parent
    )
    at = (folder / "case").read_text() if (folder / "case").exists() else "the start"
    assert done.returncode == 0, f"ended by {done.returncode} at {at}: {done.stderr[-2000:]}"
    report = json.loads(done.stdout)
    assert not report["wrong"], report["wrong"][:3]
    return report


def test_damaged_files_are_refused_by_name(tmp_path) -> None:
    report = fuzzed(tmp_path, 500, seed=0)
    refused = report["refused"]
    assert len(refused) >= 25
    assert len(report["special"]) > 5, report["special"]  # pipes, devices, folders, links
    assert all(count > 3 for count in refused.values()), refused  # mutations do damage
    assert sum(report["read"].values()) > 20  # but not always


def test_a_reader_beyond_the_limits_is_reported(tmp_path) -> None:
    code = f"""
import json
from pathlib import Path
from helpers import fuzz
from boxcov._files.input_file import reading

def spin(path):
    while True:
        pass

def take(path):
    with reading(path, "anything"):
        bytearray(3 << 30)

fuzz.SECONDS = 1
path = Path({str(tmp_path)!r}) / "x"
path.write_bytes(b"content")
known = [fuzz.Kind(f.__name__, (path,), "bytes", f) for f in (spin, take)]
print(json.dumps(fuzz.run(known, path.parent, 2, 0)["wrong"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr
    found = {case["kind"]: case["what"] for case in json.loads(done.stdout)}
    assert "no answer in 1 s" in found["spin"]
    assert "too much memory" in found["take"]


@pytest.mark.slow
def test_twenty_thousand_damaged_files(tmp_path, record_property) -> None:
    report = fuzzed(tmp_path, 20_000, seed=1)
    refused, read = sum(report["refused"].values()), sum(report["read"].values())
    slowest, largest = (max(cost[i] for cost in report["cost"].values()) for i in (0, 1))
    record_property(
        "outcome",
        f"{refused + read} damaged files of {len(report['read'])} kinds: {refused} refused by "
        f"name, {read} read; {sum(report['special'].values())} were no regular file; "
        f"{slowest} s and {largest >> 10} MiB at most",
    )
    record_property("cost", json.dumps(report["cost"]))
    assert refused + read >= 20_000


@pytest.mark.parametrize("kind", ["bytes", "json", "safetensors"])
def test_mutations_change_what_they_get_and_repeat(kind) -> None:
    content = (
        b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": [1, 2, 3]}'
        if kind == "safetensors"
        else b'{"a": [1, 2, {"b": 3}], "c": "text"}' * 3
    )
    made = [mutated(content, kind, random.Random(seed)) for seed in range(100)]
    assert made == [mutated(content, kind, random.Random(seed)) for seed in range(100)]
    assert len(set(made)) > 60


def test_nothing_unpickles() -> None:
    """Only the items of the run's own worker processes; the files of torch.save are interpreted."""
    for path in SOURCES:
        code = path.read_text(encoding="utf-8")
        for own, line in OWN_ITEMS.items():
            code = code.replace(line, "", 1) if path.match(own) else code
        found = re.findall(
            r"^\s*(?:import|from) (?:pickle|dill|joblib|shelve|marshal)\b.*", code, re.M
        )
        assert not found, path
        assert "allow_pickle" not in code.replace("allow_pickle=False", ""), path
        assert not re.search(r"\b(np|numpy|torch)\.load\(", code), path
        assert not re.search(r"(?<![\w.])(eval|exec)\(", code), path


def test_a_checkpoint_cannot_run_code(tmp_path) -> None:
    import torch

    from boxcov import BoxcovError
    from boxcov.detectors import centerpoint

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": Evil()}, tmp_path / "x.pth")
    with pytest.raises(BoxcovError, match=r"x\.pth: holds more than weights"):
        centerpoint.load(tmp_path / "x.pth")
    assert not (tmp_path / "ran").exists()


def test_sizes_are_compared_before_memory_is_taken(tmp_path) -> None:
    """A file of a few kilobytes that claims a network of terabytes."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from boxcov import BoxcovError
    from boxcov.detectors import centerpoint
    from helpers.centerpoint_cases import detector_of, pillar_config

    path = tmp_path / "net.safetensors"
    centerpoint.save(detector_of(pillar_config()), path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(file.metadata()["boxcov.centerpoint"])
    for key, value in (("widths", [2**20, 2**20, 2**20]), ("layers", [10**12, 1, 1])):
        told = {**about, "dense": {**about["dense"], key: value}}
        save_file(tensors, path, {"boxcov.centerpoint": json.dumps(told)})
        with pytest.raises(BoxcovError, match=r"net\.safetensors: .*(another shape|layers)"):
            centerpoint.load(path)
