"""One small change that breaks a promise."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mutant:
    """Replace ``old``, which occurs once in ``file``, by ``new``: then ``test`` must fail."""

    promise: str
    file: str  # in src/boxcov, unless it begins with a folder of the project
    old: str
    new: str
    test: str  # below tests/
    env: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return (
            self.file
            if self.file.startswith(("tools/", "examples/"))
            else f"src/boxcov/{self.file}"
        )
