"""Weights from det3d, mmdetection3d, OpenPCDet and boxcov's own files: read without running any code, converted, checked name by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from boxcov.detectors.centerpoint.config import Config, Framework, Pillars
from boxcov.detectors.centerpoint.conventions import head_rows
from boxcov.detectors.centerpoint.detector import CenterPoint
from boxcov.detectors.centerpoint.keys import HEADS, SPARSE, Names, layers
from boxcov.detectors.centerpoint.voxel_encoder import SparseConv
from boxcov.detectors.weight_file import State, read_weights
from boxcov.errors import BoxcovError, join_names
from boxcov.files import reading, write_safetensors

_KEY = "boxcov.centerpoint"
_WEIGHTS = Path(__file__).parent / "weights"
_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_LAYOUTS = (
    (4, 0, 1, 2, 3),
    (0, 1, 2, 3, 4),
    (3, 0, 1, 2, 4),
)  # of a sparse kernel, to (out, kz, ky, kx, in); the first is spconv 1.x's


def load(
    path_or_name: str | Path, config: Config | None = None, *, legacy: bool | None = None
) -> CenterPoint:
    """A trained CenterPoint in eval mode, from a checkpoint or from the package ("small").

    config: unless given, the file's own, or the framework's for its kind of network; voxels of 0.075 m have the same weights as those of
    0.1 m, so ask for ``Config.voxel(0.075, framework)``.
    legacy: whether a mmdetection3d checkpoint was trained before version 1.0, which meant sizes and yaw otherwise; unless given, the version in
    the file tells, and without one it is a newer one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(CenterPoint(Config.small()), f"{folder}/mine.safetensors")
    ...     load(f"{folder}/mine.safetensors").config == Config.small()
    True
    """
    path = _path(path_or_name)
    state, about = read_weights(path)
    if _KEY in about:
        with reading(path, "a CenterPoint that boxcov wrote"):
            return _own(config or Config.from_json(about[_KEY]), state, path).eval()
    framework = _framework(state, path)
    if legacy is None:
        legacy = framework == "mmdet3d" and str(about.get("mmdet3d_version", "1")).startswith("0.")
    detector = CenterPoint(config or _default_config(state, framework))
    return _converted(detector, state, framework, legacy, path).eval()


def save(detector: CenterPoint, path: str | Path) -> None:
    """Weights in half precision, norms and biases in single, and the config, in one safetensors file.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(CenterPoint(Config.small()), f"{folder}/mine.safetensors")
    ...     os.path.getsize(f"{folder}/mine.safetensors") < 4e6
    True
    """
    tensors = {}
    for name, tensor in detector.state_dict().items():
        tensors[name] = (
            tensor.half()
            if tensor.dim() > 1
            else tensor.float()
            if tensor.is_floating_point()
            else tensor
        )
        if not bool(tensors[name].isfinite().all()):
            raise BoxcovError(
                f"{path}: {name} holds values that half precision cannot (largest: {float(tensor.abs().max()):g})"
            )
    write_safetensors(path, tensors, {_KEY: detector.config.to_json()})


# reading


def _path(path_or_name: str | Path) -> Path:
    if path_or_name == "small":
        path = _WEIGHTS / "small.safetensors"
        if not path.exists():
            raise BoxcovError(
                f"{path}: the weights of the small CenterPoint are not in this installation; give the path of a checkpoint"
            )
        return path
    path = Path(path_or_name)
    if not path.is_file():
        raise BoxcovError(
            f"{path}: no such file; give the path of a checkpoint, or the name of one in the package: small"
        )
    return path


def _framework(state: State, path: Path) -> Framework:
    for framework, head in HEADS.items():
        if any(name.startswith(f"{head}.") for name in state):
            return framework
    looked = ", ".join(f"{head}. ({framework})" for framework, head in HEADS.items())
    raise BoxcovError(
        f"{path}: no CenterPoint that boxcov knows: looked for names that start with {looked}, and found {join_names(state, 4)}"
    )


def _default_config(state: State, framework: Framework) -> Config:
    if any(name.startswith(f"{SPARSE[framework]}.") for name in state):
        return Config.voxel(0.1, framework)
    named = {
        "mmdet3d": Config.mmdet3d_pillar,
        "det3d": Config.det3d_pillar,
        "openpcdet": Config.openpcdet_pillar,
    }
    return named[framework]()


# converting


def _converted(
    detector: CenterPoint, state: State, framework: Framework, legacy: bool, path: Path
) -> CenterPoint:
    """``detector`` with the weights of a framework's checkpoint."""
    names = list(layers(detector.config, framework))
    wanted = {own: foreign for layer in names for own, foreign in _keys(layer)}
    order = _layout(detector, state, names)
    tensors = {name: tensor for name, tensor in state.items() if name != "global_step"}
    for layer in names:
        key = f"{layer.foreign}.weight"
        if key in tensors:
            tensors[key] = _weight(detector, layer, tensors[key], framework, order)
        _fold_bias(tensors, layer)
    _fill(detector, tensors, wanted, path, like=state)
    with torch.no_grad():
        for layer in names:
            if layer.own_norm is None:
                branch = layer.own.split(".")[-2]
                for parameter in detector.get_submodule(layer.own).parameters():
                    parameter.copy_(head_rows(parameter.clone(), branch, framework, legacy))
    return detector


