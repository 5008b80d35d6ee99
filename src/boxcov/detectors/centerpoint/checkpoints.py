"""Load and save the weights of a CenterPoint: files of det3d, mmdetection3d, OpenPCDet and boxcov.

No code in a file is run. Every tensor is converted and checked by name and shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from boxcov._files.input_file import reading
from boxcov._files.output_file import write_safetensors
from boxcov.detectors.centerpoint.config import FRAMEWORKS, Config, Framework, Pillars
from boxcov.detectors.centerpoint.detector import CenterPoint, Fact
from boxcov.detectors.centerpoint.frameworks import (
    GENERATIONS,
    TITLES,
    LayerNames,
    choose_generation,
    head_rows,
    layer_names,
    module_name,
)
from boxcov.detectors.centerpoint.upstream_config import choose_config
from boxcov.detectors.centerpoint.voxel_encoder import SparseConv
from boxcov.detectors.weight_file import (
    State,
    check_fit,
    copy_weights,
    load_weights,
    read_weights,
    shown_names,
)
from boxcov.errors import BoxcovError, did_you_mean

_KEY = "boxcov.centerpoint"
_WEIGHTS = Path(__file__).parent / "weights"
# Permutations of a sparse kernel to (out, kz, ky, kx, in), and whose layout it is.
_LAYOUTS: dict[tuple[int, ...], str] = {
    (4, 0, 1, 2, 3): "spconv 1.x",
    (0, 1, 2, 3, 4): "spconv 2.x",
    (3, 0, 1, 2, 4): "spconv (kz, ky, kx, out, in)",
}


def load(
    path_or_name: str | Path,
    config: Config | str | Path | None = None,
    *,
    legacy: bool | None = None,
) -> CenterPoint:
    """Load a trained CenterPoint in eval mode, from a checkpoint or from the package ("small").

    config: for a checkpoint of another framework, whose weights do not tell the grid: a ``Config``,
    the name of a published network (``pillar02``, ``voxel01``, ``voxel0075``; with ``-circlenms``
    for circle NMS), or a configuration file of the framework (``.py`` or ``.yaml``), which is
    parsed and never run. By default the one in the checkpoint's meta data or in the only such file
    beside it.
    legacy: whether an mmdetection3d checkpoint was trained before version 1.0, which had another
    convention for sizes and yaw. By default what the file tells; an error asks where it does not.

    ``provenance`` of the detector lists what was understood, with the evidence.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(CenterPoint(Config.small()), f"{folder}/mine.safetensors")
    ...     load(f"{folder}/mine.safetensors").config == Config.small()
    True
    """
    path = _path(path_or_name)
    state, about = read_weights(path)
    if _KEY not in about:
        return _load_foreign(path, state, about, config, legacy).eval()
    if legacy is not None or isinstance(config, str | Path):
        raise BoxcovError(
            f"{path}: boxcov wrote this file, with its configuration inside: "
            "give neither config nor legacy"
        )
    with reading(path, "a CenterPoint that boxcov wrote"):
        return _load_own(config or Config.from_json(about[_KEY]), state, path).eval()


def _load_foreign(
    path: Path,
    state: State,
    about: Mapping[str, Any],
    config: Config | str | Path | None,
    legacy: bool | None,
) -> CenterPoint:
    """Return the network of another framework's checkpoint."""
    framework = _framework(state, path)
    if framework != "mmdet3d" and legacy is not None:
        raise BoxcovError(
            f"{path}: legacy is about mmdetection3d, and this is a checkpoint of "
            f"{TITLES[framework]}: remove it"
        )
    if any(".feature_adapt_" in name for name in state):
        raise BoxcovError(f"{path}: boxcov does not implement deformable convolutions in the head")
    config, source = choose_config(config, framework, path, about)
    pillars = state.get(f"{module_name('pillar encoder', framework)}.pfn_layers.0.linear.weight")
    features = None if pillars is None or pillars.dim() != 2 else pillars.shape[1]  # per point
    evidence = f"names that start with {module_name('head', framework)}."
    facts = [Fact("framework", TITLES[framework], evidence)]
    if framework == "mmdet3d":
        legacy, evidence = choose_generation(legacy, about, features, path)
        facts.append(Fact("generation", GENERATIONS[legacy], evidence))
    if isinstance(config.encoder, Pillars) and features in (10, 11):
        config = replace(config, encoder=replace(config.encoder, centre_z=features == 11))
    detector = CenterPoint(config)
    facts += _describe(config, framework, legacy, source)
    facts += _convert(detector, state, framework, bool(legacy), path)
    detector.provenance = tuple(facts)
    return detector


