"""Class vectors refined by attributes, and the hierarchy loss: neighbours share a nearer ancestor than with a stranger.

Points below (pictures, attributes) are compared by the points above them (attributes, classes) which could be their
lowest common ancestor. Everything here works on matrices of distances, so any space can be under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.errors import require_one_of

Sampling = Literal["default", "paper", "argmin"]


@dataclass
class HierarchyTerm:
    """A loss over triplets and what it was made of."""

    loss: Tensor
    """Mean over the triplets; 0, with a gradient of zeros, where there is none."""
    triplets: Tensor
    """(T, 3) rows i, j, k: j is a near neighbour of i, k is not."""
    chosen: Tensor
    """(T, 2) the ancestors chosen for (i, j) and for (i, j, k)."""

    @property
    def is_skipped(self) -> bool:
        """Whether there was nothing to compare: too few points, or fewer than two ancestors to choose from."""
        return self.chosen.shape[0] == 0


def mine_triplets(distances: Tensor, k: int, max_triplets: int, generator: torch.Generator) -> Tensor:
    """(T, 3) triplets (i, j, k) with j among the nearest neighbours of i and k not: all of them, or a random choice.

    Fewer than k + 2 candidates leave no stranger or none worth the name; then only ``max(1, (n - 1) // 2)``
    neighbours count.

    Args:
        distances: (B, n) of the anchors to all candidates; anchor i is candidate i, so B <= n.
        k: neighbours per anchor.
        max_triplets: at most so many, drawn with replacement where there are more.
    """
    num_anchors, count = distances.shape
    neighbours = k if count >= k + 2 else max(1, (count - 1) // 2)
    strangers = count - 1 - neighbours
    if num_anchors == 0 or strangers < 1:
        return torch.zeros(0, 3, dtype=torch.int64, device=distances.device)
    itself = torch.arange(num_anchors, device=distances.device)
    ranked = distances.detach().clone()
    ranked[itself, itself] = torch.inf  # last, and cut off
    ranked = ranked.argsort(stable=True, dim=1)[:, :-1]  # (B, n - 1)
    total = num_anchors * neighbours * strangers
    if total <= max_triplets:
        number = torch.arange(total)
    else:
        number = torch.randint(total, (max_triplets,), generator=generator)
    number = number.to(distances.device)
    anchor = number // (neighbours * strangers)
    near = number // strangers % neighbours
    far = neighbours + number % strangers
    return torch.stack([anchor, ranked[anchor, near], ranked[anchor, far]], 1)


def gumbel_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Gumbel(0, 1) noise on the CPU."""
    tiny = torch.finfo(torch.float32).tiny
    return -torch.empty(shape).exponential_(generator=generator).clamp_min(tiny).log()


def choose_ancestors(farthest: Tensor, sampling: Sampling, temperature: float, noise: Tensor | None) -> Tensor:
    """(T, N) one-hot rows in value, soft ones in gradient: the lowest common ancestor, near to all members at once.

    ``default`` samples with logits ``-max d / temperature``. ``paper`` samples with logits ``exp(-max d)``, which lie
    in (0, 1] and so choose almost evenly. ``argmin`` takes the nearest, without chance.

    ``farthest`` (T, N) is the largest of the members' distances to each ancestor, the noise Gumbel's.
    """
    logits = torch.exp(-farthest) if sampling == "paper" else -farthest / temperature
    if sampling != "argmin":
        assert noise is not None, "sampling needs noise"
        logits = logits + noise
    soft = logits.softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
    return hard - soft.detach() + soft


def hierarchy_loss(
    distances: Tensor,
    triplets: Tensor,
    *,
    margin: float = 0.1,
    sampling: Sampling = "default",
    temperature: float = 0.1,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> HierarchyTerm:
    """The triplet loss over chosen ancestors, ``a`` for (i, j) and ``b`` for (i, j, k)::

        [d(i,a) - d(i,b) + m]+ + [d(j,a) - d(j,b) + m]+ + [d(k,b) - d(k,a) + m]+

    i and j want to be nearer to their own ancestor than to the one they share with k; k the other way round. Gradients
    reach the distances and, straight through, the choice. With fewer than two ancestors both are the same, the loss
    would be the constant 3 m and teach nothing: it is skipped.

    Args:
        distances: (n, N) of the points below to the possible ancestors.
        triplets: (T, 3) of ``mine_triplets``.
        generator: of the CPU, where ``noise`` is not given.
        noise: (2, T, N) Gumbel noise for both choices.
    """
    if len(triplets) == 0 or distances.shape[1] < 2:
        nothing = torch.zeros(0, 2, dtype=torch.int64, device=distances.device)
        return HierarchyTerm(distances.sum() * 0, triplets, nothing)
    to_ancestor = distances[triplets]  # (T, 3, N)
    if noise is None and sampling != "argmin":
        assert generator is not None, "sampling needs a generator or noise"
        noise = gumbel_noise((2, len(triplets), distances.shape[1]), generator)
    if noise is not None:
        noise = noise.to(distances)
    pair = choose_ancestors(to_ancestor[:, :2].amax(1), sampling, temperature, noise[0] if noise is not None else None)
    triple = choose_ancestors(to_ancestor.amax(1), sampling, temperature, noise[1] if noise is not None else None)
    gap = (to_ancestor * (pair - triple)[:, None]).sum(-1)  # (T, 3): d(., a) - d(., b)
    sign = gap.new_tensor([1.0, 1.0, -1.0])
    loss = torch.relu(sign * gap + margin).sum(1).mean()
    return HierarchyTerm(loss, triplets, torch.stack([pair.argmax(1), triple.argmax(1)], 1))


Affinity = Literal["relu", "softmax"]

SOFTMAX_TEMPERATURE = 0.1
"""Of the affinity ``softmax``: at 1, cosines between -1 and 1 would weigh all neighbours almost alike."""


def refine(text: Tensor, attributes: Tensor, beta: float = 0.1, affinity: Affinity = "relu") -> Tensor:
    """Refined class vectors ``T + beta (D^-1/2 S D^-1/2 F)[:C]`` with ``F = [T; A]`` and ``S`` the cosines of its rows.

    The degree ``D`` sums over all C + N columns. Raw cosines can sum to a negative number, of which there is no root:
    so they are cut at zero first (``relu``), or every row is a softmax, which needs no degree (``softmax``). A row of
    zeros is nobody's neighbour. With ``beta = 0`` the class vectors come back bit for bit.

    Args:
        text: (C, D) class vectors -> (C, D).
        attributes: (N, D), N may be 0: classes are then mixed among themselves.
    """
    require_one_of("affinity", affinity, get_args(Affinity))
    if beta == 0:
        return text
    count = len(text)
    rows = torch.cat([text, attributes])  # (C + N, D)
    unit = F.normalize(rows, dim=-1)  # a row of zeros stays one
    cosines = unit @ unit.T
    if affinity == "softmax":
        return text + beta * ((cosines[:count] / SOFTMAX_TEMPERATURE).softmax(-1) @ rows)
    weight = cosines.clamp_min(0)
    degree = weight.sum(-1)
    has_neighbours = degree > 0
    root = torch.where(has_neighbours, torch.where(has_neighbours, degree, 1).rsqrt(), 0)  # (C + N,)
    return text + beta * (root[:count, None] * (weight[:count] @ (root[:, None] * rows)))
