"""Sums and maxima along the branches of a parent array, without recursion and whatever the depth.

Everything here is pointer doubling: after k rounds each node knows its ancestor 2**k steps up, so a tree of depth d
takes log2(d) vectorised rounds. A path of 100,000 nodes costs 17 rounds, where a loop over levels would take 100,000.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def as_array(values: Any) -> np.ndarray:
    """A numpy view or copy of numbers, lists or a torch tensor (which is recognised without importing torch)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # numpy has no bfloat16
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def frozen(values: np.ndarray) -> np.ndarray:
    """The same array, marked read-only."""
    values.flags.writeable = False
    return values


def jumps(parent: np.ndarray) -> Iterator[np.ndarray]:
    """Ancestors 1, 2, 4, ... steps above each node, (n + 1,) each, until every node is past its root.

    Index n is a sentinel above all roots that is its own parent.
    """
    n = len(parent)
    up = np.append(np.where(parent < 0, n, parent), n)  # (n + 1,)
    while (up != n).any():
        yield up
        up = up[up]


def sum_to_root(parent: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each node the sum of ``values`` over the node and its ancestors, (n,)."""
    total = np.append(values, 0)
    for up in jumps(parent):
        total = total + total[up]
    return total[:-1]


def sum_below(parent: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each node the sum of ``values`` over its subtree, (n,); integers stay exact integers up to 2**53."""
    total = np.append(values, 0).astype(np.float64)
    for up in jumps(parent):
        total = total + np.bincount(up, weights=total, minlength=len(total))
        total[-1] = 0
    total = total[:-1]
    return total if np.issubdtype(values.dtype, np.floating) else np.rint(total).astype(np.int64)


def max_below(parent: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each node the maximum of ``values`` over its subtree, (n,) float64."""
    best = np.append(values, -np.inf).astype(np.float64)
    for up in jumps(parent):
        raised = best.copy()
        np.maximum.at(raised, up, best)
        raised[-1] = -np.inf
        best = raised
    return best[:-1]
