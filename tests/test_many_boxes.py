"""Ten thousand boxes in one frame: nothing compares all pairs at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, resource, sys
from pathlib import Path
import torch
from boxcov import Detections
from boxcov.data.points import count_points
from boxcov.detectors.nms import greedy_nms, rotated_pairs
from boxcov.evaluate.matching import match
from boxcov.export import kalman, ros, tables
from helpers.export_boxes import in_image, in_space, with_error_model

torch.set_num_threads(1)
folder, m = Path(sys.argv[1]), 10_000
taken, peak = {}, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def measured(name, value):
    global peak
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken[name], peak = now - peak >> 10, now
    return value

def paired(found):
    one = {k: v.numpy() for k, v in (("boxes", found.boxes), ("scores", found.scores))}
    labels, frame = torch.zeros(m).long().numpy(), found.frame.numpy()
    names = {"fields": found.fields, "classes": found.classes, "uncertainty": one["scores"]}
    return match(*one.values(), labels, frame, one["boxes"] + 0.1, labels, frame, **names)

found = measured("boxes", in_space(m))
found = measured("error model", with_error_model(found))
measured("region", found.region(0.9))
measured("paired by distance", paired(found))
measured("paired by IoU", paired(in_image(m)))
measured("messages", (ros.detection3d_array(found, "x"), ros.detected_objects(found, "x")))
measured("measurements", kalman.measurements(found))
measured("table", tables.write_csv(folder / "x.csv", found))
measured("file", (found.save(folder / "x.safetensors"), Detections.load(folder / "x.safetensors")))
measured("points", count_points(torch.rand(20_000, 4), found.boxes[:1000]))
crowd = torch.cat([torch.rand(2, 4096, 2), torch.ones(2, 4096, 3)], 2)
valid = torch.ones(2, 4096, dtype=torch.bool)
measured("candidates", greedy_nms(*rotated_pairs(crowd, valid, 0.2), valid))
print(json.dumps(taken))
"""


POINTS = """
import json, resource
import torch
from boxcov.data.points import count_points

torch.set_num_threads(1)
points, boxes = 80 * torch.rand(100_000, 4) - 40, 80 * torch.rand(5000, 7) - 40
boxes[:, 3:6] = 0.5 + 3 * torch.rand(5000, 3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert int(count_points(points, boxes).sum()) > 0
print(json.dumps({"points": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10}))
"""


def memory(code: str, *words: str) -> dict[str, int]:
    """MiB that each step of the code takes, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    taken: dict[str, int] = json.loads(done.stdout)
    return taken


def test_ten_thousand_boxes_in_one_frame(tmp_path) -> None:
    """At most 400 MiB for each step; all pairs of 10,000 boxes would be 400 MB per number."""
    taken = memory(CODE, str(tmp_path))
    assert max(taken.values()) < 400, taken


@pytest.mark.slow
def test_five_thousand_labels_among_many_points() -> None:
    """All pairs with 100,000 points at once took 11 GB."""
    assert memory(POINTS)["points"] < 100
