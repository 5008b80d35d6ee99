"""Standard deviations and errors of boxes under several priors. Results: docs/concepts/method.md.

python studies/prior.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import boxcov
from boxcov.evaluate import match
from boxcov.posterior.prior import auto_prior_precision

OUT = Path(__file__).parents[1] / "docs" / "results" / "data" / "prior.json"
FIT, TEST = 20, 8  # frames
TRAINED_ON = 3500
BOX = slice(7)  # x y z w l h yaw: velocities have heavy tails


def main() -> None:
    detector = boxcov.detectors.centerpoint.load("small")
    test = boxcov.data.simulated.frames("clear", seed=77, count=TEST)
    items = [test[k] for k in range(TEST)]
    whole = boxcov.fit(detector, boxcov.data.simulated.frames("clear", count=FIT))
    rows = []
    for n in (FIT, TRAINED_ON):
        posterior = replace(whole, n_data=float(n))
        for name, other in {
            "tau = 1": posterior.with_prior(1.0),
            "tau = 100": posterior.with_prior(100.0),
            "marginal likelihood, one tau": posterior.optimize_prior_precision(),
            "marginal likelihood per layer": posterior.optimize_prior_precision(per_layer=True),
            "auto": auto_prior_precision(posterior, detector),
        }.items():
            rows.append([name, n, *measure(detector, other, items)])
            print(*rows[-1])
    OUT.write_text(
        json.dumps(
            {
                "title": f"Priors of the head of `small`: boxes with an object in {TEST} frames",
                "command": "python studies/prior.py",
                "date": datetime.now(UTC).date().isoformat(),
                "machine": "2 CPU cores",
                "columns": ["prior", "n", "std of x, m", "error of x, m", "within 1 std", "NLL"],
                "digits": [None, None, 2, 2, 2, 1],
                "rows": rows,
                "notes": [
                    f"The factors are those of {FIT} frames. Medians of the standard deviation and "
                    "of the absolute error; the share of errors in x within one standard "
                    "deviation; the mean negative log-likelihood of the errors, summed over the "
                    "seven fields without velocity."
                ],
            },
            indent=1,
        )
        + "\n"
    )


def measure(detector: boxcov.Detector, posterior: boxcov.Posterior, items: list[Any]) -> list[Any]:
    """Return the figures of one row, for the boxes that have an object."""
    model = boxcov.ExactGLM(detector, posterior)
    found = [model(inputs) for inputs, _ in items]
    objects = [targets[0] for _, targets in items]
    names = ("boxes", "scores", "labels", "uncertainty", "covariance")
    boxes, scores, labels, uncertainty, covariance = (
        np.concatenate([getattr(one, name).numpy() for one in found]) for name in names
    )
    records = match(
        boxes,
        scores,
        labels,
        np.repeat(np.arange(len(found)), [len(one) for one in found]),
        np.concatenate([one["boxes"].numpy() for one in objects]),
        np.concatenate([one["labels"].numpy() for one in objects]),
        np.repeat(np.arange(len(found)), [len(one["boxes"]) for one in objects]),
        found[0].fields,
        found[0].classes,
        uncertainty,
        covariance,
    ).as_axes()
    records = records[records.paired]
    errors = records.errors[:, BOX]
    variances = np.einsum("nii->ni", records.covariance)[:, BOX]
    std, error = np.sqrt(variances[:, 0]), np.abs(errors[:, 0])
    nll = 0.5 * (errors**2 / variances + np.log(2 * np.pi * variances)).sum(1)
    return [
        float(np.median(std)),
        float(np.median(error)),
        float((error < std).mean()),
        float(nll.mean()),
    ]


if __name__ == "__main__":
    main()
