"""Load models from folders written by ``save_pretrained``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from warnings import warn

from boxcov._files.input_file import read_json, reading, shorten
from boxcov.detectors.transformers.detector import QueryDetector
from boxcov.detectors.transformers.families import FAMILIES, KNOWN, wrap
from boxcov.detectors.weight_file import refuse_differences
from boxcov.errors import BoxcovError, BoxcovWarning, import_package

_PROCESSOR = "preprocessor_config.json"


def load(
    path: str | Path,
    classes: Sequence[str] | Mapping[str, int] | None = None,
    threshold: float = 0.3,
    images: bool = True,
) -> QueryDetector:
    """Load a trained model in eval mode from a folder with ``config.json`` and safetensors.

    Nothing is downloaded, and no code from the folder is run.
    classes, threshold: as in ``wrap``.
    images: take images from ``boxcov.data.coco`` and preprocess them by
    ``preprocessor_config.json`` (without it by the family's default, with a warning); otherwise
    take ``pixel_values``.

    >>> load("nowhere")
    Traceback (most recent call last):
    ...
    boxcov.errors.BoxcovError: nowhere: no such folder; it needs config.json and model.safetensors
    """
    path = Path(path)
    if not path.is_dir():
        raise BoxcovError(f"{path}: no such folder; it needs config.json and model.safetensors")
    name, config = _read_config(path)
    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    if config.get("use_pretrained_backbone"):  # its weights would be downloaded
        options["use_pretrained_backbone"] = False
    transformers = import_package("transformers")
    try:
        model, loading = getattr(transformers, name).from_pretrained(str(path), **options)
        processor = _processor(transformers, path, name) if images else None
    except Exception as error:  # transformers raises many types on a damaged folder
        raise BoxcovError(
            f"{path}: not a valid {name} folder ({type(error).__name__}: {error})"
        ) from None
    # published files of DETR count the batches of norms that are frozen
    surplus = [key for key in loading["unexpected_keys"] if not key.endswith("_batches_tracked")]
    refuse_differences(
        f"{path}: the weights do not match config.json",
        sorted(loading["missing_keys"]),
        sorted(surplus),
        sorted(key[0] for key in loading["mismatched_keys"]),
    )
    if images and not (path / _PROCESSOR).is_file():
        warn(
            f"{path}: no {_PROCESSOR}, so images are prepared by the defaults of {name}: if the "
            "model was trained on others, boxes will be wrong. save_pretrained of its image "
            "processor writes the file",
            BoxcovWarning,
            stacklevel=2,
        )
    return wrap(model.eval(), classes, threshold, processor)


def _read_config(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the model's class, and its configuration."""
    file = path / "config.json"
    with reading(file, "a JSON file", "save_pretrained writes it next to the weights"):
        content = read_json(file)
    config = content if isinstance(content, dict) else {}
    found = config.get("architectures")
    known = [n for n in FAMILIES if n in found] if isinstance(found, list) else []
    if not known:
        raise BoxcovError(f"{file}: its architectures are {shorten(found)}; supported are {KNOWN}")
    if not any(path.glob("*.safetensors")):
        raise BoxcovError(
            f"{path}: no safetensors file; pickled weights are not read: "
            "write the model with save_pretrained again"
        )
    return known[0], config


def _processor(transformers: Any, path: Path, name: str) -> Any:
    """Return the image processor, on Pillow if possible: pixels do not depend on torchvision."""
    if (path / _PROCESSOR).is_file():
        version = int(transformers.__version__.split(".")[0])
        choice = {"backend": "pil"} if version > 4 else {"use_fast": False}
        return transformers.AutoImageProcessor.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False, **choice
        )
    default = f"{name.removesuffix('ForObjectDetection').replace('V2', '')}ImageProcessor"
    kind = getattr(transformers, f"{default}Pil", None) or getattr(transformers, default)
    return kind()
