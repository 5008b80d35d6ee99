from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Calibration
from boxcov.posterior.calibration import box_features, variance_features

FIELDS = ("x", "y", "w", "l", "yaw", "vx", "vy")
KINDS = pytest.mark.parametrize("kind", ["score", "product"])


def some(kind: str = "product", seed: int = 0) -> Calibration:
    rng = np.random.default_rng(seed)
    names = ("score", "size", "range", "speed")
    names += variance_features(("x", "yaw")) if kind == "product" else ()
    P = len(names)

    def table(*shape: int) -> tuple:
        return tuple(tuple(row) for row in rng.normal(size=shape).tolist())

    return Calibration(
        kind=kind,
        fields=FIELDS,
        classes=("car", "bus"),
        estimator="exact",
        log_residual=table(2, 7),
        features=names,
        slopes=table(7, P),
        centre=table(1, P)[0],
        spread=(1.0, 2.0, 0.5, 1.5, 0.7, 1.2)[:P],
        limits=((-1.0, 1.0),) * P,
        floor=(1e-4,) * 7,
        regions=((0.5, 0.4), (0.9, 0.95)),
        provenance={"boxes": 3, "nll_before": np.inf, "data": "drawn"},
    )


def boxes(m: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Covariances, boxes, scores and labels."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(m, 7, 7))
    b = rng.normal(size=(m, 7)) * 3
    b[:, 2:4] = np.abs(b[:, 2:4]) + 0.1
    return A @ A.transpose(0, 2, 1), b, rng.uniform(0.0, 1.0, m), np.arange(m) % 2


@KINDS
def test_predictive_box_by_box(kind: str) -> None:
    c, (covariance, b, scores, labels) = some(kind), boxes()
    found = c.predictive(covariance, b, scores, labels)
    for i in range(len(b)):
        p = min(max(scores[i], 0.01), 0.99)
        seen = [
            np.log(p / (1 - p)),
            (np.log(b[i, 2]) + np.log(b[i, 3])) / 2,
            np.log(max(np.hypot(b[i, 0], b[i, 1]), 1.0)),
            np.log(np.sqrt(b[i, 5] ** 2 + b[i, 6] ** 2 + 0.01)),
        ]
        if kind == "product":
            seen += [np.log(covariance[i, 0, 0]), np.log(covariance[i, 4, 4])]
        standardised = (np.clip(seen, -1, 1) - np.array(c.centre)) / np.array(c.spread)
        log_r = np.array(c.log_residual[labels[i]]) + np.array(c.slopes) @ standardised
        np.testing.assert_allclose(found[i], np.diag(np.exp(log_r) + 1e-4), rtol=1e-9)


@KINDS
@pytest.mark.parametrize("m", [0, 1, 6])
def test_tensors_and_arrays_agree(kind: str, m: int) -> None:
    c, given = some(kind), boxes(m)
    expected = c.predictive(*given)
    tensors = [torch.from_numpy(array) for array in given]
    found = c.predictive(*tensors)
    assert found.shape == (m, 7, 7)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    single = c.tables(torch.zeros(1))(*[t.float() if t.is_floating_point() else t for t in tensors])
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(tensors[0], torch.from_numpy(given[0]))


@KINDS
def test_json_round_trip(kind: str) -> None:
    c = some(kind)
    text = c.to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    again = Calibration.from_json(text)
    assert again == c
    assert again.to_json() == text
    given = boxes()
    assert np.array_equal(again.predictive(*given), c.predictive(*given))


def test_json_of_version_0_1_is_read() -> None:
    """It had a scale of the epistemic covariance, -inf for these kinds, and standard errors."""
    old = json.loads(some().to_json())
    old |= {"log_scale": ["-inf", "-inf"], "error_scale": [0.0, 0.0]}
    old |= {"error_residual": old["log_residual"], "error_slopes": old["slopes"]}
    assert Calibration.from_json(json.dumps(old)) == some()


@pytest.mark.parametrize("kind", ["scale", "affine", "residual"])
def test_removed_kinds_are_refused_with_the_way_out(kind: str) -> None:
    old = {**json.loads(some().to_json()), "kind": kind, "log_scale": [0.0, 0.0]}
    with pytest.raises(BoxcovError, match="no longer supported: run `boxcov calibrate` again"):
        Calibration.from_json(json.dumps(old))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "score"}', "null", "[" * 100_000])
def test_damaged_json_is_refused(text: str) -> None:
    with pytest.raises(BoxcovError, match="not a calibration"):
        Calibration.from_json(text)


def test_wrong_shapes_and_kinds_are_refused() -> None:
    message = r"log_residual has shape \(1, 2\), expected \(1, 1\) for 1 classes"
    with pytest.raises(BoxcovError, match=message):
        Calibration("score", ("x",), ("car",), "exact", ((0.0, 0.0),))
    with pytest.raises(BoxcovError, match="unknown calibration 'magic'"):
        Calibration("magic", ("x",), ("car",), "exact", ((0.0,),))


def test_other_fields_and_classes_are_refused() -> None:
    with pytest.raises(
        BoxcovError,
        match="for the classes car, bus, the detector has car: fit one with `boxcov calibrate`",
    ):
        some().check(FIELDS, ("car",), "the detector")
    with pytest.raises(BoxcovError, match=r"for the box fields x, y, w, .* the records has x, y:"):
        some().check(("x", "y"), ("car", "bus"), "the records")


@pytest.mark.parametrize("level", [0, 1, -0.5, float("nan")])
def test_a_level_outside_0_and_1_is_refused(level: float) -> None:
    with pytest.raises(BoxcovError, match="level must lie between 0 and 1"):
        some().radius(level)


def test_the_radius_interpolates_between_levels() -> None:
    radii = [some().radius(level) for level in (0.3, 0.5, 0.7, 0.9, 0.99)]
    assert radii == sorted(radii)
    assert replace(some(), regions=()).radius(0.5) > some().radius(0.5)


def test_boxes_in_images_have_a_size_and_no_range() -> None:
    box = np.array([[1.0, 1.0, 5.0, 10.0]])
    seen = box_features(("score", "size"), ("x1", "y1", "x2", "y2"), box, np.array([0.5]))
    np.testing.assert_allclose(seen, [[0.0, np.log(6.0)]])


def test_the_repr_is_short() -> None:
    assert len(repr(some())) < 200
