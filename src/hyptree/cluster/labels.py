"""What all clusterings share: how many clusters can be asked for, and how clusters are numbered."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_k(k: int, num_tokens: int, where: str) -> int:
    """``k``, or the number of tokens if that is smaller. Fewer than one cluster is an error."""
    if k < 1:
        raise ValueError(f"{where}: k must be at least 1, got {k}; k = {num_tokens} keeps every token")
    return min(k, num_tokens)


def number_by_first_member(groups: Tensor, num_groups: int) -> Tensor:
    """Labels 0, 1, ... in the order in which groups first appear among the tokens: (B, N) in 0..num_groups-1 -> (B, N).

    Two clusterings that give the same partition then give the same labels. Groups without members take no number.
    """
    index = torch.arange(groups.shape[1], device=groups.device).expand_as(groups)
    own_first = _least(index, groups, num_groups, groups.shape[1]).gather(1, groups)  # (B, N) first of my group
    number = (own_first == index).cumsum(1) - 1
    return number.gather(1, own_first)


def best_member(cost: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """The token of least cost in each group, on ties the first: cost (B, N), groups (B, N) -> (B, num_groups) index.

    Every group must have a member. A minimum does not depend on the order in which it is taken, so this is the same on
    every device and run.
    """
    least = _least(cost, groups, num_groups, float("inf")).gather(1, groups)  # (B, N)
    index = torch.arange(cost.shape[1], device=cost.device).expand_as(groups)
    candidate = torch.where(cost == least, index, cost.shape[1] - 1)
    return _least(candidate, groups, num_groups, cost.shape[1] - 1)


def _least(value: Tensor, groups: Tensor, num_groups: int, nothing: float) -> Tensor:
    out = value.new_full((value.shape[0], num_groups), nothing)
    return out.scatter_reduce_(1, groups, value, "amin")
