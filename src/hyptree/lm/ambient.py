"""The linear map of HELM, of points by their space components, and what kernels read of it.

A point is its n space components ``s``; its time ``t = sqrt(|s|^2 + 1/c)`` is derived, in float32 at least, from the
already rounded ``s``. Kernels multiply rows ``[s, t, 1, 0, ...]`` by one aligned matrix, and its gradient is that of
all three parts of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.ops import pack_weight
from hyptree.ops.bare import readable
from hyptree.ops.residual_norm.reference import aligned as aligned
from hyptree.ops.residual_norm.reference import padded_width as padded_width
from hyptree.ops.rounding import gemm_dtype, rounded, wide

Cached = TypeVar("Cached")

UNIT_WEIGHT = math.log(math.expm1(1.0))
"""The raw weight of a residual at which ``w = 1``, where training starts."""


class WeightCache:
    """A tensor made from a layer's parameters, kept inside :func:`constant_weights` of its model and nowhere else."""

    def __init__(self) -> None:
        self.is_open = False
        self._key: Any = None
        self._value: Any = None

    def __reduce__(self) -> Any:
        return WeightCache, ()  # a copy of the layer has other parameters

    def get(self, key: Any, make: Callable[[], Cached]) -> Cached:
        """What ``make`` makes for ``key``, perhaps made earlier."""
        if not self.is_open or torch.is_grad_enabled():
            return make()
        if self._key != key:
            if torch.compiler.is_compiling():
                return make()
            self._key, self._value = key, make()
            mark_static(self._value)
        value: Cached = self._value
        return value


@contextmanager
def constant_weights(model: nn.Module) -> Iterator[None]:
    """Inside, no weight of ``model`` changes: what its layers have made of their weights they give again.

    ``generate`` does so: on a GPU a step with one token would otherwise cast and pad every weight. Compiled code cannot
    fill a cache: it takes what an uncompiled pass inside has left there.
    """
    caches = [x for module in model.modules() for x in vars(module).values() if isinstance(x, WeightCache)]
    closed = [cache for cache in caches if not cache.is_open]
    for cache in closed:
        cache.is_open = True
    try:
        yield
    finally:
        for cache in closed:
            cache.__init__()  # type: ignore[misc]


def mark_static(value: Any) -> None:
    """Tell CUDA graphs that tensors stay where they are, as parameters do. Others are copied before each replay, and
    where the code writes into others there is no graph at all.
    """
    for tensor in value if isinstance(value, tuple) else (value,):
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            torch._dynamo.mark_static_address(tensor)


class GainFactors(NamedTuple):
    """Factors on the initialisation gain of a linear map's weight and of its column of the time."""

    weight: float = 1.0
    time: float = 1.0


GAIN_FACTORS = {"xavier": GainFactors(), "small": GainFactors(0.25, 0.0)}
"""What ``HelmConfig.initializer`` may name.

"xavier" is published. Behind a norm the time of all tokens is the same, so its column adds one vector to all of them,
about half of what a map gives at first, and the first branches drown the embedding. "small" has neither.
"""


@readable
class AmbientLinear(nn.Linear):
    """``W [t; s] + b`` of points by their space components: (..., n) -> (..., m).

    Args:
        in_features: n, space components of the input. out_features: m.
        bias: learn b.
        c: curvature -c of the points.
        points: the input is this many points side by side with n/points components each, every one with its own time
            (the heads of attention).
        point_width: columns of :meth:`matrix` for one of several points, by default ``aligned(n/points + 1)``.
        row_groups: (groups, rows, padded_rows) with ``groups rows = m``: :meth:`matrix` has ``padded_rows`` rows per
            group, the last of them zero, so that its product has room in which a kernel writes the time.
        fused: how many projections lie on top of each other; each is drawn as if alone.
    """

    PARAMETER_MARKS: ClassVar = {"weight_time": (False, 1.0)}
    """For optimisers: it belongs to the matrix, and is decayed as such, although it is a vector here."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        c: float = 1.0,
        points: int = 1,
        point_width: int | None = None,
        row_groups: tuple[int, int, int] | None = None,
        fused: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        nn.Module.__init__(self)  # that of nn.Linear would draw
        self.gain_factors = GainFactors()
        if in_features % points:
            raise ValueError(f"AmbientLinear: {in_features} components do not make {points} points of equal size")
        if row_groups is not None and (row_groups[0] * row_groups[1] != out_features or row_groups[2] < row_groups[1]):
            raise ValueError(
                f"AmbientLinear: row_groups {row_groups} must be (groups, rows, padded_rows) with groups * rows = "
                f"{out_features} and padded_rows >= rows"
            )
        self.in_features, self.out_features, self.c = in_features, out_features, c
        self.points, self.fused = points, fused
        if point_width is None:
            point_width = padded_width(in_features // points, bias and points == 1)
        self.layout = pack_weight.Layout(*(row_groups or (1, out_features, out_features)), points, point_width)
        factory = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        time_shape = (out_features,) if points == 1 else (out_features, points)
        self.weight_time = nn.Parameter(torch.empty(time_shape, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **factory)) if bias else None)
        self._weight_cache = WeightCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, time column included, as Xavier uniform with gain sqrt(2) does, times factors; bias 0."""
        fan = self.out_features // self.fused + self.in_features + self.points
        bound = math.sqrt(2.0) * math.sqrt(6.0 / fan)
        for parameter, gain in ((self.weight, self.gain_factors.weight), (self.weight_time, self.gain_factors.time)):
            nn.init.uniform_(parameter, -gain * bound, gain * bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        s = input.to(gemm_dtype(input))
        time = torch.sqrt(wide(s).unflatten(-1, (self.points, -1)).square().sum(-1) + 1 / self.c)  # (..., points)
        column = self.weight_time.view(self.out_features, self.points)
        return F.linear(s, self.weight, self.bias) + F.linear(time.to(s.dtype), column)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """What kernels read of a bare layer: (rows, width) in ``dtype`` for lifted rows, with the bias of one point.

        The rows are ``[s, t, 1, 0, ...]``, or ``[s_1, t_1, 0.., s_2, t_2, 0.., ...]`` for several points, whose bias is
        not in the matrix.
        """
        bias = self.bias if self.points == 1 else None
        return self._weight_cache.get(
            dtype, lambda: pack_weight.pack_weight(self.weight, self.weight_time, bias, self.layout, dtype)
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, c={self.c:g}, points={self.points}"


def lift_padded(s: Tensor, n: int, dtype: torch.dtype, c: Any = 1.0, bias: bool = True) -> Tensor:
    """``[s, t, 1, 0, ...]`` of rows that have their width: (..., width) whose columns from n on are 0 -> (..., width).

    Args:
        s: rows in float32 at least, not yet rounded. n: the number of space components. dtype: of the result.
    """
    point = rounded(s, dtype)
    column = torch.arange(point.shape[-1], device=point.device)
    filled = torch.where(column == n, torch.sqrt(point.square().sum(-1, keepdim=True) + 1 / c), point)
    if bias:
        filled = torch.where(column == n + 1, 1.0, filled)
    return filled.to(dtype)
