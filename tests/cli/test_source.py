"""--source and --show: frames without labels in, annotated pictures and videos out."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcov import Detections
from boxcov.data.video import Video
from boxcov.detectors.yolox import YOLOX, Config
from boxcov.pipeline import predict as prediction
from boxcov.pipeline import show as showing
from boxcov.pipeline import stream as streaming
from boxcov.pipeline.detectors import load_detector
from boxcov.pipeline.options import EstimatorOptions, FileOptions, PredictCommand
from boxcov.pipeline.predict import open_frames
from boxcov.pipeline.predict import run as predict
from boxcov.report.canvas import SIDE
from helpers.centerpoint_cases import cloud, pillar_config
from helpers.command_line import boxcov, refuse, small_network, succeed

Image = pytest.importorskip("PIL.Image")
NMS = "--method nms --size 64"
pytestmark = pytest.mark.filterwarnings("ignore:.*does not name its 80 classes")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[str, Path]:
    """The word for a small YOLOX, and a folder with two images of 96 x 48 pixels and a text."""
    folder = tmp_path_factory.mktemp("images")
    torch.manual_seed(0)
    detector = YOLOX(Config(width=4, depth=1, depthwise=True))
    for layer in (*detector.head.cls_preds, *detector.head.obj_preds):
        layer.bias.data.fill_(1.0)
    torch.save({"model": detector.state_dict()}, folder / "tiny.pth")
    source = folder / "photos"
    source.mkdir()
    for seed in range(2):
        Image.fromarray(picture(seed)).save(source / f"{seed}.png")
    (source / "notes.txt").write_text("not an image")
    return f"yolox:{folder}/tiny.pth", source


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (48, 96, 3), np.uint8)


@pytest.fixture(scope="module")
def clouds(tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("clouds")
    source = folder / "sweeps"
    source.mkdir()
    for seed in range(2):
        cloud(pillar_config(), seed).numpy().astype("<f4").tofile(source / f"{seed}.bin")
    return small_network(folder), source


def test_predict_reads_a_folder_of_images(images, tmp_path: Path) -> None:
    word, source = images
    out = tmp_path / "d.safetensors"
    succeed(f"predict --source {source} --detector {word} {NMS} --out {out}")
    found = Detections.load(out)
    assert found.meta["files"] == str(source)
    assert found.meta["names"] == [f"{source}/0.png", f"{source}/1.png"]
    assert float(found.boxes[:, 2].max()) > 64  # pixels of the image, not of the square
    streamed = boxcov(f"stream --source {source} --detector {word} {NMS}")
    for one, line in zip(found.frames(2), streamed.lines):
        boxes = torch.tensor(line["boxes"])
        torch.testing.assert_close(boxes, one.boxes, rtol=1e-4, atol=1e-5)


def test_predict_reads_a_folder_of_clouds(clouds, tmp_path: Path) -> None:
    word, source = clouds
    words = f"--source {source} --points plain --detector {word} --method nms"
    succeed(f"predict {words} --out {tmp_path}/d.safetensors")
    found = Detections.load(tmp_path / "d.safetensors").frames(2)
    detector = load_detector(word)
    for seed, one in enumerate(found):
        plain = detector.detect([cloud(pillar_config(), seed)])
        assert torch.equal(one.boxes, plain.boxes)
    done = boxcov(f"evaluate {tmp_path}/d.safetensors")
    assert "frames without labels: predict labelled frames with --data" in done.err


@pytest.mark.parametrize("verb", ["predict", "stream"])
def test_pictures_are_drawn_on_the_images(images, tmp_path: Path, verb: str) -> None:
    word, source = images
    out = f"--out {tmp_path}/d.safetensors" if verb == "predict" else ""
    words = f"--source {source} --detector {word} {NMS} --show {tmp_path}/shown"
    succeed(f"{verb} {words} {out}".strip())
    paths = sorted((tmp_path / "shown").iterdir())
    assert [path.name for path in paths] == ["000000-0.png", "000001-1.png"]
    drawn = np.asarray(Image.open(paths[1]))
    assert drawn.shape == (48, 96, 3)
    assert int((drawn != picture(1)).any(2).sum()) > 100


def test_odd_file_names_are_drawn_and_stay_readable(images, tmp_path: Path) -> None:
    """Names that are as long as the disk allows, not in UTF-8, or control a terminal."""
    word, source = images
    folder = tmp_path / "in"
    folder.mkdir()
    content = (source / "0.png").read_bytes()
    for name in (b"a" * 251, b"\xff\xfe", "\x1b[31m\u202e[b]".encode()):
        (folder / f"{os.fsdecode(name)}.png").write_bytes(content)
    words = f"--source {folder} --detector {word} {NMS} --show {tmp_path}/shown"
    succeed(f"predict {words} --out {tmp_path}/d.safetensors")
    assert len(list((tmp_path / "shown").iterdir())) == 3
    names = Detections.load(tmp_path / "d.safetensors").meta["names"]
    assert all(name.isprintable() for name in names)
    assert any(name.endswith(r"\x1b[31m\u202e[b].png") for name in names)


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_video_in_and_video_out(images, tmp_path: Path, suffix: str) -> None:
    if suffix == "mp4":
        pytest.importorskip("av", reason="PyAV is not installed: pip install av")
    word, source = images
    common = f"--detector {word} {NMS}"
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    succeed(f"stream --source {source} {common} --show {first}")
    done = succeed(f"stream --source {first} {common} --show {second}")
    assert [line["frame"] for line in done.lines] == [f"{first}#0", f"{first}#1"]
    video = Video(second)
    assert len(video) == 2
    assert video[1].shape == (48, 96, 3)
    succeed(f"predict --source {first} --count 1 {common} --out {tmp_path}/d.safetensors")
    assert Detections.load(tmp_path / "d.safetensors").meta["names"] == [f"{first}#0"]


def test_labelled_clouds_are_drawn_from_above(clouds, tmp_path: Path) -> None:
    words = f"predict --detector {clouds[0]} --method nms --count 2 --sweeps 1"
    done = succeed(f"{words} --out {tmp_path}/d.safetensors --show {tmp_path}/x.gif")
    assert f"drawn in {tmp_path}/x.gif" in done.out
    assert len(Video(tmp_path / "x.gif")) == 2
    assert SIDE > 800  # larger pictures are made smaller for a GIF
    assert Video(tmp_path / "x.gif")[0].shape == (800, 800, 3)


@pytest.mark.parametrize("show", ["x.gif", "folder"])
def test_interrupted_drawing_keeps_the_blocks(images, tmp_path: Path, show: str) -> None:
    options = PredictCommand(
        out=tmp_path / "d.safetensors",
        show=tmp_path / show,
        detector=images[0],
        files=FileOptions(source=str(images[1]), size=64),
        estimator=EstimatorOptions("nms"),
    )

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict(options, drawing=stop)
    block = Detections.load(tmp_path / "d.safetensors.parts" / "00000000.safetensors")
    assert "names" not in block.meta  # every block would repeat those of all frames
    predicted: list[int] = []
    predict(replace(options, resume=True), lambda done, total: predicted.append(done))
    assert predicted == [2]  # the stored block
    drawn = Video(options.show) if show == "x.gif" else list((tmp_path / show).iterdir())
    assert len(drawn) == 2
    assert len(Detections.load(options.out).meta["names"]) == 2
    assert not (tmp_path / "d.safetensors.parts").exists()


def test_other_files_are_not_continued_with(images, tmp_path: Path) -> None:
    word, source = images[0], Path(shutil.copytree(images[1], tmp_path / "photos"))
    words = f"predict --source {source} --detector {word} {NMS} --out {tmp_path}/d"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "write_detections", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            succeed(words)
    first, *_ = sorted(source.iterdir())
    first.rename(source / f"0{first.name}")
    error = refuse(f"{words} --resume")
    assert "made with other options (names_sha256 was " in error


def test_ctrl_c_keeps_the_video_until_then(images, tmp_path: Path, monkeypatch) -> None:
    word, source = images
    add = streaming.Latencies.add

    def stop_at_two(self, milliseconds: float) -> None:
        add(self, milliseconds)
        if self.count == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(streaming.Latencies, "add", stop_at_two)
    words = f"stream --source {source} --detector {word} {NMS} --show {tmp_path}/x.gif"
    assert boxcov(words).code == 130
    assert len(Video(tmp_path / "x.gif")) == 2


def test_a_gif_that_is_full_is_written(images, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(showing, "MAX_GIF", 1)
    word, source = images
    error = refuse(f"stream --source {source} --detector {word} {NMS} --show {tmp_path}/x.gif")
    assert "a GIF holds at most 1 frames: give an .mp4 file" in error
    assert len(Video(tmp_path / "x.gif")) == 1


def test_existing_pictures_need_force(images, tmp_path: Path) -> None:
    word, source = images
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "mine.txt").write_text("mine")
    (tmp_path / "shown" / "000009-old.png").write_text("old")
    words = f"stream --source {source} --detector {word} {NMS} --show {tmp_path}/shown"
    assert "exists: replace it with --force" in refuse(words)
    succeed(f"{words} --force")
    names = sorted(path.name for path in (tmp_path / "shown").iterdir())
    assert names == ["000000-0.png", "000001-1.png", "mine.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--source nowhere", "nowhere: no such file or folder"),
        (
            "--source photos --split test",
            "takes the place of --data and --split: remove",
        ),
        ("--source photos --data kitti:ROOT", "takes the place of --data and --split"),
        ("--source photos --show x.png", "give a folder, or a video that ends in .gif or .mp4"),
        ("--source photos --show no/x.gif", "there is no folder no"),
        ("--source photos --show notes", "notes: is a file; give the name of a folder"),
        ("--source bad.gif", "bad.gif: not a GIF, MP4"),
        ("--source x.gif --workers 1", "a video is read in order: remove --workers"),
    ],
)
def test_wrong_sources_are_refused(images, words, message, tmp_path, monkeypatch) -> None:
    word, source = images
    monkeypatch.chdir(tmp_path)
    Path("photos").symlink_to(source)
    for name in ("bad.gif", "notes"):
        Path(name).write_text("nothing")
    Image.fromarray(picture(0)).save("x.gif")
    assert message in refuse(f"predict {words} --detector {word} {NMS} --out d.safetensors")
    assert not Path("d.safetensors").exists()


def test_package_for_mp4_is_named_before_the_work(images, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    word, source = images
    done = boxcov(f"stream --source {source} --detector {word} {NMS} --show {tmp_path}/x.mp4")
    assert (done.code, done.out) == (1, "")
    assert "av is not installed: pip install av" in done.err


def test_a_long_gif_is_refused_before_the_work(images, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(showing, "MAX_GIF", 1)
    word, source = images
    words = f"--source {source} --detector {word} {NMS} --show {tmp_path}/x.gif"
    error = refuse(f"predict {words} --out {tmp_path}/d.safetensors")
    assert "x.gif: a GIF holds at most 1 frames, and these are 2" in error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_number_sign_is_no_video(images, tmp_path: Path) -> None:
    word, source = images
    folder = tmp_path / "photos#1"
    folder.symlink_to(source)
    options = PredictCommand(
        out=tmp_path / "d.safetensors",
        detector=word,
        files=FileOptions(source=str(folder), size=64),
        estimator=EstimatorOptions("nms"),
        workers=1,
    )
    assert len(open_frames(options, "cpu", load_detector(word))[0]) == 2


def test_inputs_that_cannot_be_drawn_are_named(tmp_path: Path) -> None:
    with (
        pytest.raises(showing.BoxcovError, match="inputs of this frame are neither"),
        showing.pictures(tmp_path / "x") as show,
    ):
        show("frame 3", None, None)
