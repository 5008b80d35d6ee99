"""All mutants, in the order of docs/results/reliability.md."""

from __future__ import annotations

from mutants.detectors import DETECTORS
from mutants.error_models import ERROR_MODELS
from mutants.fits import FITS
from mutants.hostile import CROWDS, HOSTILE, PACKAGES
from mutants.labels import LABELS
from mutants.numbers import NUMBERS
from mutants.online import ONLINE, SOAK
from mutants.outputs import OUTPUTS
from mutants.processes import PROCESSES

__all__ = ["MUTANTS", "SOAK"]

MUTANTS = [
    *FITS,
    *PROCESSES,
    *HOSTILE,
    *CROWDS,
    *OUTPUTS,
    *NUMBERS,
    *ERROR_MODELS,
    *PACKAGES,
    *ONLINE,
    *DETECTORS,
    *LABELS,
]
