"""Lorentz distances between all points of two sets: values, softmax, the nearest point; forward and backward.

``reference`` holds the definitions, ``triton``, ``grad`` and ``rows`` the kernels, ``pairs`` the arithmetic of a tile.
The kernels know points by direction and radius alone, so ``hyptree.ops.pairwise_poincare`` uses them too. Second
derivatives are those of the definition.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hyptree.geometry import lorentz, poincare
from hyptree.geometry.core.numerics import Scalar, root
from hyptree.geometry.core.registry import check_curvature
from hyptree.geometry.sets import require_shared_curvature
from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator, operator
from hyptree.ops.derivatives import grads_with_graph, in_transform, wants_graph
from hyptree.ops.pairwise_lorentz import reference
from hyptree.ops.pairwise_lorentz.reference import Mode

__all__ = ["distance_softmax", "nearest", "pairwise_dist", "reference"]

MAX_WIDTH = 256
"""Components of a point; the backward kernel holds a row of each tile whole."""

CHARTS = {("lorentz", False): 0, ("lorentz", True): 1, ("poincare", False): 2, ("poincare", True): 3}
"""How a stored row gives a radius, by model and whether it is a tangent vector at the origin: see ``rows``."""


def _fits(x: Tensor, y: Tensor, backend: str = "auto") -> bool:
    """Whether the kernels run."""
    unsupported = None
    if x.dtype not in KERNEL_DTYPES or y.dtype != x.dtype:
        unsupported = f"{x.dtype} and {y.dtype}, the kernel takes two of float32, bfloat16 or float16"
    elif not 0 < x.shape[-1] <= MAX_WIDTH:
        unsupported = f"points of {x.shape[-1]} components, the kernel takes 1 to {MAX_WIDTH}"
    elif in_transform():
        unsupported = "it is transformed by torch.func, which the kernel does not know"
    return choose(backend, x, unsupported) == "triton"


def pairwise_dist(
    x: Tensor, y: Tensor, c: Scalar = 1.0, *, mode: Mode = "exact", tangent: bool = False, backend: str = "auto"
) -> Tensor:
    """Distances between all points of two sets: (..., N, n), (..., M, n) -> (..., N, M), float32 at least.

    Args:
        x, y: Lorentz points; batch axes broadcast. If ``y is x`` the diagonal is exactly zero.
        c: curvature -c; as a tensor of one value for each pair of sets, (..., 1, 1), it has a gradient.
        mode: as in ``hyptree.geometry.lorentz.pairwise_dist``. The kernel for "exact" multiplies as "matmul" does and
            takes differences in float64 for tiles that hold two points so close (as seen from the origin, within about
            half a radian) that the product would cost digits: data full of close points runs at the speed of those.
            For "matmul" its error is about 3e-7 / (1 - cos) of the angle, three times that of a float32 product.
        tangent: x and y are tangent vectors at the origin; the distances are those of ``expmap0`` of them.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).
    """
    return dist_in(lorentz, x, y, c, mode=mode, tangent=tangent, backend=backend)


def distance_softmax(
    x: Tensor, y: Tensor, c: Scalar = 1.0, *, temperature: float = 1.0, tangent: bool = False, backend: str = "auto"
) -> Tensor:
    """``softmax(-d / temperature)`` over the points of ``y``: (..., N, n), (..., M, n) -> (..., N, M) in float32.

    Distances have the accuracy of mode "matmul"; they are never written, nor are the points of tangent vectors, so
    those are not rounded to half precision in between. Arguments as for :func:`pairwise_dist`.
    """
    return softmax_in(lorentz, x, y, c, temperature=temperature, tangent=tangent, backend=backend)


def nearest(
    x: Tensor, y: Tensor, c: Scalar = 1.0, *, tangent: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The nearest point of ``y`` for each of ``x``: its index (..., N) and distance (..., N); no gradient.

    Distances have the accuracy of mode "exact"; of points equally near to the last digits either may be meant. A point
    of ``y`` that is NaN is nearest to none; a point of ``x`` that is NaN has index 0 and distance NaN.
    """
    return nearest_in(lorentz, x, y, c, tangent=tangent, backend=backend)


