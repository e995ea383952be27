"""Does a number rise along chains? Kendall's tau per item with its length baselines, and Spearman's correlation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyptree.errors import UserError


@dataclass(frozen=True)
class Order:
    """Mean agreement of chains with the order of their levels, from -1 to 1."""

    tau_a: float
    """Ties count as 0. Chains with fewer than two distinct values have no tau and are left out."""
    tau_b: float
    """Corrected for ties."""
    first_two: float
    """Of levels 1 and 2 alone, where the length of a caption says least; ties count as 0."""
    error: float
    """Standard error of ``tau_b``."""
    num_items: int
    num_undefined: int


def order_of_levels(values: Any) -> Order:
    """How well values (n, L) rise from level to level, per item, then averaged."""
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or values.shape[1] < 2 or len(values) == 0:
        raise ValueError(f"expected one row per chain and at least two levels, got {values.shape}")
    tau_a, tau_b = kendall_tau(values)
    defined = tau_b[~np.isnan(tau_b)]
    return Order(
        tau_a=float(tau_a[~np.isnan(tau_a)].mean()) if len(defined) else float("nan"),
        tau_b=float(defined.mean()) if len(defined) else float("nan"),
        first_two=float(np.sign(values[:, 1] - values[:, 0]).mean()),
        error=float(defined.std(ddof=1) / len(defined) ** 0.5) if len(defined) > 1 else float("nan"),
        num_items=len(values),
        num_undefined=len(values) - len(defined),
    )


def kendall_tau(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kendall's tau-a and tau-b of each row (n, L) with 1 .. L; NaN where a row holds a NaN or one value throughout."""
    first, second = np.triu_indices(values.shape[1], 1)
    signs = np.sign(values[:, second] - values[:, first])  # (n, pairs)
    untied = np.abs(signs).sum(1)
    agreement = np.where(untied == 0, np.nan, signs.sum(1))
    return agreement / len(first), agreement / np.sqrt(np.maximum(untied, 1) * len(first))


def length_baselines(chains: Sequence[Sequence[str]]) -> dict[str, Order]:
    """What the length of the captions alone scores, in words and in characters."""
    return {
        "words": order_of_levels([[len(caption.split()) for caption in chain] for chain in chains]),
        "characters": order_of_levels([[len(caption) for caption in chain] for chain in chains]),
    }


def spearman(x: Any, y: Any) -> float:
    """Spearman's rank correlation, ties at their mean rank; NaN where one of the two does not vary."""
    a, b = (_ranks(np.asarray(values, np.float64)) for values in (x, y))
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"expected two rows of equal length, got {a.shape} and {b.shape}")
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise UserError(
            f"{int((~np.isfinite(values)).sum())} of {values.size} values are not finite; look at the encoder"
        )
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
