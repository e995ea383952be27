"""Curvature conventions of other libraries and papers, translated to ours in one place.

Ours: ``c > 0``, sectional curvature ``-c``. The table in docs/geometry.md explains each row.
"""

import math
from collections.abc import Callable

from hyptree.errors import require_one_of

_TO_C: dict[str, Callable[[float], float]] = {
    "meru": lambda curv: curv,
    "hyperclip": lambda curvature: curvature,
    "himapper": math.exp,  # its parameter is the logarithm
    "hcformer": lambda kappa: kappa,
    "helm": lambda K: -K,
    "hypformer": lambda K: -K,
    "chen": lambda K: -K,
    "hypercore": lambda squared_radius: 1 / squared_radius,
    "geoopt.lorentz": lambda k: 1 / k,
    "geoopt.stereographic": lambda k: -k,
    "geoopt.poincareball": lambda c: c,
    "hypll": lambda value: math.log1p(math.exp(-abs(value))) + max(value, 0.0),  # softplus
    "ganea": lambda c: c,
}


def curvature_from(source: str, value: float) -> float:
    """Our ``c`` for the curvature of another library or paper, as in ``curvature_from("geoopt.lorentz", 2.0)``."""
    key = source.lower()
    require_one_of("curvature_from: source", key, _TO_C)
    c = _TO_C[key](value)
    if not 0 < c < math.inf:
        raise ValueError(f"curvature_from: {source} value {value} gives c = {c}, expected a positive curvature")
    return c