# --------------------------------------------------------------------------------------------- both models of the space


def dist_in(
    space: ModuleType, x: Tensor, y: Tensor, c: Scalar = 1.0, *, mode: Mode = "exact", tangent: bool = False,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """:func:`pairwise_dist` in one of the models."""
    name = _check(space, "pairwise_dist", x, y, c)
    if mode not in ("exact", "matmul"):
        raise ValueError(f"{name}: mode must be 'exact' or 'matmul', got {mode!r}")
    if not _fits(x, y, backend):
        return reference.pairwise_dist(x, y, c, mode, tangent, space)
    sets = _Sets(space, x, y, c, tangent)
    return sets.distances(_Distances.apply(*sets.tensors, sets.chart, sets.c, mode == "exact", None))


def softmax_in(
    space: ModuleType, x: Tensor, y: Tensor, c: Scalar = 1.0, *, temperature: float = 1.0, tangent: bool = False,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """:func:`distance_softmax` in one of the models."""
    name = _check(space, "distance_softmax", x, y, c)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"{name}: temperature must be a positive number, got {temperature}")
    if isinstance(c, Tensor) or not _fits(x, y, backend):  # the distances' unit would be part of the temperature
        return reference.distance_softmax(x, y, c, temperature, tangent, space)
    sets = _Sets(space, x, y, c, tangent)
    return sets.result(_Distances.apply(*sets.tensors, sets.chart, sets.c, False, float(temperature)))


def nearest_in(
    space: ModuleType, x: Tensor, y: Tensor, c: Scalar = 1.0, *, tangent: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """:func:`nearest` in one of the models."""
    name = _check(space, "nearest", x, y, c)
    if y.shape[-2] == 0:
        raise ValueError(f"{name}: expected at least one point in y (..., M, n), got shape {tuple(y.shape)}")
    with torch.no_grad():
        if not _fits(x, y, backend):
            return reference.nearest(x, y, c, tangent, space)
        sets = _Sets(space, x, y, c, tangent)
        run = _nearest_operator if needs_operator(x) else _nearest
        index, d = run(sets.tensors[0], sets.tensors[1], sets.chart, sets.c)
        return sets.result(index.unsqueeze(-1)).squeeze(-1), sets.distances(d.unsqueeze(-1)).squeeze(-1)


def _check(space: ModuleType, operation: str, x: Tensor, y: Tensor, c: Scalar) -> str:
    """The name of the operation for messages, after a look at what it was given."""
    name = f"{space.__name__.rsplit('.', 1)[-1]}.{operation}"
    check_curvature(c, name)
    require_shared_curvature(name, c)
    for key, value in (("x", x), ("y", y)):
        if value.dim() < 2 or not value.is_floating_point():
            raise ValueError(
                f"{name}: expected points {key} (..., N, n), got {value.dtype} of shape {tuple(value.shape)}"
            )
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"{name}: x has {x.shape[-1]} and y {y.shape[-1]} components; both must agree")
    return name


class _Sets:
    """Two sets of points as the kernels take them: (B, N, n) and (B, M, n), or None for "the same"; c is a number."""

    def __init__(self, space: ModuleType, x: Tensor, y: Tensor, c: Scalar, tangent: bool):
        self.chart = CHARTS[space.__name__.rsplit(".", 1)[-1], tangent]
        is_same = y is x
        self.unit: Scalar | None = None
        if isinstance(c, Tensor):  # as points of curvature 1: the gradient of c is then a sum over rows, not over pairs
            self.unit = unit = root(c.float())
            x = unit * x.float()
            y = x if is_same else unit * y.float()
        self.c = 1.0 if isinstance(c, Tensor) else float(c)
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        self.shape = (*batch, x.shape[-2])
        if not is_same and all(size == 1 for size in y.shape[:-2]) and x.shape[:-2] == batch:  # all rows, one other set
            x, y = x.reshape(1, -1, x.shape[-1]), y.reshape(1, *y.shape[-2:])
        else:
            x, y = (z.expand(*batch, *z.shape[-2:]).reshape(-1, *z.shape[-2:]) for z in (x, y))
        self.tensors = x.contiguous(), None if is_same else y.contiguous()

    def result(self, pairs: Tensor) -> Tensor:
        return pairs.view(*self.shape, pairs.shape[-1])

    def distances(self, pairs: Tensor) -> Tensor:
        # A number is known to the kernel: dividing by one would read and write all distances once more.
        return self.result(pairs) if self.unit is None else self.result(pairs) / self.unit


def _dist(
    x: Tensor, y: Tensor | None, chart: int, c: float, exact: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.pairwise_lorentz import triton

    d, known = triton.pairwise_dist(x, y, chart, c, exact)
    return d, *known


def _softmax(
    x: Tensor, y: Tensor | None, chart: int, c: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from hyptree.ops.pairwise_lorentz import softmax_kernel

    p, log_sums, known = softmax_kernel.distance_softmax(x, y, chart, c, temperature)
    return p, log_sums, *known


def _nearest(x: Tensor, y: Tensor | None, chart: int, c: float) -> tuple[Tensor, Tensor]:
    from hyptree.ops.pairwise_lorentz import nearest_kernel

    return nearest_kernel.nearest(x, y, chart, c)


def _means(p: Tensor, grad: Tensor) -> Tensor:
    from hyptree.ops.pairwise_lorentz import grad as kernels

    return kernels.row_means(p, grad)


def _grad(
    x: Tensor, y: Tensor | None, stats_x: Tensor, stats_y: Tensor, parts_x: Tensor, parts_y: Tensor, grad: Tensor,
    log_sums: Tensor | None, means: Tensor | None, c: float, exact: bool, temperature: float, needs_x: bool,
    needs_y: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.pairwise_lorentz import grad as kernels

    known = stats_x, stats_y, parts_x, parts_y
    return kernels.pairs_grad(x, y, known, grad, log_sums, means, c, exact, temperature, needs_x, needs_y)


_dist_operator = operator("pairwise_dist", _dist)
_softmax_operator = operator("distance_softmax", _softmax)
_nearest_operator = operator("nearest_point", _nearest)
_means_operator = operator("row_means", _means)
_grad_operator = operator("pairs_grad", _grad)


class _Distances(torch.autograd.Function):
    """Distances of all pairs or, with a temperature, the softmax of the negative ones over it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, chart: int, c: float, exact: bool, temperature: float | None
    ) -> Tensor:  # fmt: skip
        p = log_sums = None
        if temperature is None:
            out, *known = (_dist_operator if needs_operator(x) else _dist)(x, y, chart, c, exact)
        else:
            run = _softmax_operator if needs_operator(x) else _softmax
            out, log_sums, *known = run(x, y, chart, c, temperature)
            p = out
        ctx.save_for_backward(x, y, p, log_sums, *known)
        ctx.chart, ctx.c, ctx.exact, ctx.temperature = chart, c, exact, temperature
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, p, log_sums, *known = ctx.saved_tensors
        c, exact, temperature = ctx.c, ctx.exact, ctx.temperature
        if wants_graph():
            space, tangent = (lorentz if ctx.chart < 2 else poincare), ctx.chart % 2 == 1

            def plain(x: Tensor, y: Tensor | None) -> Tensor:
                y = x if y is None else y
                if temperature is None:
                    return reference.pairwise_dist(x, y, c, "exact" if exact else "matmul", tangent, space)
                return reference.distance_softmax(x, y, c, temperature, tangent, space)

            return *grads_with_graph(plain, (x, y), ctx.needs_input_grad[:2], grad), None, None, None, None
        grad = grad.contiguous()
        means = None if p is None else (_means_operator if needs_operator(x) else _means)(p, grad)
        needs_x, needs_y = ctx.needs_input_grad[0], ctx.needs_input_grad[0 if y is None else 1]
        run: Any = _grad_operator if needs_operator(x) else _grad
        to_x, to_y = run(x, y, *known, grad, log_sums, means, c, exact, temperature or 1.0, needs_x, needs_y)
        if y is None:  # one set that is both
            return to_x + to_y, None, None, None, None, None
        return to_x if needs_x else None, to_y if needs_y else None, None, None, None, None
