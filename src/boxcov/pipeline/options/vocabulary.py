"""The words that mean the same in every command: functions that make the fields of options."""

from __future__ import annotations

from functools import partial

from boxcov.pipeline.options.option import INPUT, METHOD, OUTPUT, POSTERIOR, option

out = partial(option, panel=OUTPUT)
data = partial(
    option,
    "simulated:clear",
    INPUT,
    "Labelled frames: simulated:SCENARIO (clear, rain, fog, sparse, crowd, unseen), "
    "nuscenes:ROOT, kitti:ROOT, coco:ROOT, or a function of your own that takes the split and "
    "returns frames: python:MODULE:FUNCTION or python:FILE.py:FUNCTION.",
    metavar="KIND:WHERE",
)
split = partial(
    option,
    None,
    INPUT,
    "train, test or val for simulated frames; the name of a split otherwise, optionally with a "
    "range of its frames: 'train[:28]'.",
    shown="simulated: val for calibrate, test for predict and rank, otherwise train",
)
count = partial(option, None, INPUT, within="[1, inf)")
sweeps = partial(
    option,
    10,
    INPUT,
    "LiDAR sweeps per frame (at most 10 for simulated frames).",
    within="[1, inf)",
)
workers = partial(
    option,
    0,
    INPUT,
    "Processes that load frames in the background; the results are the same.",
    within="[0, inf)",
)
seed = partial(option, 0, METHOD, "Random seed.", within="[0, inf)")
device = partial(option, "cpu", METHOD, "cpu, cuda, cuda:1 ...")
resume = partial(option, False, OUTPUT, "Continue an interrupted run.")
force = partial(option, False, OUTPUT, "Replace --out if it exists.")
format = partial(
    option,
    panel=OUTPUT,
    text="File format; native is what boxcov evaluate and boxcov convert read.",
)
show = partial(
    option,
    None,
    OUTPUT,
    "Draw the boxes, coloured by risk, with their 90 % regions: a folder for pictures, or a video "
    "that ends in .gif or .mp4.",
    metavar="FOLDER|FILE",
)
posterior = partial(option, None, INPUT, metavar=POSTERIOR)
