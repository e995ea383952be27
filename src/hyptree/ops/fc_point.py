"""The point whose distances to the hyperplanes of the axes are logits: ``fc_point``, the door of FC layers.

On a CPU the passes over a map are worth more than its arithmetic: blocks of rows go through all of them while they are
in the cache, forward and backward, and neither distances nor logarithms are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.geometry.core.numerics import Scalar, asinh, cap_norm, lorentz_limit, root, sinh
from hyptree.geometry.core.rows import is_eager, on_gpu
from hyptree.ops.affine import affine
from hyptree.ops.derivatives import grads_with_graph, wants_graph
from hyptree.ops.linear import product_then
from hyptree.ops.lorentz_mlr import hyperplane_logits
from hyptree.ops.lorentz_mlr.reference import mlr_logits

_BLOCK = 2**15
"""Numbers of a block of rows: with its five temporaries half of a core's cache."""


def fc_point(
    x: Tensor, matrix: Tensor, time_column: Tensor, scale: Tensor, c: Scalar, c_out: Scalar, in_ball: bool = False
) -> Tensor:
    """``w = sinh(s v) / s_out`` of the logits ``v = hyperplane_logits(x, ...)``, up to the limit of the dtype.

    Args:
        x: (..., n) Lorentz points. matrix, time_column, scale: see ``hyptree.ops.lorentz_mlr``.
        c, c_out: curvatures -c of ``x`` and of the result.
        in_ball: the result as it lies in the Poincaré ball, ``w / (1 + sqrt(1 + c_out |w|^2))``.

    Returns:
        (..., m) points in float32 at least.
    """
    if on_gpu(x):
        fused = product_then(_ball_tail if in_ball else _tail, x, matrix, time_column, scale, c, c_out)
        if fused is not None:
            return fused
    is_learned = isinstance(c_out, Tensor) and (c_out.requires_grad or c_out.numel() != 1)
    if x.device.type == "cpu" and is_eager() and not is_learned:
        product = affine(x, matrix, time_column, None, c)
        rate = scale * root(c.to(scale.dtype).reshape(()) if isinstance(c, Tensor) else c)
        points, is_inside = _Point.apply(product, rate, float(c_out), in_ball)
        if is_inside:  # what is beyond the limit is moved to it, which has another derivative
            return points
    logits = hyperplane_logits(x, matrix, time_column, scale, c)
    s = root(c.to(logits.dtype) if isinstance(c, Tensor) else c)
    return _plain(s * logits, c_out, in_ball)


def _tail(product: Tensor, x: Tensor, time_column: Tensor, scale: Tensor, c: Scalar, c_out: Scalar) -> Tensor:
    """What stands behind the product of the points and the matrix."""
    return _plain(root(c) * mlr_logits(product, x, time_column, scale, c), c_out, in_ball=False)


def _ball_tail(product: Tensor, x: Tensor, time_column: Tensor, scale: Tensor, c: Scalar, c_out: Scalar) -> Tensor:
    return _plain(root(c) * mlr_logits(product, x, time_column, scale, c), c_out, in_ball=True)


def _plain(distances: Tensor, c: Scalar, in_ball: bool) -> Tensor:
    """The definition: the point with these distances, times ``s``, from the hyperplanes of the axes."""
    s = root(c.to(distances.dtype) if isinstance(c, Tensor) else c)
    limit = lorentz_limit(s, distances.dtype)
    points = cap_norm(torch.sinh(distances.clamp(-limit, limit)) / s, sinh(limit) / s)  # type: ignore[arg-type]
    return lorentz.to_poincare(points, c) if in_ball else points


def _blocks(x: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Ranges of the rows of ``x`` (R, m), and five tensors for what is in between."""
    rows = max(1, _BLOCK // x.shape[1])
    spare = [x.new_empty(min(rows, len(x)), x.shape[1]) for _ in range(5)]
    for first in range(0, len(x), rows):
        last = min(first + rows, len(x))
        yield slice(first, last), [tensor[: last - first] for tensor in spare]


def _asinh(x: Tensor, out: Tensor, size: Tensor, rest: Tensor) -> Tensor:
    """``asinh(x)`` into ``out``: ``log1p(|x| + x^2 / (1 + sqrt(1 + x^2)))`` with the sign of ``x``."""
    torch.abs(x, out=size)
    torch.mul(x, x, out=rest)
    torch.add(rest, 1, out=out).sqrt_().add_(1)
    return torch.div(rest, out, out=out).add_(size).log1p_().copysign_(x)


class _Point(torch.autograd.Function):
    """The point of ``rate asinh(product)``, and whether none of its rows is beyond the limit."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, rate: Tensor, c: float, in_ball: bool) -> tuple[Tensor, bool]:
        s, dtype = math.sqrt(c), product.dtype
        rows = product.reshape(-1, product.shape[-1])
        points, times = torch.empty_like(rows), rows.new_empty(len(rows), 1)
        longest = math.cosh(lorentz_limit(s, dtype))
        if in_ball:  # half of the time at which the ball ends
            longest = min(longest, 0.125 / torch.finfo(dtype).eps)
        for block, (distance, size, rest, *_) in _blocks(rows):
            out, t = points[block], times[block]
            _asinh(rows[block], distance, size, rest).mul_(rate)
            # sinh(z) = (e + e / (1 + e)) / 2 with e = exp(|z|) - 1, several times as fast as torch's
            torch.abs(distance, out=size).expm1_()
            torch.add(size, 1, out=rest)
            torch.div(size, rest, out=rest)
            torch.add(size, rest, out=size).mul_(0.5 / s)
            torch.copysign(size, distance, out=out)
            torch.sum(torch.mul(out, out, out=rest), 1, keepdim=True, out=t)
            t.mul_(c).add_(1).sqrt_()
            if not bool((t <= longest).all()):  # or NaN
                return points.view(product.shape), False
            if in_ball:
                out.div_(t + 1)
        ctx.save_for_backward(product, rate, points, times)
        ctx.c, ctx.in_ball = c, in_ball
        return points.view(product.shape), True

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        product, rate, points, times = ctx.saved_tensors
        c, in_ball, needed = ctx.c, ctx.in_ball, ctx.needs_input_grad[:2]
        if wants_graph():
            plain = grads_with_graph(lambda x, k: _plain(k * asinh(x), c, in_ball), (product, rate), needed, grad)
            return *plain, None, None
        rows, grads = (x.reshape(-1, x.shape[-1]) for x in (product, grad))
        to_rows, to_rate = torch.empty_like(rows), torch.zeros_like(rate)
        for block, (slope, size, rest, w, distance) in _blocks(rows):
            x, g, point, t = rows[block], grads[block], points[block], times[block]
            if in_ball:  # y = w / (1 + t) moves less along w than across
                along = torch.mul(point, g, out=rest).sum(1, keepdim=True)
                torch.div(g, t + 1, out=slope).addcmul_(point, (-c * along).div_(t))
                torch.mul(point, t + 1, out=w)
            else:
                slope.copy_(g)
                w.copy_(point)
            # dw = sqrt(1/c + w^2) d(rate asinh(x)), and d asinh(x) = dx / sqrt(1 + x^2)
            slope.mul_(torch.mul(w, w, out=rest).add_(1 / c).sqrt_())
            if needed[1]:
                to_rate += _asinh(x, distance, size, rest).mul_(slope).sum(0)
            torch.mul(x, x, out=rest).add_(1).rsqrt_().mul_(rate)
            torch.mul(slope, rest, out=to_rows[block])
        return to_rows.view(product.shape) if needed[0] else None, to_rate if needed[1] else None, None, None
