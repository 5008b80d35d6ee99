from __future__ import annotations

import signal
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch

import boxcov as package
from boxcov.cli import fit as fit_command
from boxcov.data import shapes, simulated
from boxcov.detectors.tiny import TinyCenter
from boxcov.kfac.passes import NonFinite
from boxcov.pipeline import fit as fitting
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.options import FitCommand
from boxcov.pipeline.progress import ProgressBar
from boxcov.posterior.posterior import FisherKind, Form
from helpers.command_line import boxcov, refuse, small_network, succeed


def test_posterior_equals_that_of_the_library(tmp_path) -> None:
    word, out = small_network(tmp_path), tmp_path / "p.safetensors"
    words = ["--count 3 --sweeps 1 --prior-precision 2 --n-data 50 --fisher mc --json"]
    report = succeed(f"fit --detector {word} --out {out}", *words).report
    detector = load_detector(word)
    found = package.Posterior.load(out, detector)
    frames = simulated.frames("clear", seed=0, count=3, sweeps=1)
    expected = package.fit(detector, frames, n_data=50, prior_precision=2.0, fisher="mc")
    assert list(found.blocks) == list(expected.blocks)
    for name, block in expected.blocks.items():
        assert torch.equal(found.variances(name), expected.variances(name))
        assert torch.equal(found.blocks[name].Q.vectors, block.Q.vectors)
    assert report["layers"] == len(expected.blocks)
    assert report["bytes"]["stored"] == expected.storage().stored
    assert (
        report["made_from"]
        == {
            "detector": word,
            "data": "simulated:clear",
            "count": "3",
            "seed": "0",
            "sweeps": "1",
            "fraction": "1",
        }
        == found.meta
    )


def test_ekfac_of_sampled_targets(tmp_path) -> None:
    word, out = small_network(tmp_path), tmp_path / "p.safetensors"
    words = "--count 2 --sweeps 1 --depth head.shared --fisher mc --ekfac --json"
    report = succeed(f"fit --detector {word} --out {out}", words).report
    assert report["corrected"]
    detector = load_detector(word)
    found = package.Posterior.load(out, detector)
    frames = simulated.frames("clear", seed=0, count=2, sweeps=1)
    expected = package.fit(
        detector,
        frames,
        ["head.shared"],
        fisher="mc",
        options=package.FitOptions(ekfac=True),
    )
    assert torch.equal(found.variances("head.shared.0"), expected.variances("head.shared.0"))


def test_compressed_posterior(tmp_path) -> None:
    word, out = small_network(tmp_path), tmp_path / "p.safetensors"
    words = ["--count 2 --sweeps 1 --depth head.shared --fisher mc --compress 0.01"]
    done = succeed(f"fit --detector {word} --out {out}", *words)
    found = package.Posterior.load(out, load_detector(word))
    assert 0 < found.error <= 0.01
    assert f"no variance more than {100 * found.error:.2f} % off" in done.out
    assert out.stat().st_size < 0.5 * found.storage().factors
    refused = boxcov(f"fit --detector {word} --out {out}", *words, "--ekfac")
    assert refused.code != 0
    assert "--compress needs a plain fit" in refused.err


def test_printed_summary(tmp_path) -> None:
    out = tmp_path / "p.safetensors"
    words = ["--count 4 --sweeps 1 --fraction 0.5 --depth head.shared --batch 2 --fisher mc"]
    done = succeed("fit --detector", small_network(tmp_path), f"--out {out}", *words)
    first, prior, *words, second, third = done.out.splitlines()
    assert first.startswith("posterior of 1 layer (head.shared) from 2 frames, standing for 4, in ")
    assert prior.startswith("prior precision: auto, ")
    assert prior.endswith("(0 layers set by the frames, 1 by the size of the weights)")
    assert "the frames set it where they determine at least half of a layer's" in words[0]
    assert "prior is as wide as the weights are large" in words[1]
    assert second.startswith("factors 0.0")
    assert third == f"written to {out}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--detector", "yolo:x"],
            "no detector 'yolo:x' (did you mean 'yolox'?): give centerpoint:small",
        ),
        (["--detector", "centerpoint:"], "no detector 'centerpoint:'"),
        (["--detector", "centerpoint:nope.pth"], "nope.pth: no such file"),
        (["--data", "simulated:snow"], "no scenario 'snow': there are clear, rain"),
        (["--data", "nuscenes:nowhere"], "nowhere: no such folder"),
        (["--data", "kitti:nowhere"], "nowhere/training/velodyne: no such folder"),
        (["--split", "night"], "no split 'night' of simulated frames: there are train, test, val"),
        (["--split", "train[:3]"], "simulated splits have no ranges"),
        (["--depth", "hed"], "depth 'hed' is not a part of this detector"),
        (["--depth", "head.shared,"], "--depth 'head.shared,' has an empty name"),
        (["--fraction", "0"], "fraction must be above 0"),
        (["--device", "abacus"], "no device 'abacus' on this machine"),
        (["--out", "absent/p.safetensors"], "absent/p.safetensors: there is no folder absent"),
    ],
)
def test_user_errors_are_one_line(tmp_path, words, message) -> None:
    done = boxcov(
        "fit --detector",
        small_network(tmp_path),
        f"--out {tmp_path / 'p.safetensors'} --count 1 --sweeps 1",
        *words,
    )
    assert done.code == 1
    assert done.out == ""
    assert done.err.startswith("boxcov: ")
    assert done.err.count("\n") == 1
    assert message in done.err
    assert not (tmp_path / "p.safetensors").exists()


