"""Choose the configuration of a checkpoint: as given, in its meta data, or in a file beside it.

The weights do not tell the grid: networks on voxels of 0.1 m and of 0.075 m have the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from warnings import warn

from boxcov.detectors.centerpoint.config import Config, Framework
from boxcov.detectors.centerpoint.config_file import SUFFIXES, parse_settings, read_settings
from boxcov.detectors.centerpoint.upstream_config import (
    NAMES,
    config_of,
    framework_of,
    named_config,
)
from boxcov.errors import BoxcovError, BoxcovWarning, join_names
from boxcov.input_file import open_bytes


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
