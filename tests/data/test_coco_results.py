from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcov.data import coco
from boxcov.data.coco.results import to_image
from boxcov.errors import BoxcovError
from helpers.coco_cases import average_precisions, coco_root, edited, found_in
from helpers.error_models import make_error_model


@pytest.fixture
def frames(tmp_path: Path) -> coco.Coco:
    return coco.frames(coco_root(tmp_path / "set"), size=96)


def test_result_file_is_cocos_with_covariances(frames: coco.Coco, tmp_path: Path) -> None:
    found = found_in(frames)
    coco.write_results(tmp_path / "found.json", frames, found)
    entries = json.loads((tmp_path / "found.json").read_text())
    assert len(entries) == sum(map(len, found))
    first, box = entries[0], (found[0].boxes[0].double() / 0.96).tolist()
    names = {"image_id", "category_id", "bbox", "score", "covariance", "uncertainty"}
    assert set(first) == {*names, "bbox_covar", "covars"}
    assert (first["image_id"], first["category_id"]) == (11, 1)
    assert first["bbox"] == pytest.approx(
        [box[0], box[1], box[2] - box[0], box[3] - box[1]], rel=1e-6
    )
    assert first["uncertainty"] == pytest.approx(sum(first["covariance"][::5]))
    meta = json.loads((tmp_path / "found.meta.json").read_text())
    assert meta == {
        "covariance_fields": ["x", "y", "w", "h"],
        "covariance_frame": "image",
        "uncertainty": {"method": "exact"},
        "also": {"bbox_covar": "covariance", "covars": "covariance"},
    }


def test_the_covariance_goes_through_the_jacobian_of_the_map() -> None:
    boxes = torch.tensor([[3.0, 4.0, 30.0, 50.0]], dtype=torch.float64)
    there, J = to_image(boxes, 0.65)
    expected = torch.autograd.functional.jacobian(lambda box: to_image_by_hand(box, 0.65), boxes[0])
    torch.testing.assert_close(J[0], expected)
    torch.testing.assert_close(there[0], to_image_by_hand(boxes[0], 0.65))


def to_image_by_hand(box: torch.Tensor, scale: float) -> torch.Tensor:
    x1, y1, x2, y2 = box / scale
    return torch.stack([x1, y1, x2 - x1, y2 - y1])


def test_clipped_sides_are_named_and_come_back(frames: coco.Coco, tmp_path: Path) -> None:
    found = []
    for part in found_in(frames):
        fixed = torch.zeros(len(part), 4, dtype=torch.bool)
        fixed[::2, 0] = fixed[::3, 3] = True
        covariance = part.covariance.masked_fill(fixed[:, :, None] | fixed[:, None, :], 0.0)
        found.append(replace(part, covariance=covariance))
    coco.write_results(tmp_path / "found.json", frames, found)
    entries = json.loads((tmp_path / "found.json").read_text())
    assert entries[0]["clipped"] == ["x1", "y2"]
    assert "clipped" not in entries[1]
    for a, b in zip(found, coco.read_results(tmp_path / "found.json", frames), strict=True):
        assert torch.equal(a.clipped, b.clipped)


def test_there_and_back(frames: coco.Coco, tmp_path: Path) -> None:
    found = [replace(f, predictive=2 * f.covariance) for f in found_in(frames)]
    coco.write_results(tmp_path / "found.json", frames, found)
    for a, b in zip(found, coco.read_results(tmp_path / "found.json", frames), strict=True):
        for name in ("boxes", "scores", "covariance", "predictive"):
            torch.testing.assert_close(
                getattr(b, name), getattr(a, name).double(), rtol=1e-5, atol=1e-5
            )
        assert (b.labels.tolist(), b.fields, b.classes, b.meta) == (
            a.labels.tolist(),
            a.fields,
            a.classes,
            {"method": "exact"},
        )


