"""Score logits: the scale on which the variance of a score is reported."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_logit(logits: Tensor, number: Tensor) -> Tensor:
    """Return the logit (m,) of each row's softmax score of class ``number`` (m,).

    logits: (m, n) of all classes.
    """
    rest = logits.scatter(1, number.unsqueeze(1), -torch.inf).logsumexp(1)
    return logits.gather(1, number.unsqueeze(1))[:, 0] - rest


def logit_of_log(log_p: Tensor) -> Tensor:
    """Return the logit of a probability, given its logarithm."""
    return log_p - (-torch.expm1(log_p)).log()
