"""Spaces of constant curvature: pure functions, thin manifold classes, cones, means, distributions. Needs torch alone.

The last axis is the manifold axis, leading axes broadcast, ``c > 0`` means curvature ``-c``. Lorentz points are their
space components. See docs/geometry.md.
"""

from . import debug as _debug
from . import euclidean, klein, lorentz, numerics, poincare, registry, sphere
from .convert import curvature_from
from .curvature import Curvature, curvature_parameters
from .debug import GeometryError
from .distributions import WrappedNormal
from .frechet import frechet_mean
from .manifold import Euclidean, Lorentz, Manifold, Poincare, Product, Sphere
from .parameter import PointModule, manifold_of, mark_manifold, mark_points

debug = _debug.debug

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
