"""How often each feature appears: power laws, an exponential, a line; scaled to a number of active features."""

from __future__ import annotations

import numpy as np

from hyptree.errors import UserError, suggest

SHAPES = ("power", "exponential", "linear")


def frequencies(n: int, alpha: float = 1.0, density: float = 1.0, dist: str = "power") -> np.ndarray:
    """(n,) float64: the chance ``p_i`` that feature ``i`` is active, largest first, with ``sum(p) = density``.

    power is ``i^-alpha`` with ``i`` from 1; exponential is ``exp(-25.6 i / n)`` and linear ``(n - i) / n`` with ``i``
    from 0 (``alpha`` plays no part). For n = 10240 the exponential is the published ``exp(-i / 400)``.

    Raises:
        UserError: unknown shape, or a chance above 1: such data does not exist.
    """
    if dist not in SHAPES:
        raise UserError(
            f"unknown distribution {dist!r}; {suggest(dist, SHAPES) or 'expected one of ' + ', '.join(SHAPES)}"
        )
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
