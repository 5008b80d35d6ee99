from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from boxcov.data import batched, coco
from boxcov.data.coco.images import read_image
from boxcov.errors import BoxcovError, BoxcovWarning
from helpers.coco_cases import SIZES, coco_root, edited
from helpers.data_roots import real


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return coco_root(tmp_path / "set")


def test_frames_have_images_and_boxes_in_the_same_pixels(root: Path) -> None:
    frames = coco.frames(root, size=96)
    assert (len(frames), frames.classes, frames.category_ids, frames.image_ids) == (
        3,
        ("cat", "cow", "dog"),
        (1, 3, 7),
        [11, 5, 8],
    )
    image, (target,) = frames[0]
    assert (image.shape, image.dtype, target["image_id"], target["scale"]) == (
        (1, 3, 96, 96),
        torch.float32,
        11,
        0.96,
    )
    assert target["labels"].tolist() == [0, 2]
    torch.testing.assert_close(
        target["boxes"], 0.96 * torch.tensor([[10.0, 5, 30, 35], [90, 40, 100, 50]])
    )
    torch.testing.assert_close(target["crowds"], 0.96 * torch.tensor([[0.0, 0, 60, 20]]))
    assert target["crowd_labels"].tolist() == [1]
    assert bool((image[0, :, 48:] == 114).all())
    assert not bool((image[0, :, :48] == 114).all())
    empty = frames[1][1][0]
    assert (empty["boxes"].shape, empty["labels"].dtype, empty["crowds"].shape) == (
        (0, 4),
        torch.long,
        (0, 4),
    )
    assert [frames.scale(i) for i in range(3)] == [frames[i][1][0]["scale"] for i in range(3)]


@pytest.mark.parametrize(
    ("bbox", "message"),
    [([60, 20, 95, 45], "beyond the border"), ([0.1, 0.2, 0.5, 0.5], "at most 1 pixel")],
)
def test_boxes_that_are_not_x_y_w_h_in_pixels(root: Path, bbox, message: str) -> None:
    edited(root, lambda content: [thing.update(bbox=bbox) for thing in content["annotations"]])
    with pytest.warns(BoxcovWarning, match=rf"\.json: 5 of 5 boxes .*{message}.* x y width height"):
        coco.frames(root)


def test_images_are_turned_as_their_exif_says(tmp_path: Path) -> None:
    upright = Image.new("RGB", (4, 2))
    upright.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by half
    upright.save(tmp_path / "x.png", exif=exif)
    image = read_image(tmp_path / "x.png")
    assert image[:, 1, 3].tolist() == [0, 0, 255]
    assert image[:, 0, 0].tolist() == [0, 0, 0]


def test_parts_batches_and_other_processes(root: Path) -> None:
    frames = coco.frames(root, size=64)
    assert frames[1:].image_ids == [5, 8]
    images, targets = batched(frames, 2)[0]
    assert (images.shape, len(targets)) == ((2, 3, 64, 64), 2)
    assert torch.equal(pickle.loads(pickle.dumps(frames))[2][0], frames[2][0])
    with pytest.raises(IndexError):
        frames[3]


def test_classes_on_request(root: Path) -> None:
    frames = coco.frames(root, size=64, classes=["dog", "cat"])
    assert (
        frames[0][1][0]["labels"].tolist(),
        frames.category_ids,
        len(frames[2][1][0]["labels"]),
    ) == ([1, 0], (7, 1), 0)
    with pytest.raises(
        BoxcovError, match=r"instances_val2017\.json: no class horse: there are cat, cow, dog"
    ):
        coco.frames(root, classes=["cat", "horse"])


def test_sizes_that_the_network_cannot_take(root: Path) -> None:
    for size in (0, 100, 64.0, "64"):
        with pytest.raises(
            BoxcovError,
            match=f"a multiple of 32 pixels, or None for images as they are, got {size}",
        ):
            coco.frames(root, size=size)  # type: ignore[arg-type]


# images


