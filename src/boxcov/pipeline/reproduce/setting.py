"""What a reproduction runs on, and which runs it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Form = Literal["paper", "prior"]
FORMS: tuple[Form, ...] = ("paper", "prior")
DEPTHS = {"H": "head", "N+H": "neck", "B+N+H": "backbone"}  # the paper's words, and ours
SHARES = {"100 %": 1.0, "10 %": 0.1, "5 %": 0.05}
EPSILONS = {"1": 1.0, "1e-3": 1e-3, "1e-7": 1e-7}
SAMPLES = {"10": 10, "20": 20, "30": 30}
TEST = "test"  # the frames of every table but that of the shifts


@dataclass(frozen=True)
class Setting:
    """Detector, frames and sizes. The default is the embedded one: the detector and the frames that come with boxcov.

    >>> Setting.quick().test_count < Setting().test_count
    True
    """

    detector: str = "centerpoint:small"
    data: str = "simulated:clear"  # frames behind the posterior
    split: str | None = "train"
    count: int | None = 100  # of them; all where None
    n_data: float | None = (
        3500.0  # frames that the detector was trained on; those behind the posterior where None
    )
    test: str = "simulated:clear"
    test_split: str | None = "test"
    test_count: int | None = 24
    slow: int = 40  # boxes of the first test frame for GLM, which costs D backward passes each
    shifts: tuple[str, ...] = (
        "simulated:rain",
        "simulated:fog",
        "simulated:sparse",
        "simulated:crowd",
        "simulated:unseen",
    )
    shift_count: int = 8
    prior_precision: float = 100.0  # a prior as wide as the weights are large: their RMS is 0.1
    threshold: float = 0.1  # of the score
    sweeps: int = 10
    seed: int = 0
    device: str = "cpu"

    @staticmethod
    def quick() -> Setting:
        """The same in minutes: too few frames to read the figures as more than a check."""
        return replace(Setting(), count=12, test_count=2, slow=2, shift_count=1)

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "shifts": list(self.shifts)}


@dataclass(frozen=True)
class Run:
    """One method, once over the frames ``on``: one file of predictions."""

    method: Literal["mci", "nms", "glm", "mcglm", "exact"]
    form: Form | None = None  # none without a posterior
    depth: str = "head"  # of the posterior; "head", "neck" or "backbone"
    alone: bool = False  # that part by itself, without what lies between it and the output
    share: float = 1.0  # of the frames behind the posterior
    counted: bool = False  # n_data is that share, too; otherwise always the whole
    samples: int = 10
    derivative: Literal["jvp", "fd"] = "jvp"
    epsilon: float = 1e-7
    on: str = TEST

    @property
    def key(self) -> str:
        """The name of its file.

        >>> Run("mcglm", "paper", derivative="fd").key
        'mcglm-paper-head-k10-fd1e-07-test'
        """
        words: list[str] = [self.method]
        if self.form is not None:
            words += [self.form, self.depth + ("-alone" if self.alone else "")]
        if self.share != 1:
            words.append(f"{self.share:g}of1" + ("-counted" if self.counted else ""))
        if self.method in ("mcglm", "mci"):
            words.append(f"k{self.samples}")
        if self.method == "mcglm":
            words.append("jvp" if self.derivative == "jvp" else f"fd{self.epsilon:g}")
        return "-".join([*words, self.on.replace(":", "-").replace("/", "-")])


def published(form: Form, epsilon: float = 1e-7) -> Run:
    """MC-GLM as the paper runs it, under either posterior: finite differences with 1e-7, ten samples, the head.

    >>> published("paper").derivative
    'fd'
    """
    return Run("mcglm", form, derivative="fd", epsilon=epsilon)


def runs(setting: Setting) -> Iterator[Run]:
    """All runs that the tables are made from, each once.

    >>> keys = [run.key for run in runs(Setting())]
    >>> len(keys) == len(set(keys))
    True
    """
    seen = set()
    for run in _all(setting):
        if run not in seen:
            seen.add(run)
            yield run


def _all(setting: Setting) -> Iterator[Run]:
    yield from (Run("mci"), Run("nms"))
    for form in FORMS:
        yield from (Run("exact", form), Run("glm", form), Run("mcglm", form), published(form))
        for depth in DEPTHS.values():
            yield Run("mcglm", form, depth)
        for share in SHARES.values():
            yield Run("mcglm", form, "backbone", share=share)
            yield Run("exact", form, share=share, counted=share < 1)
        for epsilon in EPSILONS.values():
            yield published(form, epsilon)
        for samples in SAMPLES.values():
            yield Run("mcglm", form, samples=samples)
    for depth in DEPTHS.values():
        yield from (
            part_alone(depth, on) for on in (TEST, *setting.shifts)
        )  # one after another: the same method stays at work
    yield from (Run("mci", on=on) for on in setting.shifts)


def part_alone(depth: str, on: str) -> Run:
    """One part of the network by itself under the paper's posterior, exact derivatives: what each knows of a shift.

    >>> part_alone("neck", "test").key
    'mcglm-paper-neck-alone-k10-jvp-test'
    """
    return Run("mcglm", "paper", depth, alone=True, on=on)
