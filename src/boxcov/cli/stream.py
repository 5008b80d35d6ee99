"""``boxcov stream``: frames in from a folder or stdin, JSON lines out."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from boxcov.cli.options import DetectorWord, Device, Method, Posterior, Seed


class PointsKind(str, Enum):
    nuscenes = "nuscenes"
    kitti = "kitti"
    plain = "plain"


def stream(
    frames: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="Of .bin point clouds or images, taken by name; - for paths on stdin.",
        ),
    ],
    detector: DetectorWord = "centerpoint:small",
    posterior: Posterior = None,
    method: Annotated[Method, typer.Option(help="As in boxcov predict.")] = Method.mcglm,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Of mcglm and mci (10), and of what exact is to estimate below the head."
        ),
    ] = None,
    points: Annotated[
        PointsKind, typer.Option(help="What the numbers of a point are in .bin files.")
    ] = PointsKind.nuscenes,
    size: Annotated[
        int | None,
        typer.Option(
            min=32, help="Pixels of the square that an image is put into, a multiple of 32."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Wait for new files in the folder, until Ctrl-C.")
    ] = False,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many frames.")] = None,
    warmup: Annotated[
        int, typer.Option(min=0, help="First frames that the latencies leave out.")
    ] = 5,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Boxes with their covariances for frames as they come: one JSON line each on stdout, latencies on stderr at the end.

    A frame that cannot be read is a line with an error, the stream goes on, and the exit code is 1 at the end.
    """
    from boxcov.errors import BoxcovError
    from boxcov.pipeline import stream as streaming
    from boxcov.pipeline.predict import How
    from boxcov.pipeline.sources import detector_named

    if size is not None and size % 32:
        raise BoxcovError(f"--size must be a multiple of 32 pixels, got {size}")
    if watch and frames == "-":
        raise BoxcovError("--watch is for a folder: paths on stdin are waited for anyway")
    how = How(method.value, posterior, samples, seed=seed)
    network = detector_named(detector, device)
    model = how.model(network)
    reader = streaming.Reader(network, points.value, size)
    paths = (
        streaming.listed_paths(sys.stdin)
        if frames == "-"
        else streaming.folder_paths(Path(frames), reader.suffixes, watch)
    )
    seen = streaming.Latencies(warmup)
    try:
        done, bad = streaming.run(model, reader, paths, sys.stdout, seen, count)
    except BrokenPipeError:
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        print(f"boxcov: {seen.shown()}", file=sys.stderr)
    if bad:
        raise BoxcovError(f"{bad} of {done} frames gave an error: see their lines")
