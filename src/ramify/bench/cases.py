"""The cases of ``ramify bench geometry``: what is computed, on which shapes, by whom, and what it may cost.

An operation is a function that yields cases. To add one, write it beside the others and enter it in :data:`OPERATIONS`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.geometry import Lorentz, Poincare, lorentz, mark_manifold, poincare

from . import definitions as exact
from . import rivals
from .harness import Built, Contender, NotTakingPart, relative_error
from .rivals import Rival

C = 0.8
"""Curvature of all cases; not 1, so that a mistaken convention is seen."""

OURS, COMPILED, GEOOPT, HYPLL = "ours", "compiled", "geoopt", "HypLL"
TWIN, TWIN_COMPILED, TWIN_FUSED = "twin", "twin compiled", "twin fused"

Pass = Literal["forward", "backward", "step"]
PASSES: tuple[Pass, Pass] = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """One line of the table. ``twin`` says in words what the Euclidean twin is."""

    op: str
    shape: str
    kind: Pass
    twin: str
    contenders: Sequence[Contender]
    num_bytes: int
    flops: int = 0
    target: float | None = None


@dataclass
class Maker:
    """Makes random inputs and cases for one device and dtype."""

    device: str
    dtype: torch.dtype
    seed: int
    quick: bool = False
    compile: bool = True
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self._store(torch.randn(*shape, generator=self.generator, dtype=torch.float64) * scale)

    def positive(self, *shape: int) -> Tensor:
        return self._store(torch.rand(*shape, generator=self.generator, dtype=torch.float64) + 0.1)

    def tangent(self, *shape: int) -> Tensor:
        """Vectors of random direction with length 0.1 to 3."""
        return self._store(self._tangent(shape))

    def points(self, *shape: int) -> Tensor:
        """Lorentz points at distance 0.1 to 3 from the origin."""
        return self._store(exact.lorentz_expmap0(self._tangent(shape), C))

    def ball_points(self, *shape: int) -> Tensor:
        """The same in the Poincaré ball."""
        return self._store(exact.poincare_expmap0(self._tangent(shape) / 2, C))

    def _tangent(self, shape: Sequence[int]) -> Tensor:
        v = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        radius = 0.1 + 2.9 * torch.rand(*shape[:-1], 1, generator=self.generator, dtype=torch.float64)
        return F.normalize(v, dim=-1) * radius

    def _store(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype)

    def target(self, most: float | None) -> float | None:
        """The most that ours, compiled, may cost: a matter of real sizes only."""
        return most if self.compile and not self.quick else None

    def size(self, full: tuple[int, ...], quick: tuple[int, ...]) -> tuple[int, ...]:
        return quick if self.quick else full

    # ------------------------------------------------------------------------------------------- cases of functions

    def cases(
        self,
        op: str,
        inputs: Sequence[Tensor],
        definition: Callable[..., Tensor],
        ours: Callable[..., Tensor],
        twin: tuple[str, Callable[..., Tensor]],
        *,
        shape: str = "",
        twin_inputs: Callable[..., Sequence[Tensor]] | None = None,
        geoopt: Rival | None = None,
        hypll: Rival | None = None,
        flops: int = 0,
        target: float | None = None,
    ) -> Iterator[Case]:
        """The forward case and the forward-and-backward case of a function of tensors."""
        doubles = [x.double() for x in inputs]
        twin_name, twin_run = twin
        ways: list[tuple[str, Rival | None, bool]] = [
            (OURS, Rival(lambda: ours), False),
            (COMPILED, Rival(lambda: ours), True),
            (GEOOPT, geoopt, False),
            (HYPLL, hypll, False),
            (TWIN, Rival(lambda: twin_run, twin_inputs or (lambda *x: x)), False),
            (TWIN_COMPILED, Rival(lambda: twin_run, twin_inputs or (lambda *x: x)), True),
        ]
        target = self.target(target)
        with torch.no_grad():
            truth = definition(*doubles, C)
        data, result = sum(x.nbytes for x in inputs), truth.numel() * self.dtype.itemsize
        shape = shape or str(tuple(inputs[0].shape)).replace(" ", "")
        for kind in PASSES:
            if kind == "backward":
                check = self._gradient_check(doubles, definition, truth)
            else:
                check = _Check(truth, None)
            contenders = [
                Contender(name, functools.partial(self._build, way, inputs, check, name, compiled))
                for name, way, compiled in ways
                if self.compile or not compiled
            ]
            if kind == "forward":
                yield Case(op, shape, kind, twin_name, contenders, data + result, flops, target)
            else:
                yield Case(op, shape, kind, twin_name, contenders, 3 * data + 2 * result, 3 * flops, target)

    def _gradient_check(self, doubles: Sequence[Tensor], definition: Callable[..., Tensor], truth: Tensor) -> _Check:
        cotangent = self.normal(*truth.shape)
        leaves = [x.detach().requires_grad_() for x in doubles]
        grads = torch.autograd.grad(definition(*leaves, C), leaves, cotangent.double())
        return _Check(truth, cotangent, grads)

    def _build(self, way: Rival | None, inputs: Sequence[Tensor], check: _Check, name: str, compiled: bool) -> Built:
        if way is None:
            raise NotTakingPart("absent", "has no such operation")
        _require_memory(self.device, way.peak_elements * self.dtype.itemsize, check.cotangent is not None)
        run = way.make()
        if compiled:
            run = torch.compile(run, fullgraph=True, dynamic=False)
        is_twin = name.startswith(TWIN)
        if check.cotangent is None:
            args = [x.detach() for x in way.prepare(*inputs)]
            with torch.no_grad():
                error = None if is_twin else relative_error(way.read(run(*args)), check.truth)
            return Built(_without_grad(run, args), error)
        leaves = [x.detach().requires_grad_() for x in inputs]
        prepared = way.prepare(*leaves)
        error = None
        if not is_twin:
            out = way.read(run(*prepared))
            found = torch.autograd.grad(out, leaves, check.cotangent.to(out.dtype))
            error = max(relative_error(g, e) for g, e in zip(found, check.grads, strict=True))
        args = [x.detach().requires_grad_() for x in prepared]
        return Built(_with_grad(run, args), error)


@dataclass(frozen=True)
class _Check:
    """The right answer, and for the backward pass the cotangent and the right gradients."""

    truth: Tensor
    cotangent: Tensor | None
    grads: Sequence[Tensor] = ()


def _without_grad(run: Callable[..., Tensor], args: Sequence[Tensor]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return run(*args)

    return call


def _with_grad(run: Callable[..., Tensor], args: Sequence[Tensor]) -> Callable[[], object]:
    cotangent = torch.randn_like(run(*args))

    def call() -> object:
        return torch.autograd.grad(run(*args), args, cotangent)

    return call


def _require_memory(device: str, largest: int, backward: bool) -> None:
    """Leave out a contender whose temporaries (about 4 of the largest, 8 for backward) exceed 60 % of free memory."""
    needed = largest * (8 if backward else 4)
    if not needed:
        return
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > 0.6 * free:
        raise NotTakingPart("skipped", f"needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free")


# ------------------------------------------------------------------------------------------------------ row by row

_ROWS = ((64, 49, 32), (65536, 64))
_QUICK_ROWS = (4, 9, 8)


def _row_shapes(make: Maker) -> Sequence[tuple[int, ...]]:
    return (_QUICK_ROWS,) if make.quick else _ROWS


def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


_NORM = ("rms_norm", _rms_norm)
_DISTANCE = ("norm(x-y)", lambda x, y: torch.linalg.vector_norm(x - y, dim=-1))


def lorentz_expmap0(make: Maker) -> Iterator[Case]:
    manifold = functools.partial(rivals.geoopt_lorentz, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        geoopt = Rival(rivals.geoopt_method(manifold, "expmap0"), rivals.tangent0, rivals.space)
        ours = functools.partial(lorentz.expmap0, c=C)
        yield from make.cases(
            "lorentz.expmap0", [make.tangent(*shape)], exact.lorentz_expmap0, ours, _NORM, geoopt=geoopt
        )


def lorentz_logmap0(make: Maker) -> Iterator[Case]:
    manifold = functools.partial(rivals.geoopt_lorentz, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        geoopt = Rival(rivals.geoopt_method(manifold, "logmap0"), functools.partial(rivals.ambient, C), rivals.space)
        ours = functools.partial(lorentz.logmap0, c=C)
        yield from make.cases(
            "lorentz.logmap0", [make.points(*shape)], exact.lorentz_logmap0, ours, _NORM, geoopt=geoopt
        )


def lorentz_dist(make: Maker) -> Iterator[Case]:
    manifold = functools.partial(rivals.geoopt_lorentz, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        geoopt = Rival(rivals.geoopt_method(manifold, "dist"), functools.partial(rivals.ambient, C))
        inputs = [make.points(*shape), make.points(*shape)]
        ours = functools.partial(lorentz.dist, c=C)
        yield from make.cases("lorentz.dist", inputs, exact.lorentz_dist, ours, _DISTANCE, geoopt=geoopt)


def poincare_expmap0(make: Maker) -> Iterator[Case]:
    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    manifold = functools.partial(rivals.geoopt_poincare, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        yield from make.cases(
            "poincare.expmap0",
            [make.tangent(*shape) / 2],
            exact.poincare_expmap0,
            functools.partial(poincare.expmap0, c=C),
            _NORM,
            geoopt=Rival(rivals.geoopt_method(manifold, "expmap0")),
            hypll=Rival(rivals.hypll_expmap0(ball)),
        )


def poincare_logmap0(make: Maker) -> Iterator[Case]:
    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    manifold = functools.partial(rivals.geoopt_poincare, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        yield from make.cases(
            "poincare.logmap0",
            [make.ball_points(*shape)],
            exact.poincare_logmap0,
            functools.partial(poincare.logmap0, c=C),
            _NORM,
            geoopt=Rival(rivals.geoopt_method(manifold, "logmap0")),
            hypll=Rival(rivals.hypll_logmap0(ball)),
        )


def poincare_dist(make: Maker) -> Iterator[Case]:
    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    manifold = functools.partial(rivals.geoopt_poincare, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        yield from make.cases(
            "poincare.dist",
            [make.ball_points(*shape), make.ball_points(*shape)],
            exact.poincare_dist,
            functools.partial(poincare.dist, c=C),
            _DISTANCE,
            geoopt=Rival(rivals.geoopt_method(manifold, "dist")),
            hypll=Rival(rivals.hypll_method(ball, "dist")),
        )


def poincare_mobius_add(make: Maker) -> Iterator[Case]:
    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    manifold = functools.partial(rivals.geoopt_poincare, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        yield from make.cases(
            "poincare.mobius_add",
            [make.ball_points(*shape), make.ball_points(*shape)],
            exact.mobius_add,
            functools.partial(poincare.mobius_add, c=C),
            ("x + y", torch.add),
            geoopt=Rival(rivals.geoopt_method(manifold, "mobius_add")),
            hypll=Rival(rivals.hypll_method(ball, "mobius_add")),
        )


# ----------------------------------------------------------------------------------------------------- sets of points

_SETS = ((64, 49, 16, 32), (16, 196, 196, 64), (1, 2048, 2048, 128))
_QUICK_SETS = ((2, 7, 5, 8),)


def _pairwise(make: Maker, model: str, mode: str, target: float | None) -> Iterator[Case]:
    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    is_lorentz = model == "lorentz"
    geoopt = rivals.geoopt_lorentz if is_lorentz else rivals.geoopt_poincare
    manifold = functools.partial(geoopt, C, make.dtype, make.device)
    draw = make.points if is_lorentz else make.ball_points
    module = lorentz if is_lorentz else poincare
    for b, n, m, d in _QUICK_SETS if make.quick else _SETS:
        geoopt_way = Rival(
            rivals.geoopt_pairwise(manifold),
            functools.partial(rivals.ambient, C) if is_lorentz else lambda *x: x,
            peak_elements=b * n * m * d,
        )
        hypll_way = Rival(rivals.hypll_method(ball, "cdist"), peak_elements=b * n * m * d)
        yield from make.cases(
            f"{model}.pairwise {mode}",
            [draw(b, n, d), draw(b, m, d)],
            exact.lorentz_pairwise if is_lorentz else exact.poincare_pairwise,
            functools.partial(module.pairwise_dist, c=C, mode=mode),
            ("cdist", torch.cdist),
            shape=f"({b},{n},{m},{d})",
            geoopt=geoopt_way,
            hypll=None if is_lorentz else hypll_way,
            flops=2 * b * n * m * d,
            target=target,
        )


def lorentz_pairwise_matmul(make: Maker) -> Iterator[Case]:
    return _pairwise(make, "lorentz", "matmul", 1.3)


def lorentz_pairwise_exact(make: Maker) -> Iterator[Case]:
    return _pairwise(make, "lorentz", "exact", None)


def poincare_pairwise_matmul(make: Maker) -> Iterator[Case]:
    return _pairwise(make, "poincare", "matmul", None)


def poincare_pairwise_exact(make: Maker) -> Iterator[Case]:
    return _pairwise(make, "poincare", "exact", None)


def _weighted_mean(x: Tensor, w: Tensor) -> Tensor:
    return (w.unsqueeze(-1) * x).sum(-2) / w.sum(-1, keepdim=True)


def lorentz_centroid(make: Maker) -> Iterator[Case]:
    shape = make.size((256, 196, 64), (2, 7, 8))
    inputs = [make.points(*shape), make.positive(*shape[:-1])]
    ours = functools.partial(lorentz.centroid, c=C)
    yield from make.cases("lorentz.centroid", inputs, exact.lorentz_centroid, ours, ("weighted mean", _weighted_mean))


def poincare_centroid(make: Maker) -> Iterator[Case]:
    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    manifold = functools.partial(rivals.geoopt_poincare, C, make.dtype, make.device)
    shape = make.size((256, 196, 64), (2, 7, 8))
    yield from make.cases(
        "poincare.centroid",
        [make.ball_points(*shape), make.positive(*shape[:-1])],
        exact.poincare_centroid,
        functools.partial(poincare.centroid, c=C),
        ("weighted mean", _weighted_mean),
        geoopt=Rival(rivals.geoopt_method(manifold, "weighted_midpoint", reducedim=[-2])),
        hypll=Rival(rivals.hypll_centroid(ball)),
    )


# ------------------------------------------------------------------------------------------------------------- layers


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def lorentz_linear(make: Maker) -> Iterator[Case]:
    from ramify import nn

    rows, n, m = make.size((4096, 512, 512), (64, 32, 16))
    yield from make.cases(
        "lorentz.linear",
        [make.points(rows, n), make.normal(m, n, scale=n**-0.5), make.normal(m, scale=n**-0.5), make.normal(m)],
        exact.lorentz_linear,
        functools.partial(nn.lorentz_linear, c=C),
        ("linear", _linear),
        shape=f"{rows}x{n}->{m}",
        twin_inputs=lambda x, weight, weight_time, bias: (x, weight, bias),
        flops=2 * rows * n * m,
        target=1.15,
    )


def lorentz_mlr(make: Maker) -> Iterator[Case]:
    from ramify import nn

    rows, n, k = make.size((4096, 512, 1000), (64, 32, 10))
    yield from make.cases(
        "lorentz.mlr",
        [make.points(rows, n), make.normal(k, n, scale=n**-0.5), make.normal(k, scale=0.5)],
        exact.lorentz_mlr,
        functools.partial(nn.lorentz_mlr, c=C),
        ("linear", _linear),
        shape=f"{rows}x{n}->{k}",
        flops=2 * rows * n * k,
        target=1.5,
    )


def poincare_mlr(make: Maker) -> Iterator[Case]:
    from ramify import nn

    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    rows, n, k = make.size((4096, 512, 1000), (64, 32, 10))
    yield from make.cases(
        "poincare.mlr",
        [make.ball_points(rows, n), make.normal(k, n, scale=n**-0.5), make.normal(k, scale=0.3)],
        exact.poincare_mlr,
        functools.partial(nn.poincare_mlr, c=C),
        ("linear", _linear),
        shape=f"{rows}x{n}->{k}",
        hypll=Rival(rivals.hypll_planes(ball, "hyperplane_dists"), rivals.transposed_weight),
        flops=2 * rows * n * k,
        target=1.5,
    )


def poincare_fc(make: Maker) -> Iterator[Case]:
    from ramify import nn

    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    rows, n, m = make.size((4096, 512, 512), (64, 32, 16))
    # Small weights: an output near the boundary of the ball would be clipped by HypLL, which is not what is timed here.
    yield from make.cases(
        "poincare.fc",
        [make.ball_points(rows, n), make.normal(m, n, scale=0.1 / n), make.normal(m, scale=0.01)],
        exact.poincare_fc,
        functools.partial(nn.poincare_fc, c=C),
        ("linear", _linear),
        shape=f"{rows}x{n}->{m}",
        hypll=Rival(rivals.hypll_planes(ball, "fully_connected"), rivals.transposed_weight),
        flops=2 * rows * n * m,
    )


def lorentz_attention(make: Maker) -> Iterator[Case]:
    from ramify import nn

    b, h, n, d = make.size((8, 8, 512, 64), (1, 2, 24, 8))
    yield from make.cases(
        "lorentz.attention",
        [make.points(b, h, n, d) for _ in range(3)],
        exact.lorentz_attention,
        functools.partial(nn.lorentz_attention, c=C),
        ("sdpa", F.scaled_dot_product_attention),
        shape=f"({b},{h},{n},{d})",
        flops=4 * b * h * n * n * d,
        target=1.3,
    )


# --------------------------------------------------------------------------------------------------------- optimisers

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
        raise NotTakingPart("absent", "has no such operation")
    optimizer, params, read = way(points, grads)
    if name.startswith(TWIN):
        return Built(optimizer if callable(optimizer) else optimizer.step, None)
    optimizer.step()
    # The error of the step itself: the point that it started from would hide it.
    steps = [(read(p.detach()).double() - x, t - x) for p, t, x in zip(params, truth, points, strict=True)]
    error = max(relative_error(found, right) for found, right in steps)
    for group in optimizer.param_groups:
        group["lr"] = _TIMED_LR  # thousands of timed steps must not carry the points away
    return Built(optimizer.step, error)


def _parameters(points: list[Tensor], grads: list[Tensor]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(x.clone()) for x in points]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    return params


def _our_adam(is_lorentz: bool, compiled: bool, points: list[Tensor], grads: list[Tensor]) -> Any:
    from ramify.optim import RiemannianAdam

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


OPERATIONS: dict[str, Callable[[Maker], Iterator[Case]]] = {
    "lorentz.expmap0": lorentz_expmap0,
    "lorentz.logmap0": lorentz_logmap0,
    "lorentz.dist": lorentz_dist,
    "lorentz.pairwise_matmul": lorentz_pairwise_matmul,
    "lorentz.pairwise_exact": lorentz_pairwise_exact,
    "lorentz.centroid": lorentz_centroid,
    "lorentz.linear": lorentz_linear,
    "lorentz.mlr": lorentz_mlr,
    "lorentz.attention": lorentz_attention,
    "lorentz.adam": lorentz_adam,
    "poincare.expmap0": poincare_expmap0,
    "poincare.logmap0": poincare_logmap0,
    "poincare.dist": poincare_dist,
    "poincare.pairwise_matmul": poincare_pairwise_matmul,
    "poincare.pairwise_exact": poincare_pairwise_exact,
    "poincare.mobius_add": poincare_mobius_add,
    "poincare.centroid": poincare_centroid,
    "poincare.mlr": poincare_mlr,
    "poincare.fc": poincare_fc,
    "poincare.adam": poincare_adam,
}
