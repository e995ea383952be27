"""Cases of ``hyptree bench geometry``: the layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.geometry import definitions as exact
from benchmarks.geometry import rivals
from benchmarks.geometry.maker import C, Case, Maker
from benchmarks.geometry.rivals import Rival


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def lorentz_linear(make: Maker) -> Iterator[Case]:
    from hyptree import nn

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
    from hyptree import nn

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
    from hyptree import nn

    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    rows, n, k = make.size((4096, 512, 1000), (64, 32, 10))
    yield from make.cases(
        "poincare.mlr",
        [make.ball_points(rows, n), make.normal(k, n, scale=n**-0.5), make.normal(k, scale=0.3)],
        exact.poincare_mlr,
        functools.partial(nn.poincare_mlr, c=C),
        ("linear", _linear),
        shape=f"{rows}x{n}->{k}",
        hypll=Rival(rivals.hypll_planes(ball, "hyperplane_dists"), rivals.transposed_weights),
        flops=2 * rows * n * k,
        target=1.5,
    )


def poincare_fc(make: Maker) -> Iterator[Case]:
    from hyptree import nn

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
        hypll=Rival(rivals.hypll_planes(ball, "fully_connected"), rivals.transposed_weights),
        flops=2 * rows * n * m,
    )


def _chain(layer: Callable[..., Tensor], relu: Callable[[Tensor], Tensor], width: int) -> Callable[..., Tensor]:
    """Three layers with ``relu`` between, each with ``width`` parameters of its own behind ``x``."""

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        for first in range(0, 3 * width, width):
            x = layer(relu(x) if first else x, *parameters[first : first + width])
        return x

    return run


def _exact_chain(layer: Callable[..., Tensor], relu: Callable[..., Tensor], width: int) -> Callable[..., Tensor]:
    """The same of definitions, which take the curvature last."""

    def run(*inputs: Any) -> Tensor:
        *tensors, c = inputs
        return _chain(functools.partial(layer, c=c), functools.partial(relu, c=c), width)(*tensors)

    return run


def lorentz_mlp(make: Maker) -> Iterator[Case]:
    """Three layers of 512; an activation acts on the space components."""
    from hyptree import nn

    rows, n = make.size((4096, 512), (64, 32))
    parameters = [
        x for _ in range(3) for x in (make.normal(n, n, scale=n**-0.5), make.normal(n, scale=n**-0.5), make.normal(n))
    ]
    yield from make.cases(
        "lorentz.mlp",
        [make.points(rows, n), *parameters],
        _exact_chain(exact.lorentz_linear, lambda x, c: x.relu(), 3),
        _chain(functools.partial(nn.lorentz_linear, c=C), F.relu, 3),
        ("mlp", _chain(_linear, F.relu, 2)),
        shape=f"{rows}x{n}, 3 layers",
        twin_inputs=lambda x, *rest: (x, *(rest[i] for i in (0, 2, 3, 5, 6, 8))),
        flops=6 * rows * n * n,
    )


def poincare_mlp(make: Maker) -> Iterator[Case]:
    """Three layers of 512 as of HypLL's users; an activation acts on tangent vectors at the origin."""
    from hyptree import nn
    from hyptree.geometry import poincare

    ball = functools.partial(rivals.hypll_ball, C, make.dtype, make.device)
    rows, n = make.size((4096, 512), (64, 32))
    parameters = [x for _ in range(3) for x in (make.normal(n, n, scale=0.1 / n), make.normal(n, scale=0.01))]

    def exact_relu(x: Tensor, c: float) -> Tensor:
        return exact.poincare_expmap0(exact.poincare_logmap0(x, c).relu(), c)

    def relu(x: Tensor) -> Tensor:
        return poincare.expmap0(poincare.logmap0(x, C).relu(), C)

    yield from make.cases(
        "poincare.mlp",
        [make.ball_points(rows, n), *parameters],
        _exact_chain(exact.poincare_fc, exact_relu, 2),
        _chain(functools.partial(nn.poincare_fc, c=C), relu, 2),
        ("mlp", _chain(_linear, F.relu, 2)),
        shape=f"{rows}x{n}, 3 layers",
        hypll=Rival(rivals.hypll_mlp(ball), rivals.transposed_weights),
        flops=6 * rows * n * n,
    )


def lorentz_attention(make: Maker) -> Iterator[Case]:
    from hyptree import nn

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
