"""How a frame is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from boxcov.errors import BoxcovError
from boxcov.predict.cuda.graphs import Precision
from boxcov.predict.head.weights import TOLERANCE


@dataclass(frozen=True)
class EngineOptions:
    """Speed against accuracy and memory; the defaults give float32 accuracy.

    precision: of products on a GPU: "float32", or "tf32", which is faster and less exact; "half"
        also propagates tangents in bfloat16, on a CPU too.
    tolerance: relative error allowed for each variance of the posterior in a head with stages;
        1e-3 or 1e-2 may be much faster.
    cuda_graphs: on a GPU, replay the static part of the detector and the head's stages as CUDA
        graphs; they hold memory.
    chunk: number of directions differentiated at once by vmap(jvp), to bound memory; None for all.

    >>> EngineOptions(precision="tf32")
    EngineOptions(precision='tf32', tolerance=1e-05, cuda_graphs=True, chunk=None)
    """

    precision: Precision = "float32"
    tolerance: float = TOLERANCE
    cuda_graphs: bool = True
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise BoxcovError(f"precision must be one of {known}, got {self.precision!r}")
        if not 1e-6 <= self.tolerance <= 0.1:
            raise BoxcovError(f"tolerance must lie between 1e-6 and 0.1, got {self.tolerance!r}")
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise BoxcovError(
                f"chunk must be a whole number of directions of at least 1, got {self.chunk!r}"
            )
