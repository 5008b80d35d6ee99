"""A latency budget: how many directions, of which layers, a frame has time for."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from boxcov.errors import BoxcovError

clock = perf_counter  # seconds
_FORGET = (
    0.98  # what is known of a choice that is not taken fades by frame, so that it is tried again
)
_FALL = 0.2  # of the way down in one frame, for a choice that took less time than thought; up it goes at once


@dataclass(frozen=True)
class Choice:
    """The first ``samples`` directions, of all layers or of the head's alone."""

    samples: int
    head: bool = False


class Budget:
    """Milliseconds for a frame, and what the choices have taken so far.

    Choices go from the best to the least: all directions, half of them and so on down to two; then the same of the head alone, where the
    posterior reaches below it. The first is taken until it is known to be too slow. One that has not been tried is thought to take as much
    less as it has fewer directions.

    >>> budget = Budget(10.0, samples=10, below=False)
    >>> budget.choose(left=8.0)
    Choice(samples=10, head=False)
    >>> budget.took(Choice(10), 12.0)
    >>> budget.choose(left=8.0), budget.choose(left=1.0)
    (Choice(samples=5, head=False), Choice(samples=2, head=False))
    """

    def __init__(self, milliseconds: float, samples: int, below: bool) -> None:
        if (
            isinstance(milliseconds, bool)
            or not isinstance(milliseconds, (int, float))
            or not 0 < milliseconds < float("inf")
        ):
            raise BoxcovError(
                f"budget_ms must be a number of milliseconds above 0, got {milliseconds!r}"
            )
        self.milliseconds = float(milliseconds)
        numbers = [samples]
        while numbers[-1] > 3:
            numbers.append(numbers[-1] // 2)
        if numbers[-1] > 2:
            numbers.append(2)
        self.choices = [
            Choice(k, head) for head in ((False, True) if below else (False,)) for k in numbers
        ]
        self._known: dict[Choice, float] = {}
        self._met: set[Choice] = set()

    def choose(self, left: float) -> Choice:
        """The best choice that is thought to fit into the milliseconds that are left; the least if none does."""
        return next(
            (choice for choice in self.choices if self.expected(choice) <= left), self.choices[-1]
        )

    def expected(self, choice: Choice) -> float:
        """Milliseconds that a choice is thought to take."""
        if choice in self._known:
            return self._known[choice]
        # a pass costs about one direction more than there are; the nearest choice of the same layers tells
        others = sorted(
            abs(other.samples - choice.samples)
            for other in self._known
            if other.head == choice.head
        )
        same = [
            other
            for other in self._known
            if other.head == choice.head and abs(other.samples - choice.samples) == others[0]
        ]
        return self._known[same[0]] * (choice.samples + 1) / (same[0].samples + 1) if same else 0.0

    def took(self, choice: Choice, milliseconds: float) -> None:
        """What a frame took from the moment of the choice on."""
        for other in self._known:
            if other != choice:
                self._known[other] *= _FORGET
        before = self._known.get(choice, 0.0)
        first = (
            choice not in self._met
        )  # with all that is made and compared once: too much, but better than nothing
        self._met.add(choice)
        falls = before - _FALL * (before - milliseconds)
        self._known[choice] = milliseconds if first or milliseconds > before else falls

    def note(self, choice: Choice, spent: float) -> str:
        """What a reader of the result should know, in a few words; nothing where all went as asked."""
        best = self.choices[0]
        said = []
        if choice.samples != best.samples:
            said.append(f"{choice.samples} of {best.samples} samples")
        if choice.head:
            said.append("the head's layers alone")
        if spent > self.milliseconds:
            said.append(f"over the budget of {self.milliseconds:g} ms")
        return ", ".join(said)
