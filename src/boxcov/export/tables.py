"""Tables with one row per box: CSV, pandas and parquet.

CSV needs no package, the others need pandas or pyarrow.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from boxcov._files.output_file import atomic_write, to_json
from boxcov.detection_meta import meta_to_write
from boxcov.detections import Detections, to_array
from boxcov.errors import BoxcovError, import_package
from boxcov.result_check import check_result

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # begin a formula in a spreadsheet

if TYPE_CHECKING:
    import pandas as pd


def columns(detections: Detections) -> dict[str, Any]:
    """Return the columns (m,) of the table by name.

    They are frame, label, class, score, the box fields, ``uncertainty``, ``var_x`` for each field,
    and ``cov_x_y`` for each pair of fields. Calibrated boxes have ``risk``, ``no_object``,
    ``misplaced``, ``flipped`` (with a heading), ``scale_x`` and ``half_width_90_x`` (the region
    that holds 90 % of the errors) after the box fields, and the predictive covariance as
    ``predictive_var_x`` and ``predictive_cov_x_y`` at the end. Then come ``score_variance`` and
    ``score_cov_x``, where known.

    >>> from torch import eye, ones, zeros
    >>> frame = label = zeros(1).long()
    >>> box = Detections(ones(1, 2), ones(1), label, frame, ("x", "y"), ("car",), eye(2)[None])
    >>> list(columns(box))
    ['frame', 'label', 'class', 'score', 'x', 'y', 'uncertainty', 'var_x', 'var_y', 'cov_x_y']
    """
    check_result(detections, "these detections cannot be exported")
    fields, arrays = detections.fields, detections.numpy()
    taken = {"frame", "label", "class", "score", "uncertainty", "risk"} & set(fields)
    if taken:
        raise BoxcovError(
            f"the box field {', '.join(sorted(taken))} has the name of a column of the table: "
            "rename the field"
        )
    table: dict[str, Any] = {
        "frame": arrays["frame"],
        "label": arrays["labels"],
        "class": np.array(detections.classes, dtype=object)[arrays["labels"].astype(int)],
        "score": arrays["scores"],
        **_field_columns("", arrays["boxes"], fields),
    }
    if detections.no_object is not None:
        names = ("risk", "no_object", "misplaced", "flipped")
        table |= {name: arrays[name] for name in names if name in arrays}
        if "scale" in arrays:
            table |= _field_columns("scale_", arrays["scale"], fields)
        if detections.region_widths is not None:
            widths = to_array(detections.region(0.9))
            table |= _field_columns("half_width_90_", widths, fields)
    if "covariance" in arrays:
        table["uncertainty"] = arrays["uncertainty"]
        table |= _covariance_columns(arrays["covariance"], fields, "")
    if "predictive" in arrays:
        table |= _covariance_columns(arrays["predictive"], fields, "predictive_")
    if "score_variance" in arrays:
        table["score_variance"] = arrays["score_variance"]
    if "score_covariance" in arrays:
        table |= _field_columns("score_cov_", arrays["score_covariance"], fields)
    return table


def _field_columns(prefix: str, values: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return one column per field of values (m, D)."""
    return {f"{prefix}{name}": values[:, i] for i, name in enumerate(fields)}


def _covariance_columns(C: Any, fields: tuple[str, ...], prefix: str) -> dict[str, Any]:
    """Return the diagonal of C (m, D, D), then the entries above it."""
    table = _field_columns(f"{prefix}var_", C.diagonal(axis1=1, axis2=2), fields)
    for i, first in enumerate(fields):
        for j, second in enumerate(fields[i + 1 :], i + 1):
            table[f"{prefix}cov_{first}_{second}"] = C[:, i, j]
    return table


def write_csv(path: str | Path, detections: Detections) -> None:
    """Write a header and one line per box, with all digits of float32.

    >>> import tempfile
    >>> from torch import ones, zeros
    >>> frame = label = zeros(1).long()
    >>> box = Detections(ones(1, 1), ones(1), label, frame, ("x",), ("car",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_csv(f"{folder}/boxes.csv", box)
    ...     Path(folder, "boxes.csv").read_text().split()
    ['frame,label,class,score,x', '0,0,car,1,1']
    """
    write_columns(path, columns(detections))


def write_columns(path: str | Path, table: Mapping[str, Any]) -> None:
    """Write columns of equal length as a CSV file with a header."""
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([_cell(name) for name in table])
        for row in zip(*table.values()):
            writer.writerow([_cell(value) for value in row])


def _cell(value: Any) -> Any:
    """Return a value for a CSV file; a quote keeps a spreadsheet from running it as a formula."""
    if isinstance(value, np.floating):
        return f"{value:.9g}"
    return f"'{value}" if str(value).startswith(_FORMULA) and isinstance(value, str) else value


def to_pandas(detections: Detections) -> pd.DataFrame:
    """Return the table as a ``pandas.DataFrame``, with ``detections.meta`` in its ``attrs``."""
    table = import_package("pandas").DataFrame(columns(detections))
    table.attrs = {"boxcov": dict(detections.meta)}
    return table


def write_parquet(path: str | Path, detections: Detections) -> None:
    """Write the table as a parquet file, with ``detections.meta`` as JSON in its schema."""
    parquet, pa = import_package("pyarrow.parquet"), import_package("pyarrow")
    table = pa.table({name: pa.array(values) for name, values in columns(detections).items()})
    metadata = to_json({"fields": detections.fields, "meta": meta_to_write(detections.meta)})
    with atomic_write(path) as temporary:
        parquet.write_table(
            table.replace_schema_metadata({b"boxcov": metadata.encode()}), temporary
        )
