"""What theory says: loss of dropped features, exponents, and how small overlaps can be. numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def unlearned_loss(p: np.ndarray, k: Any) -> Any:
    """Loss of a model that keeps the ``k`` most frequent features: ``sum over i > k of (4/3 p_i - p_i^2)``.

    A dropped feature is answered by its mean ``p_i``; what is left is its variance.

    Args:
        p: (n) chances, largest first.
        k: one number, or an array of them.
    """
    rest = np.concatenate([np.cumsum((4 / 3 * p - p**2)[::-1])[::-1], [0.0]])
    return rest[np.clip(np.asarray(k, int), 0, len(p))]


def finite_exponent(p: np.ndarray, m: Sequence[int]) -> float:
    """The exponent of :func:`unlearned_loss` over the widths ``m`` where each keeps ``m`` features.

    ``alpha - 1`` is its limit for endless features; with a thousand it is far from it.
    """
    return -float(np.polyfit(np.log(m), np.log(unlearned_loss(p, m)), 1)[0])


def weak_exponent(alpha: float) -> float:
    """``alpha - 1``: weak superposition, endless features. Zero up to alpha 1, where m of them are nothing."""
    return max(0.0, alpha - 1)


def strong_exponent(alpha: float) -> float:
    """``max(1, 2 (alpha - 1))``: strong superposition.

    Overlaps give 1; where frequencies fall steeply, the features beyond the ``m^2 / 2`` that can be packed evenly do.
    """
    return max(1.0, 2 * (alpha - 1))


def welch_bound(num: int, m: int) -> float:
    """Least possible largest overlap of ``num`` unit vectors in ``m`` dimensions; its square bounds the mean square.

    Zero where they can be orthogonal. Reached where all overlaps are equal, which needs ``num <= m (m + 1) / 2``.
    """
    return float(np.sqrt((num - m) / (m * (num - 1)))) if num > m else 0.0


def random_overlap(m: int) -> tuple[float, float]:
    """Mean and variance of the squared overlap of random unit vectors in ``m`` dimensions."""
    return 1 / m, 2 * (m - 1) / (m**2 * (m + 2))


def curved_threshold(curvature: float, norm: float = 1.0) -> float:
    """What the readout takes off the overlap of two features of this norm in a space of curvature -c, per ``norm^2``.

    ``(e(norm) / norm)^2`` (see :mod:`ramify.lab.hyperbolic`): a feature answers ``cos - k`` where a flat one answers
    ``cos``, and ``1 - k`` to itself. Zero in a flat space, one in the limit of endless curvature.
    """
    return float((np.sqrt(curvature) * norm / (1 + np.sqrt(1 + curvature * norm**2))) ** 2)


def matched_curvature(m: int) -> float:
    """The curvature whose threshold, for norms of one, is the usual overlap ``1/sqrt(m)`` in ``m`` dimensions.

    With less, overlaps pass the relu; with more, features lose of their own signal. Solves ``k = 1/sqrt(m)``:
    ``c = 4 k / (1 - k)^2``, which falls as ``4/sqrt(m)``.
    """
    k = m**-0.5
    return 4 * k / (1 - k) ** 2 if m > 1 else float("inf")
