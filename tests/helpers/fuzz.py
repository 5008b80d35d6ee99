"""Read thousands of damaged files of every kind within limits of memory and time.

``python -m helpers.fuzz FOLDER CASES SEED`` prints a JSON object: cases per kind, the number that
were refused, every wrong outcome, and the largest time and memory of each kind. One case in 20
replaces the file by a pipe, a device, a folder, a socket or a link.
Run as a process of its own, because a crash inside a reader would be one here.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import torch

from boxcov import BoxcovError, Checkpoint, Detections, FitOptions, Posterior, fit
from boxcov.data import coco, kitti, nuscenes, shapes
from boxcov.data.simulated import CLASSES
from boxcov.detectors import centerpoint, yolox
from boxcov.detectors.tiny import TinyCenter
from boxcov.detectors.training import Recipe, train
from boxcov.evaluate.ground_truth import GroundTruth
from boxcov.pipeline.predict import block_store, read_blocks
from helpers.centerpoint_cases import detector_of, pillar_config
from helpers.centerpoint_foreign import Foreign
from helpers.coco_cases import coco_root, found_in
from helpers.data_roots import VERSION, kitti_root, nuscenes_root, random_detections
from helpers.error_models import make_error_model
from helpers.export_boxes import in_space, with_error_model
from helpers.fuzz_commands import convert_to_messages, print_names, show_boxes
from helpers.mutations import mutated, put_special, remove_special
from helpers.yolox_cases import small

MEMORY = 1 << 30  # bytes of address space that a case may take beyond what is there at the start
SECONDS = 10  # of the processor that a case may take
WAIT = 100  # seconds that a case may take, also where it waits
SPECIAL = 0.05  # share of cases with a file that is no regular one


@dataclass(frozen=True)
class Kind:
    name: str
    files: tuple[Path, ...]
    structure: str  # bytes, json, safetensors, image or pickle
    read: Callable[[Path], Any]  # given the damaged file
    named: Path | None = None  # a folder that an error may name: tables refer to each other


def kinds(folder: Path) -> Iterable[Kind]:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    yield from _own(folder)
    yield from _sets(folder)


def _own(folder: Path) -> Iterable[Kind]:
    tiny, frames = TinyCenter(width=4), list(shapes.frames(count=3))
    posterior = fit(
        tiny,
        frames,
        options=FitOptions(ekfac=True),
        depth=["head.shared", "head.branches.rot"],
    )
    posterior.with_error_model(make_error_model(tiny.box_fields, tiny.classes)).save(
        folder / "posterior.safetensors"
    )
    yield Kind(
        "posterior",
        (folder / "posterior.safetensors",),
        "safetensors",
        lambda path: _used(Posterior.load(path, tiny)),
    )
    fit(tiny, frames, depth=["head.shared", "head.branches.rot"], n_data=1000).compress(0.01).save(
        folder / "truncated.safetensors"
    )
    yield Kind(
        "truncated",
        (folder / "truncated.safetensors",),
        "safetensors",
        lambda path: _used(Posterior.load(path, tiny)),
    )
    found = random_detections(torch.randn(4, 5), torch.tensor([0, 1, 1, 0]), tiny.classes)
    found.save(folder / "detections.safetensors")
    yield Kind(
        "detections",
        (folder / "detections.safetensors",),
        "safetensors",
        lambda path: Detections.load(path).numpy(),
    )
    store = block_store(folder / "x")
    about = {"method": "mcglm"}
    store.save(0, found, {**about, "milliseconds": [1.0, 2.0]})
    yield Kind(
        "part",
        tuple(store._files()),
        "safetensors",
        lambda path: (store.has_block(0, about), read_blocks(store, 2)),
    )
    _cut_off(folder / "fit.checkpoint", tiny, frames)
    yield Kind(
        "fit",
        (folder / "fit.checkpoint",),
        "safetensors",
        lambda path: fit(
            tiny,
            frames,
            depth=["head.shared"],
            checkpoint=Checkpoint(path, every_seconds=1e9, resume=True),
        ),
    )
    two = {"depth": ["head.shared"], "options": FitOptions(ekfac=True)}
    fit(tiny, frames, checkpoint=Checkpoint(folder / "two", every_seconds=0), **two)
    resumed = Checkpoint(folder / "two", every_seconds=1e9, resume=True)
    yield Kind(
        "second",
        (folder / "two.second",),
        "safetensors",
        lambda path: fit(tiny, frames, checkpoint=resumed, **two),
    )
    objects = {"boxes": torch.rand(3, 9), "labels": torch.arange(3)}
    GroundTruth.from_frames([(None, [objects]), (None, [objects])]).save(
        folder / "objects.safetensors", {"source": "x"}
    )
    yield Kind(
        "objects",
        (folder / "objects.safetensors",),
        "safetensors",
        lambda path: GroundTruth.concatenate([GroundTruth.load(path)[0]] * 2),
    )
    recipe = Recipe(steps=1, batch=2)
    train(TinyCenter(width=4), frames, recipe, checkpoint=folder / "training.safetensors")
    yield Kind(
        "training",
        (folder / "training.safetensors",),
        "safetensors",
        lambda path: train(TinyCenter(width=4), frames, recipe, checkpoint=path, resume=True),
    )
    config = pillar_config()
    centerpoint.save(detector_of(config), folder / "center.safetensors")
    yield Kind(
        "centerpoint",
        (folder / "center.safetensors",),
        "safetensors",
        lambda path: centerpoint.load(path),
    )
    torch.save(
        {"state_dict": Foreign(config, "mmdet3d").state_dict(), "meta": {"mmdet3d_version": "1.1"}},
        folder / "center.pth",
    )
    yield Kind(
        "centerpoint.pth",
        (folder / "center.pth",),
        "bytes",
        lambda path: centerpoint.load(path, config),
    )
    torch.save({"model": small().float().state_dict()}, folder / "yolox.pth")
    yield Kind("yolox.pth", (folder / "yolox.pth",), "bytes", lambda path: yolox.load(path))
    yield Kind("pickles", (folder / "pickles.pth",), "pickle", lambda path: yolox.load(path))
    (folder / "pickles.pth").touch()
    simulated = {"data": "simulated:clear", "split": "test", "count": 3, "seed": 0, "sweeps": 1}
    meta = {**found.meta, "source": simulated, "frames": 3, "milliseconds": [1.0, 2.0, 3.0]}
    replace(in_space(5, frames=3), classes=CLASSES, meta=meta).save(folder / "p.safetensors")
    yield Kind("predictions", (folder / "p.safetensors",), "safetensors", convert_to_messages)
    (folder / "q.safetensors").write_bytes((folder / "p.safetensors").read_bytes())
    yield Kind("printed", (folder / "q.safetensors",), "safetensors", print_names)
    with_error_model(in_space(5, frames=3)).save(folder / "r.safetensors")
    yield Kind("shown", (folder / "r.safetensors",), "safetensors", show_boxes)


def _sets(folder: Path) -> Iterable[Kind]:
    road = nuscenes_root(folder / "nuscenes")
    tables = tuple(sorted((road / VERSION).glob("*.json")))
    yield Kind(
        "nuscenes tables",
        tables,
        "json",
        lambda path: list(nuscenes.frames(road, sweeps=2)),
        named=road,
    )
    keys = nuscenes.frames(road, sweeps=2)
    clouds = tuple(road / name.decode() for name in keys.table_index.readings.file[:2])
    yield Kind("nuscenes points", clouds, "bytes", lambda path: list(keys), named=road)
    one = [
        random_detections(
            keys[i][1][0]["boxes"].double().nan_to_num(), keys[i][1][0]["labels"], nuscenes.CLASSES
        )
        for i in range(len(keys))
    ]
    nuscenes.write_results(folder / "nuscenes.json", keys, one)
    yield Kind(
        "nuscenes results",
        (folder / "nuscenes.json",),
        "json",
        lambda path: nuscenes.read_results(path),
    )
    drive_root = kitti_root(folder / "kitti", frames=1)
    texts = (*drive_root.glob("*/label_2/*.txt"), *drive_root.glob("*/calib/*.txt"))
    yield Kind("kitti texts", texts, "bytes", lambda path: list(kitti.frames(drive_root)))
    yield Kind(
        "kitti points",
        tuple(drive_root.glob("*/velodyne/*.bin")),
        "bytes",
        lambda path: list(kitti.frames(drive_root)),
    )
    drive = kitti.frames(drive_root)
    target = drive[0][1][0]
    kitti.write_results(
        folder / "results",
        drive,
        [random_detections(target["boxes"][:, :7].double(), target["labels"], kitti.CLASSES)],
    )
    covariances = (folder / "results" / "covariance.json",)
    yield Kind(
        "kitti covariances",
        covariances,
        "json",
        lambda path: kitti.read_results(folder / "results", drive),
        named=folder / "results",
    )
    rows = tuple((folder / "results").glob("*.txt"))
    yield Kind(
        "kitti results",
        rows,
        "bytes",
        lambda path: kitti.read_results(folder / "results", drive),
        named=folder / "results",
    )
    pictures = coco_root(folder / "coco")
    yield Kind(
        "coco annotations",
        tuple(pictures.glob("annotations/*.json")),
        "json",
        lambda path: list(coco.frames(pictures, size=32)),
        named=pictures,
    )
    images = tuple(path for path in pictures.rglob("*") if path.suffix in (".png", ".jpg"))
    yield Kind("coco images", images, "bytes", lambda path: coco.read_image(path))
    (pictures / "hostile.jpg").touch()
    hostile = (pictures / "hostile.jpg",)
    yield Kind("hostile images", hostile, "image", lambda path: coco.read_image(path))
    shown = coco.frames(pictures, size=32)
    coco.write_results(folder / "coco.json", shown, found_in(shown))
    yield Kind(
        "coco results",
        (folder / "coco.json", folder / "coco.meta.json"),
        "json",
        lambda path: coco.read_results(folder / "coco.json", shown),
        named=folder,
    )


def _used(posterior: Posterior) -> None:
    for name in posterior.blocks:
        assert bool(posterior.variances(name).isfinite().all()), "variances that are not finite"
    posterior.sample(2, torch.Generator().manual_seed(0))


def _cut_off(path: Path, tiny: TinyCenter, frames: list[Any]) -> None:
    def stop(done: int, total: int | None) -> None:
        raise InterruptedError

    try:
        fit(
            tiny,
            frames,
            checkpoint=Checkpoint(path, every_seconds=0),
            depth=["head.shared"],
            progress=stop,
        )
    except InterruptedError:
        return


def attempt(kind: Kind, path: Path) -> str:
    """Outcome of a damaged file: "read", "refused", or the traceback of an unexpected error."""
    try:
        kind.read(path)
    except BoxcovError as error:
        named = str(path) in str(error) or (
            kind.named is not None and str(kind.named) in str(error)
        )
        if any(word in str(error) for word in ("MemoryError", "allocate memory", "alloc failed")):
            return f"too much memory: {error}"
        return "refused" if named else f"an error without the file's name: {error}"
    except BaseException:
        return traceback.format_exc(limit=-4)
    return "read"


def main(folder: Path, cases: int, seed: int) -> dict[str, Any]:
    """Read ``cases`` damaged files of all kinds; return the report."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return run(list(kinds(folder)), folder, cases, seed)


