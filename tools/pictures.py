"""Draw the pictures of the documentation from the package itself: ``make pictures``.

``drive``: a simulated drive from above, as a moving picture. ``report``: screenshots of the report
of ``make demo``, by a headless Chromium. ``gate``: charts of the risk. ``frame``: one frame, as a
plot and as an annotated picture. ``image``: annotated boxes of an image detector; photographs of
data sets are not ours to show, so the image is drawn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from PIL import Image

import boxcov
from boxcov.report.canvas import draw_from_above, draw_image
from boxcov.report.study import last_sweep

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SEED = 1000  # the detector was trained on others
SECONDS, RATE = 6, 10
REACH = 42.0  # metres from the ego car to the border of the drive's pictures
SIDE = 640  # pixels of the drive's pictures
MIN_SCORE = 0.25
ZOOM = 7  # pixels of image.webp per pixel of the drawing


def load_model() -> boxcov.ExactGLM:
    """Return the shipped detector with its posterior and error model."""
    detector = boxcov.detectors.centerpoint.load("small")
    return boxcov.ExactGLM(detector, boxcov.Posterior.load("small", detector))


def drive(folder: Path, seconds: float = SECONDS) -> None:
    """Write drive.webp: every box with the colour of its risk and its 90 % region."""
    model, drawn = load_model(), []
    frames = boxcov.data.simulated.sequences("clear", SEED, 1, seconds, RATE)[0]
    for inputs, _ in frames:
        found = model(inputs)
        points = last_sweep(inputs[0].numpy())
        picture = draw_from_above(found[found.scores >= MIN_SCORE], points, REACH)
        drawn.append(picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
        print(f"drive: {len(drawn)} of {len(frames)} frames", flush=True)
    save_animation(folder / "drive.webp", drawn)


def save_animation(path: Path, drawn: list[Image.Image]) -> None:
    """Write an endless animation, as WebP."""
    drawn[0].save(
        path,
        save_all=True,
        append_images=drawn[1:],
        duration=1000 // RATE,
        loop=0,
        quality=45,
        method=6,
    )


def gate(folder: Path) -> None:
    """Write gate.png: bad boxes behind a gate, and the reliability of the risk."""
    from matplotlib import pyplot as plt

    model, frames = load_model(), boxcov.data.simulated.frames("clear", seed=SEED, count=20)
    found = boxcov.join_frames([model(inputs) for inputs, _ in frames])
    with tempfile.TemporaryDirectory() as scratch:
        study = boxcov.evaluate.report(Path(scratch) / "report.html", found, frames)
    records = study.methods[0].records
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    boxcov.evaluate.plot_risk(records, left)
    boxcov.evaluate.plot_reliability(records, right)
    figure.savefig(folder / "gate.png", dpi=90)


def frame(folder: Path) -> None:
    """Write one frame: plot.png by ``Detections.plot``, annotated.png as ``--show`` does."""
    inputs, targets = boxcov.data.simulated.frames("clear", seed=SEED, count=3)[2]
    found = load_model()(inputs)
    found = found[found.scores >= MIN_SCORE]
    found.plot(inputs, targets).figure.savefig(folder / "plot.png", dpi=80)
    picture = draw_from_above(found, last_sweep(inputs[0].numpy()))
    picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(folder / "annotated.png")


def image(folder: Path) -> None:
    """Write image.webp: boxes of the tests' image detector on drawings that it has not seen."""
    from helpers import own_detector as own

    with tempfile.TemporaryDirectory() as scratch:
        own.WEIGHTS = Path(scratch) / "weights.pt"
        own.train(own.WEIGHTS, steps=3000, count=2048)
        detector = own.build()
    posterior = boxcov.fit(detector, own.frames("train"))
    model = boxcov.calibrate(boxcov.ExactGLM(detector, posterior), own.Pictures(1, 300))
    own.SIZE = 96  # a larger drawing than those of the training, with room for four objects
    inputs, _ = max(own.Pictures(2, 20), key=lambda frame: len(frame[1][0]["boxes"]))
    found = model(inputs)
    assert found.region_widths is not None
    found = replace(found, boxes=found.boxes * ZOOM, region_widths=found.region_widths * ZOOM)
    pixels = (inputs["image"][0] * 0.3 + 0.3).clamp(0, 1).mul(255).byte().permute(1, 2, 0).numpy()
    picture = draw_image(found, pixels.repeat(ZOOM, 0).repeat(ZOOM, 1))
    picture.save(folder / "image.webp", quality=80)


def report(folder: Path) -> None:
    """Write screenshots of demo/clear/report.html: all, filtered, pinned, dark, 400 pixels."""
    from helpers.browser import Browser
    from helpers.viewer_page import choose, still

    page = ROOT / "demo" / "clear" / "report.html"
    if not page.exists():
        sys.exit(f"{page}: no such file: run make demo")
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile), 1280, 900)
        try:
            browser.open(page)
            still(browser)
            browser.picture(folder / "report.png")
            choose(browser, "value-filter", 40)
            browser.picture(folder / "report-filtered.png")
            choose(browser, "value-filter", 0)
            browser.run(_PIN)
            browser.picture(folder / "report-pinned.png")
            still(browser, prefers_color_scheme="dark")
            browser.picture(folder / "report-dark.png")
            still(browser)
            browser.run("document.getElementById('calibration').scrollIntoView()")
            browser.picture(folder / "report-calibration.png")
            narrow = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": True}
            browser.command("Emulation.setDeviceMetricsOverride", **narrow)
            browser.open(page)
            browser.picture(folder / "report-narrow.png")
        finally:
            browser.close()
    for path in folder.glob("report*.png"):  # a quarter of the bytes
        with Image.open(path) as picture:
            few = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        few.save(path, optimize=True)


# the last listed box that is misplaced: the one of lowest risk
_PIN = """const rows = [...document.querySelectorAll("#list tbody tr")];
rows.findLast((row) => row.lastChild.textContent === "misplaced").click();"""
PICTURES = {"drive": drive, "gate": gate, "frame": frame, "image": image, "report": report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], default=[])
    parser.add_argument("--out", type=Path, default=IMAGES)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))  # the browser and the image detector of the tests
    for name in args.names or PICTURES:
        PICTURES[name](args.out)


if __name__ == "__main__":
    main()
