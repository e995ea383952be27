"""What the layers share: constructor, checks with one clear line, initial weights."""

import math
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from hyptree.geometry import Manifold
from hyptree.geometry.core.numerics import Scalar

Space = TypeVar("Space", bound=Manifold)


def require_features(name: str, x: Tensor, features: int, argument: str = "x") -> None:
    """Raise unless the last axis of ``x`` has ``features`` components."""
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(
            f"{name}: expected {argument} of shape (..., {features}), got {tuple(x.shape)}; "
            "the last axis holds the coordinates of one point, without the time component"
        )


def require_space(name: str, kind: type[Manifold], *manifolds: Manifold | None) -> None:
    """Raise unless every given manifold is of this kind."""
    for manifold in manifolds:
        if manifold is not None and not isinstance(manifold, kind):
            got, expected = type(manifold).__name__, kind.__name__
            raise ValueError(f"{name}: expected a {expected} manifold, got {got}; pass {expected}(c=1.0)")


def out_curvature(manifold: Manifold, manifold_out: Manifold | None) -> Scalar | None:
    """Curvature of the output, or None if it is that of the input."""
    return None if manifold_out is None or manifold_out is manifold else manifold_out.c


def uniform_(parameter: Tensor, fan_in: int, gain: float = 1.0) -> None:
    """Fill with ``U(-b, b)``, ``b = gain / sqrt(fan_in)``, the distribution of ``nn.Linear``."""
    bound = gain / math.sqrt(fan_in) if fan_in > 0 else 0.0
    nn.init.uniform_(parameter, -bound, bound)


class PointLayer(nn.Module, ABC, Generic[Space]):
    """A layer from points with n coordinates to m numbers per point: its sizes, its spaces, its parameters.

    A layer names the ``space`` it is made for and says in ``add_parameters`` what it learns; the rest is here.

    Args:
        in_features: n, without the time component. out_features: m.
        manifold: where the input lives; share one object between layers to share a learned curvature.
        manifold_out: where the output lives, by default the same.
        bias: learn the shift that goes with the weight.
    """

    space: type[Manifold]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        manifold: Space,
        manifold_out: Space | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        require_space(type(self).__name__, self.space, manifold, manifold_out)
        self.in_features, self.out_features, self.has_bias = in_features, out_features, bias
        self.manifold, self.manifold_out = manifold, manifold_out
        self.add_parameters(device=device, dtype=dtype)
        self.reset_parameters()

    @abstractmethod
    def add_parameters(self, **factory: Any) -> None:
        """Register the parameters, not yet drawn; ``factory`` holds the device and the dtype for ``torch.empty``."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw the parameters as at construction."""

    @property
    def c_out(self) -> Scalar | None:
        """Curvature of the output, or None if it is that of the input."""
        return out_curvature(self.manifold, self.manifold_out)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}"
