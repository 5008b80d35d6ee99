"""NMSSpread: a baseline without a posterior, the spread of the boxes that NMS removed."""

from __future__ import annotations

from boxcov._torch.process_state import at_least_float32
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError
from boxcov.predict.linearize import LinearizationPoint, short_way
from boxcov.predict.predictor import Predictor


class NMSSpread(Predictor):
    """The covariance of each box is the spread of the boxes that NMS removed in its favour.

    The spread is taken around the reported box and weighted by the scores; it is 0 where NMS
    removed none. It costs a second NMS and no other pass. It is not a covariance under the
    posterior: it measures how much neighbouring cells disagree. A cell that scores for two classes
    of a task has one box for both, so that one of the two adds its score and no distance.

    >>> import torch
    >>> from boxcov.detectors.centerpoint import CenterPoint, Config
    >>> model = NMSSpread(CenterPoint(Config.small()))
    >>> model([torch.rand(100, 5)]).covariance.shape[1:]
    torch.Size([9, 9])
    """

    method = "nms"
    needs_posterior = False

    def __init__(self, detector: Detector) -> None:
        if type(detector).candidates is Detector.candidates:
            raise BoxcovError(
                f"NMSSpread needs the boxes that NMS removes: {type(detector).__name__} has no "
                "candidates()"
            )
        super().__init__(detector, None)

    def predict(self, point: LinearizationPoint) -> Detections:
        detector = point.shadow
        found = detector.candidates(point.raw)
        if found is None:
            raise BoxcovError(
                f"{type(detector).__name__}.candidates() gave None: NMSSpread needs the boxes that "
                "NMS chose from"
            )
        removed = (found.removed_by >= 0).nonzero()[:, 0]
        by = found.removed_by[removed]  # (c,)
        boxes = at_least_float32(detector.decode(point.raw, found))
        plain = at_least_float32(point.boxes)
        delta = short_way(boxes[removed] - plain[by], detector)  # (c, D)
        weights = at_least_float32(found.scores[removed])
        total = plain.new_zeros(len(plain)).index_add(0, by, weights)  # (m,)
        shares = (weights / total[by])[:, None, None]
        spread = delta.unsqueeze(2) * delta.unsqueeze(1) * shares  # (c, D, D)
        D = plain.shape[1]
        return point.detections(
            covariance=plain.new_zeros(len(plain), D, D).index_add(0, by, spread)
        )
