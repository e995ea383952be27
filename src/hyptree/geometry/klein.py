"""The Klein model: the ball in which geodesics are straight lines. Maps to and from the other models, and distance."""

from torch import Tensor

from hyptree.geometry import lorentz, poincare
from hyptree.geometry.core.numerics import Scalar
from hyptree.geometry.core.registry import geometric


@geometric("point")
def to_lorentz(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Space components of the same point on the hyperboloid."""
    return lorentz.from_klein(x, c)


@geometric("ball")
def from_lorentz(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Klein point of a Lorentz point given by its space components."""
    return lorentz.to_klein(x, c)


@geometric("ball")
def to_poincare(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """The same point in the Poincaré ball."""
    return poincare.from_klein(x, c)


@geometric("ball")
def from_poincare(x: Tensor, c: Scalar = 1.0) -> Tensor:
    """Klein point of a point of the Poincaré ball."""
    return poincare.to_klein(x, c)


@geometric("scalar")
def dist(x: Tensor, y: Tensor, c: Scalar = 1.0) -> Tensor:
    """Hyperbolic distance of two Klein points."""
    return lorentz.dist(lorentz.from_klein(x, c), lorentz.from_klein(y, c), c)
