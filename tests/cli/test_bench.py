from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import boxcov
from boxcov.detectors.tiny import TinyCenter
from boxcov.errors import BoxcovError
from boxcov.pipeline import bench as benchmarking
from boxcov.pipeline.options import BenchCommand
from helpers.centerpoint_cases import detector_of, frames, pillar_config


@pytest.fixture(scope="module")
def measured():
    config = pillar_config()
    detector, data = detector_of(config), frames(config)
    options = BenchCommand(samples=(3,))
    posterior = boxcov.fit(detector, data)
    found = benchmarking.methods_to_time(detector, posterior, options, [data[0][0]])
    return (
        detector,
        found,
        benchmarking.measure(detector, found, [data[0][0]], repeats=2, device="cpu"),
    )


def test_every_method_has_a_row(measured) -> None:
    _, _, rows = measured
    assert [row["method"] for row in rows] == [
        "plain",
        "exact",
        "mcglm",
        "mcglm as published",
        "mc dropout",
        "glm as published",
    ]
    for row in rows:
        assert {"method", "device", "boxes", "samples", "depth", "ms", "ratio", "peak_mib"} <= set(
            row
        )
        assert row["low"] <= row["ms"] <= row["high"]
        assert row["ratio"] == pytest.approx(row["ms"] / rows[0]["ms"])
    assert json.loads(json.dumps(rows)) == rows
    assert "extrapolated" in rows[-1]["note"]
    assert "glm as published" in benchmarking.format_table(rows)


def test_a_calibrated_posterior_is_timed_with_its_error_model() -> None:
    detector = boxcov.detectors.centerpoint.load("small")
    options = BenchCommand(posterior=Path("small"), samples=(2,))
    (posterior,) = benchmarking.posteriors_to_time(detector, [], options)
    inputs = boxcov.data.simulated.frames(seed=3, count=1)[0][0]
    entries = benchmarking.methods_to_time(detector, posterior, options, [inputs])
    assert [entry.name for entry in entries[:3]] == ["plain", "exact", "exact and error model"]
    _, exact, calibrated = (entry.call(inputs) for entry in entries[:3])
    assert exact.scale is None
    assert calibrated.scale is not None
    assert torch.equal(exact.covariance, calibrated.covariance)


def test_depth_of_a_given_posterior_is_refused() -> None:
    with pytest.raises(BoxcovError, match="--depth is for a fitted posterior"):
        BenchCommand(posterior=Path("small"), depth=("neck",))
    with pytest.raises(BoxcovError, match="absent: no such file"):
        BenchCommand(posterior=Path("absent"))


def test_a_method_that_cannot_run_says_why(measured) -> None:
    detector, _, _ = measured
    plain = benchmarking.TimedMethod("plain", None, detector.detect)
    entries = [plain, benchmarking.TimedMethod("exact, fused", None, None, "needs a GPU")]
    rows = benchmarking.measure(detector, entries, [frames(pillar_config())[0][0]], 1, "cpu")
    assert rows[1]["ms"] is rows[1]["ratio"] is None
    assert "needs a GPU" in benchmarking.format_table(rows)
    assert json.loads(json.dumps(rows)) == rows


def test_stages_of_a_frame_have_times_work_and_limits() -> None:
    options = BenchCommand(posterior=Path("small"), stages=True, count=1, repeats=1)
    rows = benchmarking.run(options)
    names = ["encoder", "backbone and neck", "head", "selection and decoding", "of which NMS"]
    names += ["covariance", "points for the signals", "signals", "error model"]
    assert [row["stage"] for row in rows] == names
    assert all(row["ms"] > 0 and row["mb"] > 0 and row["limit_ms"] > 0 for row in rows)
    assert {row["precision"] for row in rows} == {"float32"}
    by_name = {row["stage"]: row for row in rows}
    detector = boxcov.detectors.centerpoint.load("small")
    dense = operations_of_convolutions(detector, ("backbone", "neck")) / 1e9
    assert by_name["backbone and neck"]["gflop"] == pytest.approx(dense, rel=1e-6)
    assert by_name["of which NMS"]["gflop"] < 0.1 < by_name["covariance"]["gflop"]
    assert json.loads(json.dumps(rows)) == rows
    table = benchmarking.format_table(rows)
    assert len({len(line) for line in table.splitlines()}) == 1
    assert "limit ms" in table


def operations_of_convolutions(detector, parts: tuple[str, ...]) -> float:
    """Two operations per weight and place where it is used, by hooks on a plain pass."""
    found = []

    def count(module, inputs, output) -> None:
        places = inputs[0] if isinstance(module, torch.nn.ConvTranspose2d) else output
        found.append(2 * module.weight.numel() * places.shape[-2] * places.shape[-1])

    convolutions = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
    hooks = [
        module.register_forward_hook(count)
        for part in parts
        for module in getattr(detector, part).modules()
        if isinstance(module, convolutions)
    ]
    detector(boxcov.data.simulated.frames(count=1)[0][0])
    for hook in hooks:
        hook.remove()
    return sum(found)