@pytest.mark.parametrize(
    "words", [["--count", "x"], ["--fisher", "true"], ["--form", "round"], ["--colour", "red"]]
)
def test_wrong_usage_exits_with_2(tmp_path, words) -> None:
    assert boxcov(f"fit --out {tmp_path / 'p.safetensors'}", *words).code == 2


def test_resume_replaces_no_finished_fit(tmp_path) -> None:
    word, out = small_network(tmp_path), tmp_path / "p.safetensors"
    words = f"fit --detector {word} --out {out} --count 4 --sweeps 1 --fisher mc".split()
    succeed(*words, "--resume")
    made = out.read_bytes()
    error = refuse(*words, "--resume")
    assert f"{out}: exists: replace it with --force" in error
    assert out.read_bytes() == made
    # interrupted after it wrote
    out.write_text("other")
    (tmp_path / "p.safetensors.checkpoint.second").touch()
    succeed(*words, "--resume")
    assert out.read_bytes() == made


def test_interrupted_fit_resumes(tmp_path, monkeypatch) -> None:
    word, out = small_network(tmp_path), tmp_path / "p.safetensors"
    words = [f"fit --detector {word} --out {out} --count 4 --sweeps 1 --fisher mc"]
    succeed(*words)
    whole = out.read_bytes()
    out.unlink()
    show = ProgressBar.__call__

    def stop(number: int) -> None:
        def called(self, done: int, total: int | None = None, note: str = "") -> None:
            if done == 2:
                signal.raise_signal(number)
            show(self, done, total, note)

        monkeypatch.setattr(ProgressBar, "__call__", called)

    stop(signal.SIGINT)
    done = boxcov(*words)
    assert done.code == 130
    assert done.err == "boxcov: interrupted; the same command with --resume continues\n"
    assert not out.exists()
    assert "checkpoint of an interrupted fit: continue it with" in refuse(*words)
    error = refuse(*words, "--depth neck")
    assert "checkpoint of another fit (depth was 'head', is 'neck'" in error
    (tmp_path / "p.safetensors.checkpoint").unlink()
    stop(signal.SIGTERM)
    done = boxcov(*words)
    assert done.code == 143
    assert "the same command with --resume continues" in done.err
    monkeypatch.undo()
    succeed(*words, "--resume")
    assert out.read_bytes() == whole
    assert not (tmp_path / "p.safetensors.checkpoint").exists()


def test_existing_output_is_replaced_with_force_only(tmp_path) -> None:
    word, out = small_network(tmp_path), tmp_path / "p.safetensors"
    out.write_text("mine")
    words = f"fit --detector {word} --out {out} --count 4 --sweeps 1 --fisher mc"
    done = boxcov(words)
    assert (done.code, done.err) == (
        1,
        f"boxcov: {out}: exists: replace it with --force, or give another name\n",
    )
    assert out.read_text() == "mine"
    succeed(words, "--force")
    assert out.stat().st_size > 1000


@pytest.mark.parametrize(("n_data", "few"), [(4, True), (1e6, False)])
def test_a_posterior_that_is_almost_the_prior_is_named(n_data: float, few: bool) -> None:
    detector, frames = TinyCenter(), shapes.frames(count=4)
    posterior = package.fit(detector, frames, n_data=n_data)
    said = fitting.summarize(posterior, 0.0)
    text = fit_command._format({**said, "out": "p.safetensors"})
    assert ("the prior may decide most of" in text) == few
    assert said["weights"] == sum(block.size for block in posterior.blocks.values())
    # the claim itself: variances of boxes without any frame
    prior = replace(posterior, n_data=1e-9)
    own, without = (
        package.ExactGLM(detector, p)(frames[0][0]).covariance.diagonal(dim1=1, dim2=2)
        for p in (posterior, prior)
    )
    assert len(own)
    assert bool(((own / without).median(0).values > 0.9).all()) == few


def test_choices_equal_those_of_the_library() -> None:
    fit = get_type_hints(FitCommand)
    assert fit["fisher"] == FisherKind
    assert fit["nonfinite"] == NonFinite
    assert fit["form"] == Form
