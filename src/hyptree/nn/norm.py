"""Euclidean modules on space components: norms, activations, dropout.

R^n is a global chart of the hyperboloid, so any map of R^n is a map of points and ``nn.RMSNorm``, ``nn.LayerNorm``,
``nn.GELU`` or ``nn.Dropout`` need no hyperbolic twin: apply them to the points as they are. What is left to say is
where the result lives (:class:`OnSpace` may change the curvature) and which axis a batch norm should read
(:class:`LorentzBatchNorm`). The only epsilon is the one of the norm layer itself.
"""

from torch import Tensor, nn

from hyptree.geometry import Lorentz
from hyptree.nn.point_layer import out_curvature, require_features, require_space
from hyptree.nn.residual import change_curvature


class OnSpace(nn.Module):
    """A Euclidean module applied to the space components, as in ``OnSpace(nn.RMSNorm(64), manifold)``.

    This is ``x -> f(x) sqrt(c_in/c_out)``, the building block that Hypformer and HELM use for norms, activations and
    dropout. Without ``manifold_out`` it does what the module alone does.

    Args:
        module: maps (..., n) to (..., m).
        manifold: where the input lives. manifold_out: where the output lives, by default in the same place.

    Shape:
        x (..., n) -> (..., m)
    """

    def __init__(self, module: nn.Module, manifold: Lorentz, manifold_out: Lorentz | None = None):
        super().__init__()
        require_space("OnSpace", Lorentz, manifold, manifold_out)
        self.module = module
        self.manifold, self.manifold_out = manifold, manifold_out

    def forward(self, x: Tensor) -> Tensor:
        return change_curvature(self.module(x), self.manifold.c, out_curvature(self.manifold, self.manifold_out))


class LorentzBatchNorm(nn.BatchNorm1d):
    """Batch norm of the space components over every axis but the last, for any number of axes.

    ``nn.BatchNorm1d`` reads the second axis of (B, N, n) as the features, which is not where points keep theirs.
    The light version of a hyperbolic batch norm: no Fréchet mean, one pass, running statistics as usual.
    An empty batch in training raises, as it does in torch: it has no statistics.

    Shape:
        x (..., n) -> (..., n)
    """

    def forward(self, x: Tensor) -> Tensor:
        require_features("LorentzBatchNorm", x, self.num_features)
        return super().forward(x.reshape(-1, self.num_features)).reshape(x.shape)
