"""What theory says: loss of dropped features, exponents, how small overlaps can be; how often features appear.

numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyptree.errors import UserError, require_known


def unlearned_loss(p: np.ndarray, k: Any) -> Any:
    """Loss of a model that keeps the ``k`` most frequent features: ``sum over i > k of (4/3 p_i - p_i^2)``.

    A dropped feature is answered by its mean ``p_i``; what is left is its variance. The chances ``p`` (n) are sorted,
    largest first; ``k`` may be an array.
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

    ``(e(norm) / norm)^2`` (see :mod:`hyptree.lab.hyperbolic`): a feature answers ``cos - k`` where a flat one answers
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


def curved_floor(p: np.ndarray, curvature: float) -> tuple[float, float, float]:
    """(loss, norm, cosine): what is left in endless dimensions where all features have one norm and one angle.

    A flat space has room for all features at right angles and no loss. In a curved one the time of a sum of points is
    not the sum of their times, so features that are active together disturb each other at any width, and the best
    arrangement has long rows that share a direction: overlaps near the threshold. Loss at a fixed curvature cannot fall
    as a power of the width for ever. An estimate, not a bound: features of their own norms and angles may do better.
    """
    if curvature == 0:
        return 0.0, 1.0, 0.0
    values, active, weight = _active_values(p)
    total, square = values.sum(1), (values**2).sum(1)  # (S)
    root = np.sqrt(curvature)

    def excess(of_square: np.ndarray) -> np.ndarray:
        return root * of_square / (1 + np.sqrt(1 + curvature * of_square))

    def loss(norm: np.ndarray, share: np.ndarray, bias: np.ndarray) -> np.ndarray:
        """Of candidates, all (C, 1); the cosine is a share of the threshold, so that idle features answer nearly 0."""
        size = norm**2
        cosine = share * excess(size) ** 2 / size
        idle = size * cosine * total - excess(size) * excess(size * (square + cosine * (total**2 - square))) + bias
        own = idle[..., None] + (size * (1 - cosine))[..., None] * values  # (C, S, K)
        errors = ((np.maximum(own, 0) - values) ** 2 * active).sum(-1)
        errors += np.maximum(idle, 0) ** 2 * (len(p) - active.sum(1))
        return (errors * weight).sum(-1) + (1 - weight.sum()) * len(p) * np.maximum(bias[:, 0], 0) ** 2

    # The least of a grid of 5 x 5 x 5 around the last, which shrinks where that is inside. At the first norm a feature
    # answers itself with one.
    middle, half = np.array([np.sqrt(1 + curvature / 4), 1.0, 0.0]), np.array([0.4, 0.2, 0.2])
    steps = np.stack(np.meshgrid(*[np.linspace(-1, 1, 5)] * 3), -1).reshape(-1, 3)
    least = np.inf
    for _ in range(40):
        tried = middle + half * steps
        losses = loss(*tried.T[..., None])
        best = int(losses.argmin())
        least, middle = float(losses[best]), tried[best]
        half = half * np.where(np.abs(steps[best]) == 1, 1.0, 0.7)
    return least, float(middle[0]), float(middle[1]) * curved_threshold(curvature, float(middle[0]))


def _active_values(p: np.ndarray, most: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples with 1 to ``most`` active features, as a quadrature: values (S, most), which are active, weights (S)."""
    chance = np.zeros(most + 1)  # of k active features; more count as ``most``
    chance[0] = 1
    for q in p:
        chance[1:-1], chance[0], chance[-1] = (
            chance[1:-1] * (1 - q) + chance[:-2] * q,
            chance[0] * (1 - q),
            chance[-1] + chance[-2] * q,
        )
    values, active, weights = [], [], []
    for k, points in zip(range(1, most + 1), (16, 10, 6, 4), strict=True):
        node, mass = np.polynomial.legendre.leggauss(points)
        grid = np.stack(np.meshgrid(*[node + 1] * k), -1).reshape(-1, k)
        each = np.prod(np.stack(np.meshgrid(*[mass / 2] * k), -1).reshape(-1, k), 1)
        values.append(np.pad(grid, ((0, 0), (0, most - k))))
        active.append(np.tile(np.arange(most) < k, (len(grid), 1)))
        weights.append(chance[k] * each)
    return np.concatenate(values), np.concatenate(active), np.concatenate(weights)


SHAPES = ("power", "exponential", "linear")


def frequencies(n: int, alpha: float = 1.0, density: float = 1.0, dist: str = "power") -> np.ndarray:
    """(n,) float64: the chance ``p_i`` that feature ``i`` is active, largest first, with ``sum(p) = density``.

    power is ``i^-alpha`` with ``i`` from 1; exponential is ``exp(-25.6 i / n)`` and linear ``(n - i) / n`` with ``i``
    from 0 (``alpha`` plays no part). For n = 10240 the exponential is the published ``exp(-i / 400)``. Data with a
    chance above 1 does not exist, and is an error.
    """
    require_known("unknown distribution {!r}", [dist], SHAPES)
    if dist == "power":
        raw = np.arange(1, n + 1, dtype=np.float64) ** -alpha
    elif dist == "exponential":
        raw = np.exp(-25.6 * np.arange(n, dtype=np.float64) / n)
    else:
        raw = (n - np.arange(n, dtype=np.float64)) / n
    p = raw / raw.sum()
    # A hair above 1 is rounding: density 1/p_1 makes the first feature always active.
    if p[0] * density > 1 + 1e-9:
        where = f"alpha {alpha:g}" if dist == "power" else dist
        raise UserError(
            f"density {density:g} with {where} and n {n} needs a feature that is active with probability "
            f"{p[0] * density:.3g} > 1; the density can be at most {1 / p[0]:.4g}"
        )
    return np.minimum(p * density, 1.0)
