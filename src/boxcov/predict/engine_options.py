"""The numerical options of all engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from boxcov._torch.process_state import Precision
from boxcov.errors import BoxcovError, check_choice, check_flag, check_real
from boxcov.predict.head.weight_stacks import TOLERANCE


@dataclass(frozen=True)
class EngineOptions:
    """Numerical options of the engines. The defaults give float32 accuracy.

    precision: arithmetic of matrix products on a GPU: "float32", or "tf32", which is faster and
        less exact; tangents below the head are then in float16, which has as many digits.
    tolerance: relative error allowed for each variance of the posterior in a head with stages;
        1e-3 or 1e-2 may be much faster.
    cuda_graphs: on a GPU, replay the static part of the detector and the head's stages as CUDA
        graphs; they hold memory.
    verify: a change of weights in place raises an error within this many calls, because each call
        compares a share of the weights, 1 / verify. "always" compares all weights in each call.

    >>> EngineOptions(precision="tf32")
    EngineOptions(precision='tf32', tolerance=1e-05, cuda_graphs=True, verify=16)
    """

    precision: Precision = "float32"
    tolerance: float = TOLERANCE
    cuda_graphs: bool = True
    verify: int | Literal["always"] = 16

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, Precision)
        check_real("tolerance", self.tolerance)
        check_flag("cuda_graphs", self.cuda_graphs)
        if not 1e-6 <= self.tolerance <= 0.1:
            raise BoxcovError(f"tolerance must lie between 1e-6 and 0.1, got {self.tolerance!r}")
        is_count = isinstance(self.verify, int) and not isinstance(self.verify, bool)
        if self.verify != "always" and not (is_count and self.verify >= 1):
            raise BoxcovError(
                f"verify must be 'always' or a number of calls of at least 1, got {self.verify!r}"
            )


DEFAULT_ENGINE = EngineOptions()