def run(known: list[Kind], folder: Path, cases: int, seed: int) -> dict[str, Any]:
    """Read damaged files within the limits, which hold for the rest of this process."""
    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY, here + MEMORY))
    for number in (signal.SIGALRM, signal.SIGVTALRM):
        signal.signal(number, _too_long)
    report: dict[str, Any] = {"read": {}, "refused": {}, "wrong": [], "cost": {}, "special": {}}
    for kind in known:
        whole = {path: path.read_bytes() for path in kind.files}
        counts, most = {"read": 0, "refused": 0}, [0.0, 0]
        for case in range(-(-cases // len(known))):
            draw = random.Random(f"{seed} {kind.name} {case}")
            path = draw.choice(kind.files)
            (folder / "case").write_text(f"{kind.name} {case}")  # what a crash was about
            if draw.random() < SPECIAL:
                what = put_special(path, draw)
                report["special"][what] = report["special"].get(what, 0) + 1
            else:
                path.write_bytes(mutated(whole[path], kind.structure, draw))
            outcome, cost = measured(kind, path)
            most = [max(pair) for pair in zip(most, cost)]
            if outcome in counts:
                counts[outcome] += 1
            else:
                report["wrong"].append(
                    {"kind": kind.name, "case": case, "file": path.name, "what": outcome}
                )
            remove_special(path)
            for each, content in whole.items():
                each.write_bytes(content)
        report["read"][kind.name], report["refused"][kind.name] = counts["read"], counts["refused"]
        report["cost"][kind.name] = most
    return report


def measured(kind: Kind, path: Path) -> tuple[str, tuple[float, int]]:
    """Return the outcome of a case, its seconds of the processor and its memory in KiB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is held now
    before, began = _memory("VmRSS"), process_time()
    signal.alarm(WAIT)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    outcome = attempt(kind, path)
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return outcome, (round(process_time() - began, 2), _memory("VmHWM") - before)


def _memory(name: str) -> int:
    """Return an entry of the process's status, in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def _too_long(*_: Any) -> None:
    raise TooLongError(f"no answer in {SECONDS} s")


class TooLongError(BaseException):
    """Not an Exception: a reader that catches all of those must not hide it."""


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
