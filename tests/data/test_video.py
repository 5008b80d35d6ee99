from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from boxcov import BoxcovError
from boxcov.data.video import Video

Image = pytest.importorskip("PIL.Image")


def pictures(count: int) -> list:
    return [Image.new("RGB", (40, 32), (60 * i, 0, 255 - 60 * i)) for i in range(count)]


@pytest.fixture
def gif(tmp_path: Path) -> Path:
    first, *others = pictures(4)
    first.save(tmp_path / "x.gif", save_all=True, append_images=others, duration=50)
    return tmp_path / "x.gif"


@pytest.fixture
def mp4(tmp_path: Path) -> Path:
    av = pytest.importorskip("av", reason="PyAV is not installed: pip install av")
    with av.open(str(tmp_path / "x.mp4"), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 40, 32, "yuv420p"
        for picture in pictures(4):
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return tmp_path / "x.mp4"


@pytest.mark.parametrize(("kind", "rate"), [("gif", 20), ("mp4", 25)])
def test_frames_are_read_in_any_order(kind: str, rate: float, request) -> None:
    video = Video(request.getfixturevalue(kind))
    assert (len(video), video.rate) == (4, pytest.approx(rate))
    for index in (0, 1, 3, 2, 0, -1):
        assert video[index].shape == (32, 40, 3)
        expected = np.asarray(pictures(4)[index])
        assert np.abs(video[index].astype(int) - expected).max() <= 12  # lossy
    with pytest.raises(IndexError):
        video[4]


@pytest.mark.parametrize("name", ["x.gif", "x.mp4", "x.avi"])
@pytest.mark.parametrize("content", [b"", b"GIF89a", b"#EXTM3U\nhttp://x/y.ts\n", b"\0" * 4096])
def test_damaged_videos_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    if not name.endswith("gif"):
        pytest.importorskip("av", reason="PyAV is not installed: pip install av")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BoxcovError, match=name):
        Video(tmp_path / name)


def test_truncated_videos_are_named(gif: Path) -> None:
    gif.write_bytes(gif.read_bytes()[:-120])
    with pytest.raises(BoxcovError, match=r"x\.gif: "):
        list(Video(gif))


def test_missing_and_special_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BoxcovError, match=r"none\.gif: no such file"):
        Video(tmp_path / "none.gif")
    (tmp_path / "zero.gif").symlink_to("/dev/zero")
    with pytest.raises(BoxcovError, match="not a regular file"):
        Video(tmp_path / "zero.gif")


def test_package_for_mp4_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(BoxcovError, match="av is not installed: pip install av"):
        Video(tmp_path / "x.mp4")
