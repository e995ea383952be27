"""Cases of ``hyptree bench geometry``: functions of points, row by row and for sets of points."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.geometry import definitions as exact
from benchmarks.geometry import rivals
from benchmarks.geometry.maker import C, Case, Maker
from benchmarks.geometry.rivals import Rival
from hyptree.geometry import lorentz, poincare
from hyptree.ops import pairwise_lorentz, pairwise_poincare

# ------------------------------------------------------------------------------------------------------ row by row

_ROWS = ((64, 32), (8192, 64), (65536, 64))
_GPU_ROWS = ((64, 49, 32), (65536, 64))
_QUICK_ROWS = (4, 9, 8)


def _row_shapes(make: Maker) -> Sequence[tuple[int, ...]]:
    if make.quick:
        return (_QUICK_ROWS,)
    return _GPU_ROWS if make.device == "cuda" else _ROWS


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


def lorentz_expmap(make: Maker) -> Iterator[Case]:
    manifold = functools.partial(rivals.geoopt_lorentz, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        geoopt = Rival(rivals.geoopt_method(manifold, "expmap"), functools.partial(rivals.tangent, C), rivals.space)
        inputs, ours = [make.points(*shape), make.tangent(*shape)], functools.partial(lorentz.expmap, c=C)
        yield from make.cases("lorentz.expmap", inputs, exact.lorentz_expmap, ours, ("x + v", torch.add), geoopt=geoopt)


def lorentz_logmap(make: Maker) -> Iterator[Case]:
    manifold = functools.partial(rivals.geoopt_lorentz, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        geoopt = Rival(rivals.geoopt_method(manifold, "logmap"), functools.partial(rivals.ambient, C), rivals.space)
        inputs, ours = [make.points(*shape), make.points(*shape)], functools.partial(lorentz.logmap, c=C)
        yield from make.cases("lorentz.logmap", inputs, exact.lorentz_logmap, ours, ("x - y", torch.sub), geoopt=geoopt)


def lorentz_transport(make: Maker) -> Iterator[Case]:
    manifold = functools.partial(rivals.geoopt_lorentz, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        prepare = functools.partial(rivals.transported, C)
        geoopt = Rival(rivals.geoopt_method(manifold, "transp"), prepare, rivals.space)
        inputs = [make.points(*shape), make.points(*shape), make.tangent(*shape)]
        ours, twin = functools.partial(lorentz.transport, c=C), ("x + y + v", lambda x, y, v: x + y + v)
        yield from make.cases("lorentz.transport", inputs, exact.lorentz_transport, ours, twin, geoopt=geoopt)


def _poincare_rows(
    make: Maker,
    name: str,
    inputs: Callable[..., Sequence[Tensor]],
    definition: Callable[..., Tensor],
    twin: tuple[str, Callable[..., Tensor]],
    hypll: Callable[[functools.partial[Any]], Callable[[], Callable[..., Tensor]]],
) -> Iterator[Case]:
    """The cases of a function of the ball that geoopt calls by the same name."""
    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    manifold = functools.partial(rivals.geoopt_poincare, C, make.dtype, make.device)
    for shape in _row_shapes(make):
        yield from make.cases(
            f"poincare.{name}",
            inputs(*shape),
            definition,
            functools.partial(getattr(poincare, name), c=C),
            twin,
            geoopt=Rival(rivals.geoopt_method(manifold, name)),
            hypll=Rival(hypll(ball)),
        )


def poincare_expmap0(make: Maker) -> Iterator[Case]:
    def inputs(*shape: int) -> Sequence[Tensor]:
        return [make.tangent(*shape) / 2]

    return _poincare_rows(make, "expmap0", inputs, exact.poincare_expmap0, _NORM, rivals.hypll_expmap0)


def poincare_logmap0(make: Maker) -> Iterator[Case]:
    def inputs(*shape: int) -> Sequence[Tensor]:
        return [make.ball_points(*shape)]

    return _poincare_rows(make, "logmap0", inputs, exact.poincare_logmap0, _NORM, rivals.hypll_logmap0)


def _two_balls(make: Maker) -> Callable[..., Sequence[Tensor]]:
    return lambda *shape: [make.ball_points(*shape), make.ball_points(*shape)]


def poincare_dist(make: Maker) -> Iterator[Case]:
    hypll = functools.partial(rivals.hypll_method, name="dist")
    return _poincare_rows(make, "dist", _two_balls(make), exact.poincare_dist, _DISTANCE, hypll)


def poincare_expmap(make: Maker) -> Iterator[Case]:
    def inputs(*shape: int) -> Sequence[Tensor]:
        point, v = make.ball_points(*shape), make.tangent(*shape)
        return [point, v * exact.gap(point, C) / 2]  # hyperbolic length 0.1 to 3, as everywhere

    return _poincare_rows(make, "expmap", inputs, exact.poincare_expmap, ("x + v", torch.add), rivals.hypll_expmap)


def poincare_logmap(make: Maker) -> Iterator[Case]:
    hypll = functools.partial(rivals.hypll_method, name="logmap")
    return _poincare_rows(make, "logmap", _two_balls(make), exact.poincare_logmap, ("x - y", torch.sub), hypll)


def poincare_mobius_add(make: Maker) -> Iterator[Case]:
    hypll = functools.partial(rivals.hypll_method, name="mobius_add")
    return _poincare_rows(make, "mobius_add", _two_balls(make), exact.mobius_add, ("x + y", torch.add), hypll)


# ----------------------------------------------------------------------------------------------------- sets of points

_SETS = ((64, 49, 16, 32), (16, 196, 196, 64), (1, 2048, 2048, 128))
_GPU_SETS = ((512, 49, 16, 32), (64, 196, 196, 64), (8, 2048, 2048, 128))
_QUICK_SETS = ((2, 7, 5, 8),)


def _sets(make: Maker) -> Sequence[tuple[int, int, int, int]]:
    if make.quick:
        return _QUICK_SETS
    return _GPU_SETS if make.device == "cuda" else _SETS


def _pairwise(make: Maker, model: str, mode: str, target: float | None) -> Iterator[Case]:
    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    is_lorentz = model == "lorentz"
    geoopt = rivals.geoopt_lorentz if is_lorentz else rivals.geoopt_poincare
    manifold = functools.partial(geoopt, C, make.dtype, make.device)
    draw = make.points if is_lorentz else make.ball_points
    module = lorentz if is_lorentz else poincare
    ops = pairwise_lorentz if is_lorentz else pairwise_poincare
    for b, n, m, d in _sets(make):
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
            kernels=functools.partial(ops.pairwise_dist, c=C, mode=mode, backend="triton"),
            wide_result=True,
            flops=2 * b * n * m * d,
            target=target,
        )


def lorentz_pairwise_matmul(make: Maker) -> Iterator[Case]:
    return _pairwise(make, "lorentz", "matmul", 1.0 if make.device == "cuda" else 1.3)


def lorentz_pairwise_exact(make: Maker) -> Iterator[Case]:
    return _pairwise(make, "lorentz", "exact", 1.0 if make.device == "cuda" else None)


def poincare_pairwise_matmul(make: Maker) -> Iterator[Case]:
    return _pairwise(make, "poincare", "matmul", None)


def poincare_pairwise_exact(make: Maker) -> Iterator[Case]:
    return _pairwise(make, "poincare", "exact", None)


def _softmax(make: Maker, model: str) -> Iterator[Case]:
    """From tangent vectors at the origin to the softmax of distances between their points, as one operation."""
    is_lorentz = model == "lorentz"
    expmap0 = exact.lorentz_expmap0 if is_lorentz else exact.poincare_expmap0
    pairwise = exact.lorentz_pairwise if is_lorentz else exact.poincare_pairwise
    ops = pairwise_lorentz if is_lorentz else pairwise_poincare
    for b, n, m, d in _sets(make):
        inputs = [make.tangent(b, size, d) if is_lorentz else make.tangent(b, size, d) / 2 for size in (n, m)]
        yield from make.cases(
            f"{model}.softmax",
            inputs,
            lambda x, y, c: torch.softmax(-pairwise(expmap0(x, c), expmap0(y, c), c), -1),
            functools.partial(ops.distance_softmax, c=C, tangent=True, backend="torch"),
            ("cdist softmax", lambda x, y: torch.softmax(-torch.cdist(x, y), -1)),
            shape=f"({b},{n},{m},{d})",
            kernels=functools.partial(ops.distance_softmax, c=C, tangent=True, backend="triton"),
            wide_result=True,
            flops=2 * b * n * m * d,
        )


def lorentz_distance_softmax(make: Maker) -> Iterator[Case]:
    return _softmax(make, "lorentz")


def poincare_distance_softmax(make: Maker) -> Iterator[Case]:
    return _softmax(make, "poincare")


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
