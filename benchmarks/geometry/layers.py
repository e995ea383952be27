"""Cases of ``hyptree bench geometry``: the layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator

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
        hypll=Rival(rivals.hypll_planes(ball, "hyperplane_dists"), rivals.transposed_weight),
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
        hypll=Rival(rivals.hypll_planes(ball, "fully_connected"), rivals.transposed_weight),
        flops=2 * rows * n * m,
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
