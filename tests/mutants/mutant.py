"""One small change that breaks a promise."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mutant:
    """One small change that breaks a promise: in ``file``, ``old`` (there once) becomes ``new``; then ``test`` fails."""

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
