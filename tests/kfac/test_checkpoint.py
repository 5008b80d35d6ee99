from __future__ import annotations

import json
import signal
import threading
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from boxcov import BoxcovError, BoxcovWarning, Checkpoint, FitOptions, fit
from boxcov.data import batched, shapes
from boxcov.detectors.tiny import TinyCenter
from boxcov.kfac import checkpoint, passes
from boxcov.kfac.accumulate import Accumulator
from boxcov.kfac.ekfac import GradientMoments
from boxcov.posterior.kronecker_block import Eigendecomposition
from helpers.cut_offs import FRAMES, Cut, CutOff, about, bytes_of, cut


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fisher": "mc", "options": FitOptions(seed=3)},
        {"depth": "backbone"},
        {"options": FitOptions(fraction=0.6, seed=1)},
        {"depth": ["up", "head.shared"]},
    ],
    ids=["head", "mc", "backbone", "fraction", "modules"],
)
def test_an_interrupted_fit_resumes_to_the_same_bytes(tmp_path, settings) -> None:
    whole = bytes_of(fit(TinyCenter(), FRAMES, **settings), tmp_path)
    path = tmp_path / "c"
    done = fit(TinyCenter(), FRAMES, **settings).frames
    numbers = iter(range(done))

    class Some(CutOff):
        def __getitem__(self, i: int):
            if next(numbers) == 2:
                raise Cut
            return self.frames[i]

    with pytest.raises(Cut):
        fit(
            TinyCenter(), Some(FRAMES, -1), checkpoint=Checkpoint(path, every_seconds=0), **settings
        )
    reading = CutOff(FRAMES, -1)
    resumed = fit(TinyCenter(), reading, checkpoint=Checkpoint(path, resume=True), **settings)
    assert bytes_of(resumed, tmp_path) == whole
    assert resumed.frames == done
    # the remaining items, and the last counted one for comparison
    assert len(reading.read) == done - 2 + 1


@pytest.mark.parametrize("at", range(1, 7))
def test_fit_resumes_after_an_interrupt_at_any_item(tmp_path, at) -> None:
    cut(tmp_path / "c", at)
    assert bytes_of(
        fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", resume=True)), tmp_path
    ) == bytes_of(fit(TinyCenter(), FRAMES), tmp_path)


def test_resuming_a_stream_skips_the_counted_items(tmp_path) -> None:
    def stream(cut_at: int = -1):
        for i, item in enumerate(FRAMES):
            if i == cut_at:
                raise Cut
            yield item

    with pytest.raises(Cut):
        fit(
            TinyCenter(),
            stream(6),
            options=FitOptions(fraction=0.5),
            checkpoint=Checkpoint(tmp_path / "c", every_seconds=0),
        )
    resumed = fit(
        TinyCenter(),
        stream(),
        options=FitOptions(fraction=0.5),
        checkpoint=Checkpoint(tmp_path / "c", resume=True),
    )
    whole = fit(TinyCenter(), stream(), options=FitOptions(fraction=0.5))
    assert resumed.n_data == whole.n_data == 7
    assert bytes_of(resumed, tmp_path) == bytes_of(whole, tmp_path)


def test_checkpoints_at_the_interval_and_on_an_error(tmp_path, monkeypatch) -> None:
    # at the start, after each frame, and after each write
    ticks = iter([0.0, 10.0, 20.0, 60.0, 60.0, 70.0, 70.0])
    monkeypatch.setattr(passes, "monotonic", lambda: next(ticks))
    written = []
    monkeypatch.setattr(
        checkpoint,
        "write_safetensors",
        lambda path, tensors, about: written.append(json.loads(about["boxcov.checkpoint"])["next"]),
    )
    with pytest.raises(Cut):
        fit(
            TinyCenter(), CutOff(FRAMES, 4), checkpoint=Checkpoint(tmp_path / "c", every_seconds=60)
        )
    assert written == [3, 4]


def test_an_existing_checkpoint_is_not_overwritten(tmp_path) -> None:
    cut(tmp_path / "c")
    with pytest.raises(
        BoxcovError,
        match=r"c: checkpoint of an interrupted fit: continue it with resume=True \(--resume\)",
    ):
        fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c"))


def test_resume_without_a_checkpoint_starts_a_fit(tmp_path) -> None:
    assert fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", resume=True)).frames == 7
    with pytest.raises(BoxcovError, match="every_seconds must be at least 0, got nan"):
        Checkpoint(tmp_path / "c", every_seconds=float("nan"))


