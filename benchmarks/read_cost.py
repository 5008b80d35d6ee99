"""Memory and time that reading a file takes, against its bytes: the limits in SECURITY.md.

    python benchmarks/read_cost.py [--write]

Each file is read in a process of its own, which is a fork: its peak of memory minus what it held
before is divided by the bytes of the file. --write replaces
docs/results/data/reliability-reading.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from time import process_time
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from boxcov import BoxcovError, Detections  # noqa: E402
from boxcov.data import coco, nuscenes  # noqa: E402
from boxcov.data.points import read_points  # noqa: E402
from boxcov.detectors.centerpoint.config_file import read_settings  # noqa: E402
from boxcov.detectors.weight_file import read_weights  # noqa: E402
from helpers.coco_cases import coco_root  # noqa: E402
from helpers.data_roots import VERSION, nuscenes_root  # noqa: E402
from helpers.export_boxes import in_space  # noqa: E402
from helpers.hostile_images import many_scans, solid_png  # noqa: E402

Case = tuple[str, Path, Callable[[], Any]]
RESULT = ROOT / "docs/results/data/reliability-reading.json"


def cases(folder: Path) -> Iterator[Case]:
    """Yield the name of a kind of file, a large one, and a function that reads it."""
    path = folder / "boxes.safetensors"
    found = in_space(40_000, frames=40)
    replace(found, meta={"frames": 40}).save(path)
    yield "detections, tensors", path, lambda path=path: Detections.load(path)
    path = folder / "times.safetensors"
    replace(in_space(4), meta={"frames": 10**6, "milliseconds": [1.5] * 10**6}).save(path)
    yield "detections, metadata", path, lambda path=path: Detections.load(path)
    path = folder / "yolox.pth"
    torch.save({"model": {f"layer {i}": torch.rand(1 << 20) for i in range(10)}}, path)
    yield "weights of torch.save", path, lambda path=path: read_weights(path)
    pictures = coco_root(folder / "coco")
    path = next(pictures.glob("annotations/*.json"))
    about = json.loads(path.read_text())
    about["images"] = [{**about["images"][0], "id": i} for i in range(300)]
    things = [about["annotations"][0] | {"id": i, "image_id": i % 300} for i in range(100_000)]
    path.write_text(json.dumps({**about, "annotations": things}))
    yield "COCO annotations", path, lambda: coco.frames(pictures, size=32)
    road = nuscenes_root(folder / "nuscenes")
    path = road / VERSION / "sample_annotation.json"
    rows = json.loads(path.read_text())
    more = [{**rows[0], "token": f"{i:032x}"} for i in range(9_000)]
    path.write_text(json.dumps(rows + more))
    yield "nuScenes tables", path, lambda: list(nuscenes.frames(road, sweeps=1))
    path = folder / "nuscenes.json"
    keys = nuscenes.frames(nuscenes_root(folder / "plain"), sweeps=1)
    one = in_space(5_000)
    boxes = [replace(one, classes=nuscenes.CLASSES) for _ in range(len(keys))]
    nuscenes.write_results(path, keys, boxes)
    yield "nuScenes results", path, lambda path=path: nuscenes.read_results(path)
    path = folder / "points.bin"
    path.write_bytes(torch.rand(2_000_000, 5).numpy().tobytes())
    yield "points", path, lambda path=path: read_points(path, 5)
    for name, size in (("PNG of 40 million pixels", (8000, 5000)), ("PNG beyond", (8000, 5001))):
        path = folder / f"{name}.png"
        path.write_bytes(solid_png(*size))
        yield name, path, lambda path=path: coco.read_image(path)
    path = folder / "scans.jpg"
    path.write_bytes(many_scans(8000, 5000, more=90))
    yield "JPEG of 40 million pixels, 96 scans", path, lambda path=path: coco.read_image(path)
    path = folder / "net.yaml"
    path.write_text("".join(f"key{i}: [1, 2, {{a: b}}]\n" for i in range(40_000)))
    yield "configuration, YAML", path, lambda path=path: read_settings(path)
    path = folder / "net.py"
    path.write_text("".join(f"key{i} = [1, 2, dict(a='b')]\n" for i in range(30_000)))
    yield "configuration, Python", path, lambda path=path: read_settings(path)


def measure(read: Callable[[], Any]) -> tuple[float, float, bool]:
    """Return MiB, seconds of the processor and whether the file was read, in a forked process."""
    back, out = os.pipe()
    if os.fork() == 0:
        Path("/proc/self/clear_refs").write_text("5")
        before, began, is_read = memory("VmRSS"), process_time(), True
        try:
            kept = read()  # held until the peak is known
        except BoxcovError:
            kept, is_read = None, False
        taken = (memory("VmHWM") - before) / 1024, process_time() - began, is_read
        os.write(out, json.dumps(taken).encode())
        os._exit(kept is None and is_read)
    os.wait()
    return tuple(json.loads(os.read(back, 1000)))


def memory(name: str) -> int:
    """Return an entry of the process's status, in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path, read in cases(Path(folder)):
            size = path.stat().st_size / 2**20
            taken, seconds, is_read = measure(read)
            end = "read" if is_read else "refused"
            rows.append([name, round(size, 2), round(taken), round(taken / size, 1), seconds, end])
            print(*rows[-1], sep="\t", flush=True)
    if "--write" in sys.argv:
        result = {
            "title": "Reading large and hostile files",
            "command": "python benchmarks/read_cost.py --write",
            "date": str(date.today()),
            "machine": "one core of a shared CPU",
            "columns": ["file", "MiB", "memory, MiB", "memory / bytes", "seconds", "outcome"],
            "digits": [None, 2, None, 1, 2, None],
            "rows": rows,
            "notes": [
                "Memory is the peak of the process above what it held before. Seconds are of the "
                "processor. A ratio of an image is of its compressed bytes; its memory goes with "
                "the pixels."
            ],
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
