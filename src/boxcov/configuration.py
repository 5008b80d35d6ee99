"""The configuration of a detector: what decides its boxes besides the weights.

A grid or an image size cannot be seen in the weights, so a posterior would load for a detector
whose boxes are other ones. ``Detector.configuration`` names such settings; files hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from boxcov.errors import BoxcovError

SELECTION = "selection."  # start of names that decide only which boxes are reported
_SHOWN = 4  # differences in a message
_LONGEST = 1000  # characters of a value


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Return nested values as texts, under names with dots.

    >>> flatten({"nms": "circle", "grid": {"range": (-54, 54.0)}})
    {'nms': 'circle', 'grid.range': '-54 54'}
    """
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            texts |= {f"{name}.{key}": text for key, text in flatten(value).items()}
        else:
            texts[name] = _text(value)
    return texts


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        nested = any(isinstance(item, (tuple, list)) for item in value)
        return bounded((" | " if nested else " ").join(map(_text, value)))
    text = f"{value:.9g}" if type(value) in (int, float) else str(value)
    return bounded(text)


def bounded(text: str) -> str:
    """Return a text, or its hash if a file could not hold it: the names of a thousand classes."""
    digest = sha256(text.encode()).hexdigest()
    return text if len(text) <= _LONGEST else f"{text[:40]}... (SHA-256 {digest})"


def of_network(configuration: Mapping[str, str]) -> dict[str, str]:
    """Return what a posterior depends on: all but the selection."""
    return {name: text for name, text in configuration.items() if not name.startswith(SELECTION)}


def check_network(saved: Mapping[str, str], current: Mapping[str, str], context: str) -> None:
    """Raise if a posterior was fitted under another configuration of the network."""
    if differences := describe_differences(of_network(saved), of_network(current)):
        raise BoxcovError(
            f"{context}: this posterior was fitted under another configuration ({differences}): "
            "load the detector with that configuration, or fit a new posterior"
        )


def describe_differences(saved: Mapping[str, str], current: Mapping[str, str]) -> str:
    """Return in words where two configurations differ; nothing if they are equal.

    >>> describe_differences({"voxel_size": "0.1"}, {"voxel_size": "0.075"})
    'voxel_size was 0.1, is 0.075'
    """
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    words = [
        f"{name} was {saved.get(name, 'not known')}, is {current.get(name, 'not known')}"
        for name in names
    ]
    more = [f"and {len(words) - _SHOWN} more"] if len(words) > _SHOWN else []
    return "; ".join(words[:_SHOWN] + more)