@pytest.mark.parametrize(
    ("frames", "settings", "message"),
    [
        (FRAMES, {"depth": "neck"}, "depth was 'head', is 'neck'"),
        (FRAMES, {"fisher": "mc"}, "fisher was 'empirical', is 'mc'"),
        (FRAMES, {"options": FitOptions(seed=5)}, "seed was 0, is 5"),
        (FRAMES, {"options": FitOptions(fraction=0.9)}, r"fraction was 1\.0, is 0\.9"),
        (FRAMES, {"options": FitOptions(exclude=["head.shared"])}, "parameters was"),
        (shapes.frames(count=8), {}, "items was 7, is 8"),
        (batched(FRAMES, 2), {}, "items was 7, is 4"),
        (
            shapes.frames(count=7, seed=1),
            {},
            "made from other data: item 3 has changed",
        ),
        ([FRAMES[i] for i in (0, 1, 2, 4, 3, 5, 6)], {}, "item 3 has changed"),
    ],
)
def test_a_checkpoint_of_another_fit_is_refused(tmp_path, frames, settings, message) -> None:
    cut(tmp_path / "c", 4)
    with pytest.raises(BoxcovError, match=message):
        fit(TinyCenter(), frames, checkpoint=Checkpoint(tmp_path / "c", resume=True), **settings)


@pytest.mark.parametrize("change", [np.float32(0.5), np.arange(3), np.zeros(3, np.float32)])
def test_arrays_of_an_item_count(change) -> None:
    item = torch.zeros(2), {"boxes": np.zeros(3), "weight": 1.0}
    own = checkpoint.hash_item(item)
    assert own == checkpoint.hash_item((torch.zeros(2), {"boxes": np.zeros(3), "weight": 1.0}))
    assert own != checkpoint.hash_item((item[0], {**item[1], "boxes": change}))


def test_other_weights_are_refused(tmp_path) -> None:
    cut(tmp_path / "c")
    with pytest.raises(
        BoxcovError,
        match=r"c: checkpoint of another fit \(weights_sha256 was '\w{64}', is '\w{64}'\)",
    ):
        fit(TinyCenter(seed=1), FRAMES, checkpoint=Checkpoint(tmp_path / "c", resume=True))


def test_settings_that_do_not_affect_the_sums_may_change(tmp_path) -> None:
    cut(tmp_path / "c")
    resumed = fit(
        TinyCenter(),
        FRAMES,
        checkpoint=Checkpoint(tmp_path / "c", resume=True),
        n_data=99,
        prior_precision=5.0,
    )
    assert (resumed.n_data, resumed.prior_precision, resumed.frames) == (99, 5.0, 7)


SECOND = {"options": FitOptions(ekfac=True), "fisher": "mc"}


@pytest.fixture(scope="module")
def twice(tmp_path_factory) -> bytes:
    """The posterior of two uninterrupted passes."""
    return bytes_of(fit(TinyCenter(), FRAMES, **SECOND), tmp_path_factory.mktemp("twice"))


@pytest.mark.parametrize("done", [7, 8, 10, 14])
def test_an_interrupted_second_pass_resumes(tmp_path, done, twice) -> None:
    def stop(number: int, total: int | None) -> None:
        assert total == 14
        if number == done:
            raise Cut

    with pytest.raises(Cut):
        fit(
            TinyCenter(),
            FRAMES,
            checkpoint=Checkpoint(tmp_path / "c", every_seconds=1e9),
            progress=stop,
            **SECOND,
        )
    assert about(tmp_path / "c")["next"] == 7
    if done > 7:
        assert about(tmp_path / "c.second")["next"] == done - 7
        with pytest.raises(BoxcovError, match=r"c: checkpoint of an interrupted fit"):
            fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c"), **SECOND)
    frames, seen = CutOff(FRAMES, -1), []
    resumed = fit(
        TinyCenter(),
        frames,
        checkpoint=Checkpoint(tmp_path / "c", resume=True),
        progress=lambda *now: seen.append(now),
        **SECOND,
    )
    assert bytes_of(resumed, tmp_path) == twice
    assert seen == [(number, 14) for number in range(done + 1, 15)]


def test_a_damaged_or_left_over_second_pass_is_refused(tmp_path) -> None:
    fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", every_seconds=0), **SECOND)
    (tmp_path / "c").unlink()
    # refused before the first pass
    with pytest.raises(BoxcovError, match=r"c\.second: checkpoint of an interrupted fit"):
        fit(TinyCenter(), CutOff(FRAMES, 0), checkpoint=Checkpoint(tmp_path / "c"), **SECOND)
    (tmp_path / "c.second").write_bytes(b"no")
    with pytest.raises(
        BoxcovError, match=r"c\.second: not a checkpoint of a fit, or a damaged one"
    ):
        fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", resume=True), **SECOND)


def test_a_second_pass_in_other_bases_is_refused(tmp_path) -> None:
    """Equal sums may give other eigenvectors on another machine; moments of one do not fit."""
    fit(
        TinyCenter(),
        FRAMES,
        options=FitOptions(ekfac=True),
        checkpoint=Checkpoint(tmp_path / "c", every_seconds=0),
    )
    decompose = Eigendecomposition.of

    def other(matrix, dtype):
        eigen = decompose(matrix, dtype)
        return replace(eigen, vectors=-eigen.vectors)

    with (
        mock.patch.object(Eigendecomposition, "of", other),
        pytest.raises(BoxcovError, match=r"c\.second: checkpoint of another fit \(basis was"),
    ):
        fit(
            TinyCenter(),
            FRAMES,
            options=FitOptions(ekfac=True),
            checkpoint=Checkpoint(tmp_path / "c", resume=True),
        )


