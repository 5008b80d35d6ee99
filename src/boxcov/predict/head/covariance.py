"""The exact covariance of all boxes of a frame through a staged head: products over all boxes, kinds and branches at once.

With A (T x n_in) the inputs of a layer at the T cells that a box sees and D_j (T x n_out) the gradient of its number j there, and in the eigenbasis
``alpha = A U``, ``delta_j = D_j V``, the layer adds

    C[j, j'] = sum over p of delta_j[:, p]^T K_p delta_j'[:, p],    K_p = alpha diag(v[p]) alpha^T    (T x T).

K_p has no j in it, and with v in separable form (``separable.py``) it is a combination of a few Gram matrices, which are the same for all
branches and for boxes on the same cell. alpha is computed once for each cell of the map. Numbers come first, the decoding's Jacobian last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from boxcov.predict.head.branches import branches
from boxcov.predict.head.cells import Plan
from boxcov.predict.head.products import back
from boxcov.predict.head.stem import from_below, stem_covariance, stem_directions, stem_stage
from boxcov.predict.head.weights import Drawn, HeadWeights


def head_covariance(
    head: HeadWeights, plan: Plan, pixels: Tensor, tangents: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The covariance of the numbers of all boxes (m, R, R) and the numbers (m, R), from the features (P + 1, C) of the cells that they see.

    For a head prepared with k directions, the derivatives along them (m, R, k) come in the place of the covariance.
    tangents: (k, B, C, height, width) of the features, if they depend on weights, too; then also the derivatives (m, R, k) along these.
    """
    rows, stem = pixels, []
    for layers, cells in zip(head.stem, plan.stages):
        rows, passed = stem_stage(layers, cells, rows)
        stem.append(passed)
    numbers, found, d = branches(head, plan, rows)
    for layers, cells, passed in zip(
        reversed(head.stem), reversed(plan.stages[:-1]), reversed(stem)
    ):
        d = d * cells.seen(passed.slope)  # (R, m, T, C)
        if layers.turned is not None:
            assert passed.alpha is not None
            add = stem_directions if isinstance(layers.turned, Drawn) else stem_covariance
            part = add(layers.turned, passed.alpha, d, cells, plan)  # type: ignore[arg-type]
            found = part if found is None else found + part
        if layers is not head.stem[0]:
            d = back(d, layers.W[0, 0], layers)
    assert found is not None
    return found, numbers, None if tangents is None else from_below(head.stem[0], plan, d, tangents)


def decode_jacobian(numbers: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """Derivatives (m, D, R) of boxes in their numbers (m, R), each of its own.

    >>> decode_jacobian(torch.zeros(3, 2), lambda x: 2 * x.exp())[0]
    tensor([[2., 0.],
            [0., 2.]])
    """
    with torch.enable_grad():
        numbers = numbers.detach().requires_grad_()
        boxes = decode(numbers)
        m, D = boxes.shape
        ones = torch.eye(D, dtype=boxes.dtype, device=boxes.device).unsqueeze(1).expand(D, m, D)
        (J,) = torch.autograd.grad(boxes, numbers, ones, is_grads_batched=True)  # (D, m, R)
    return J.transpose(0, 1)