def test_stages_of_other_detectors_and_depths_are_refused(monkeypatch) -> None:
    with pytest.raises(BoxcovError, match="--stages has the posterior of the head: remove"):
        BenchCommand(stages=True, depth=("neck",))
    monkeypatch.setattr(benchmarking, "load_detector", lambda options, device: TinyCenter())
    monkeypatch.setattr(benchmarking, "load_frames", lambda *given: 1 / 0)  # before the work
    with pytest.raises(BoxcovError, match="TinyCenter has no fused network with stages"):
        benchmarking.run(BenchCommand(stages=True))


def test_batches_are_timed_per_frame(measured, monkeypatch) -> None:
    detector, _, _ = measured
    data = [item for item, _ in frames(pillar_config())]
    found = benchmarking.compiled_methods({"plain": detector}, data)
    assert [method.name for method in found] == [
        *("plain, compiled", "plain, fused", "plain, fused, 8 frames at once")
    ]
    clock = iter((10.0, 14.0))
    monkeypatch.setattr(benchmarking, "seconds", lambda device: next(clock))
    assert found[2].call(None) == 0.5  # of 4 seconds for 8 frames


def test_frames_that_no_batch_holds_are_a_note(measured) -> None:
    detector, _, _ = measured
    shapes = [torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmarking, "compile", lambda *given, **options: None)
        found = benchmarking.compiled_methods({"plain": detector}, shapes)
    assert "cannot merge tensors of the shapes" in found[2].note
    assert found[2].call is None


def script(name: str):
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_growth_tables_have_a_row_per_method(measured) -> None:
    growth, (_, _, rows) = script("growth"), measured
    columns, cells = growth.table([*rows, *({**row, "boxes": 500} for row in rows)], "boxes")
    assert columns[0] == "boxes"
    assert columns[-1] == "500"
    assert len(cells) == 6
    assert {len(row) for row in cells} == {3}


def test_rows_of_a_run_that_was_cut_off_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``benchmarks/frame.py`` writes after each row: some methods are not measured yet."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    frame, suffix = script("frame"), "" if torch.cuda.is_available() else "-cpu"
    whole = ["small, 9 boxes", "float32", "plain", 3.0, 2.0, 1.0, None]
    sampled = ["small, 9 boxes", "float32", "MC-GLM, head, k = 10", 4.0, None, None, None]
    frame.write(tmp_path, [], [whole, sampled])
    tables = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {name: table["rows"] for name, table in tables.items()} == {
        f"performance-frame{suffix}": [whole[:-1]],
        f"performance-methods{suffix}": [[*sampled[:2], 4.0]],
    }
    assert tables[f"performance-methods{suffix}"]["columns"] == ["network", "precision", "MC-GLM"]


def test_the_papers_mcglm_is_its_finite_difference(measured) -> None:
    """Full passes along the same directions give the covariance of ``derivative="fd"``."""
    detector, found, _ = measured
    data = frames(pillar_config())
    published = next(entry for entry in found if entry.name == "mcglm as published")
    posterior = boxcov.fit(detector, data)
    ours = boxcov.MCGLM(detector, posterior, samples=3, seed=0, derivative="jvp")(
        data[0][0]
    ).covariance
    off = (published.call(data[0][0]) - ours).norm() / ours.norm()
    assert float(off) < 0.05


@pytest.mark.parametrize("count", [6, 30])
def test_detector_with_a_given_number_of_boxes(count: int) -> None:
    config = pillar_config()
    detector = benchmarking.with_box_count(detector_of(config), count)
    assert 0.3 * count <= len(detector.detect(frames(config, 1)[0][0])) <= count


def test_no_repeats_are_refused() -> None:
    with pytest.raises(BoxcovError, match="--repeats must be at least 1, got 0"):
        BenchCommand(repeats=0)


def test_a_ratio_that_worsens_by_more_than_half_is_noticed() -> None:
    regression = script("regression")
    row = {"device": "cpu", "method": "exact", "samples": None}
    record = {"cpu, exact, samples None": 2.0}
    assert not regression.worsened([{**row, "ratio": 2.9}], record)
    assert regression.worsened([{**row, "ratio": 3.1}], record) == [
        "cpu, exact, samples None: 3.10 plain frames, 2.00 on record"
    ]
    assert not regression.worsened([{**row, "method": "another", "ratio": 9.0}], record)
