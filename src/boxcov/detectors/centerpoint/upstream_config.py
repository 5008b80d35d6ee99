"""The configuration of a checkpoint of det3d, mmdetection3d or OpenPCDet.

The weights do not tell the grid: networks on voxels of 0.1 m and of 0.075 m have the same shapes.
So a configuration is given, by name or as a file of the framework, or it is found in the
checkpoint's meta data or in a file beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import warn

from boxcov._files.input_file import open_bytes, reading
from boxcov.detectors.centerpoint.config import (
    Config,
    Framework,
    Loss,
    Pillars,
    Reporting,
    Voxels,
)
from boxcov.detectors.centerpoint.config_file import (
    SUFFIXES,
    Settings,
    parse_settings,
    read_settings,
)
from boxcov.detectors.centerpoint.upstream_settings import SettingsReader, framework_of
from boxcov.errors import BoxcovError, BoxcovWarning, join_names

NAMES = ("pillar02", "voxel01", "voxel0075")
CIRCLE = "-circlenms"  # at the end of a name: circle NMS instead of rotated NMS
_ABSENT = object()
_CIRCLE_NMS = ("circle", "circle_nms", True)
_PILLAR_ENCODERS = ("PillarFeatureNet", "DynPillarVFE", "DynamicPillarVFE")
_VOXEL_ENCODERS = ("HardSimpleVFE", "VoxelFeatureExtractorV3", "MeanVFE")
# Settings of networks that boxcov does not implement: path, unsupported value, in words
_UNSUPPORTED: dict[Framework, tuple[tuple[str, Any, str], ...]] = {
    "mmdet3d": (
        ("head.separate_head.type", "DCNSeparateHead", "deformable convolutions in the head"),
        ("head.norm_bbox", False, "sizes that are not logarithms (norm_bbox=False)"),
    ),
    "det3d": (
        ("head.dcn_head", True, "deformable convolutions in the head"),
        ("test.double_flip", True, "flipped copies of the frame (double_flip)"),
        ("test.per_class_nms", True, "NMS of each class by itself (per_class_nms)"),
    ),
    "openpcdet": (
        ("test.NMS_CONFIG.MULTI_CLASSES_NMS", True, "NMS of each class (MULTI_CLASSES_NMS)"),
    ),
}


def choose_config(
    config: Config | str | Path | None, framework: Framework, path: Path, about: Mapping[str, Any]
) -> tuple[Config, str]:
    """Return the configuration of the checkpoint ``path``, and where it is from.

    config: as given to ``load``. about: the meta data of the checkpoint.
    """
    if config is None:
        return _stored_config(framework, path, about) or _config_beside(path, framework)
    if isinstance(config, Config):
        chosen = config, "as given"
    elif Path(config).suffix in SUFFIXES:
        chosen = config_of(read_settings(Path(config)), framework), str(config)
    else:
        chosen = named_config(str(config), framework), f"the name {config}, as given"
    try:
        stored = _stored_config(framework, path, about)
    except BoxcovError:  # a file whose own configuration cannot be read needs one that is given
        return chosen
    if stored is not None:
        _warn_if_other(chosen[0], *stored)
    return chosen


def _stored_config(
    framework: Framework, path: Path, about: Mapping[str, Any]
) -> tuple[Config, str] | None:
    """Return the configuration in the meta data of a checkpoint, and where it is from."""
    for key in ("config", "cfg"):
        if isinstance(text := about.get(key), str) and "\n" in text:
            source = f"{key} in the meta data of {path}"
            return config_of(parse_settings(text, source), framework), source
    return None


def _warn_if_other(config: Config, stored: Config, source: str) -> None:
    """Warn if the configuration that was given contradicts the one stored with the weights."""
    names = ("voxel_size", "point_range", "tasks")
    pairs = [(name, getattr(config, name), getattr(stored, name)) for name in names]
    other = [f"{name} {own}, not {theirs}" for name, own, theirs in pairs if own != theirs]
    if other:
        warn(
            f"the configuration that was given has {'; '.join(other)} as in {source}, which the "
            "weights were trained with: boxes will be wrong. Without config= or --config that one "
            "is taken",
            BoxcovWarning,
            stacklevel=2,
        )


def _config_beside(path: Path, framework: Framework) -> tuple[Config, str]:
    """Return the configuration in a file beside the checkpoint; raise if there is not just one."""
    files = [file for suffix in SUFFIXES if (file := path.with_suffix(suffix)).is_file()]
    if not files:
        # OpenPCDet keeps checkpoints in a folder ckpt/ beside the configuration
        folders = [path.parent, *([path.parent.parent] if path.parent.name == "ckpt" else [])]
        found = (file for folder in folders for file in sorted(folder.iterdir()))
        files = [file for file in found if file.suffix in SUFFIXES and _is_config(file, framework)]
    if len(files) == 1:
        return config_of(read_settings(files[0]), framework), str(files[0])
    reason = (
        f"there are several configurations beside it ({join_names(file.name for file in files)})"
        if files
        else "there is none in it or beside it"
    )
    raise BoxcovError(
        f"{path}: the weights do not tell the grid of the network (voxel size and range), and "
        f"{reason}: give its configuration as config=, on the command line --config: "
        f"{', '.join(NAMES)}, or a configuration file of the framework (.py or .yaml)"
    )


def _is_config(file: Path, framework: Framework) -> bool:
    """Return whether a file may be the configuration: one that is not understood must be asked."""
    try:
        settings = read_settings(file)
    except BoxcovError:
        try:
            with open_bytes(file) as content:
                return b"CenterHead" in content.read(1 << 20)
        except OSError:  # a pipe, or a link to nothing
            return False
    found = framework_of(settings)
    return found == framework or (found is None and bool(settings.missing_bases))


def named_config(name: str, framework: Framework) -> Config:
    """Return the published nuScenes network ``name`` of a framework.

    name: ``pillar02``, ``voxel01`` or ``voxel0075``; with ``-circlenms`` for circle NMS.
    """
    plain = name.removesuffix(CIRCLE)
    if plain not in NAMES:
        raise BoxcovError(
            f"no configuration {name!r}: give {', '.join(NAMES)} (with {CIRCLE} for circle NMS), "
            "or the path of a configuration file of the framework (.py or .yaml)"
        )
    if plain == "pillar02":
        config = Config.pillar(framework)
    else:
        config = Config.voxel(0.1 if plain == "voxel01" else 0.075, framework)
    rules = config.reporting if plain == name else replace(config.reporting, nms="circle")
    return replace(config, reporting=rules, sweeps=10)


def config_of(settings: Settings, framework: Framework) -> Config:
    """Return the configuration that a framework's file describes."""
    found = framework_of(settings)
    if found is None and not settings.missing_bases:
        settings.get("model", "MODEL")  # an error if only running the file would give it
        raise BoxcovError(f"{settings.source}: not the configuration of a CenterPoint")
    if found is not None and found != framework:
        raise BoxcovError(
            f"{settings.source}: a configuration of {found}, but the checkpoint is of {framework}"
        )
    with reading(settings.source, "a configuration of a CenterPoint"):
        return _build(SettingsReader(settings, framework))