def save(detector: CenterPoint, path: str | Path) -> None:
    """Write the weights and the config to one safetensors file.

    Weights are stored in half precision, norms and biases in single precision.
    """
    tensors = {}
    for name, tensor in detector.state_dict().items():
        dtype = torch.float16 if tensor.dim() > 1 else torch.float32
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if not bool(tensors[name].isfinite().all()):
            raise BoxcovError(
                f"{path}: {name} has values too large for half precision "
                f"(largest: {float(tensor.abs().max()):g})"
            )
    write_safetensors(path, tensors, {_KEY: detector.config.to_json()})


# read


def _path(path_or_name: str | Path) -> Path:
    """Return the file of a checkpoint; small is in the package, pillar in a checkout."""
    name, checkout = str(path_or_name), Path(__file__).parents[4] / "weights"
    named = {"small": (_WEIGHTS,), "pillar": (checkout, Path("weights"))}
    places = [folder / f"{name}.safetensors" for folder in named.get(name, ())] or [Path(name)]
    for path in places:
        if path.is_file():
            return path
    if name in named:
        raise BoxcovError(
            f"{places[0]}: the weights of {name} are not in this installation: give the path of a "
            "checkpoint, or work in a checkout of boxcov"
        )
    raise BoxcovError(
        f"{name}: no such file{did_you_mean(name, named)}; give the path of a checkpoint, or a "
        "name: small (in the package) or pillar (in a checkout)"
    )


def _framework(state: State, path: Path) -> Framework:
    heads = {framework: module_name("head", framework) for framework in FRAMEWORKS}
    for framework, head in heads.items():
        if any(name.startswith(f"{head}.") for name in state):
            return framework
    prefixes = ", ".join(f"{head}. ({framework})" for framework, head in heads.items())
    raise BoxcovError(
        f"{path}: no CenterPoint that boxcov knows: looked for names that start with {prefixes}, "
        f"and found {shown_names(state, 4)}"
    )


# convert


def _convert(
    detector: CenterPoint, state: State, framework: Framework, legacy: bool, path: Path
) -> list[Fact]:
    """Copy the weights of a framework's checkpoint into ``detector``; return what was converted."""
    names = list(layer_names(detector.config, framework))
    foreign = {own: there for layer in names for own, there in layer.tensors().items()}
    order = _kernel_layout(detector, state, names)
    tensors = {name: tensor for name, tensor in state.items() if name != "global_step"}
    folded = 0
    for layer in names:
        key = f"{layer.foreign}.weight"
        if key in tensors:
            tensors[key] = _convert_weight(detector, layer, tensors[key], framework, order)
        folded += _fold_bias(tensors, layer)
    own = detector.state_dict()
    check_fit(own, tensors, _misfit(path), foreign, stored=state)
    copy_weights(own, tensors, foreign)
    with torch.no_grad():
        for layer in names:
            if not layer.has_norm:
                branch = layer.own.split(".")[-2]
                for parameter in detector.get_submodule(layer.own).parameters():
                    parameter.copy_(head_rows(parameter.clone(), branch, framework, legacy))
    facts = [Fact("folded", f"{folded} biases, into the means of the norms after them", "names")]
    if not isinstance(detector.config.encoder, Pillars):
        facts.append(Fact("kernels", f"of {_LAYOUTS[order]}", "shapes of the sparse weights"))
    return facts


def _fold_bias(tensors: dict[str, Tensor], layer: LayerNames) -> bool:
    """Subtract a bias before a norm from the norm's mean; return whether there was one.

    A bias of another shape stays and is reported as surplus.
    """
    key, mean_key = f"{layer.foreign}.bias", f"{layer.foreign_norm}.running_mean"
    bias, mean = tensors.get(key), tensors.get(mean_key)
    if not layer.has_norm or bias is None or mean is None or bias.shape != mean.shape:
        return False
    tensors[mean_key] = mean.float() - tensors.pop(key).float()
    return True


