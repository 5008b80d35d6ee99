"""A frame of ``small`` on two CPU cores: on an idle and a busy machine, and by layout.

    python benchmarks/busy.py [--out FOLDER]

Threads that wait for each other spin, as OpenMP does by default, or sleep, as in the commands of
boxcov. The machine is idle, or four other processes compute on the same two cores. Then, on the
idle machine, the network after the encoder with channels first and last. Medians of 9.
Writes performance-busy.json and performance-layout.json, tables of docs/results/performance.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deep import timed
from torch import nn

import boxcov
from boxcov.data import simulated
from boxcov.detectors import centerpoint

BUSY = 4  # other processes
ROUNDS = 9
POLICIES = {"spin": "active", "as OpenMP does": None, "sleep": "passive"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the two JSON files")
    parser.add_argument("--frame", action="store_true", help=argparse.SUPPRESS)  # in a child
    args = parser.parse_args()
    if args.frame:
        print(json.dumps(frame_times()))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    machine = f"2 CPU cores, torch {torch.__version__}"
    date = str(datetime.date.today())
    about = {"command": "python benchmarks/busy.py", "date": date, "machine": machine}
    rows = []
    for others in (0, BUSY):
        for name, policy in POLICIES.items():
            rows.append([others, name, *beside(others, policy)])
            print(*rows[-1], flush=True)
    busy = {
        "title": "A frame on an idle and on a busy machine, milliseconds",
        **about,
        "columns": ["other processes", "threads wait", "plain", "exact covariance"],
        "digits": [None, None, 0, 0],
        "rows": rows,
        "notes": [f"`small`, two threads, medians of {ROUNDS}."],
    }
    torch.set_num_threads(2)
    layouts = layout_rows()
    layout = {
        "title": "The network after the encoder by layout, milliseconds",
        **about,
        "columns": ["layout", "ms"],
        "digits": [None, 1],
        "rows": layouts,
        "notes": [f"`small`: backbone, neck and head, two threads, medians of {ROUNDS}."],
    }
    print(*layouts, sep="\n")
    if args.out is not None:
        for name, table in {"busy": busy, "layout": layout}.items():
            text = json.dumps(table, indent=1)
            (args.out / f"performance-{name}.json").write_text(text + "\n")


def beside(others: int, policy: str | None) -> list[float]:
    """Milliseconds of a frame, plain and with covariance, beside other processes."""
    env = {n: v for n, v in os.environ.items() if n not in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    env |= {} if policy is None else {"OMP_WAIT_POLICY": policy}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        words = [sys.executable, __file__, "--frame"]
        out = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    finally:
        for process in busy:
            process.kill()
            process.wait()
    times: list[float] = json.loads(out)
    return times


def frame_times() -> list[float]:
    torch.set_num_threads(2)
    detector = centerpoint.load("small")
    points = simulated.frames("clear", seed=11, count=1)[0][0]
    model = boxcov.ExactGLM(detector, boxcov.Posterior.load("small", detector))
    return [middle(lambda: detector.detect(points)), middle(lambda: model(points))]


def middle(run: Callable[[], Any]) -> float:
    for _ in range(2):
        run()
    return median(timed(run) for _ in range(ROUNDS))


@torch.no_grad()
def layout_rows() -> list[list[Any]]:
    detector = centerpoint.load("small")
    bev = detector.encoder(simulated.frames("clear", seed=11, count=1)[0][0])
    dense = nn.Sequential(detector.backbone, detector.neck, detector.head)

    twin = deepcopy(detector).to(memory_format=torch.channels_last)
    other = nn.Sequential(twin.backbone, twin.neck, twin.head)
    maps = bev.contiguous(memory_format=torch.channels_last)
    return [
        ["channels first, as PyTorch stores maps", middle(lambda: dense(bev))],
        ["channels last", middle(lambda: other(maps))],
    ]


if __name__ == "__main__":
    main()
