"""The cases of ``hyptree bench geometry``: what is computed, on which shapes, by whom, and what it may cost.

An operation is a function that yields cases. To add one, write it beside its like (points, layers, steps) and enter it
in :data:`OPERATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.geometry import layers, points, steps
from benchmarks.geometry.maker import (
    COMPILED,
    GEOOPT,
    HYPLL,
    KERNELS,
    OURS,
    TWIN,
    TWIN_COMPILED,
    TWIN_FUSED,
    C,
    Case,
    Maker,
)

__all__ = [
    "COMPILED",
    "GEOOPT",
    "HYPLL",
    "KERNELS",
    "OPERATIONS",
    "OURS",
    "TWIN",
    "TWIN_COMPILED",
    "TWIN_FUSED",
    "C",
    "Case",
    "Maker",
]

OPERATIONS: dict[str, Callable[[Maker], Iterator[Case]]] = {
    "lorentz.expmap0": points.lorentz_expmap0,
    "lorentz.logmap0": points.lorentz_logmap0,
    "lorentz.dist": points.lorentz_dist,
    "lorentz.expmap": points.lorentz_expmap,
    "lorentz.logmap": points.lorentz_logmap,
    "lorentz.transport": points.lorentz_transport,
    "lorentz.pairwise_matmul": points.lorentz_pairwise_matmul,
    "lorentz.pairwise_exact": points.lorentz_pairwise_exact,
    "lorentz.softmax": points.lorentz_distance_softmax,
    "lorentz.centroid": points.lorentz_centroid,
    "lorentz.linear": layers.lorentz_linear,
    "lorentz.mlr": layers.lorentz_mlr,
    "lorentz.mlp": layers.lorentz_mlp,
    "lorentz.attention": layers.lorentz_attention,
    "lorentz.adam": steps.lorentz_adam,
    "poincare.expmap0": points.poincare_expmap0,
    "poincare.logmap0": points.poincare_logmap0,
    "poincare.dist": points.poincare_dist,
    "poincare.expmap": points.poincare_expmap,
    "poincare.logmap": points.poincare_logmap,
    "poincare.pairwise_matmul": points.poincare_pairwise_matmul,
    "poincare.pairwise_exact": points.poincare_pairwise_exact,
    "poincare.softmax": points.poincare_distance_softmax,
    "poincare.mobius_add": points.poincare_mobius_add,
    "poincare.centroid": points.poincare_centroid,
    "poincare.mlr": layers.poincare_mlr,
    "poincare.fc": layers.poincare_fc,
    "poincare.mlp": layers.poincare_mlp,
    "poincare.adam": steps.poincare_adam,
}
