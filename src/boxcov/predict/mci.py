"""MCI: Bayesian averaging over weights drawn at random, by dropout or from the Laplace posterior. The paper's baseline; not post hoc.

Where the detector can run its head one instance at a time and the chosen layers are all in it, no more of it is run than the boxes see. With
weights from the posterior that changes nothing but rounding. With dropout every box then has masks of its own: what a box's own numbers are
distributed as stays the same, and nothing that is reported goes across boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from boxcov._torch.fingerprint import check_fingerprint, check_finite_weights
from boxcov._torch.inputs import fresh
from boxcov._torch.layer_calls import LayerCall, LayerCallMode
from boxcov._torch.precision import at_least_float32
from boxcov.detections import Detections
from boxcov.detector import Detector, InstanceGroup
from boxcov.errors import BoxcovError
from boxcov.kfac.subset import chosen_parameters
from boxcov.posterior.posterior import Posterior
from boxcov.predict.dependence import groups, instances_of, leaves_read, trace
from boxcov.predict.linearize import LinearizationPoint
from boxcov.predict.predictor import (
    Predictor,
    calibration_of,
    check_samples,
    sample_covariance,
    score_parts,
)

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
_NOTHING_DROPPED = (
    "the detector has no dropout layers of its own (Dropout, Dropout1d to 3d), so nothing would vary: "
    "give a rate, as in MCI(detector, dropout=0.1)"
)
_NOTHING_CALLED = (
    "no weight of the chosen depth is used as a linear layer or convolution, so nothing would be dropped: "
    "choose another depth, or dropout=None for the detector's own dropout layers"
)


class MCI(Predictor):
    """The mean and covariance of the boxes over ``samples`` networks, for the instances that the plain detector reports.

    posterior: draw the networks from it; otherwise by dropout.
    dropout: the rate at which the inputs of every layer at ``depth`` are dropped; None keeps the detector's own dropout layers active instead.
    calibrated: also fill ``Detections.predictive``, by the posterior's calibration.
    with_logit: also the variance of each score's logit over the networks, and its covariance with the box.

    The boxes returned are the mean, not the plain detector's: Bayesian averaging is not post hoc.

    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> model = MCI(TinyCenter(threshold=0.05, most=3), dropout=0.1)
    >>> model(shapes.frames(count=1)[0][0]).covariance.shape
    torch.Size([3, 5, 5])
    """

    method = "mci"

    def __init__(
        self,
        detector: Detector,
        posterior: Posterior | None = None,
        dropout: float | None = 0.1,
        samples: int = 10,
        seed: int = 0,
        *,
        depth: str | Sequence[str] = "head",
        calibrated: bool = False,
        with_logit: bool = False,
    ) -> None:
        check_samples(samples)
        if posterior is not None:
            check_finite_weights(detector)
            check_fingerprint(posterior.fingerprint, detector, "posterior")
            names = posterior.parameters
        elif dropout is None:
            names = []
        elif 0 < dropout < 1:
            names = list(chosen_parameters(detector, depth))
        else:
            raise BoxcovError(
                f"dropout must lie between 0 and 1, got {dropout}; None uses the detector's own dropout layers"
            )
        if calibrated and posterior is None:
            raise BoxcovError(
                "calibrated=True takes a posterior that carries a calibration, and MC dropout has none"
            )
        super().__init__(
            detector,
            names,
            calibration_of(posterior, detector) if posterior is not None and calibrated else None,
            with_logit,
        )
        self.posterior = None if posterior is None else posterior.to(self.device)
        self.dropout, self.samples, self.seed = dropout, samples, seed
        self._generator = torch.Generator(self.device)
        self._etas: dict[str, Tensor] | None = None
        self._by_instance: bool | None = None  # None: no box has been seen yet

    def asks(self) -> bool:
        return not self._by_instance

    def settings(self) -> dict[str, Any]:
        own = {
            "method": self.method,
            "samples": self.samples,
            "seed": self.seed,
            **self._score_settings(),
        }
        if self.posterior is None:
            return {**own, "dropout": self.dropout, "weights_sha256": self._fingerprint}
        about = {"depth": self.posterior.depth, "weights_sha256": self.posterior.fingerprint}
        return {**own, **about, **self._calibration_settings()}

    def predict(self, point: LinearizationPoint) -> Detections:
        draw = (
            self._own_dropout
            if self.posterior is None and self.dropout is None
            else self._layer_drawer(point)
        )
        self._drops = 0
        self._generator.manual_seed(
            self.seed
        )  # equal frames get equal numbers, whatever came before them
        deltas = torch.stack(
            [at_least_float32(point.difference(draw(point, i))) for i in range(self.samples)], 2
        )  # (m, D, k)
        if self.posterior is None and not self._drops:
            raise BoxcovError(_NOTHING_DROPPED if self.dropout is None else _NOTHING_CALLED)
        of_boxes = deltas[:, : point.boxes.shape[1]].contiguous()
        mean = point.boxes + of_boxes.mean(2).to(point.boxes.dtype)
        score = score_parts(sample_covariance(deltas)[:, -1] if self.with_logit else None)
        return point.detections(
            boxes=mean, covariance=sample_covariance(of_boxes), meta=self.settings(), **score
        )

    def _layer_drawer(
        self, point: LinearizationPoint
    ) -> Callable[[LinearizationPoint, int], Tensor]:
        # the logits by instance even if they are not asked for: the masks of the boxes are the same either way
        whole = point if type(self._detector).logits is Detector.logits else point.scored()
        if self._by_instance is None:
            self._by_instance = self._found_by_instance(whole)
        given = groups(whole) if self._by_instance else None

        def draw(point: LinearizationPoint, number: int) -> Tensor:
            answer = self._dropped if self.posterior is None else self._perturbed(number)
            return (
                point.z_by(answer)
                if given is None
                else self._z_of(given, whole, answer)[:, : point.z.shape[1]]
            )

        return draw

    def _z_of(
        self,
        given: list[InstanceGroup],
        point: LinearizationPoint,
        answer: Callable[[str, LayerCall], Tensor],
    ) -> Tensor:
        """z (m, D), every instance by itself."""
        z = torch.empty_like(point.z)
        with LayerCallMode(self.linearized.names, answer):
            for index, run in given:
                z[index] = run().to(z.dtype)
        return z

    def _found_by_instance(self, point: LinearizationPoint) -> bool:
        """Whether instances() runs all of the chosen layers that boxes depend on; it is compared with decode()."""
        if instances_of(point) is None:
            return False
        leaves = tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), point.raw
        )
        watched = replace(point, raw=leaves)
        with torch.inference_mode(False), torch.enable_grad():
            read = {leaf for _, run in groups(watched) for leaf in leaves_read(run())}
        return not trace(watched).upstream_of(leaves, read)

    def _dropped(self, name: str, call: LayerCall) -> Tensor:
        assert self.dropout is not None
        self._drops += 1
        return call(x=drop(call.x, self.dropout, self._generator))

    def _perturbed(self, number: int) -> Callable[[str, LayerCall], Tensor]:
        assert self.posterior is not None
        if self._etas is None:
            self._etas = self.posterior.sample(
                self.samples, torch.Generator().manual_seed(self.seed)
            )
        theta = self.linearized.theta()
        weights = {
            name: theta[name] + eta[number].to(theta[name].dtype)
            for name, eta in self._etas.items()
        }
        return self.linearized.exchanged(weights)

    def _own_dropout(self, point: LinearizationPoint, number: int) -> Tensor:
        with _Active(self._generator) as active:
            z = point.z_of(point.linearized.shadow(fresh(point.inputs)))
        self._drops += active.count
        return z


def drop(x: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Dropout from its own generator, so that the global one stays where it is.

    >>> drop(torch.ones(4), 0.5, torch.Generator().manual_seed(0)).unique()
    tensor([0., 2.])
    """
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= rate
    return x * kept.to(x.dtype) / (1 - rate)


class _Active(TorchFunctionMode):
    """Dropout layers drop, though they are in eval mode, and draw from ``generator``."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator, self.count = generator, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        given = {**dict(zip(("input", "p", "training", "inplace"), args)), **kwargs}
        x, rate = given["input"], given.get("p", 0.5)
        if rate == 0:
            return x
        self.count += 1
        if func is F.dropout:
            return drop(x, rate, self.generator)
        spatial = _DROPOUTS.index(func)  # whole channels fall away
        return x * drop(
            x.new_ones(*x.shape[: x.dim() - spatial], *[1] * spatial), rate, self.generator
        )
