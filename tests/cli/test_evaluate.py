from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from boxcov import BoxcovError, Detections
from boxcov.data import simulated
from boxcov.data.poses import BOX_FIELDS
from boxcov.evaluate.ground_truth import GroundTruth, match_detections
from boxcov.evaluate.quality import auroc
from boxcov.evaluate.summary import summarise
from boxcov.pipeline.evaluate import run
from boxcov.pipeline.frames import load_frames
from boxcov.pipeline.options import DataOptions, EvaluateCommand
from boxcov.posterior.file import SHIPPED
from helpers.command_line import boxcov, refuse, succeed
from helpers.error_models import make_error_model

SOURCE = {"data": "simulated:clear", "split": "test", "count": 4, "seed": 0, "sweeps": 1}


def matched(found: Detections, frames):
    return match_detections(found, GroundTruth.from_frames(frames))


def study_of(paths, **options):
    return run(EvaluateCommand(predictions=tuple(paths), replicates=2, **options))[0]


def noisy(frames, noise: float = 0.4, seed: int = 0) -> Detections:
    """Return the objects with noise and its covariance, and some false positives."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for number, (_, (target,)) in enumerate(frames):
        truth = target["boxes"].nan_to_num()
        scale = noise * torch.rand(len(truth), 1, generator=generator)
        step = torch.zeros_like(truth)
        step[:, :3] = scale * torch.randn(len(truth), 3, generator=generator)
        ghosts = truth[:5] + torch.tensor([30.0, 30, 0, 0, 0, 0, 0, 0, 0])
        boxes = torch.cat([truth + step, ghosts])
        variance = torch.cat([scale**2, torch.ones(len(ghosts), 1)])
        labels = torch.cat([target["labels"], target["labels"][:5]])
        parts.append(
            (boxes, labels, torch.full_like(labels, number), variance[:, :, None] * torch.eye(9))
        )
    boxes, labels, frame, covariance = (torch.cat(column) for column in zip(*parts))
    scores = 0.05 + 0.9 * torch.rand(len(boxes), generator=generator)
    meta = {
        "method": "exact",
        "samples": None,
        "source": SOURCE,
        "frames": 4,
        "milliseconds": [90.0, 10.0, 12.0, 14.0],
        "device": "cpu",
    }
    return Detections(
        boxes, scores, labels, frame, BOX_FIELDS, simulated.CLASSES, covariance, meta=meta
    )


@pytest.fixture(scope="module")
def frames() -> list:
    return list(load_frames(DataOptions(**SOURCE)))


@pytest.fixture
def saved(tmp_path, frames) -> list:
    """Two files of the same boxes."""
    found = noisy(frames)
    found.save(tmp_path / "exact.safetensors")
    other = replace(
        found, covariance=found.covariance.flip(0), meta={**found.meta, "method": "nms"}
    )
    other.save(tmp_path / "nms.safetensors")
    return [tmp_path / "exact.safetensors", tmp_path / "nms.safetensors"]


def test_matching_agrees_with_a_loop(frames) -> None:
    found = noisy(frames)
    hidden = [dict(targets[0], points=targets[0]["points"].clone()) for _, targets in frames]
    for target in hidden:
        target["points"][::3] = 0  # such objects do not count
    records = matched(found, [([], [target]) for target in hidden])
    scored = found[found.scores > 0.1]
    assert np.array_equal(records.boxes, scored.boxes.double().numpy())
    expected = np.full(len(scored), np.nan)
    taken: set[tuple[int, int]] = set()
    for i in sorted(range(len(scored)), key=lambda i: -float(scored.scores[i])):
        target = hidden[int(scored.frame[i])]
        best, nearest = 2.0, -1
        for k in range(len(target["labels"])):
            if (
                target["points"][k] == 0
                or target["labels"][k] != scored.labels[i]
                or (int(scored.frame[i]), k) in taken
            ):
                continue
            distance = float(
                (target["boxes"][k, :2].double() - scored.boxes[i, :2].double()).norm()
            )
            if distance < best:
                best, nearest = distance, k
        if nearest >= 0:
            taken.add((int(scored.frame[i]), nearest))
            expected[i] = float(
                (target["boxes"][nearest, :3].double() - scored.boxes[i, :3].double()).norm()
            )
    assert 10 < int((~np.isnan(expected)).sum()) < len(expected)
    assert np.allclose(records.l2, expected, equal_nan=True)


def test_boxes_with_fewer_fields_are_matched(frames) -> None:
    found = noisy(frames)
    flat = Detections(
        found.boxes[:, :7],
        found.scores,
        found.labels,
        found.frame,
        BOX_FIELDS[:7],
        found.classes,
        found.covariance[:, :7, :7],
        meta=found.meta,
    )
    assert np.allclose(matched(flat, frames).l2, matched(found, frames).l2, equal_nan=True)
    strange = replace(flat, fields=("x1", "y1", "x2", "y2", "a", "b", "c"))
    with pytest.raises(
        BoxcovError, match=r"the detections have the box fields x1, y1, .* do not belong together"
    ):
        matched(strange, frames)


def test_frames_without_objects_and_missing_frames(frames) -> None:
    empty = [
        (
            [],
            [
                {
                    "boxes": torch.zeros(0, 9),
                    "labels": torch.zeros(0, dtype=torch.long),
                    "points": torch.zeros(0),
                }
            ],
        )
    ] * 4
    assert GroundTruth.from_frames(empty).frames == 4
    assert not matched(noisy(frames), empty).paired.any()
    with pytest.raises(
        BoxcovError, match="last frame of the detections is 3, but the data has 2 frames"
    ):
        matched(noisy(frames), frames[:2])
    with pytest.raises(BoxcovError, match="these detections have no covariance"):
        matched(replace(noisy(frames), covariance=None), frames)
    with pytest.raises(BoxcovError, match="no frames to compare"):
        GroundTruth.from_frames([])


def test_json_has_every_number(saved, frames) -> None:
    report = succeed("evaluate", *saved, "--json --replicates 20").report
    rows = {row["method"]: row for row in report["rows"]}
    both = [f"score + size + covariance ({name})" for name in ("exact", "nms")]
    names = ["exact", "nms", "1 - score", "score + size", *both]
    differences = [f"{name}, minus score + size" for name in both]
    assert list(rows) == [
        *(name + shuffled for name in names for shuffled in ("", ", shuffled")),
        *differences,
    ]
    assert rows["exact"]["boxes"] == len(matched(noisy(frames), frames))
    # the covariances that belong to the boxes
    assert rows["exact"]["AUROC l2"]["value"] > rows["nms"]["AUROC l2"]["value"]
    assert report["about"]["frames"] == 4
    assert report["about"]["nms"]["method"] == "nms"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate POSTERIOR", "this is a posterior (written by boxcov fit or calibrate): give "),
        ("evaluate POSTERIOR", "give predictions (written by boxcov predict)"),
        ("convert POSTERIOR --format csv --out x", "give predictions"),
        ("monitor BOXES --usual POSTERIOR", "give predictions"),
        ("predict --posterior BOXES --out x", "this is predictions"),
        ("predict --posterior WEIGHTS --out x", "this is weights of a detector"),
        ("calibrate --posterior BOXES --out x", "give a posterior (written by boxcov fit"),
        ("export --posterior BOXES --out x.onnx", "give a posterior"),
        ("fit --detector centerpoint:POSTERIOR --out x", "give weights of a detector"),
        ("fit --detector yolox:BOXES --out x", "give weights of a detector"),
        ("evaluate OTHER", "a safetensors file of another program, expected a file of boxcov"),
    ],
)
def test_swapped_files_are_named(words: str, message: str, tmp_path, saved, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    files = {"BOXES": saved[0], "POSTERIOR": SHIPPED, "OTHER": "other.safetensors"}
    files["WEIGHTS"] = SHIPPED.with_name("small.safetensors")
    for name, path in files.items():
        words = words.replace(name, str(path))
    error = refuse(words)
    assert message in error
    assert "KeyError" not in error


def test_table_and_report_are_written(tmp_path, saved) -> None:
    done = succeed(
        "evaluate", *saved, f"--out {tmp_path / 'report.html'} --scenes 2 --replicates 20"
    )
    assert "AUROC IoU" in done.out
    assert "chance" in done.out
    assert "report.html" in done.out
    page = (tmp_path / "report.html").read_text()
    assert "Uncertainty of boxes: simulated:clear test" in page
    study = study_of(saved, scenes=2)
    assert sorted(study.scenes) == [0, 1]
    assert len(study.scenes[0].points) > 1000
    assert [row["ms"] for row in study.runtime] == [12.0, 12.0]  # the first frame warms up


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"source": {**SOURCE, "count": 3}},
            "d.safetensors: boxes of 4 frames, but simulated:clear has 3: give the --data",
        ),
        ({"source": None}, "does not state which frames it was computed on"),
        ({"source": {**SOURCE, "data": "nuscenes:nowhere"}}, "nowhere: no such folder"),
    ],
)
def test_missing_frames_are_an_error(tmp_path, frames, change, message) -> None:
    found = noisy(frames)
    meta = {name: value for name, value in {**found.meta, **change}.items() if value is not None}
    replace(found, meta=meta).save(tmp_path / "d.safetensors")
    assert message in refuse(f"evaluate {tmp_path / 'd.safetensors'}")


def test_frames_of_every_file_are_counted(tmp_path, frames) -> None:
    found = noisy(frames)
    meta = {"method": "exact", "frames": 4}
    replace(found, meta=meta).save(tmp_path / "a.safetensors")
    few = replace(found[found.frame < 3], meta={**meta, "frames": 3})
    few.save(tmp_path / "b.safetensors")
    files = f"{tmp_path / 'a.safetensors'} {tmp_path / 'b.safetensors'}"
    error = refuse(f"evaluate {files} --data simulated:clear --count 4")
    assert "b.safetensors: boxes of 3 frames, but simulated:clear has 4" in error


def test_user_errors_are_one_line(tmp_path, saved, frames) -> None:
    found = noisy(frames)
    other = tmp_path / "other.safetensors"
    replace(found, meta={**found.meta, "source": {**SOURCE, "seed": 1}}).save(other)
    for words, message in (
        ([tmp_path / "absent"], "absent: no such file"),
        ([saved[0], saved[0]], f"{saved[0]}: the same file is given twice: remove one"),
        ([saved[0], other], "predictions of other frames than"),
        (
            [saved[0], "--data", "simulated:rain"],
            "predictions for simulated:clear, not for simulated:rain",
        ),
        ([saved[0], "--out", "absent/r.html"], "absent/r.html: there is no folder absent"),
    ):
        error = refuse("evaluate", *words)
        assert error.startswith("boxcov: ")
        assert error.count("\n") == 1
        assert message in error
    assert boxcov("evaluate").code == 2


def test_files_with_equal_names_use_their_paths(tmp_path, saved) -> None:
    (tmp_path / "b").mkdir()
    again = tmp_path / "b" / "exact.safetensors"
    again.write_bytes(saved[0].read_bytes())
    assert [method.name for method in study_of([saved[0], again]).methods] == [
        str(saved[0]),
        str(again),
    ]


def test_what_the_covariance_adds(saved) -> None:
    words = (f"evaluate {saved[0]} --replicates 5 --scenes 0",)
    assert "what the covariance adds" in boxcov(*words).out
    found = json.loads(boxcov(*words, "--json").out)
    assert found["about"]["u"] == "trace"
    assert found["rows"][-1]["kind"] == "difference"


def test_risk_is_one_more_method(frames, tmp_path) -> None:
    path = tmp_path / "exact.safetensors"
    found = noisy(frames)
    model = make_error_model(found.fields, found.classes)
    calibrated = model.apply(found)
    calibrated.save(path)
    done = succeed("evaluate", path, "--replicates 5 --json")
    rows = {row["method"]: row for row in done.report["rows"]}
    records = matched(calibrated, frames)
    assert np.array_equal(records.risk, calibrated.risk[found.scores > 0.1].numpy())
    expected = auroc(records.iou < 0.4, records.risk)
    assert rows["exact: risk"]["AUROC IoU"]["value"] == pytest.approx(expected)
    assert rows["exact"]["AUROC IoU"]["value"] != pytest.approx(expected)
    kept = records[records.paired]
    inside = np.abs(kept.as_axes().errors) <= kept.regions[:, 1]
    share = inside[~np.isnan(kept.errors)].mean()
    assert rows["exact"]["coverage 90% regions"]["value"] == pytest.approx(share)
    assert "1 - score (exact: risk)" not in rows  # the same boxes: one baseline
    assert rows["exact"]["NLL Student-t"]["value"] == summarise(records, 2)["predictive"]["NLL"]
    shown = boxcov("evaluate", path, "--replicates 5").out
    assert "epistemic, Gaussian" in shown
    assert "error model, Student-t" in shown


def test_predictive_is_compared_with_axes(frames) -> None:
    found = noisy(frames)
    turned = found.boxes.clone()
    turned[:, BOX_FIELDS.index("yaw")] += np.pi
    model = make_error_model(found.fields, found.classes)
    both = [replace(model.apply(found), boxes=boxes) for boxes in (found.boxes, turned)]
    records = [matched(one, frames) for one in both]
    plain, flipped = (summarise(one, 2) for one in records)
    assert flipped["predictive"]["NLL"] == pytest.approx(plain["predictive"]["NLL"], rel=1e-4)
    assert flipped["covariance"]["NLL"] > plain["covariance"]["NLL"] + 1
