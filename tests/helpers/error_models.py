"""A small error model without a fit, for tests of files and of everything that carries one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from boxcov import Posterior
from boxcov.error_model.inputs import box_inputs
from boxcov.error_model.model import ErrorModel
from boxcov.error_model.network import Network, Outputs
from boxcov.error_model.regions import LEVELS, RANGES, Regions
from boxcov.error_model.unusual_frames import Widening

THRESHOLDS = (0.3, 0.4, 0.5)


def make_error_model(
    fields: Sequence[str],
    classes: Sequence[str],
    estimator: str = "exact",
    fingerprint: str = "",
    inputs: Sequence[str] = ("score",),
    seed: int = 0,
) -> ErrorModel:
    """Return an error model with random weights that reads ``inputs``."""
    generator = torch.Generator().manual_seed(seed)
    D, P, K = len(fields), len(inputs), 2
    outputs = Outputs(len(THRESHOLDS), D, "yaw" in fields)
    network = Network.initial(K, P, outputs.size, 4, generator)
    network = network.with_parameters(
        [0.3 * torch.randn(p.shape, generator=generator) for p in network.parameters()]
    )
    quantiles = torch.linspace(0.5, 3.0, len(LEVELS)).reshape(1, 1, -1, 1).expand(K, 1, -1, D)
    return ErrorModel(
        fields=tuple(fields),
        classes=tuple(classes),
        estimator=estimator,
        fingerprint=fingerprint,
        inputs=tuple(inputs),
        thresholds=THRESHOLDS,
        threshold=0.4,
        centre=torch.zeros(P),
        spread=torch.ones(P),
        network=network,
        unit=torch.full((D,), 0.1),
        dof=torch.full((D,), 4.0),
        noise=torch.full((len(classes), D), 0.01),
        correlation=torch.eye(D),
        regions=Regions(
            quantiles.contiguous(),
            1.5 * quantiles[..., 0].contiguous(),
            torch.zeros(len(classes), len(RANGES) + 1, dtype=torch.long),
        ),
        provenance={"boxes": 10, "paired": 5, "frames": 2},
    )


def with_error_model(model: Any, posterior: Posterior, inputs: Any, estimator: str) -> Posterior:
    """Return the posterior with an error model that reads everything known about the boxes."""
    found = model.with_signals(inputs)
    names = tuple(box_inputs(found))
    error_model = make_error_model(
        found.fields, found.classes, estimator, posterior.fingerprint, names
    )
    quantiles = error_model.regions.quantiles.clone()
    quantiles[:, :, -1] = torch.inf  # too few boxes for the highest level
    return posterior.with_error_model(
        replace(
            error_model,
            spread=torch.full((len(names),), 5.0),
            network=error_model.network.with_parameters(
                [0.3 * p for p in error_model.network.parameters()]
            ),
            regions=replace(error_model.regions, quantiles=quantiles),
            widening=Widening(
                bound=torch.tensor(2.0),  # every frame is unusual
                factors=torch.linspace(1.0, 3.0, quantiles[0, 0].numel()).view_as(quantiles[0, 0]),
                joint=torch.linspace(1.5, 2.5, len(LEVELS)),
                no_object=torch.tensor([0.5, 0.8]),
                iou_below=torch.tensor([0.3, 1.2]),
            ),
        )
    )