def _build(reader: SettingsReader) -> Config:
    framework, kind = reader.framework, reader.get("encoder")
    if kind not in (*_PILLAR_ENCODERS, *_VOXEL_ENCODERS):
        raise BoxcovError(f"boxcov does not implement the encoder {kind}")
    base = named_config("pillar02" if kind in _PILLAR_ENCODERS else "voxel01", framework)
    for path, value, words in _UNSUPPORTED[framework]:
        if reader.get(path, default=_ABSENT) == value:
            raise BoxcovError(f"boxcov does not implement {words}")
    tasks = [t["class_names"] if isinstance(t, Mapping) else t for t in reader.get("tasks")]
    dense = ["widths", "layers", "strides", "up_widths", "up_strides", "shared"]
    dense += [] if framework == "det3d" else ["branch"]  # always 64 in det3d
    config = replace(
        base,
        tasks=tuple(tuple(map(str, names)) for names in tasks),
        point_range=tuple(map(float, reader.get("point_range"))),
        voxel_size=tuple(map(float, reader.get("voxel_size"))),
        encoder=_encoder(reader, base),
        dense=replace(base.dense, **reader.fields(base.dense, *dense)),
        reporting=_reporting(reader, base.reporting),
        loss=_loss(reader, base.loss),
        velocity="vel" in reader.get("branches"),
        sweeps=_sweeps(reader),
    )
    config = Config.from_json(config.to_json())  # every setting has the type of its field
    _check_repeated(reader, config)
    _warn_if_not_nuscenes(reader)
    return config


