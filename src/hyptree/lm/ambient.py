"""What every block of a HELM does with points: lift, linear map, norm, residual, each one pass over its input.

A point is its n space components ``s``; its time ``t = sqrt(|s|^2 + 1/c)`` is derived, in float32 at least, from the
already rounded ``s``. A linear map reads the row ``[s, t, 1, 0, ...]``: one aligned matrix product then gives
``W [t; s] + b``, and its backward gives the gradients of all three parts of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry.core.numerics import Scalar, sqnorm
from hyptree.nn.precision import gemm_dtype, like
from hyptree.ops import pack_weight
from hyptree.ops.residual_norm.reference import residual as residual  # one definition, beside its kernel
from hyptree.ops.residual_norm.reference import rms_norm as rms_norm
from hyptree.ops.rounding import rounded, wide

Cached = TypeVar("Cached")

_ALIGN = 8
"""Columns of a row are padded to a multiple of this: 16 bytes of bfloat16, what fast matrix products read at once."""


def aligned(width: int) -> int:
    """``width`` rounded up to a multiple of 8."""
    return -(-width // _ALIGN) * _ALIGN


def padded_width(n: int, bias: bool = True) -> int:
    """Columns of a lifted point with n space components: n, the time, the one for the bias, zeros up to 8 k."""
    return aligned(n + 1 + int(bias))


def time_of(s: Tensor, c: Scalar = 1.0) -> Tensor:
    """The times ``sqrt(|s|^2 + 1/c)`` of points: (..., n) -> (..., 1), float32 at least."""
    s = wide(s)
    return torch.sqrt(sqnorm(s) + 1 / like(c, s))


def lift(s: Tensor, c: Scalar = 1.0, width: int | None = None, bias: bool = True) -> Tensor:
    """``[s, t, 1, 0, ...]``, what an :class:`AmbientLinear` reads: (..., n) -> (..., width).

    Args:
        s: (..., n) points. c: curvature -c, a float or a tensor that broadcasts against (..., 1).
        width: columns of the result; ``padded_width(n, bias)`` if None.
        bias: put a one behind the time.

    Returns:
        (..., width) in the dtype of the matrix product: bfloat16 inside autocast, else that of ``s``.
    """
    n = s.shape[-1]
    width = padded_width(n, bias) if width is None else width
    if width < n + 1 + int(bias):
        raise ValueError(f"lift: width {width} is too small for {n} components, time and bias={bias}; leave it out")
    dtype = gemm_dtype(s)
    point = rounded(s, dtype)
    tail = time_of(point, c)
    if bias:
        tail = F.pad(tail, (0, 1), value=1.0)
    tail = F.pad(tail, (0, width - n - tail.shape[-1]))
    return torch.cat([point.to(dtype), tail.to(dtype)], -1)


def lift_padded(s: Tensor, n: int, dtype: torch.dtype, c: Scalar = 1.0, bias: bool = True) -> Tensor:
    """:func:`lift` of rows that already have their width: (..., width) whose columns from n on are 0 -> (..., width).

    For what comes out of an :class:`AmbientLinear` with ``row_groups``: no row changes its length, so that a compiler
    makes one kernel of this and of whatever made ``s``.

    Args:
        s: rows in float32 at least, not yet rounded. n: the number of space components. dtype: of the result.
    """
    point = rounded(s, dtype)
    column = torch.arange(point.shape[-1], device=point.device)
    filled = torch.where(column == n, time_of(point, c), point)
    if bias:
        filled = torch.where(column == n + 1, 1.0, filled)
    return filled.to(dtype)


UNIT_WEIGHT = math.log(math.expm1(1.0))
"""The ``raw_weight`` of :func:`residual` at which ``w = 1``, where training starts."""


_weights_are_constant = False
_filled: list[WeightCache] = []
"""Caches with something in them; only ever inside :func:`constant_weights`."""


@contextmanager
def constant_weights() -> Iterator[None]:
    """Inside, no weight changes: what a :class:`WeightCache` has made it gives again. ``generate`` does so.

    A step with one token would otherwise cast and pad every weight of the model. Compiled code cannot fill a cache:
    it takes what an uncompiled pass inside has left there.
    """
    global _weights_are_constant
    before, _weights_are_constant = _weights_are_constant, True
    try:
        yield
    finally:
        _weights_are_constant = before
        while not before and _filled:
            _filled.pop().clear()


class WeightCache:
    """A tensor made from parameters, kept inside :func:`constant_weights` and nowhere else."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget it."""
        self._key: Any = None
        self._value: Any = None

    def get(self, key: Any, make: Callable[[], Cached]) -> Cached:
        """What ``make`` makes for ``key``, perhaps made earlier."""
        if not _weights_are_constant or torch.is_grad_enabled():
            return make()
        if self._key != key:
            if torch.compiler.is_compiling():
                return make()
            self._key, self._value = key, make()
            mark_static(self._value)
            _filled.append(self)
        value: Cached = self._value
        return value


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


