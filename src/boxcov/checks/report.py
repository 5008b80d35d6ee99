"""The result of ``boxcov.check``: findings, layers and cost, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from textwrap import wrap
from typing import Any

from boxcov._files.output_file import to_json
from boxcov._files.plain_text import aligned
from boxcov.errors import BoxcovError, counted, join_names

WIDTH = 120


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    passed: bool | None  # None: could not be checked
    seen: str
    todo: str = ""  # how to fix it


@dataclass(frozen=True)
class LayerRow:
    """A parameter of the detector: in the posterior, or the reason why not."""

    name: str
    part: str
    shape: tuple[int, ...]
    reason: str = ""  # why it is not in the posterior; empty if it is
    n_in: int = 0  # of its matrix, including the bias
    n_out: int = 0
    groups: int = 1


@dataclass(frozen=True)
class DepthCost:
    """Memory of a posterior of one depth."""

    depth: str
    layers: int
    parameters: int
    factors_mib: float  # upper bound: layers that read the same tensor share a factor
    fit_mib: float  # sums in float64 while fitting
    online_mib: float  # factors and variances
    directions_mib: float  # of MCGLM with 10 samples


@dataclass(frozen=True)
class Report:
    """Everything that ``boxcov.check`` found. ``print(report)`` shows it.

    >>> good, bad = Finding("names", True, "x"), Finding("parts", False, "no head", "name it")
    >>> report = Report("Net", "1 box of x", (good, bad))
    >>> report.ok, report["parts"].todo, [finding.name for finding in report.failed]
    (False, 'name it', ['parts'])
    >>> report
    Report(Net, 1 of 2 checks passed, 1 failed: parts)
    >>> print(report)
    Net: 1 box of x
    <BLANKLINE>
      ok    names  x
      FAIL  parts  no head
                   -> name it
    <BLANKLINE>
    1 of 2 checks passed, 1 failed
    """

    detector: str
    about: str
    findings: tuple[Finding, ...]
    layers: tuple[LayerRow, ...] = ()
    depths: tuple[DepthCost, ...] = ()
    milliseconds: float | None = None  # of one plain pass
    checkpoint: tuple[tuple[str, str, str], ...] = ()  # what was understood of it, and the evidence

    @property
    def ok(self) -> bool:
        """Whether no check failed; skipped checks do not count."""
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.passed is False)

    def __getitem__(self, name: str) -> Finding:
        found = {finding.name: finding for finding in self.findings}
        if name not in found:
            raise BoxcovError(f"no finding {name!r}: there are {', '.join(found)}")
        return found[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return {"ok": self.ok, **asdict(self)}

    def to_json(self) -> str:
        return to_json(self.to_dict())

    def __str__(self) -> str:
        sections = (self._checkpoint(), self._findings(), self._layers(), self._costs())
        texts = ["\n".join(lines) for lines in sections if lines]
        return "\n\n".join([f"{self.detector}: {self.about}", *texts, self._outcome()])

    def __repr__(self) -> str:
        failed = f": {join_names([finding.name for finding in self.failed])}" if self.failed else ""
        return f"Report({self.detector}, {self._outcome()}{failed})"

    def _outcome(self) -> str:
        passed, failed, skipped = (
            sum(finding.passed is state for finding in self.findings)
            for state in (True, False, None)
        )
        outcome = f"{passed} of {passed + failed} checks passed"
        outcome += f", {failed} failed" if failed else ""
        return outcome + (f", {skipped} skipped" if skipped else "")

    def _checkpoint(self) -> list[str]:
        room = max((len(name) for name, _, _ in self.checkpoint), default=0)
        lines = ["understood of the checkpoint"] if self.checkpoint else []
        for name, value, evidence in self.checkpoint:
            lines += _hanging(f"  {name:<{room}}  ", f"{value}  [{evidence}]")
        return lines

    def _findings(self) -> list[str]:
        room = max((len(finding.name) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            mark = {True: "ok", False: "FAIL", None: "-"}[finding.passed]
            lines += _hanging(f"  {mark:<4}  {finding.name:<{room}}  ", finding.seen)
            if finding.todo:
                lines += _hanging(" " * (10 + room), f"-> {finding.todo}")
        return lines

    def _layers(self) -> list[str]:
        """Layers of equal shape share a line; the JSON lists each."""
        if not self.layers:
            return []
        inside = [row for row in self.layers if not row.reason]
        outside = [row for row in self.layers if row.reason]
        count = counted(len(inside), "layer")
        lines = [f"in the posterior at full depth: {count}, as matrices n_out x n_in"]
        lines += _rows(inside)
        if outside:
            lines += ["", "not in the posterior, kept constant", *_rows(outside)]
        return lines

    def _costs(self) -> list[str]:
        if not self.depths:
            return []
        sizes = ("factors", "sums of fit", "online", "10 directions")
        cells = [("depth", "layers", "parameters", *sizes)]
        for depth, layers, parameters, *mib in map(astuple, self.depths):
            cells.append((depth, f"{layers}", f"{parameters:,}", *(f"{size:.2f}" for size in mib)))
        lines = ["memory per depth in MiB (factors: upper bound)"]
        lines += [f"  {line}" for line in aligned(cells)]
        if self.milliseconds is not None:
            lines += ["", f"a plain forward pass took {self.milliseconds:.1f} ms"]
        return lines


def _hanging(start: str, text: str) -> list[str]:
    """``text`` after ``start``, wrapped with a hanging indent."""
    parts = wrap(text, WIDTH - len(start), break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{start if i == 0 else ' ' * len(start)}{part}" for i, part in enumerate(parts)]


def _rows(layers: Sequence[LayerRow]) -> list[str]:
    """A line for the layers of each part that are of one shape, or out for one reason."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in layers:
        groups = f", {row.groups} groups" if row.groups > 1 else ""
        what = row.reason or f"{row.n_out} x {row.n_in}{groups}"
        alike.setdefault((row.part, what), []).append(row.name)
    rows = [(part, what, join_names(names, 2)) for (part, what), names in alike.items()]
    return [f"  {line}" for line in aligned(rows, right=False)]