def _warn_if_not_nuscenes(reader: SettingsReader) -> None:
    """Warn if the network was trained on another data set: the shapes do not tell its points."""
    settings = reader.settings
    name = settings.at("DATA_CONFIG.DATASET") or settings.at("dataset_type")
    if isinstance(name, str) and "nuscenes" not in name.lower():
        warn(
            f"{settings.source}: a network of {name}. boxcov gives it x, y, z, the intensity from "
            "0 to 255 and the age in seconds of each point, as for nuScenes: if it was trained on "
            "other numbers, its boxes will be wrong",
            BoxcovWarning,
            stacklevel=2,
        )


def _sweeps(reader: SettingsReader) -> int | None:
    """Return the sweeps per frame that the network was trained on, the newest included."""
    settings = reader.settings
    steps = settings.at("test_pipeline")  # mmdetection3d does not count the newest
    steps = steps if isinstance(steps, list) else []
    before = [step.get("sweeps_num") for step in steps if isinstance(step, Mapping)]
    counts = [count + 1 for count in before if isinstance(count, int)]
    counts += [settings.at("nsweeps"), settings.at("DATA_CONFIG.MAX_SWEEPS")]  # det3d, OpenPCDet
    return next((count for count in counts if isinstance(count, int)), None)


def _check_repeated(reader: SettingsReader, config: Config) -> None:
    """Raise if a file contradicts itself: boxcov would decode other boxes than the framework."""
    for name in ("voxel_size", "point_range", "stride"):
        own, again = getattr(config, name), reader.optional(f"{name}2")
        expected = list(own[: len(again)]) if isinstance(again, list) else own
        if again is not None and again != expected:
            raise BoxcovError(
                f"{reader.places(f'{name}2')[0]} is {again}, but {name} is {expected}: the file "
                "contradicts itself"
            )
    limit = reader.optional("nms_limit")
    rules = config.reporting
    if rules.nms == "rotated" and limit is not None and limit < rules.candidates:
        raise BoxcovError(
            f"boxcov does not implement NMS of only {limit} of the {rules.candidates} candidates "
            f"({reader.places('nms_limit')[0]})"
        )


def _encoder(reader: SettingsReader, base: Config) -> Pillars | Voxels:
    encoder = base.encoder
    if isinstance(encoder, Pillars):
        if reader.framework == "mmdet3d" and reader.get("encoder.legacy", default=True):
            raise BoxcovError("boxcov does not implement the pillar encoder with legacy=True")
        encoder = replace(encoder, widths=tuple(reader.get("pillars")))
    elif reader.framework == "openpcdet":
        encoder = replace(encoder, shuffled=bool(reader.get("shuffled", default=False)))
    if encoder.max_points is None:
        return encoder
    limits = reader.get("max_cells")
    if isinstance(limits, Mapping):
        limits = [limits["train"], limits["test"]]
    train, test = limits if isinstance(limits, list) else (limits, limits)
    return replace(encoder, max_points=int(reader.get("max_points")), max_cells=(train, test))


def _reporting(reader: SettingsReader, base: Reporting) -> Reporting:
    names = ["threshold", "candidates", "overlap", "max_boxes", "centre_range"]
    if reader.framework == "mmdet3d":
        base = replace(base, threshold=0.0, candidates=100)  # the defaults of its box coder
    kind = reader.get("nms", default=False)  # det3d says whether it is circle NMS
    if kind not in ("rotate", "nms_gpu", False, *_CIRCLE_NMS):
        raise BoxcovError(f"boxcov does not implement the NMS {kind}")
    found = reader.fields(base, *names)
    if kind not in _CIRCLE_NMS and reader.framework == "mmdet3d":
        # only rotated NMS reads these, in addition to those of the box coder
        found["threshold"] = max(found["threshold"], reader.optional("test.score_threshold") or 0.0)
        limits = reader.optional("test.post_center_limit_range")
        if limits is not None and tuple(limits) != found["centre_range"]:
            raise BoxcovError(
                f"test_cfg.post_center_limit_range is {limits}, the box coder's range "
                f"{list(found['centre_range'])}: the file contradicts itself"
            )
    if kind not in _CIRCLE_NMS:
        return replace(base, nms="rotated", **found)
    return replace(base, nms="circle", **found, **reader.fields(base, "radii"))


def _loss(reader: SettingsReader, base: Loss) -> Loss:
    weights = tuple(map(float, reader.get("weights")))
    if reader.framework == "det3d":  # it has the velocity before the rotation
        weights = (*weights[:6], *weights[8:], *weights[6:8])
    return replace(base, weights=weights, **reader.fields(base, "box_weight"))
