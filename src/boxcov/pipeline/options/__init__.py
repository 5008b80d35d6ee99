"""The options of every command: one frozen dataclass per command, and the only list of its options.

The functions of ``boxcov.pipeline`` take these dataclasses; ``boxcov.cli`` builds the command line
from them. Nothing here imports torch or click, so that ``boxcov --help`` is fast.
"""

from boxcov.pipeline.options.commands import (
    CalibrateCommand,
    CheckCommand,
    ConvertCommand,
    DemoCommand,
    EvaluateCommand,
    FitCommand,
    PredictCommand,
    RankCommand,
)
from boxcov.pipeline.options.common import (
    DataOptions,
    DetectorOptions,
    EstimatorOptions,
    FileOptions,
    MessageOptions,
    PredictedData,
)
from boxcov.pipeline.options.deployment import ExportCommand, MonitorCommand, StreamCommand
from boxcov.pipeline.options.research import BenchCommand, ReproduceCommand, TrainCommand

__all__ = [
    "BenchCommand",
    "CalibrateCommand",
    "CheckCommand",
    "ConvertCommand",
    "DataOptions",
    "DemoCommand",
    "DetectorOptions",
    "EstimatorOptions",
    "EvaluateCommand",
    "ExportCommand",
    "FileOptions",
    "FitCommand",
    "MessageOptions",
    "MonitorCommand",
    "PredictCommand",
    "PredictedData",
    "RankCommand",
    "ReproduceCommand",
    "StreamCommand",
    "TrainCommand",
]