def _fold_bias(tensors: dict[str, Tensor], layer: Names) -> None:
    """A bias before a norm is a shift of the norm's mean; one that does not fit stays, to be named as surplus."""
    if layer.foreign_norm is None:
        return
    bias, mean = (
        tensors.get(f"{layer.foreign}.bias"),
        tensors.get(f"{layer.foreign_norm}.running_mean"),
    )
    if bias is not None and mean is not None and bias.shape == mean.shape:
        tensors[f"{layer.foreign_norm}.running_mean"] = (
            mean.float() - tensors.pop(f"{layer.foreign}.bias").float()
        )


def _keys(layer: Names) -> list[tuple[str, str]]:
    """Names of a layer's tensors, here and there."""
    if layer.own_norm is None:
        return [(f"{layer.own}.{leaf}", f"{layer.foreign}.{leaf}") for leaf in ("weight", "bias")]
    norms = [(f"{layer.own_norm}.{leaf}", f"{layer.foreign_norm}.{leaf}") for leaf in _NORM]
    return [(f"{layer.own}.weight", f"{layer.foreign}.weight"), *norms]


def _layout(detector: CenterPoint, state: State, names: list[Names]) -> tuple[int, ...]:
    """The layout of the sparse kernels that explains most of their shapes: square ones fit two."""
    if isinstance(detector.config.encoder, Pillars):
        return _LAYOUTS[0]
    votes = dict.fromkeys(_LAYOUTS, 0)
    for layer in names:
        module, tensor = detector.get_submodule(layer.own), state.get(f"{layer.foreign}.weight")
        if isinstance(module, SparseConv) and tensor is not None and tensor.dim() == 5:
            for order in _LAYOUTS:
                votes[order] += tuple(tensor.permute(order).shape) == (
                    module.n_out,
                    *module.kernel,
                    module.n_in,
                )
    return max(votes, key=lambda order: votes[order])


def _weight(
    detector: CenterPoint,
    layer: Names,
    tensor: Tensor,
    framework: Framework,
    order: tuple[int, ...],
) -> Tensor:
    """A weight in the form that it has here; one of an unexpected shape is left as it is, to be named later."""
    module = detector.get_submodule(layer.own)
    if isinstance(module, SparseConv):
        if tensor.dim() == 5 and tuple(tensor.permute(order).shape) == (
            module.n_out,
            *module.kernel,
            module.n_in,
        ):
            return tensor.permute(order).flatten(1)
        return tensor
    if (
        framework == "openpcdet"
        and isinstance(module, torch.nn.Conv2d)
        and "deblocks" in layer.own
        and module.stride == (1, 1)
    ):
        return (
            tensor.transpose(0, 1) if tensor.dim() == 4 else tensor
        )  # it writes this one as a transposed convolution
    return tensor


def _own(config: Config, state: State, path: Path) -> CenterPoint:
    """The network of a file of boxcov's; what the file says of its sizes is compared with its tensors before any memory is taken."""
    if sum(config.dense.layers) > len(state):
        raise BoxcovError(f"{path}: {len(state)} tensors for {sum(config.dense.layers)} layers")
    with torch.device("meta"):
        planned = CenterPoint(config).state_dict()
    _check_fit(planned, state, {name: name for name in planned}, path, state)
    detector = CenterPoint(config)
    _fill(detector, state, {name: name for name in planned}, path)
    return detector


def _fill(
    detector: CenterPoint,
    tensors: State,
    wanted: Mapping[str, str],
    path: Path,
    like: State | None = None,
) -> None:
    """Copy the tensors, whose names are the values of ``wanted``, into the detector; all that does not fit in one error."""
    own = detector.state_dict()
    _check_fit(own, tensors, wanted, path, tensors if like is None else like)
    with torch.no_grad():
        for here, there in wanted.items():
            if there in tensors:
                own[here].copy_(tensors[there])


def _check_fit(
    own: State, tensors: State, wanted: Mapping[str, str], path: Path, like: State
) -> None:
    # how many batches a norm has seen is nothing to a frozen network, and old checkpoints do not tell
    missing = [
        there
        for here, there in wanted.items()
        if there not in tensors and not here.endswith("num_batches_tracked")
    ]
    surplus = sorted(set(tensors) - set(wanted.values()))
    shapes = {
        there: (tuple(like[there].shape), tuple(own[here].shape))
        for here, there in wanted.items()
        if there in tensors
    }
    wrong = [
        f"{there} {shapes[there][0]} for {shapes[there][1]}"
        for here, there in wanted.items()
        if there in tensors and tensors[there].shape != own[here].shape
    ]
    if missing or surplus or wrong:
        lists = {"missing": missing, "surplus": surplus, "of another shape": wrong}
        text = "; ".join(
            f"{len(names)} {kind}: {join_names(names, 20)}"
            for kind, names in lists.items()
            if names
        )
        raise BoxcovError(
            f"{path}: the weights do not fit this network. {text}. Is it another one? Give its config"
        )
