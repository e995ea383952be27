"""Class vectors refined by learned attributes: one step of message passing over the graph of their cosines."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.errors import require_one_of

Affinity = Literal["relu", "softmax"]

SOFTMAX_TEMPERATURE = 0.1
"""Of the affinity ``softmax``: at 1, cosines between -1 and 1 would weigh all neighbours almost alike."""


def refine(text: Tensor, attributes: Tensor, beta: float = 0.1, affinity: Affinity = "relu") -> Tensor:
    """Refined class vectors ``T + beta (D^-1/2 S D^-1/2 F)[:C]`` with ``F = [T; A]`` and ``S`` the cosines of its rows.

    The degree ``D`` sums over all C + N columns. Raw cosines can sum to a negative number, of which there is no root:
    so they are cut at zero first (``relu``), or every row is a softmax, which needs no degree (``softmax``). A row of
    zeros is nobody's neighbour. With ``beta = 0`` the class vectors come back bit for bit.

    Args:
        text: (C, D) class vectors.
        attributes: (N, D), N may be 0: classes are then mixed among themselves.
        beta: how much of the neighbourhood is added.
        affinity: "relu" or "softmax".

    Returns:
        (C, D).
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