def slow_bilinear(pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Pixel by pixel, centres aligned, without smoothing."""
    height, width = pixels.shape[:2]
    out = np.zeros((rows, columns, 3))
    for r in range(rows):
        for c in range(columns):
            y = min(max((r + 0.5) * height / rows - 0.5, 0), height - 1)
            x = min(max((c + 0.5) * width / columns - 0.5, 0), width - 1)
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            top = pixels[y0, x0] * (1 - x + x0) + pixels[y0, x1] * (x - x0)
            bottom = pixels[y1, x0] * (1 - x + x0) + pixels[y1, x1] * (x - x0)
            out[r, c] = top * (1 - y + y0) + bottom * (y - y0)
    return out


@pytest.mark.parametrize(("height", "width"), [(50, 100), (9, 5), (64, 64)])
def test_letterboxing_is_plain_bilinear_interpolation(height: int, width: int) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3))
    square, scale = coco.letterbox(torch.from_numpy(pixels).permute(2, 0, 1).to(torch.uint8), 32)
    rows, columns = int(height * scale), int(width * scale)
    expected = slow_bilinear(pixels.astype(float), rows, columns)
    assert (
        float(np.abs(square[:, :rows, :columns].permute(1, 2, 0).numpy() - expected).max()) <= 0.501
    )  # rounded
    assert max(rows, columns) == 32
    assert bool((square[:, rows:] == 114).all() and (square[:, :, columns:] == 114).all())


def test_a_line_of_pixels_keeps_one_row() -> None:
    square, scale = coco.letterbox(torch.zeros(3, 1, 500, dtype=torch.uint8), 64)
    assert scale == 64 / 500
    assert int((square == 0).sum()) == 3 * 64


def colour(mode: str, value: object, folder: Path) -> torch.Tensor:
    path = folder / f"{mode.replace(';', '')}.png"
    Image.new(mode, (3, 2), value).save(path)  # type: ignore[arg-type]
    return coco.read_image(path)


def test_images_of_every_kind(tmp_path: Path) -> None:
    expected = {
        "L": (77, [77] * 3),
        "RGBA": ((1, 2, 3, 0), [3, 2, 1]),
        "LA": ((9, 128), [9] * 3),
        "1": (1, [255] * 3),
        "I;16": (40_000, [156] * 3),
    }
    for mode, (value, bgr) in expected.items():
        image = colour(mode, value, tmp_path)
        assert (image.shape, image.dtype) == ((3, 2, 3), torch.uint8)
        assert image[:, 1, 2].tolist() == bgr, mode
    palette = Image.new("P", (3, 2), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.save(tmp_path / "P.png")
    assert coco.read_image(tmp_path / "P.png")[:, 0, 0].tolist() == [30, 20, 10]
    Image.new("RGB", (1, 1), (5, 6, 7)).save(tmp_path / "one.png")
    square, _ = coco.letterbox(coco.read_image(tmp_path / "one.png"), 32)
    assert bool((square == torch.tensor([7.0, 6, 5]).reshape(3, 1, 1)).all())


def test_damaged_images_are_named(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "cut.jpg")
    Image.fromarray(pixels).save(tmp_path / "cut.png")
    for name in ("cut.jpg", "cut.png"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "empty.jpg").touch()
    for name in ("cut.jpg", "cut.png", "text.jpg", "empty.jpg"):
        said = rf"{name}: not a JPEG, .* image, or a damaged one"
        with pytest.raises(BoxcovError, match=said) as raised:
            coco.read_image(tmp_path / name)
        assert " at 0x" not in str(raised.value)  # an address in memory
    with pytest.raises(BoxcovError, match=r"absent\.jpg: no such file"):
        coco.read_image(tmp_path / "absent.jpg")


def test_an_image_of_another_size_than_annotated(root: Path) -> None:
    Image.new("RGB", (7, 9)).save(root / "val2017" / f"{11:012d}.png")
    with pytest.raises(
        BoxcovError, match=r"000000000011\.png: 7 x 9 pixels, and 100 x 50 in the annotations"
    ):
        coco.frames(root)[0]


# annotations


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("images"), "not COCO's annotations, or a damaged one .*images"),
        (lambda c: c["images"][0].pop("width"), "a damaged one .*width"),
        (lambda c: c["images"][0].update(width=0), "image 11 is 0 x 50 pixels large"),
        (lambda c: c["images"][0].update(id=8), "two images have the same id|objects in"),
        (
            lambda c: c["annotations"][0].update(image_id=99),
            r"objects in 1 image that it does not list \(99\)",
        ),
        (lambda c: c["images"].clear() or c["annotations"].clear(), "has no images"),
        (lambda c: c["annotations"][0].update(category_id=2), "object 1 is of category 2"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), "a damaged one"),
        (
            lambda c: c["annotations"][0].update(bbox=[1, 2, float("nan"), 3]),
            "object 1 has the box",
        ),
        (lambda c: c["annotations"][0].update(bbox="text"), "a damaged one"),
        (lambda c: c["categories"].append(7), "a damaged one"),
        (
            lambda c: c["categories"].append({**c["categories"][0], "name": "other"}),
            "two categories have the same name or id",
        ),
        (
            lambda c: c["categories"].append({**c["categories"][0], "id": 99}),
            "two categories have the same name or id",
        ),
    ],
)
def test_invalid_annotations_are_refused(root: Path, change, message: str) -> None:
    edited(root, change)
    with pytest.raises(BoxcovError, match=message):
        coco.frames(root)


@pytest.mark.parametrize(
    "name", ["../secret.png", "/etc/passwd", "a/../../b.png", "..\\b.png", "C:/b.png", ""]
)
def test_file_names_cannot_lead_out_of_the_folder(root: Path, name: str) -> None:
    edited(root, lambda content: content["images"][0].update(file_name=name))
    with pytest.raises(BoxcovError, match="leads out of the folder"):
        coco.frames(root)


def test_files_that_are_not_annotations_are_refused(root: Path) -> None:
    path = root / "annotations" / "instances_val2017.json"
    for text in ("{", "[1, 2]", "7"):
        path.write_text(text)
        with pytest.raises(BoxcovError, match=r"instances_val2017\.json: not "):
            coco.frames(root)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BoxcovError, match=r"instances_val2017\.json: not COCO's annotations"):
        coco.frames(root)
    with pytest.raises(BoxcovError, match=r"instances_test\.json: no such file"):
        coco.frames(root, "test")


def test_a_split_without_labels(root: Path) -> None:
    edited(root, lambda content: content.pop("annotations"))
    assert [len(targets[0]["labels"]) for _, targets in coco.frames(root)] == [0] * len(SIZES)


def test_the_real_set() -> None:
    root = real("coco")
    train, val = coco.frames(root, "train2017"), coco.frames(root, "val2017")
    assert (len(train), len(val), train.classes) == (206, 80, coco.CLASSES)
    crowds = sum(len(p.crowds) for p in val.annotations.pictures)
    boxes = sum(len(p.objects) for p in val.annotations.pictures)
    assert boxes + crowds == 815
    image, (target,) = val[0]
    assert image.shape == (1, 3, 416, 416)
    assert bool((target["boxes"][:, 2:] <= 416).all())
    named = json.loads((root / "annotations" / "instances_val2017.json").read_text())["categories"]
    assert tuple(entry["name"] for entry in named) == coco.CLASSES
