"""Measure which files of boxcov typical calls enter, in order of first entry: ``make walks``.

The lists go to docs/concepts/architecture.md, between ``<!-- walks -->`` and ``<!-- end -->``. A
file counts as entered when one of its functions runs; imports and class bodies do not count. The
code of detectors and data sets is left out: it differs from detector to detector.

A file is re-entered when another file calls back into it before the file's own call has returned:
A calls B, B calls A. Each function that is called back counts once, however often that happens. A
reader who follows the calls has to turn back so many times.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "architecture.md"
START, END = "<!-- walks -->", "<!-- end -->"
LEFT_OUT = ("data/", "detectors/", "__init__.py")
PREDICTION = "model(inputs), after the route has been verified"
CALIBRATION = "boxcov.calibrate(model, frames)"


def files_entered(call: Callable[[], Any]) -> dict[str, int]:
    """Return the files of boxcov whose functions ``call`` runs, in order of first entry.

    The values say how often each is re-entered.
    """
    import boxcov

    package = str(Path(boxcov.__file__).parent) + "/"
    entered: dict[str, int] = {}
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # neither the body of a module or class, nor a lambda or comprehension
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event != "call" or not is_function or code in seen:
            return
        path = code.co_filename.removeprefix(package)
        if path == code.co_filename or path.startswith(LEFT_OUT):
            return
        seen.add(code)
        waiting = _files_on_stack(frame, package)
        calls_back = bool(waiting) and waiting[0] != path and path in waiting
        entered[path] = entered.get(path, 0) + calls_back

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return entered


def _files_on_stack(frame: FrameType, package: str) -> list[str]:
    """Return the files of the functions that wait for ``frame``, the caller first."""
    found = []
    caller = frame.f_back
    while caller is not None:
        path = caller.f_code.co_filename
        if path.startswith(package) and not path.removeprefix(package).startswith(LEFT_OUT):
            found.append(path.removeprefix(package))
        caller = caller.f_back
    return found


def measure() -> dict[str, dict[str, int]]:
    """Return the walks of fit, exact prediction, evaluate and calibrate, by the call."""
    import boxcov

    for name in ("kfac.fit", "predict.exact", "evaluate"):
        import_module(f"boxcov.{name}")  # so that imports are not measured
    detector = boxcov.detectors.centerpoint.load("small")
    frames = boxcov.data.simulated.frames("clear", seed=0, count=8, sweeps=1)
    items = [frames[k] for k in range(8)]
    results: list[Any] = []

    def walk(call: Callable[[], Any]) -> dict[str, int]:
        return files_entered(lambda: results.append(call()))

    walks = {}
    walks["boxcov.fit(detector, frames)"] = walk(
        lambda: boxcov.fit(detector, items[:2], n_data=3500)
    )
    posterior = results[-1]
    walks["boxcov.ExactGLM(detector, posterior)(inputs)"] = walk(
        lambda: boxcov.ExactGLM(detector, posterior)(items[0][0])
    )
    model = boxcov.ExactGLM(detector, posterior)
    found = [model(inputs) for inputs, _ in items]
    walks[PREDICTION] = walk(lambda: model(items[1][0]))
    arguments = _arguments(found, items)
    walks['boxcov.evaluate.table({"exact": match(...)})'] = walk(
        lambda: boxcov.evaluate.table({"exact": boxcov.evaluate.match(*arguments)}, replicates=20)
    )
    walks[CALIBRATION] = walk(lambda: boxcov.calibrate(model, items))
    return walks


def _arguments(found: Sequence[Any], items: Sequence[Any]) -> list[Any]:
    """Return the arguments of ``match`` for the detections and objects of all frames."""
    targets = [target for _, batch in items for target in batch]
    names = ("boxes", "scores", "labels", "uncertainty", "covariance")
    boxes, scores, labels, uncertainty, covariance = (
        np.concatenate([getattr(one, name).numpy() for one in found]) for name in names
    )
    objects = [target["boxes"].numpy() for target in targets]
    return [
        boxes,
        scores,
        labels,
        np.repeat(np.arange(len(found)), [len(one) for one in found]),
        np.concatenate(objects),
        np.concatenate([target["labels"].numpy() for target in targets]),
        np.repeat(np.arange(len(objects)), [len(one) for one in objects]),
        found[0].fields,
        found[0].classes,
        uncertainty,
        covariance,
    ]


def markdown(walks: Mapping[str, Mapping[str, int]]) -> str:
    """Return one section per walk: the files, grouped where neighbours share a folder."""
    sections = []
    for call, walk in walks.items():
        shared = len(walk.keys() & walks[PREDICTION].keys()) if call == CALIBRATION else 0
        note = f", {shared} of them those of a prediction" if shared else ""
        lines = [f"**`{call}`**: {len(walk)} files{note}", "", "```text"]
        folder = None
        for path, again in walk.items():
            parent, _, name = path.rpartition("/")
            shown = f"{name:<24}re-entered {again}" if again else name
            lines.append(f"{parent or '.' if parent != folder else '':<22}{shown}")
            folder = parent
        sections.append("\n".join([*lines, "```"]))
    return "\n\n".join(sections)


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        walks = measure()
    text = PAGE.read_text()
    start, end = text.index(START) + len(START), text.index(END)
    PAGE.write_text(f"{text[:start]}\n\n{markdown(walks)}\n\n{text[end:]}")
    for call, walk in walks.items():
        print(f"{len(walk):3} files, re-entered at most {max(walk.values())} times  {call}")


if __name__ == "__main__":
    main()