def _kernel_layout(detector: CenterPoint, state: State, names: list[LayerNames]) -> tuple[int, ...]:
    """Return the layout that fits most of the sparse kernels: one with n_in = n_out fits two."""
    votes = dict.fromkeys(_LAYOUTS, 0)
    for layer in names:
        module, tensor = detector.get_submodule(layer.own), state.get(f"{layer.foreign}.weight")
        if isinstance(module, SparseConv) and tensor is not None and tensor.dim() == 5:
            for order in _LAYOUTS:
                votes[order] += tensor.permute(order).shape == module.kernel_shape
    return max(votes, key=votes.__getitem__)


def _convert_weight(
    detector: CenterPoint,
    layer: LayerNames,
    tensor: Tensor,
    framework: Framework,
    order: tuple[int, ...],
) -> Tensor:
    """Return a weight in boxcov's layout; one of an unexpected shape is reported later."""
    module = detector.get_submodule(layer.own)
    if isinstance(module, SparseConv):
        fits = tensor.dim() == 5 and tensor.permute(order).shape == module.kernel_shape
        return tensor.permute(order).flatten(1) if fits else tensor
    is_same_size = isinstance(module, torch.nn.Conv2d) and module.stride == (1, 1)
    if framework == "openpcdet" and "deblocks" in layer.own and is_same_size and tensor.dim() == 4:
        return tensor.transpose(0, 1)  # OpenPCDet writes this convolution as a transposed one
    return tensor


def _load_own(config: Config, state: State, path: Path) -> CenterPoint:
    """Return the network of boxcov's own file."""
    layers = sum(config.dense.layers) + len(config.tasks) * len(config.branches)
    if layers > len(state):
        raise BoxcovError(f"{path}: {len(state)} tensors for {layers} layers")
    return load_weights(lambda: CenterPoint(config), state, _misfit(path))


def _misfit(path: Path) -> str:
    return (
        f"{path}: the weights do not fit this network: if the file is of another one, give its "
        "config"
    )


# what was understood


def _describe(config: Config, framework: Framework, legacy: bool | None, source: str) -> list[Fact]:
    """Return what the configuration says of a checkpoint. source: where the configuration is from.

    legacy: whether the conventions are those of mmdetection3d before 1.0.
    """
    low, high = config.point_range[:3], config.point_range[3:]
    axes = ", ".join(f"{axis} {a:g} to {b:g}" for axis, a, b in zip("xyz", low, high))
    size = " x ".join(f"{side:g}" for side in config.voxel_size)
    rules, encoder, (rows, columns) = config.reporting, config.encoder, config.map_size
    old = framework == "det3d" or legacy
    nms = f"rotated NMS at IoU {rules.overlap:g}" if rules.nms == "rotated" else "circle NMS"
    limit = "no limits"
    if encoder.max_cells is not None:
        limit = f"at most {encoder.max_cells[1]:,} cells of {encoder.max_points} points per frame"
    if isinstance(encoder, Pillars):
        widths = " and ".join(map(str, encoder.widths))
        kind = f"pillars, widths {widths}, {encoder.point_features} features per point"
        limit += ", points of any height" if encoder.any_height else ""
    else:
        kind = "sparse voxels"
        limit += ", points shuffled" if encoder.shuffled else ""
    boxes = "log sizes (w, l, h), rotation -yaw - pi / 2" if old else "log sizes (l, w, h), yaw"
    conventions = f"conventions of {TITLES[framework]}{' before 1.0' if legacy else ''}"
    classes = " | ".join(" ".join(names) for names in config.tasks)
    kept = f"score > {rules.threshold:g}, {nms}, {rules.max_boxes} boxes per task"
    return [
        Fact("encoder", kind, "names and shapes of the weights"),
        Fact("grid", f"{size} m; {axes} m; a map of {rows} x {columns} cells", source),
        Fact("limits", limit, source),
        Fact("sweeps", f"{config.sweeps or 'not known how many'} per frame", source),
        Fact("classes", classes, source),
        Fact("boxes", boxes, conventions),
        Fact("selection", kept, source),
    ]
