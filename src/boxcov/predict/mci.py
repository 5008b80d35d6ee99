"""MCI: Bayesian averaging over sampled networks, by dropout or from the Laplace posterior.

The paper's baseline; it is not post hoc. Where the detector can run its head by instance and all
chosen layers are in it, only the head's crops are run. With weights from the posterior that changes
nothing but rounding. With dropout every box then has its own masks: the distribution of each box
stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from boxcov._torch.layers import LayerCall
from boxcov._torch.modules import LayerCallMode
from boxcov._torch.process_state import at_least_float32
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, check_seed, check_whole
from boxcov.kfac.losses import select_parameters
from boxcov.posterior.posterior import Posterior
from boxcov.predict.forward_mode.derivatives import sample_covariance
from boxcov.predict.linearize import LinearizationPoint, LinearizedDetector, OnCall
from boxcov.predict.predictor import Predictor
from boxcov.predict.route.mci import MCIRouter


class MCI(Predictor):
    """The mean and covariance of the plain detector's instances over ``samples`` networks.

    posterior: sample the networks from it; otherwise by dropout.
    dropout: the rate at which the inputs of every layer at ``depth`` are dropped.
    with_logit: also return the variance of each score's logit and its covariance with the box.

    The boxes returned are the mean, not the plain detector's: Bayesian averaging is not post hoc.

    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> model = MCI(TinyCenter(threshold=0.05, most=3), dropout=0.1)
    >>> model(shapes.frames(count=1)[0][0]).covariance.shape
    torch.Size([3, 5, 5])
    """

    method = "mci"
    needs_posterior = False
    router: MCIRouter
    samples: int

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior | None = None,
        dropout: float = 0.1,
        samples: int = 10,
        seed: int = 0,
        *,
        depth: str | Sequence[str] = "head",
        with_logit: bool = False,
    ) -> None:
        check_whole("samples", samples, 2)
        if posterior is None and not 0 < dropout < 1:
            raise BoxcovError(f"dropout must lie between 0 and 1, got {dropout}")
        names = None if posterior is not None else list(select_parameters(detector, depth))
        self.dropout, self.samples, self.seed = dropout, samples, check_seed(seed)
        super().__init__(detector, posterior, names, with_logit=with_logit)
        self._generator = torch.Generator(self.device)

    def build_router(self, linearized: LinearizedDetector) -> MCIRouter:
        return MCIRouter(linearized, self.engine)

    def settings(self) -> dict[str, Any]:
        own: dict[str, Any] = {"samples": self.samples, "seed": self.seed}
        if self.posterior is None:
            own["dropout"] = self.dropout
        return {**super().settings(), **own}

    def predict(self, point: LinearizationPoint) -> Detections:
        self._drops = 0
        self._generator.manual_seed(self.seed)  # equal frames give equal numbers
        columns = [at_least_float32(point.difference(z)) for z in self._sampled(point)]
        deltas = torch.stack(columns, 2)  # (m, D, k)
        if self.posterior is None and not self._drops:
            raise BoxcovError(
                "no weight of the chosen depth is used as a linear layer or convolution, so "
                "nothing would be dropped: choose another depth"
            )
        of_boxes = deltas[:, : point.boxes.shape[1]].contiguous()
        row = sample_covariance(deltas)[:, -1] if self.with_logit else None
        return point.detections(
            row,
            boxes=point.boxes + of_boxes.mean(2).to(point.boxes.dtype),
            covariance=sample_covariance(of_boxes),
        )

    def _sampled(self, point: LinearizationPoint) -> Iterator[Tensor]:
        """z (m, D) of each network, with dropped inputs or perturbed weights of the layers."""
        # by instance always with logits: the boxes' masks must not depend on with_logit
        has_logits = type(self._detector).logits is not Detector.logits
        joint = point.with_logits() if has_logits else point
        groups = self.router.groups(joint)
        point = self.router.with_trunk(point) if groups is None else point
        for number in range(self.samples):
            on_call: OnCall = self._drop_inputs
            if self.posterior is not None:
                on_call = self.linearized.substitute(self.linearized.moved(self.etas, number))
            if groups is None:
                yield point.z_by(on_call)
                continue
            z = torch.empty_like(joint.z)
            with LayerCallMode(self.linearized.names, on_call):
                for index, run in groups:
                    z[index] = run().to(z.dtype)
            yield z[:, : point.z.shape[1]]

    def _drop_inputs(self, name: str, call: LayerCall) -> Tensor:
        self._drops += 1
        return call(x=drop(call.x, self.dropout, self._generator))


def drop(x: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Dropout with masks from ``generator``; the global generator is not used."""
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= rate
    return x * kept.to(x.dtype) / (1 - rate)
