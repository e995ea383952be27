"""Spaces of constant curvature: pure functions, thin manifold classes, cones, means, distributions. Needs torch alone.

The last axis is the manifold axis, leading axes broadcast, ``c > 0`` means curvature ``-c``. Lorentz points are their
space components. See docs/geometry.md.
"""

from hyptree.geometry import euclidean, klein, lorentz, poincare, sphere
from hyptree.geometry.convert import curvature_from
from hyptree.geometry.core import numerics, registry
from hyptree.geometry.core.curvature import Curvature, curvature_parameters
from hyptree.geometry.core.debug import GeometryError, debug
from hyptree.geometry.core.parameter import PointModule, manifold_of, mark_manifold, mark_points
from hyptree.geometry.distributions import WrappedNormal
from hyptree.geometry.frechet import frechet_mean
from hyptree.geometry.manifold import Euclidean, Lorentz, Manifold, Poincare, Product, Sphere

__all__ = [
    "Curvature",
    "Euclidean",
    "GeometryError",
    "Lorentz",
    "Manifold",
    "Poincare",
    "PointModule",
    "Product",
    "Sphere",
    "WrappedNormal",
    "curvature_from",
    "curvature_parameters",
    "debug",
    "euclidean",
    "frechet_mean",
    "klein",
    "lorentz",
    "manifold_of",
    "mark_manifold",
    "mark_points",
    "numerics",
    "poincare",
    "registry",
    "sphere",
]