class AmbientLinear(nn.Module):
    """``W [t; s] + b`` for lifted points, one aligned matrix product: (..., width) -> (..., m).

    Args:
        in_features: n, space components of the input. out_features: m.
        bias: learn b.
        points: the input is this many points side by side with n/points components each, every one with its own time
            (the heads of attention); ``lifted`` is then ``[s_1, t_1, 0.., s_2, t_2, 0.., ...]`` with ``point_width``
            columns each, and no one for the bias, which is added in the product's epilogue.
        point_width: columns of one of several points, by default ``aligned(n/points + 1)``.
        row_groups: (groups, rows, padded_rows) with ``groups rows = m``: the output has ``padded_rows`` columns per
            group, the last of them zero, room in which a lift writes the time.
        fused: how many projections lie on top of each other; each is drawn as if alone.

    Shape:
        lifted (..., width) -> (..., m), or (..., groups padded_rows)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        points: int = 1,
        point_width: int | None = None,
        row_groups: tuple[int, int, int] | None = None,
        fused: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.gain_factors = GainFactors()
        if in_features % points:
            raise ValueError(f"AmbientLinear: {in_features} components do not make {points} points of equal size")
        if row_groups is not None and (row_groups[0] * row_groups[1] != out_features or row_groups[2] < row_groups[1]):
            raise ValueError(
                f"AmbientLinear: row_groups {row_groups} must be (groups, rows, padded_rows) with groups * rows = "
                f"{out_features} and padded_rows >= rows"
            )
        self.in_features, self.out_features, self.points, self.fused = in_features, out_features, points, fused
        self.row_groups = row_groups
        size = in_features // points
        if points == 1:
            self.point_width = padded_width(size, bias) if point_width is None else point_width
        else:
            self.point_width = aligned(size + 1) if point_width is None else point_width
        factory = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        time_shape = (out_features,) if points == 1 else (out_features, points)
        self.weight_time = nn.Parameter(torch.empty(time_shape, **factory))
        self.bias = nn.Parameter(torch.empty(out_features, **factory)) if bias else None
        # The column of the time belongs to the matrix, and is decayed as such, although it is a vector here.
        self.weight_time._no_weight_decay = False  # type: ignore[attr-defined]
        self._weight_cache = WeightCache()
        self.reset_parameters()

    @property
    def width(self) -> int:
        """Columns of the input."""
        return self.points * self.point_width

    def reset_parameters(self) -> None:
        """Draw the weight, time column included, as Xavier uniform with gain sqrt(2) does, times factors; bias 0."""
        fan = self.out_features // self.fused + self.in_features + self.points
        bound = math.sqrt(2.0) * math.sqrt(6.0 / fan)
        for parameter, gain in ((self.weight, self.gain_factors.weight), (self.weight_time, self.gain_factors.time)):
            nn.init.uniform_(parameter, -gain * bound, gain * bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def padded(self, dtype: torch.dtype | None = None) -> Tensor:
        """The whole map as one matrix (rows, width) in ``dtype``, columns in the order of the lifted input."""
        bias = self.bias if self.points == 1 else None
        dtype = self.weight.dtype if dtype is None else dtype
        full = pack_weight.pack_weight(self.weight, self.weight_time, bias, self.layout, dtype)
        return full if self.row_groups is not None else self._pad_rows(full)

    @property
    def layout(self) -> pack_weight.Layout:
        """Where rows and columns of the matrix lie."""
        groups, rows, padded_rows = self.row_groups or (1, self.out_features, self.out_features)
        return pack_weight.Layout(groups, rows, padded_rows, self.points, self.point_width)

    def _pad_rows(self, full: Tensor) -> Tensor:
        if self.row_groups is None:
            return full
        groups, rows, padded_rows = self.row_groups
        grouped = full.unflatten(0, (groups, rows))
        return F.pad(grouped, (0,) * (2 * full.dim() - 1) + (padded_rows - rows,)).flatten(0, 1)

    def _epilogue(self, dtype: torch.dtype) -> Tensor | None:
        """The bias that is not a column of the matrix."""
        if self.bias is None or self.points == 1:
            return None
        return self._pad_rows(self.bias.to(dtype))

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """:meth:`padded` and the bias of the epilogue."""
        return self._weight_cache.get(dtype, lambda: (self.padded(dtype), self._epilogue(dtype)))

    def forward(self, lifted: Tensor) -> Tensor:
        if lifted.shape[-1] != self.width:
            raise ValueError(
                f"AmbientLinear: expected lifted points of shape (..., {self.width}), got {tuple(lifted.shape)}; "
                "lift(s, c) makes them"
            )
        weight, bias = self.matrices(lifted.dtype)
        return F.linear(lifted, weight, bias)

    def extra_repr(self) -> str:
        points = "" if self.points == 1 else f", points={self.points}"
        rows = "" if self.row_groups is None else f", row_groups={self.row_groups}"
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}{points}{rows}"
