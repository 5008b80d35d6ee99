"""Every result records version, seed, fingerprint of the weights and settings."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from boxcov import (
    GLM,
    MCGLM,
    MCI,
    Detections,
    ExactGLM,
    FitOptions,
    Posterior,
    __version__,
    fit,
)
from boxcov._files.output_file import write_safetensors
from boxcov._torch.modules import fingerprint
from boxcov.data import shapes
from boxcov.detectors import centerpoint
from boxcov.detectors.tiny import TinyCenter
from helpers.command_line import boxcov, refuse, small_network, succeed


def header(path: Path, key: str) -> dict:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()[key])


def test_results_carry_version_seed_fingerprint_and_settings(tmp_path) -> None:
    detector = TinyCenter(threshold=0.05)
    own = fingerprint(detector)
    posterior = fit(
        detector,
        shapes.frames(count=4),
        options=FitOptions(seed=3, fraction=0.5),
        fisher="mc",
        n_data=9,
        prior_precision=2.0,
    )
    posterior.save(tmp_path / "p")
    about = header(tmp_path / "p", "boxcov.posterior")
    assert (about["version"], about["weights_sha256"], about["meta"]) == (
        __version__,
        own,
        {"seed": "3", "fraction": "0.5"},
    )
    settings = {
        name: about[name]
        for name in (
            "fisher",
            "n_data",
            "prior_precision",
            "depth",
            "form",
            "frames",
            "skipped",
        )
    }
    assert settings == {
        "fisher": "mc",
        "n_data": 9,
        "prior_precision": 2.0,
        "depth": "head",
        "form": "eigen",
        "frames": 2,
        "skipped": 0,
    }
    image = shapes.frames(count=1, seed=7)[0][0]
    drawing = {
        "mcglm": MCGLM(detector, posterior, 5, seed=7),
        "mci": MCI(detector, samples=5, seed=7),
    }
    others = {"glm": GLM(detector, posterior, max_boxes=1), "exact": ExactGLM(detector, posterior)}
    for method, model in {**drawing, **others}.items():
        model(image).save(tmp_path / method)
        assert header(tmp_path / method, "boxcov.detections")["version"] == __version__
        meta = Detections.load(tmp_path / method).meta
        assert meta["weights_sha256"] == own, method
        if method in drawing:
            assert (meta["seed"], meta["samples"]) == (7, 5)


@pytest.mark.parametrize("verb", ["fit", "predict", "evaluate"])
def test_a_full_disk_is_an_error_and_leaves_no_partial_file(tmp_path, verb, monkeypatch) -> None:
    """Finished work is kept, and the run resumes once there is space."""
    word = small_network(tmp_path)
    common = ("--detector", word, "--count", 3, "--sweeps", 1)
    succeed("predict", "--method", "nms", *common, "--out", tmp_path / "nms")
    words = {
        "fit": ("fit", "--fisher", "mc", *common),
        "predict": ("predict", "--method", "nms", *common),
        "evaluate": ("evaluate", tmp_path / "nms", "--replicates", 2),
    }
    out, sync = tmp_path / "out", os.replace

    def full(source, target) -> None:
        if Path(target) == out:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(source, target)

    before = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        done = boxcov(*words[verb], "--out", out)
    assert done.code == 1
    assert (
        done.err.strip().splitlines()[-1]
        == f"boxcov: {out}: cannot be written (No space left on device)"
    )
    assert {path.name for path in tmp_path.iterdir()} - before == (
        {"out.checkpoint"} if verb == "fit" else {"out.parts"}
    )
    (tmp_path / ".out.abcdefgh").write_text("half")  # as left by a killed run
    succeed(*words[verb], "--out", out, "--resume")
    assert {path.name for path in tmp_path.iterdir()} - before == {"out"}


@pytest.mark.parametrize("verb", ["fit", "predict", "evaluate"])
def test_a_missing_folder_is_refused_before_the_work(tmp_path, verb) -> None:
    words = {
        "fit": ("fit",),
        "predict": ("predict", "--method", "nms"),
        "evaluate": ("evaluate", tmp_path / "none"),
    }
    error = refuse(*words[verb], "--out", tmp_path / "no" / "out")
    assert f"there is no folder {tmp_path / 'no'}: create it" in error


def test_temporary_files_have_recognisable_names(tmp_path, monkeypatch) -> None:
    """Files left by a killed run are removed by name; safetensors alone writes ``.tmpXXXXXX``."""
    monkeypatch.setattr(
        "safetensors.torch.serialize_file", lambda *_: pytest.fail("written by safetensors itself")
    )
    write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(3)}, {"about": "it"})
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], torch.ones(3))


def test_the_shipped_posterior_is_that_of_its_make_target() -> None:
    makefile = Path(__file__).parents[1].joinpath("Makefile").read_text()
    rule = makefile.split("\nsmall-posterior:")[1].split("\n\n")[0]
    counts = [int(n) for n in re.findall(r"--count (\d+)", rule)]
    n_data, bound = (float(re.search(rf"--{o} ([\d.]+)", rule)[1]) for o in ("n-data", "compress"))
    posterior = Posterior.load("small", centerpoint.load("small"))
    fitted = posterior.error_model.provenance
    assert [posterior.frames, fitted["frames"]] == counts
    assert posterior.n_data == n_data
    assert 0 < posterior.error <= bound
    assert fitted["data"] == "simulated:clear val seed 0"
