"""Load the weights of a YOLOX: upstream checkpoints and files with folded BatchNorm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from warnings import warn

from boxcov._files.input_file import MAX_CLASSES, reading
from boxcov.data.coco.classes import CLASSES
from boxcov.detectors.weight_file import State, load_weights, read_weights, shown_names
from boxcov.detectors.yolox.config import SIZES, Config
from boxcov.detectors.yolox.detector import YOLOX
from boxcov.errors import BoxcovError, BoxcovWarning

_SHORT_NAMES = {  # of the pyramid's modules, in files with folded weights
    "lateral0": "lateral_conv0",
    "c3p4": "C3_p4",
    "reduce1": "reduce_conv1",
    "c3p3": "C3_p3",
    "bu2": "bu_conv2",
    "c3n3": "C3_n3",
    "bu1": "bu_conv1",
    "c3n4": "C3_n4",
}
_STEM = "backbone.backbone.stem.conv.conv.weight"
_STEM_NORM = "backbone.backbone.stem.conv.bn"
_NORMALISED = 50.0  # mean square of inputs below which they were not 0 to 255


def load(
    path: str | Path,
    classes: Sequence[str] | None = None,
    threshold: float = 0.3,
    overlap: float = 0.65,
    max_boxes: int = 100,
    logit: bool = False,
) -> YOLOX:
    """Load a trained YOLOX in eval mode, from an upstream checkpoint (.pth) or safetensors.

    The size of the network follows from the weights.
    classes: names of its classes; by default those of COCO if there are 80, with a warning unless
    the file has the name of a released one, such as ``yolox_s.pth``.
    threshold, overlap, max_boxes: which boxes are reported, see ``Config``. The official COCO
    evaluation uses a threshold of 0.01 or less.
    logit: whether the score logit is a fifth number of each box.

    >>> import tempfile, torch
    >>> state = YOLOX(Config.named("nano")).state_dict()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"model": state}, f"{folder}/yolox_nano.pth")
    ...     load(f"{folder}/yolox_nano.pth").config == Config.named("nano")
    True
    """
    path = Path(path)
    if not path.is_file():
        raise BoxcovError(f"{path}: no such file; give the path of a YOLOX checkpoint")
    state = {_upstream(name): tensor for name, tensor in read_weights(path)[0].items()}
    with reading(path, "a checkpoint of YOLOX"):
        found = _config(state, classes, path)
    config = replace(found, threshold=threshold, overlap=overlap, max_boxes=max_boxes, logit=logit)
    with reading(path, "a checkpoint of YOLOX"):
        misfit = f"{path}: the weights do not fit a YOLOX of width {config.width}"
        detector = load_weights(lambda: YOLOX(config), state, misfit)
    _warn_if_normalised(state, path)
    if _is_released(found, path):
        detector.trained_size = found.size
    elif classes is None and found.classes == CLASSES:
        warn(
            f"{path}: the file does not name its {len(CLASSES)} classes: COCO's names are used. If "
            "it was trained on others, give load(..., classes=), for a command in a function of "
            "yours: python:FILE.py:FUNCTION. Released files are known by their names (yolox_s.pth)",
            BoxcovWarning,
            stacklevel=2,
        )
    return detector.eval()


def _is_released(config: Config, path: Path) -> bool:
    """Return whether a file has the name, size and classes of a network that upstream released."""
    name = path.stem.removesuffix("_folded").removeprefix("yolox_")
    return name in SIZES and config == replace(Config.named(name), norm=config.norm)


def _warn_if_normalised(state: State, path: Path) -> None:
    """Warn if the network was trained on normalised RGB images, as YOLOX before 0.1.1 was.

    The first norm knows the mean square of the first convolution's outputs. Divided by that of its
    weights it is the mean square of the inputs: about 1 if they were normalised, and from 500 to
    400,000 in the channels of the released YOLOX-Nano, which reads 0 to 255.
    """
    norm = [state.get(f"{_STEM_NORM}.running_{name}") for name in ("mean", "var")]
    if norm[0] is None or norm[1] is None or not bool(norm[0].any()):  # folded, or never trained
        return
    outputs = norm[0].double().square() + norm[1].double()
    inputs = outputs / state[_STEM].double().square().sum((1, 2, 3)).clamp(min=1e-12)
    if float(inputs.median()) < _NORMALISED:
        warn(
            f"{path}: the statistics of its first norm say that it was trained on normalised "
            f"images (mean square {float(inputs.median()):.2g}), as YOLOX before 0.1.1 was (its "
            "option --legacy): boxcov feeds it BGR images from 0 to 255, so boxes will be wrong",
            BoxcovWarning,
            stacklevel=3,
        )


def _upstream(name: str) -> str:
    """Return the upstream name of a tensor; files with folded weights have short names."""
    first, _, rest = name.partition(".")
    if first == "stem" or re.fullmatch(r"dark\d", first):
        return f"backbone.backbone.{name}"
    if first in _SHORT_NAMES:
        return f"backbone.{_SHORT_NAMES[first]}.{rest}"
    if re.fullmatch(r"stems|(cls|reg)_convs|(cls|reg|obj)_preds", first):
        return f"head.{name}"
    return name


def _config(state: State, classes: Sequence[str] | None, path: Path) -> Config:
    stem, named = state.get(_STEM), state.get("head.cls_preds.0.weight")
    if stem is None or named is None or stem.dim() != 4:
        raise BoxcovError(
            f"{path}: no YOLOX that boxcov knows: looked for {_STEM} and head.cls_preds.0.weight, "
            f"and found {shown_names(state, 4)}. "
            "YOLOX-Darknet53 and networks before version 0.1 are not supported"
        )
    found = (re.match(r"backbone\.C3_p4\.m\.(\d+)\.", name) for name in state)
    bottlenecks = {match[1] for match in found if match}
    count, depth = len(named), max(len(bottlenecks), 1)
    # a YOLOX has 12 bottlenecks of two convolutions per step of depth
    if count > MAX_CLASSES or 24 * depth > len(state):
        raise BoxcovError(
            f"{path}: {count} classes (at most {MAX_CLASSES} are read) and a depth of {depth} "
            f"with {len(state)} tensors: not a YOLOX"
        )
    if classes is None:
        classes = CLASSES if count == len(CLASSES) else [f"class {i}" for i in range(count)]
    if len(classes) != count:
        raise BoxcovError(
            f"{path}: a network for {count} classes, but {len(classes)} names were given"
        )
    return Config(
        width=len(stem),
        depth=depth,
        depthwise="backbone.backbone.dark2.0.dconv.conv.weight" in state,
        norm="backbone.backbone.stem.conv.bn.weight" in state,
        classes=tuple(classes),
    )
