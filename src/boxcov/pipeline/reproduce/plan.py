"""What a reproduction runs on: its setting, and a run of one method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from boxcov.pipeline.options import EstimatorOptions, ReproduceCommand
from boxcov.pipeline.source import default_split

Form = Literal["paper", "prior"]
FORMS: tuple[Form, ...] = ("paper", "prior")
DEPTHS = {"H": "head", "N+H": "neck", "B+N+H": "backbone"}  # the paper's names, and ours
SHARES = {"100 %": 1.0, "10 %": 0.1, "5 %": 0.05}
EPSILONS = {"1": 1.0, "1e-3": 1e-3, "1e-7": 1e-7}
SAMPLES = {"10": 10, "20": 20, "30": 30}
TEST = "test"  # the frames of every table
CALIBRATION = "calibration"  # the frames of the error model, of the split val


@dataclass(frozen=True, kw_only=True)
class Setting(ReproduceCommand):
    """The options of a reproduction, complete, and its other sizes."""

    test: str
    slow: int = 40  # boxes of the first test frame for GLM: D backward passes per box
    prior_precision: float = 100.0  # a prior as wide as the weights, whose RMS is 0.1
    calibration_count: int = 40  # simulated frames for the error model; 0: no error model

    @staticmethod
    def from_options(options: ReproduceCommand) -> Setting:
        """Fill in what the command line leaves open."""
        test = options.test or options.data
        sizes = (12, 2, 2) if options.quick else (100, 24, 40)
        defaults: dict[str, Any] = dict(zip(("count", "test_count", "slow"), sizes))
        defaults |= {"test": test, "test_split": default_split(test, "predict")}
        if options.detector == Setting.detector:
            defaults["n_data"] = 3500.0
        if options.quick or not test.startswith("simulated"):
            defaults["calibration_count"] = 0  # other data has no frames beyond training and test
        given = {name: value for name, value in vars(options).items() if value is not None}
        return Setting(**{**defaults, **given})

    def json(self) -> dict[str, Any]:
        """Return what the results depend on."""
        return {name: value for name, value in vars(self).items() if name not in ("out", "quick")}


@dataclass(frozen=True)
class Run:
    """One method on the frames ``on``: one file of predictions."""

    method: Literal["mci", "nms", "glm", "mcglm", "exact"]
    form: Form | None = None  # of the posterior; None without a posterior
    depth: str = "head"  # of the posterior: "head", "neck" or "backbone"
    alone: bool = False  # only this part of the network, without those between it and the output
    share: float = 1.0  # of the frames for the posterior
    counted: bool = False  # n_data is multiplied by the share
    samples: int = 10
    epsilon: float | None = None  # step of MC-GLM's finite differences; None: exact derivatives
    on: str = TEST
    calibrated: bool = False  # with an error model

    @property
    def estimator(self) -> EstimatorOptions:
        """How the covariances are computed."""
        samples = self.samples if self.method in ("mcglm", "mci") else None
        return EstimatorOptions(self.method, None, samples)

    @property
    def key(self) -> str:
        """The name of the file.

        >>> Run("mcglm", "paper", epsilon=1e-7).key
        'mcglm-paper-head-k10-fd1e-07-test'
        """
        parts: list[str] = [self.method]
        if self.form is not None:
            parts += [self.form, self.depth + ("-alone" if self.alone else "")]
        if self.share != 1:
            parts.append(f"{self.share:g}of1" + ("-counted" if self.counted else ""))
        if self.method in ("mcglm", "mci"):
            parts.append(f"k{self.samples}")
        if self.method == "mcglm":
            parts.append("jvp" if self.epsilon is None else f"fd{self.epsilon:g}")
        if self.calibrated:
            parts.append("calibrated")
        return "-".join([*parts, file_name(self.on)])


def file_name(data: str) -> str:
    """Return a data name that can be part of a file name."""
    return data.replace(":", "-").replace("/", "-")


def paper_mcglm(form: Form, epsilon: float = 1e-7) -> Run:
    """Return MC-GLM as in the paper: finite differences, ten samples, the head."""
    return Run("mcglm", form, epsilon=epsilon)
