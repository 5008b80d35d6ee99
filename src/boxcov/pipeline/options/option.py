"""How an option is declared, and which values it accepts: others are refused before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from boxcov.errors import BoxcovError, did_you_mean

INPUT, METHOD, OUTPUT = "Input", "Method", "Output"  # the panels of the help text, in this order
REQUIRED: Any = MISSING

DETECTORS = {
    "centerpoint": "centerpoint:small, centerpoint:pillar or centerpoint:CHECKPOINT",
    "yolox": "yolox:CHECKPOINT",
    "transformers": "transformers:FOLDER",
    "torchvision": "torchvision:NAME or torchvision:NAME:WEIGHTS",
    "ultralytics": "ultralytics:FILE.pt",
    "python": "python:MODULE:FUNCTION or python:FILE.py:FUNCTION",
}  # the forms of --detector, by kind
DATA = {
    "simulated": "simulated:SCENARIO",
    "nuscenes": "nuscenes:ROOT",
    "kitti": "kitti:ROOT",
    "coco": "coco:ROOT",
    "python": "python:MODULE:FUNCTION or python:FILE.py:FUNCTION",
}  # the forms of --data, by kind
SCENARIOS = ("clear", "rain", "fog", "sparse", "crowd", "unseen")  # of simulated data
POSTERIOR = "POSTERIOR"  # metavar
SHIPPED_POSTERIOR = Path("small")  # the calibrated posterior of centerpoint:small in the package
_NAMES = {"KIND:WHICH": ("detector", DETECTORS), "KIND:WHERE": ("data", DATA)}  # by metavar


def check_name(what: str, forms: Mapping[str, str], given: str) -> None:
    """Raise unless ``given`` is KIND:WHERE of a known kind, before anything is loaded."""
    kind, _, where = given.partition(":")
    if kind not in forms or not where:
        known = did_you_mean(kind, forms) if kind not in forms else ""
        raise BoxcovError(f"no {what} {given!r}{known}: give {', '.join(forms.values())}")
    if kind == "simulated" and where not in SCENARIOS:
        known = did_you_mean(where, SCENARIOS)
        raise BoxcovError(f"no scenario {where!r}{known}: there are {', '.join(SCENARIOS)}")


@dataclass(frozen=True)
class Interval:
    """Numbers between two bounds, as in mathematics: ``[`` includes a bound, ``(`` excludes it.

    >>> [x in Interval("(0, 1]") for x in (0, 1, float("nan"))], str(Interval("(0, 1]"))
    ([False, True, False], 'above 0 and at most 1')
    """

    text: str

    def __contains__(self, value: float) -> bool:
        low, high = map(float, self.text[1:-1].split(","))
        from_low = low <= value if self.text[0] == "[" else low < value
        return from_low and (value <= high if self.text[-1] == "]" else value < high)

    def __str__(self) -> str:
        low, high = self.text[1:-1].split(", ")
        words = [f"{'at least' if self.text[0] == '[' else 'above'} {low}"]
        if high != "inf":
            words.append(f"{'at most' if self.text[-1] == ']' else 'below'} {high}")
        return " and ".join(words)


@dataclass(frozen=True)
class Help:
    """What the command line shows for a field, and which numbers it accepts."""

    text: str
    panel: str
    metavar: str | None
    within: Interval | None
    default: str | None  # shown instead of the field's own default
    is_argument: bool = False  # given by its place, not by its name

    def check(self, name: str, value: Any) -> None:
        """Raise if the option ``name`` does not accept this value."""
        is_number = isinstance(value, (int, float))
        if self.within is not None and is_number and value not in self.within:
            raise BoxcovError(f"{name} must be {self.within}, got {value}")
        if self.metavar in _NAMES:
            check_name(*_NAMES[self.metavar], value)
        if self.metavar == POSTERIOR and value != SHIPPED_POSTERIOR and not value.is_file():
            what = "is a folder" if value.is_dir() else "no such file"
            raise BoxcovError(f"{value}: {what}: write a posterior with boxcov fit")


def option(
    default: Any,
    panel: str,
    text: str,
    *,
    metavar: str | None = None,
    within: str | None = None,
    shown: str | None = None,
) -> Any:
    """Return a dataclass field with a default and a help text; ``within`` as in ``Interval``."""
    interval = None if within is None else Interval(within)
    return field(default=default, metadata={"help": Help(text, panel, metavar, interval, shown)})


def argument(text: str, metavar: str | None = None) -> Any:
    """Return a required dataclass field that is given by its place on the command line."""
    return field(metadata={"help": Help(text, INPUT, metavar, None, None, is_argument=True)})


@dataclass(frozen=True)
class Options:
    """Base of all options: numbers outside their interval and unknown names are refused."""

    def __post_init__(self) -> None:
        for one in fields(self):
            about: Help | None = one.metadata.get("help")
            given = getattr(self, one.name)
            for value in given if isinstance(given, tuple) else (given,):
                if about is not None and value is not None:
                    about.check(f"--{one.name.replace('_', '-')}", value)
