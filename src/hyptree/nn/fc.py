"""Fully connected layers by distances to hyperplanes (Shimizu et al., Hyperbolic Neural Networks++).

Each output coordinate is set so that the signed distance of the output to the hyperplane orthogonal to its axis is one
logit ``v`` of the classifier of :mod:`hyptree.nn.classifier`. In Lorentz coordinates that is ``sinh(s v)/s``, and the
ball version is the same point seen in the ball.
"""

from torch import Tensor

from hyptree.geometry import Lorentz, Poincare, poincare
from hyptree.geometry.core.numerics import Scalar
from hyptree.nn.classifier import Hyperplanes, planes
from hyptree.nn.point_layer import require_features, uniform_
from hyptree.nn.precision import ball_store, store
from hyptree.ops.fc_point import fc_point


def lorentz_fc(x: Tensor, weight: Tensor, offset: Tensor, c: Scalar = 1.0, c_out: Scalar | None = None) -> Tensor:
    """``y = sinh(s v)/s`` with the logits ``v = lorentz_mlr(x, weight, offset)``.

    Rows beyond the limit of the dtype (``s r = 40`` in float32) are moved to it, as ``expmap0`` does.

    Args:
        x: (..., n) Lorentz points. weight: (m, n) normals. offset: (m,) signed distances.
        c: curvature of the input. c_out: of the output (``s y`` is kept), the same if None.

    Returns:
        (..., m) points in the dtype of the matrix product.
    """
    points, matrix, time_column, scale = planes(x, weight, offset, c)
    return store(fc_point(points, matrix, time_column, scale, c, c if c_out is None else c_out), points.dtype)


def poincare_fc(x: Tensor, weight: Tensor, offset: Tensor, c: Scalar = 1.0, c_out: Scalar | None = None) -> Tensor:
    """``w/(1 + sqrt(1 + c|w|^2))`` with ``w = sinh(s v)/s`` and the logits ``v = poincare_mlr(x, weight, offset)``.

    Args:
        x: (..., n) points of the ball. weight: (m, n) normals. offset: (m,) ``r``, half the signed distance.
        c: curvature of the input. c_out: of the output (``s y`` is kept), the same if None.

    Returns:
        (..., m) points of the ball in the dtype of ``x``; close to the boundary every digit of a ball point counts.
    """
    points, matrix, time_column, scale = planes(poincare.to_lorentz(x, c), weight, 2 * offset, c)
    c_last = c if c_out is None else c_out
    point = fc_point(points, matrix, time_column, 2 * scale, c, c_last, in_ball=True)
    return ball_store(point, x.dtype, c_last)


class LorentzFC(Hyperplanes[Lorentz]):
    """Fully connected layer of the hyperboloid by distances to hyperplanes: :func:`lorentz_fc`.

    Args:
        in_features: n. out_features: m. manifold: Lorentz manifold of the input.
        manifold_out: of the output, by default the same. bias: learn the offsets of the hyperplanes.

    Shape:
        x (..., n) -> (..., m)
    """

    space = Lorentz

    def forward(self, x: Tensor) -> Tensor:
        require_features(type(self).__name__, x, self.in_features)
        return lorentz_fc(x, self.weight, self.offset, self.manifold.c, self.c_out)


class PoincareFC(Hyperplanes[Poincare]):
    """Fully connected layer of the Poincaré ball: :func:`poincare_fc`; arguments and shapes as for LorentzFC."""

    space = Poincare

    def reset_parameters(self) -> None:
        """As ``nn.Linear``, halved: near the origin the layer is ``x -> 2 W x``; so it keeps the size of its input."""
        super().reset_parameters()
        uniform_(self.weight, self.in_features, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        require_features(type(self).__name__, x, self.in_features)
        return poincare_fc(x, self.weight, self.offset, self.manifold.c, self.c_out)
