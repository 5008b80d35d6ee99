"""``boxcov monitor``: compare the frames of a stream or a file with usual frames."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from boxcov._files.input_file import conform, open_text, parse_metadata, reading
from boxcov._files.output_file import write_text
from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.monitor import Monitor
from boxcov.pipeline.options import MonitorCommand
from boxcov.pipeline.paths import check_output, holds_output
from boxcov.pipeline.terminal import say, say_json

_SAME = ("method", "samples", "weights_sha256", "posterior_sha256")  # other ones: other variances
_LIMITS = ("false_alarm_rate", "run_length")
_HELP = {
    "frames": "Frames seen.",
    "alarms": "Frames that do not look like the usual ones.",
    "changes": "Times the evidence of a change reached the run length.",
    "unreadable": "Frames that could not be read.",
    "p_value": "Conformal p-value of the last frame.",
    "evidence": "Evidence of a change, 1 is none.",
}


@holds_output
def run(options: MonitorCommand, out: TextIO, totals: dict[str, Any]) -> None:
    """Write the verdict on each frame; add it to ``totals``, with the last p-value and evidence.

    Ctrl-C is how a stream ends: Prometheus text is written then, too.
    """
    if options.save is not None:
        check_output(options.save, may_replace=True)
    _check_same_model(options.usual, Path(options.frames))
    monitor = load_monitor(options)
    if options.save is not None:
        monitor.save(options.save)
    totals |= dict.fromkeys(("frames", "alarms", "changes", "unreadable"), 0)
    if options.out is not None:  # else the numbers of an earlier run stay until the first frame
        write_text(options.out, prometheus(totals))
    try:
        _watch(monitor, options, out, totals)
    finally:
        if options.format == "prometheus" and options.out is None:
            say(prometheus(totals).rstrip(), out)


def _watch(monitor: Monitor, options: MonitorCommand, out: TextIO, totals: dict[str, Any]) -> None:
    """Write the verdict on each frame, and count it."""
    for name, frame in _frames(options.frames):
        if "error" in frame:
            verdict = {"alarm": True, "reasons": [f"no boxes: {frame['error']}"]}
        else:
            with reading(f"frame {name}", "boxes of a frame"):
                verdict = asdict(monitor(frame))
            totals |= {key: verdict[key] for key in ("p_value", "evidence")}
            totals["changes"] += verdict["change"]
        totals["frames"] += 1
        totals["alarms"] += verdict["alarm"]
        totals["unreadable"] += "error" in frame
        if options.format == "json":
            say_json({"frame": name, **verdict}, out)
        elif options.out is not None:
            write_text(options.out, prometheus(totals))


def _check_same_model(usual: Path, frames: Path) -> None:
    """Raise if two files of boxes state another detector, posterior or method; lines state none."""
    if {usual.suffix, frames.suffix} != {".safetensors"}:
        return
    before, now = Detections.load(usual).meta, Detections.load(frames).meta
    for name in _SAME:
        if name in before and name in now and before[name] != now[name]:
            raise BoxcovError(
                f"{frames}: {name} is {now[name]}, that of the usual frames in {usual} is "
                f"{before[name]}: predict both with the same detector, posterior and method"
            )


def load_monitor(options: MonitorCommand) -> Monitor:
    """Return the monitor of the usual frames: a file of ``--save``, or of frames."""
    usual: Any
    limits = {}
    if options.usual.suffix == ".json":
        saved = Monitor.load(options.usual)
        usual, limits = saved.usual, {name: getattr(saved, name) for name in _LIMITS}
    else:
        frames = [frame for _, frame in _frames(str(options.usual))]
        usual = [frame for frame in frames if "error" not in frame]
        if frames and not usual:
            raise BoxcovError(
                f"{options.usual}: none of the {len(frames)} frames could be read, the first one "
                f"because of {frames[0]['error']}"
            )
    given = {name: getattr(options, name) for name in _LIMITS}
    limits |= {name: value for name, value in given.items() if value is not None}
    with reading(options.usual, "a file of usual frames"):
        return Monitor(usual, **limits)


def _frames(where: str) -> Iterator[tuple[str, Any]]:
    """Yield name and content of each frame: lines of ``boxcov stream``, or a file of boxes."""
    if where == "-":
        with reading("stdin", "JSON lines of boxcov stream"):
            yield from _lines(iter(sys.stdin.readline, ""), "stdin")
    elif Path(where).suffix == ".safetensors":
        found = Detections.load(where)
        for number, frame in enumerate(found.frames(found.meta.get("frames"))):
            yield str(number), {"fields": frame.fields, **frame.numpy()}
    else:
        with reading(where, "JSON lines of boxcov stream"), open_text(where) as file:
            yield from _lines(file, where)


def _lines(lines: Iterable[str], where: str) -> Iterator[tuple[str, Any]]:
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        with reading(f"{where}, line {number}", "a line of boxcov stream"):
            line = parse_metadata(text)
            name = conform(line["frame"], str, "frame")
            frame = {"error": line["error"]} if "error" in line else _arrays(line)
        yield name, frame


def _arrays(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the monitor needs of a line; raise if it is damaged."""
    fields = conform(line["fields"], tuple[str, ...], "fields")
    m, D = len(line["boxes"]), len(fields)
    arrays = {"fields": fields, "scores": np.array(line["scores"], float).reshape(m)}
    if "no_object" in line:
        arrays["no_object"] = np.array(line["no_object"], float).reshape(m)
    for name, short in (("covariance", "std"), ("predictive", "predictive_std")):
        if name in line:
            arrays[name] = np.array(line[name], float).reshape(m, D, D)
        elif short in line:
            arrays[name] = np.zeros((m, D, D))
            np.einsum("mdd->md", arrays[name])[:] = np.array(line[short], float).reshape(m, D) ** 2
    return arrays


def prometheus(totals: Mapping[str, Any]) -> str:
    """Return the totals in Prometheus' text format."""
    text = ""
    for name, about in _HELP.items():
        if name in totals:
            suffix, kind = ("_total", "counter") if isinstance(totals[name], int) else ("", "gauge")
            metric = f"boxcov_monitor_{name}{suffix}"
            text += f"# HELP {metric} {about}\n# TYPE {metric} {kind}\n{metric} {totals[name]}\n"
    return text