def test_boxes_without_covariance_remove_old_meta_files(frames: coco.Coco, tmp_path: Path) -> None:
    coco.write_results(tmp_path / "found.json", frames, found_in(frames))
    coco.write_results(tmp_path / "found.json", frames, found_in(frames, covariance=False))
    assert not (tmp_path / "found.meta.json").exists()
    assert set(json.loads((tmp_path / "found.json").read_text())[0]) == {
        "image_id",
        "category_id",
        "bbox",
        "score",
    }
    assert coco.read_results(tmp_path / "found.json", frames)[0].covariance is None


def test_nothing_found_anywhere(frames: coco.Coco, tmp_path: Path) -> None:
    nothing = [found[:0] for found in found_in(frames)]
    coco.write_results(tmp_path / "none.json", frames, nothing)
    assert json.loads((tmp_path / "none.json").read_text()) == []
    assert [len(found) for found in coco.read_results(tmp_path / "none.json", frames)] == [0, 0, 0]


def test_other_names_for_the_covariance(frames: coco.Coco, tmp_path: Path) -> None:
    found = found_in(frames)
    coco.write_results(tmp_path / "found.json", frames, found)
    entry = json.loads((tmp_path / "found.json").read_text())[0]
    assert np.array(entry["bbox_covar"]).ravel().tolist() == entry["covariance"]
    C = found[0].covariance[0].double().numpy() / 0.96**2  # of the corners, in pixels of the image
    np.testing.assert_allclose(entry["covars"], [C[:2, :2], C[2:, 2:]], rtol=1e-5, atol=1e-6)


