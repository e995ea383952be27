"""What an embedding of a hierarchy should minimise: distances to ancestors, or entailment cones.

Both take one batch of nodes with all their ancestors and one set of negatives that the whole batch shares. The cost is
then one matrix of (nodes, negatives), not one small vector per pair and negative.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hyptree.geometry import Euclidean, Lorentz, Manifold, Poincare


def distance_loss(
    nodes: Tensor,
    others: Tensor,
    ancestor_dist: Tensor,
    row: Tensor,
    masked: tuple[Tensor, Tensor],
    manifold: Manifold,
) -> Tensor:
    """Negative log likelihood of each ancestor among the negatives (Nickel and Kiela 2017): (P,).

    ``-log(exp(-d(u,v)) / (exp(-d(u,v)) + sum_n exp(-d(u,n))))``, that is
    ``softplus(log sum_n exp(-d(u,n)) + d(u,v))``: the sum is taken once per node.

    Args:
        nodes: (B, n) points. others: (M, n) negatives.
        ancestor_dist: (P,) distance of each pair. row: (P,) which of the nodes it belongs to.
        masked: rows and columns of the (B, M) entries that are no negatives: ancestors and the node itself.
        manifold: the space.
    """
    mass = log_proximity(nodes, others, masked, manifold)
    return F.softplus(mass[row] + ancestor_dist)


def log_proximity(x: Tensor, y: Tensor, masked: tuple[Tensor, Tensor], manifold: Manifold) -> Tensor:
    """``log sum_j exp(-d(x_i, y_j))`` without the masked entries: (B, n), (M, n) -> (B,); -inf for an empty sum."""
    if isinstance(manifold, Euclidean):
        return log_proximity_reference(x, y, masked, manifold)
    assert isinstance(manifold, (Lorentz, Poincare))
    return _LogProximity.apply(manifold.to_ambient(x), manifold.to_ambient(y), *masked, float(manifold.c))


def log_proximity_reference(x: Tensor, y: Tensor, masked: tuple[Tensor, Tensor], manifold: Manifold) -> Tensor:
    """The definition of :func:`log_proximity`, by distances and autograd."""
    hide = torch.zeros(len(x), len(y), dtype=torch.bool, device=x.device)
    hide[masked] = True
    logits = torch.where(hide, -torch.inf, -manifold.pairwise_dist(x, y))
    empty = hide.all(1, keepdim=True)  # autograd of logsumexp gives NaN there
    return torch.where(empty, -torch.inf, torch.where(empty, 0.0, logits).logsumexp(1, keepdim=True)).squeeze(1)


class _LogProximity(torch.autograd.Function):
    """:func:`log_proximity` on ambient points, with its gradient by hand.

    With ``z = -c <x,y>_L = cosh(s d)`` and ``q = sqrt(z^2 - 1)``, ``exp(-d) = (z + q)^(-1/s)``: no logarithm is needed,
    and the derivative of the sum is again a matrix of the same shape, so the backward pass is two matrix products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, mask_row: Tensor, mask_column: Tensor, c: float) -> Tensor:
        s = math.sqrt(c)
        z = c * (_flip_space(x) @ y.mT)
        q = (z + 1).mul_(z - 1).clamp_min_(0).sqrt_()
        weight = z.clamp_min_(1).add_(q).reciprocal_()
        if s != 1:
            weight.pow_(1 / s)
        weight[mask_row, mask_column] = 0
        total = weight.sum(1)
        # Where two points coincide as far as the dtype can tell, the distance has no direction to grow in.
        smallest = 64 * torch.finfo(q.dtype).eps ** 0.5
        weight.div_(q.clamp_min_(smallest)).masked_fill_(q <= smallest, 0)
        ctx.save_for_backward(weight, x, y, total)
        ctx.s = s
        return total.log()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        weight, x, y, total = ctx.saved_tensors
        some = total > 0
        g = torch.where(some, -ctx.s * grads[0] / torch.where(some, total, 1.0), 0.0)[:, None]
        return _flip_space(g * (weight @ y)), _flip_space(weight.mT @ (g * x)), None, None, None


def _flip_space(x: Tensor) -> Tensor:
    """Time first: the sign of the space components changed, so that a plain product is ``-<x,y>_L``."""
    return torch.cat([x[:, :1], -x[:, 1:]], 1)


def cone_loss(
    general: Tensor,
    specific: Tensor,
    hidden: tuple[Tensor, Tensor],
    margin: float,
    aperture: float,
    manifold: Manifold,
) -> Tensor:
    """How much closer than ``margin`` negatives are to a cone, ``max(0, margin - E)`` (Ganea et al. 2018): (G, S).

    Args:
        general: (G, n) points whose cones are looked at. specific: (S, n) points that should lie outside of them.
        hidden: rows and columns of the (G, S) entries that are no negatives.
        margin: in radians. aperture: ``K`` of the cones.
        manifold: the space.
    """
    assert isinstance(manifold, (Lorentz, Poincare))
    energy = manifold.cone_energy(general[:, None], specific[None], K=aperture)  # (G, S)
    loss = torch.relu(margin - energy)
    keep = torch.ones_like(loss)
    keep[hidden] = 0
    return loss * keep
