"""Features in hyperbolic space: the toy model with hidden states and feature rows on a hyperboloid.

A point of curvature -c is its space components ``s`` (..., m), as everywhere in this library; its time is
``t = sqrt(1/c + |s|^2)`` and the origin is ``o = (1/sqrt(c), 0)``. The hidden state ``h = Wᵀx`` and every row ``W_i``
are read as points, and the output comes from the Lorentz product of the two, seen from the origin:

    z_i = <W_i - o, h - o>_L + b_i = W_i · h - e(W_i) e(h) + b_i,    e(s) = t - 1/sqrt(c)

The *excess* ``e`` is ``sqrt(c) |s|^2 / (1 + sqrt(1 + c |s|^2))``: no cancellation, and zero for c = 0, where this is
the model of the paper. So curvature takes away ``e(W_i) e(h)``, a threshold that grows with the hidden state, and needs
no parameters of its own. (Space components, not tangent vectors: ``expmap0`` would make outputs grow exponentially with
the value of a feature, and the model has to answer that value.) Decay and growth act on the space components, so the
norm that growth pulls to one is theirs.

In matrix products the excess is one more column beside that of the bias: ``[h, -e(h), 1] · [W_i, e(W_i), b_i]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.geometry import lorentz


def readout(h: Tensor, W: Tensor, curvature: float) -> Tensor:
    """``<W_i - o, h - o>_L`` by its definition: h (B, m) and W (n, m) -> (B, n); ``W h`` for curvature 0."""
    if curvature == 0:
        return h @ W.T
    minkowski = torch.ones(W.shape[1] + 1, dtype=W.dtype, device=W.device)
    minkowski[0] = -1
    origin = lorentz.to_ambient(torch.zeros_like(W[:1]), curvature)
    return (lorentz.to_ambient(h, curvature) - origin) * minkowski @ (lorentz.to_ambient(W, curvature) - origin).T


def excess(points: Tensor, root: Tensor) -> Tensor:
    """How far the time of points lies above the origin's: (..., m) -> (..., 1).

    Args:
        root: square root of the curvature, broadcast against (..., 1); zero gives zero.
    """
    square = torch.linalg.vector_norm(points, dim=-1, keepdim=True).square_()
    return root * square / (1 + (1 + root.square() * square).sqrt_())


def widen(P: Tensor, root: Tensor) -> Tensor:
    """The excess of rows put beside the bias: ``[W, b]`` (G, n, m + 1) -> ``[W, e(W), b]`` (G, n, m + 2)."""
    W, b = P[..., :-1], P[..., -1:]
    return torch.cat([W, excess(W, root), b], dim=-1)


def narrow(grad: Tensor) -> Tensor:
    """Leave the excess out again: (G, n, m + 2) -> (G, n, m + 1)."""
    return torch.cat([grad[..., :-2], grad[..., -1:]], dim=-1)


def pull_back(grad: Tensor, lifted: Tensor, root: Tensor, sign: int) -> None:
    """Carry the gradient of the excess column over to the space components, in place.

    ``de/ds = s / t``, and ``t = e + 1/sqrt(c)``.

    Args:
        grad: (G, k, m + 2) gradient with respect to ``lifted``.
        lifted: (G, k, m + 2) ``[s, sign e(s), ...]``.
        root: (G, 1, 1) square root of the curvature.
    """
    slope = root / (1 + root * lifted[..., -2:-1].abs())
    grad[..., :-2].addcmul_(grad[..., -2:-1] * slope, lifted[..., :-2], value=sign)
