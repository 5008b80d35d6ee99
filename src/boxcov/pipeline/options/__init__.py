"""The options of every command: one frozen dataclass per command, and the only list of its options.

The functions of ``boxcov.pipeline`` take these dataclasses; ``boxcov.cli`` builds the command line
from them. Nothing here imports torch or typer, so that ``boxcov --help`` is fast.
"""

from boxcov.pipeline.options.commands import (
    BenchOptions,
    CalibrateOptions,
    CheckOptions,
    ConvertOptions,
    DemoOptions,
    EvaluateOptions,
    ExportOptions,
    FitOptions,
    PredictOptions,
    ReproduceOptions,
    StreamOptions,
    TrainOptions,
)
from boxcov.pipeline.options.shared import (
    DataOptions,
    EstimatorOptions,
    MessageOptions,
)

__all__ = [
    "BenchOptions",
    "CalibrateOptions",
    "CheckOptions",
    "ConvertOptions",
    "DataOptions",
    "DemoOptions",
    "EstimatorOptions",
    "EvaluateOptions",
    "ExportOptions",
    "FitOptions",
    "MessageOptions",
    "PredictOptions",
    "ReproduceOptions",
    "StreamOptions",
    "TrainOptions",
]
