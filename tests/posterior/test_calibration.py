from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, Calibration
from boxcov.posterior.calibration import features

FIELDS = ("x", "y", "w", "l", "yaw", "vx", "vy")


def some(
    kind: str = "residual", classes: tuple[str, ...] = ("car", "bus"), seed: int = 0
) -> Calibration:
    rng = np.random.default_rng(seed)
    D, P = len(FIELDS), 4
    with_features = kind in ("residual", "score")

    def table(*shape: int) -> tuple:
        values = rng.normal(size=shape)
        return (
            tuple(tuple(row) for row in values.tolist())
            if len(shape) == 2
            else tuple(values.tolist())
        )

    return Calibration(
        kind=kind,
        fields=FIELDS,
        classes=classes,
        estimator="exact",
        log_scale=(-np.inf,) * len(classes) if kind == "score" else table(len(classes)),
        log_residual=((-np.inf,) * D,) * len(classes)
        if kind == "scale"
        else table(len(classes), D),
        features=("score", "size", "range", "speed") if with_features else (),
        slopes=table(D, P) if with_features else (),
        centre=table(P) if with_features else (),
        spread=(1.0, 2.0, 0.5, 1.5) if with_features else (),
        limits=((-1.0, 1.0),) * P if with_features else (),
        floor=(1e-4,) * D,
        error_scale=(np.inf,) * len(classes),
        provenance={"boxes": 3, "nll_before": np.inf, "data": "drawn"},
    )


def boxes(m: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(m, 7, 7))
    b = rng.normal(size=(m, 7)) * 3
    b[:, 2:4] = np.abs(b[:, 2:4]) + 0.1
    return A @ A.transpose(0, 2, 1), b, rng.uniform(0.0, 1.0, m), np.arange(m) % 2


@pytest.mark.parametrize("kind", ["scale", "affine", "residual", "score"])
def test_it_is_what_it_says_box_by_box(kind: str) -> None:
    c, (covariance, b, scores, labels) = some(kind), boxes()
    found = c.predictive(covariance, b, scores, labels)
    for i in range(len(b)):
        expected = np.exp(c.log_scale[labels[i]]) * covariance[i]
        if kind != "scale":
            log_r = np.array(c.log_residual[labels[i]])
            if c.features:
                p = min(max(scores[i], 0.01), 0.99)
                seen = [
                    np.log(p / (1 - p)),
                    (np.log(b[i, 2]) + np.log(b[i, 3])) / 2,
                    np.log(max(np.hypot(b[i, 0], b[i, 1]), 1.0)),
                ]
                seen.append(np.log(np.sqrt(b[i, 5] ** 2 + b[i, 6] ** 2 + 0.01)))
                log_r = log_r + np.array(c.slopes) @ (
                    (np.clip(seen, -1, 1) - np.array(c.centre)) / np.array(c.spread)
                )
            expected = expected + np.diag(np.exp(log_r) + 1e-4)
        np.testing.assert_allclose(found[i], expected, rtol=1e-9)


@pytest.mark.parametrize("kind", ["scale", "affine", "residual", "score"])
@pytest.mark.parametrize("m", [0, 1, 6])
def test_tensors_and_arrays_give_the_same(kind: str, m: int) -> None:
    c, given = some(kind), boxes(m)
    expected = c.predictive(*given)
    tensors = [torch.from_numpy(array) for array in given]
    found = c.predictive(*tensors)
    assert found.shape == (m, 7, 7)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    single = c.prepared(torch.zeros(1))(
        *[t.float() if t.is_floating_point() else t for t in tensors]
    )
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(tensors[0], torch.from_numpy(given[0]))


@pytest.mark.parametrize("kind", ["scale", "affine", "residual", "score"])
def test_json_there_and_back(kind: str) -> None:
    c = some(kind)
    text = c.to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    again = Calibration.from_json(text)
    assert again == c
    assert again.to_json() == text
    given = boxes()
    assert np.array_equal(again.predictive(*given), c.predictive(*given))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "scale"}', "null"])
def test_damaged_json_is_refused(text: str) -> None:
    with pytest.raises(BoxcovError, match="not a calibration"):
        Calibration.from_json(text)


def test_tables_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(
        BoxcovError, match=r"log_scale has shape \(2,\), expected \(1,\) for 1 classes"
    ):
        Calibration("scale", ("x",), ("car",), "exact", (0.0, 0.0), ((0.0,),))
    with pytest.raises(BoxcovError, match="no kind of calibration 'magic'"):
        Calibration("magic", ("x",), ("car",), "exact", (0.0,), ((0.0,),))


def test_other_classes_are_refused() -> None:
    with pytest.raises(
        BoxcovError,
        match="for the classes car, bus, the detector has car: fit one with `boxcov calibrate`",
    ):
        some().check(FIELDS, ("car",), "the detector")


def test_boxes_in_images_have_a_size_and_no_range() -> None:
    seen = features(
        ("score", "size"),
        ("x1", "y1", "x2", "y2"),
        np.array([[1.0, 1.0, 5.0, 10.0]]),
        np.array([0.5]),
    )
    np.testing.assert_allclose(seen, [[0.0, np.log(6.0)]])
