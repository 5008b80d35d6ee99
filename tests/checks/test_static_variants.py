"""A select_static() with other rules than select() is found, also if the frame does not show it."""

from __future__ import annotations

from typing import Any

import pytest

import boxcov
from boxcov import check
from boxcov.checks import Finding
from boxcov.static_selection import StaticLimits
from helpers.spots import spots


def finding(**rules: Any) -> Finding:
    detector, image = spots(**rules)
    return check(detector, (image, None))["select_static"]


def test_the_same_rules_are_not_refused() -> None:
    found = finding()
    assert found.passed, found.seen
    assert "in this frame and 1" in found.seen  # at least ten variants are within the limits


@pytest.mark.parametrize(
    "rules",
    [{"threshold": 0.3}, {"threshold": 0.1}, {"overlap": 0.6}, {"per_class": False}],
    ids=str,
)
def test_other_rules_than_those_of_select_are_named(rules: dict[str, Any]) -> None:
    found = finding(**rules)
    assert found.passed is False, found.seen
    assert "This is so for other raw outputs than this frame's" in found.seen
    assert "threshold, NMS overlap, classes" in found.seen


@pytest.mark.parametrize("rules", [{}, {"threshold": 0.3}, {"overlap": 0.6}], ids=str)
def test_an_export_refuses_other_rules(tmp_path, rules: dict[str, Any]) -> None:
    onnx = pytest.importorskip("boxcov.export.onnx")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    detector, image = spots(**rules)
    posterior = boxcov.fit(detector, [(image, None)], prior_precision=1.0)
    path, limits = tmp_path / "spots.onnx", StaticLimits(boxes=5, candidates=20)
    if not rules:
        onnx.export(detector, posterior, path, image, 2, limits=limits)
        return
    with pytest.raises(boxcov.BoxcovError, match=r"select_static\(\).*other raw outputs than this"):
        onnx.export(detector, posterior, path, image, 2, limits=limits)
    assert not path.exists()
