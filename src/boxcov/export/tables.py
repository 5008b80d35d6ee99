"""One row a box, for analysis: CSV without any package, pandas and parquet with ``pip install 'boxcov[analysis]'``."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from boxcov.detections import Detections
from boxcov.errors import BoxcovError
from boxcov.files import atomic_write

if TYPE_CHECKING:
    import pandas as pd


def columns(detections: Detections) -> dict[str, Any]:
    """Columns (m,) by name: frame, label, class, score, the fields, ``uncertainty``, ``var_x``, and ``cov_x_y`` for each pair above the diagonal.

    Where they are there, the same of the predictive covariance as ``predictive_var_x`` and so on, and ``score_variance`` and ``score_cov_x``.

    >>> from torch import eye, ones, zeros
    >>> found = Detections(ones(1, 2), ones(1), zeros(1).long(), zeros(1).long(), ("x", "y"), ("car",), eye(2)[None])
    >>> list(columns(found))
    ['frame', 'label', 'class', 'score', 'x', 'y', 'uncertainty', 'var_x', 'var_y', 'cov_x_y']
    """
    arrays = detections.numpy()
    names = np.array(detections.classes, dtype=object)
    taken = {"frame", "label", "class", "score", "uncertainty"} & set(detections.fields)
    if taken:
        raise BoxcovError(
            f"a field of the boxes is called {', '.join(sorted(taken))}, as a column of the table is: give it another name"
        )
    table: dict[str, Any] = {
        "frame": arrays["frame"],
        "label": arrays["labels"],
        "class": names[arrays["labels"].astype(int)],
    }
    table |= {
        "score": arrays["scores"],
        **{name: arrays["boxes"][:, i] for i, name in enumerate(detections.fields)},
    }
    if "covariance" in arrays:
        table |= {
            "uncertainty": arrays["uncertainty"],
            **_covariance(arrays["covariance"], detections.fields, ""),
        }
    if "predictive" in arrays:
        table |= _covariance(arrays["predictive"], detections.fields, "predictive_")
    if "score_variance" in arrays:
        table["score_variance"] = arrays["score_variance"]
    if "score_covariance" in arrays:
        table |= {
            f"score_cov_{name}": arrays["score_covariance"][:, i]
            for i, name in enumerate(detections.fields)
        }
    return table


def _covariance(C: Any, fields: tuple[str, ...], start: str) -> dict[str, Any]:
    table = {f"{start}var_{name}": C[:, i, i] for i, name in enumerate(fields)}
    for i, first in enumerate(fields):
        table |= {
            f"{start}cov_{first}_{second}": C[:, i, j] for j, second in enumerate(fields) if j > i
        }
    return table


def write_csv(path: str | Path, detections: Detections) -> None:
    """A header and one line a box, numbers with all digits that float32 has.

    >>> import tempfile
    >>> from torch import ones, zeros
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_csv(f"{folder}/boxes.csv", Detections(ones(1, 1), ones(1), zeros(1).long(), zeros(1).long(), ("x",), ("car",)))
    ...     print(Path(folder, "boxes.csv").read_text().replace(chr(13), ""), end="")
    frame,label,class,score,x
    0,0,car,1,1
    """
    table = columns(detections)
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        for row in zip(*table.values()):
            writer.writerow(
                [f"{value:.9g}" if isinstance(value, np.floating) else value for value in row]
            )


def to_pandas(detections: Detections) -> pd.DataFrame:
    """The same as a ``pandas.DataFrame``; what there is to know of the whole file is in ``frame.attrs``."""
    try:
        import pandas as pd
    except ImportError:
        raise BoxcovError(
            "tables of pandas need pandas: pip install 'boxcov[analysis]'; the format csv needs nothing"
        ) from None
    table = pd.DataFrame(columns(detections))
    table.attrs = {"boxcov": dict(detections.meta)}
    return table


def write_parquet(path: str | Path, detections: Detections) -> None:
    """The same as a parquet file; ``meta`` is in the schema under ``boxcov``, as JSON."""
    import json

    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise BoxcovError(
            "the format parquet needs pyarrow: pip install 'boxcov[analysis]'; the format csv needs nothing"
        ) from None
    table = pa.table({name: pa.array(values) for name, values in columns(detections).items()})
    about = {
        b"boxcov": json.dumps({"fields": detections.fields, "meta": dict(detections.meta)}).encode()
    }
    with atomic_write(path) as temporary:
        parquet.write_table(table.replace_schema_metadata(about), temporary)