def test_aliases_match_sampled_boxes(frames: coco.Coco, tmp_path: Path) -> None:
    """The predictive covariance, where there is one: readers score it as that of the error."""
    found = [replace(f, predictive=3 * f.covariance) for f in found_in(frames)]
    coco.write_results(tmp_path / "found.json", frames, found)
    entry = json.loads((tmp_path / "found.json").read_text())[0]
    C = found[0].predictive[0].double()
    noise = (
        torch.randn(200_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        @ torch.linalg.cholesky(C).T
    )
    x1, y1, x2, y2 = ((found[0].boxes[0].double() + noise) / 0.96).unbind(1)
    draws = torch.stack([x1, y1, x2 - x1, y2 - y1], 1)
    corners = torch.cat([draws[:, :2], draws[:, :2] + draws[:, 2:]], 1)
    expected = [np.cov(corners[:, :2].T.numpy()), np.cov(corners[:, 2:].T.numpy())]
    for given, sampled in (
        (entry["bbox_covar"], np.cov(draws.T.numpy())),
        (entry["covars"][0], expected[0]),
        (entry["covars"][1], expected[1]),
    ):
        assert np.linalg.norm(np.array(given) - sampled) < 0.02 * np.linalg.norm(sampled)
    meta = json.loads((tmp_path / "found.meta.json").read_text())
    assert meta["also"] == {"bbox_covar": "predictive", "covars": "predictive"}
    torch.testing.assert_close(
        coco.read_results(tmp_path / "found.json", frames)[0].predictive,
        found[0].predictive.double(),
        rtol=1e-5,
        atol=1e-5,
    )


def test_logit_is_not_written(frames: coco.Coco, tmp_path: Path) -> None:
    found = found_in(frames, fields=("x1", "y1", "x2", "y2", "logit"))
    coco.write_results(tmp_path / "found.json", frames, found)
    again = coco.read_results(tmp_path / "found.json", frames)[0]
    torch.testing.assert_close(
        again.covariance, found[0].covariance[:, :4, :4].double(), rtol=1e-5, atol=1e-5
    )


def test_unwritable_results_are_refused(frames: coco.Coco, tmp_path: Path) -> None:
    found = found_in(frames)
    bad = [
        (
            [replace(f, fields=("x", "y", "w", "h")) for f in found],
            "image 11: COCO takes boxes of x1 y1 x2 y2 .*; these are x y w h",
        ),
        (
            [replace(f, boxes=f.boxes * torch.nan) for f in found],
            "frame 11: the position or size of 4 of 4 boxes is not finite",
        ),
        (
            [replace(f, scores=f.scores * torch.nan) for f in found],
            "frame 11: the score of 4 of 4 boxes is not finite",
        ),
        ([replace(f, classes=("cat", "horse", "dog")) for f in found], "frame 11: no class horse"),
        (found[:2], "detections of 2 frames for 3 frames"),
    ]
    for detections, message in bad:
        with pytest.raises(BoxcovError, match=message):
            coco.write_results(tmp_path / "bad.json", frames, detections)
    assert not (tmp_path / "bad.json").exists()


def test_files_that_are_not_results_are_refused(frames: coco.Coco, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    texts = [
        "{",
        "[1]",
        '[{"image_id": 11}]',
        '[{"image_id": 11, "category_id": 2, "bbox": [1, 2, 3, 4], "score": 1}]',
    ]
    for text in texts:
        path.write_text(text)
        with pytest.raises(
            BoxcovError, match=r"found\.json: not a file of COCO results, or a damaged one"
        ):
            coco.read_results(path, frames)
    path.write_text('[{"image_id": 12}]')
    with pytest.raises(BoxcovError, match="image 12, which is not among the frames"):
        coco.read_results(path, frames)


def test_official_evaluation_ignores_the_covariances(frames: coco.Coco, tmp_path: Path) -> None:
    path = edited(
        tmp_path / "set",
        lambda content: [thing.setdefault("iscrowd", 0) for thing in content["annotations"]],
    )
    found = found_in(frames)
    coco.write_results(tmp_path / "with.json", frames, found)
    coco.write_results(
        tmp_path / "without.json", frames, [replace(f, covariance=None) for f in found]
    )
    with_it, without = (
        average_precisions(path, tmp_path / f"{name}.json") for name in ("with", "without")
    )
    assert with_it == without
    assert with_it[1] > 0.3  # at an IoU of 0.5: the boxes were put near the objects


def test_results_of_an_error_model(frames: coco.Coco, tmp_path: Path) -> None:
    """Corners to a width mix two fields: x1 and y1 keep scales and regions, x2 and y2 cannot."""
    error_model = make_error_model(("x1", "y1", "x2", "y2"), frames.classes)
    found = [error_model.apply(one) for one in found_in(frames)]
    coco.write_results(tmp_path / "found.json", frames, found)
    text = (tmp_path / "found.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    first, scale = json.loads(text)[0], frames.scale(0)
    assert first["risk"] == pytest.approx(float(found[0].risk[0]), rel=1e-6)
    assert first["misplaced"] == pytest.approx(float(found[0].misplaced[0]), rel=1e-6)
    assert first["scale"] == [
        pytest.approx(float(found[0].scale[0, 0]) / scale, rel=1e-6),
        pytest.approx(float(found[0].scale[0, 1]) / scale, rel=1e-6),
        None,
        None,
    ]
    assert "flipped" not in first
    widths = found[0].region(0.95)[0] / scale  # both sides are inside in at least 90 %
    assert first["region_widths"][14] == pytest.approx(float(widths[0] + widths[2]), rel=1e-6)
    for a, b in zip(found, coco.read_results(tmp_path / "found.json", frames), strict=True):
        for name in ("no_object", "iou_below", "misplaced", "risk", "predictive"):
            torch.testing.assert_close(
                getattr(b, name), getattr(a, name).double(), rtol=1e-5, atol=1e-5
            )
        torch.testing.assert_close(b.scale[:, :2], a.scale[:, :2].double(), rtol=1e-6, atol=0)
        assert bool(b.scale[:, 2:].isnan().all())
        assert bool((b.region(0.9) >= a.region(0.9) * (1 - 1e-6)).all())
        torch.testing.assert_close(
            b.region(0.9)[:, :2], a.region(0.9)[:, :2].double(), rtol=1e-6, atol=0
        )
