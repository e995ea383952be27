"""Cases of ``hyptree bench geometry``: one step of an optimiser."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.geometry import definitions as exact
from benchmarks.geometry import rivals
from benchmarks.geometry.maker import COMPILED, GEOOPT, HYPLL, OURS, TWIN, TWIN_COMPILED, TWIN_FUSED, C, Case, Maker
from benchmarks.harness import Built, Contender, Skipped, relative_error
from hyptree.geometry import Lorentz, Poincare, mark_manifold

_CHECK_LR, _TIMED_LR = 0.1, 1e-4


def _adam(make: Maker, model: str) -> Iterator[Case]:
    is_lorentz = model == "lorentz"
    draw = make.points if is_lorentz else make.ball_points
    definition = exact.lorentz_adam if is_lorentz else exact.poincare_adam
    table, small, count = make.size((10_000, 64), (50, 8)), make.size((32, 16), (4, 8)), 5 if make.quick else 50
    for shape, shapes in ((f"{table[0]}x{table[1]}", [table]), (f"{count} of {small[0]}x{small[1]}", [small] * count)):
        points = [draw(*size) for size in shapes]
        grads = [make.normal(*size) for size in shapes]
        truth = [definition(x.double(), g.double(), _CHECK_LR, C) for x, g in zip(points, grads, strict=True)]
        ways = [
            (OURS, functools.partial(_our_adam, is_lorentz, False)),
            (COMPILED, functools.partial(_our_adam, is_lorentz, True)),
            (GEOOPT, functools.partial(_geoopt_adam, make, is_lorentz)),
            (HYPLL, None if is_lorentz else functools.partial(_hypll_adam, make)),
            (TWIN, functools.partial(_torch_adam, "plain")),
            (TWIN_FUSED, functools.partial(_torch_adam, "fused")),
            (TWIN_COMPILED, functools.partial(_torch_adam, "compiled")),
        ]
        contenders = [
            Contender(name, functools.partial(_build_adam, way, points, grads, truth, name))
            for name, way in ways
            if make.compile or name not in (COMPILED, TWIN_COMPILED)
        ]
        elements = sum(x.nbytes for x in points)
        # Point, gradient and first moment are read, point and moment written; the second moment is one number per row.
        yield Case(f"{model}.adam", shape, "step", "Adam", contenders, 5 * elements, target=make.target(3.0))


def _build_adam(way: Any, points: list[Tensor], grads: list[Tensor], truth: list[Tensor], name: str) -> Built:
    if way is None:
        raise Skipped("absent", "has no such operation")
    optimizer, params, read = way(points, grads)
    if name.startswith(TWIN):
        return Built(optimizer if callable(optimizer) else optimizer.step, None)
    optimizer.step()
    actual = [read(p.detach()) for p in params]
    error = max(step_error(f, t, x) for f, t, x in zip(actual, truth, points, strict=True))
    for group in optimizer.param_groups:
        group["lr"] = _TIMED_LR  # thousands of timed steps must not carry the points away
    return Built(optimizer.step, error)


def step_error(actual: Tensor, truth: Tensor, start: Tensor) -> float:
    """Error of a step, of its own size and beyond what rounding the exact result to the stored dtype costs.

    Of the step, as the point that it started from would hide it. Beyond the rounding, as the dtype may hold no better
    answer: a step of 0.1 from radius 3 moves a coordinate of the ball by a few bfloat16 numbers, so the exact step,
    correctly rounded, is already a fifth of the mean step away from itself.
    """
    if actual.shape != truth.shape:
        return math.inf
    rounding = (truth.to(start.dtype).double() - truth).abs()
    beyond = ((actual.double() - truth).abs() - rounding).clamp_min(0)
    return relative_error(truth - start + beyond, truth - start)


def _parameters(points: list[Tensor], grads: list[Tensor]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(x.clone()) for x in points]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    return params


def _our_adam(is_lorentz: bool, compiled: bool, points: list[Tensor], grads: list[Tensor]) -> Any:
    from hyptree.optim import RiemannianAdam

    manifold = Lorentz(C) if is_lorentz else Poincare(C)
    params = [mark_manifold(p, manifold) for p in _parameters(points, grads)]
    return RiemannianAdam(params, lr=_CHECK_LR, compile=compiled), params, lambda x: x


def _geoopt_adam(make: Maker, is_lorentz: bool, points: list[Tensor], grads: list[Tensor]) -> Any:
    if is_lorentz:
        manifold = rivals.geoopt_lorentz(C, make.dtype, make.device)
        starts = list(rivals.ambient(C, *points))
        ambient_grads = [rivals.tangent0(g)[0] for g in grads]  # the loss does not look at the time
        return *rivals.geoopt_adam(manifold, starts, ambient_grads, _CHECK_LR), rivals.space
    manifold = rivals.geoopt_poincare(C, make.dtype, make.device, exact=True)  # the other one steps along a chord
    return *rivals.geoopt_adam(manifold, points, grads, _CHECK_LR), lambda x: x


def _hypll_adam(make: Maker, points: list[Tensor], grads: list[Tensor]) -> Any:
    return *rivals.hypll_adam(rivals.hypll_ball(C, make.dtype, make.device), points, grads, _CHECK_LR), lambda x: x


def _torch_adam(kind: str, points: list[Tensor], grads: list[Tensor]) -> Any:
    params = _parameters(points, grads)
    lr = torch.tensor(_TIMED_LR) if kind == "compiled" else _TIMED_LR
    optimizer = torch.optim.Adam(params, lr=lr, fused=True if kind == "fused" else None)
    return torch.compile(optimizer.step) if kind == "compiled" else optimizer, params, None


def lorentz_adam(make: Maker) -> Iterator[Case]:
    return _adam(make, "lorentz")


def poincare_adam(make: Maker) -> Iterator[Case]:
    return _adam(make, "poincare")