class Interrupted(dict):
    """Raises KeyboardInterrupt at the fourth lookup."""

    def __getitem__(self, name):
        self.looks = getattr(self, "looks", 0) + 1
        if self.looks == 4:
            raise KeyboardInterrupt
        return super().__getitem__(name)


def test_a_half_counted_item_is_not_saved(tmp_path, twice) -> None:
    """An interrupt may come at any moment; a half counted item must not be in the file."""
    add, add_moments, calls = Accumulator.add, GradientMoments.add, []

    def half_counted(self, terms) -> None:
        calls.append(1)
        self.sums = Interrupted(self.sums) if len(calls) == 4 else self.sums
        add(self, terms)

    def half_added(self, terms) -> None:
        calls.append(1)
        add_moments(self, [Interrupted(each) for each in terms] if len(calls) == 4 else terms)

    for patched in (
        mock.patch.object(Accumulator, "add", half_counted),
        mock.patch.object(GradientMoments, "add", half_added),
    ):
        calls.clear()
        with patched, pytest.raises(KeyboardInterrupt):
            fit(
                TinyCenter(),
                FRAMES,
                checkpoint=Checkpoint(tmp_path / "c", every_seconds=1e9, resume=True),
                **SECOND,
            )
    assert (
        bytes_of(
            fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", resume=True), **SECOND),
            tmp_path,
        )
        == twice
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_checkpoint(tmp_path, number) -> None:
    class Signalled(CutOff):
        def __getitem__(self, i: int):
            if i == 3:
                signal.raise_signal(number)
            return super().__getitem__(i)

    def terminate(*_) -> None:  # as the command line does
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(
                TinyCenter(),
                Signalled(FRAMES, -1),
                checkpoint=Checkpoint(tmp_path / "c", every_seconds=1e9),
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert about(tmp_path / "c")["next"] == 3
    resumed = fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", resume=True))
    assert bytes_of(resumed, tmp_path) == bytes_of(fit(TinyCenter(), FRAMES), tmp_path)


def test_an_added_item_that_is_not_counted_is_not_saved(tmp_path) -> None:
    """An interrupt between the end of ``add`` and the counter must not add the item twice."""
    add, calls = Accumulator.add, []

    def interrupted(self, terms) -> None:
        add(self, terms)
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with mock.patch.object(Accumulator, "add", interrupted), pytest.raises(KeyboardInterrupt):
        fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", every_seconds=1e9))
    resumed = fit(TinyCenter(), FRAMES, checkpoint=Checkpoint(tmp_path / "c", resume=True))
    assert bytes_of(resumed, tmp_path) == bytes_of(fit(TinyCenter(), FRAMES), tmp_path)


def test_another_thread_writes_checkpoints(tmp_path) -> None:
    thread = threading.Thread(target=lambda: cut(tmp_path / "c"))
    thread.start()
    thread.join()
    assert about(tmp_path / "c")["next"] == 4


def test_settings_of_0_1_are_read() -> None:
    """0.1 stored no configuration, and what it weighted differently cannot go on."""
    current = {"depth": "head", "seed": 0, "configuration tasks": "car"}
    old = {"depth": "head", "seed": 0, "locations": "all", "weight": None}
    checkpoint._check_settings(old, current)
    for more in ({"locations": "gradient"}, {"weight": "by_objects"}):
        with pytest.raises(BoxcovError, match="which this version does not have: remove the file"):
            checkpoint._check_settings({**old, **more}, current)
    with pytest.raises(BoxcovError, match="configuration tasks was 'bus', is 'car'"):
        checkpoint._check_settings({**old, "configuration tasks": "bus"}, current)


def test_an_item_that_is_left_out_is_counted_once(tmp_path, monkeypatch) -> None:
    """An interrupt before the item is counted must not leave it among the skipped ones."""
    bad = [*FRAMES]
    bad[1] = (bad[1][0] * float("nan"), bad[1][1])
    options, terms = FitOptions(nonfinite="skip"), passes.Pass._terms

    def interrupted(self, number, item):
        found = terms(self, number, item)
        if number == 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(passes.Pass, "_terms", interrupted)
    with pytest.warns(BoxcovWarning, match="left out"), pytest.raises(KeyboardInterrupt):
        fit(TinyCenter(), bad, options=options, checkpoint=Checkpoint(tmp_path / "c"))
    monkeypatch.undo()
    with pytest.warns(BoxcovWarning, match="left out"):
        resumed = fit(
            TinyCenter(), bad, options=options, checkpoint=Checkpoint(tmp_path / "c", resume=True)
        )
    assert resumed.skipped == 1
