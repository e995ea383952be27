"""What ``hyptree bench kernels`` computes: per operation of ``hyptree.ops`` fresh inputs at the shapes that matter.

An operation's function gives jobs; a job knows its name at once and draws its inputs when it is its turn. To add one,
write it beside its like and enter it in :data:`JOBS` of ``language.py``. Shapes of HCFormer are those of the
nano and medium models at batch 128 and 224 pixels (a test holds them to the models).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry import lorentz, poincare
from hyptree.ops import (
    fold_norm,
    gelu_grad,
    lorentz_mlr,
    map_norm,
    pairwise_lorentz,
    pairwise_poincare,
    project_levels,
)
from hyptree.ops.cluster_map import reference as plain_cluster
from hyptree.ops.cluster_map.kernels import cluster_patch, cluster_window
from hyptree.ops.pairwise_lorentz import reference as plain_pairs
from hyptree.ops.windows import Cut

C = 0.8
"""Curvature of all jobs; not 1, so that a mistaken convention is seen."""

BF16, FP32 = torch.bfloat16, torch.float32

Outputs = tuple[Tensor, ...]


@dataclass
class Work:
    """One operation on drawn inputs, by its definition and by its kernels.

    Attributes:
        definition, kernel: from ``inputs`` to results; they work on float64 as well, or in place.
        leaves: places of the inputs that have a gradient; none where the operation has no backward.
        kernel_grad: (inputs, results, cotangents) to gradients of the leaves, for operations without autograd.
        gives_again: the backward kernel writes the results once more, which counts as bytes.
        rival: the Euclidean operation in its place, from the same inputs, in words and as a function.
        flops: of the matrix products forward; a backward has twice as many.
        scales: sizes of the cotangents, 1 where nothing is said.
        compiles: whether torch.compile can take the definition.
        seen: what of the results is compared, where it is not they themselves.
        most_of_rival, most_of_bytes: promised forward, as a multiple of the rival's time and of that of the bytes.
    """

    inputs: tuple[Tensor | None, ...]
    definition: Callable[..., Outputs]
    kernel: Callable[..., Outputs]
    leaves: tuple[int, ...] = ()
    kernel_grad: Callable[[Sequence[Any], Outputs, Outputs], Sequence[Tensor | None]] | None = None
    gives_again: bool = False
    rival: tuple[str, Callable[..., Any]] | None = None
    flops: int = 0
    scales: tuple[float, ...] = ()
    compiles: bool = True
    seen: Callable[[Outputs], Outputs] | None = None
    most_of_rival: float | None = None
    most_of_bytes: float | None = None

    def __post_init__(self) -> None:
        self.leaves = tuple(place for place in self.leaves if self.inputs[place] is not None)


@dataclass(frozen=True)
class Job:
    """A line of the table before it is measured."""

    op: str
    form: str
    shape: str
    dtype: torch.dtype
    make: Callable[[], Work] = field(compare=False)

    @property
    def name(self) -> str:
        form = f" {self.form}" if self.form else ""
        return f"{self.op}{form} {self.shape} {str(self.dtype).removeprefix('torch.')}"


class Draw:
    """Fresh random inputs on a device; on ``meta`` their shapes alone."""

    def __init__(self, device: str, seed: int, quick: bool = False):
        self.device, self.quick = device, quick
        # Not the seed itself: torch has it, and cotangents that torch draws would be the inputs once more.
        self.generator = None if device == "meta" else torch.Generator(device).manual_seed(seed ^ 0x2A2A2A2A)

    def normal(self, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
        x = torch.empty(shape, device=self.device)
        return (x if self.generator is None else x.normal_(generator=self.generator) * scale).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = FP32) -> Tensor:
        x = torch.empty(shape, device=self.device)
        return (x if self.generator is None else x.uniform_(low, high, generator=self.generator)).to(dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        if self.generator is None:
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        return torch.randint(0, high, shape, generator=self.generator, device=self.device)

    def order(self, count: int) -> Tensor:
        if self.generator is None:
            return torch.empty(count, dtype=torch.int64, device=self.device)
        return torch.randperm(count, generator=self.generator, device=self.device)

    def tangent(self, *shape: int) -> Tensor:
        """Vectors of random direction and length 0.1 to 3, in float64 where the device has numbers."""
        v = self.normal(*shape)
        if self.generator is None:
            return v
        return F.normalize(v.double(), dim=-1) * self.uniform(*shape[:-1], 1, low=0.1, high=3.0).double()


# ---------------------------------------------------------------------------------------------------------- HCFormer

BATCH = 128
CUTS = {  # map, windows, window, margin, centres, heads, dim, cells
    "nano stage 1": Cut(56, 56, 7, 7, 8, 8, 0, 0, 4, 4, 4, 16, 4, 4),
    "nano stage 2": Cut(28, 28, 7, 7, 4, 4, 0, 0, 2, 2, 4, 16, 4, 4),
    "nano stage 3": Cut(14, 14, 1, 1, 14, 14, 0, 0, 7, 7, 8, 16, 1, 1),
    "nano stage 4": Cut(7, 7, 1, 1, 7, 7, 0, 0, 4, 4, 8, 16),
    "medium stage 1": Cut(56, 56, 7, 7, 8, 8, 0, 0, 4, 4, 6, 32, 4, 4),
    "medium stage 2": Cut(28, 28, 7, 7, 4, 4, 0, 0, 2, 2, 6, 32, 4, 4),
    "medium stage 3": Cut(14, 14, 1, 1, 14, 14, 0, 0, 7, 7, 12, 32, 1, 1),
    "medium stage 4": Cut(7, 7, 1, 1, 7, 7, 0, 0, 4, 4, 12, 32),
}
QUICK_CUTS = {
    "tiny": Cut(8, 8, 2, 2, 4, 4, 0, 0, 2, 2, 1, 8, 2, 2),
    "tiny, in tiles": Cut(14, 14, 1, 1, 14, 14, 0, 0, 7, 7, 1, 8, 1, 1),
}


def _cuts(draw: Draw) -> tuple[dict[str, Cut], int]:
    return (QUICK_CUTS, 1) if draw.quick else (CUTS, BATCH)


def _window_attention(both: Tensor, cut: Cut) -> Tensor:
    """Attention inside the same windows, points as queries and keys, and the map again: what Swin mixes with."""
    B = both.shape[0]
    parts = both.view(B, cut.rows, cut.wy, cut.columns, cut.wx, 2, cut.num_heads, cut.dim)
    parts = parts.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(2, -1, cut.num_heads, cut.window, cut.dim)
    mixed = F.scaled_dot_product_attention(parts[0], parts[0], parts[1])
    mixed = mixed.view(B, cut.rows, cut.columns, cut.num_heads, cut.wy, cut.wx, cut.dim)
    return mixed.permute(0, 1, 4, 2, 5, 3, 6).reshape(B, cut.height, cut.width, cut.inner)


def patches(draw: Draw) -> Iterator[Job]:
    cuts, B = _cuts(draw)
    for name, cut in cuts.items():
        for dtype in (FP32,) if draw.quick else (BF16,):
            shape = f"({B},{cut.height},{cut.width},{2 * cut.inner})"
            yield Job("cluster_patch", name, shape, dtype, functools.partial(_patch_work, draw, cut, B, dtype))


def _patch_work(draw: Draw, cut: Cut, B: int, dtype: torch.dtype) -> Work:
    inputs = (
        draw.normal(B, cut.height, cut.width, 2 * cut.inner, dtype=dtype),
        draw.uniform(low=0.7, high=1.7),
        draw.normal(cut.num_windows, cut.num_heads, cut.centres, cut.window),
    )
    pairs = B * cut.num_windows * cut.num_heads * cut.centres * cut.window
    return Work(
        inputs,
        lambda both, alpha, bias: plain_cluster.cluster_patch(both, alpha, bias, cut),
        lambda both, alpha, bias: cluster_patch(both, alpha, bias, cut),
        leaves=(0, 1, 2),
        rival=("window attention", lambda both, alpha, bias: _window_attention(both, cut)),
        flops=2 * 5 * pairs * cut.dim,  # two centres, cosines, gathered and mixed values
        scales=(1.0, 1.0, 0.05),
    )


def windows(draw: Draw) -> Iterator[Job]:
    cuts, B = _cuts(draw)
    for name, cut in cuts.items():
        if cut.cells_y:
            shape, dtype = f"({B},{cut.num_windows},4,{2 * cut.inner})", FP32 if draw.quick else BF16
            yield Job("cluster_window", name, shape, dtype, functools.partial(_window_work, draw, cut, B, dtype))


def _window_work(draw: Draw, cut: Cut, B: int, dtype: torch.dtype) -> Work:
    cells = cut.cells_y * cut.cells_x
    is_trivial = cells == 1
    inputs = (
        draw.normal(B, cut.num_windows, 4, 2 * cut.inner, dtype=dtype),
        None if is_trivial else draw.uniform(low=0.7, high=1.7),
        None if is_trivial else draw.normal(1, cut.num_heads, cells, cut.num_windows),
    )
    return Work(
        inputs,
        lambda parts, alpha, bias: plain_cluster.cluster_window(parts, alpha, bias, cut, C, 1.0),
        lambda parts, alpha, bias: cluster_window(parts, alpha, bias, cut, C, 1.0),
        leaves=(0, 1, 2),
        flops=2 * 4 * B * cut.inner * cut.num_windows * cells,
        scales=(1.0, 0.05),
    )


MAPS = {  # height, width, channels
    "medium stage 1": (56, 56, 64),
    "medium stage 2": (28, 28, 128),
    "medium stage 3": (14, 14, 320),
    "medium stage 4": (7, 7, 512),
}
QUICK_MAPS = {"tiny": (3, 3, 8), "tiny, in parts": (33, 33, 32)}


def norms(draw: Draw) -> Iterator[Job]:
    """As autocast has them: the map is float32, the normed one is read by a product in bfloat16."""
    maps, B = (QUICK_MAPS, 2) if draw.quick else (MAPS, BATCH)
    for name, size in maps.items():
        shape = f"({','.join(map(str, (B, *size)))})"
        yield Job("map_norm", name, shape, BF16, functools.partial(_norm_work, draw, (B, *size)))


def _norm_work(draw: Draw, shape: tuple[int, ...]) -> Work:
    def to(x: Tensor) -> torch.dtype:
        return torch.float64 if x.dtype == torch.float64 else BF16

    return Work(
        (draw.normal(*shape, scale=2.0) + 0.5,),
        lambda x: (map_norm.reference.map_norm(x, 1e-5, to(x)),),
        lambda x: (map_norm.map_norm(x, 1e-5, BF16, backend="triton"),),
        leaves=(0,),
    )


INNER = {"medium stage 1": 192, "medium stage 2": 192, "medium stage 3": 384, "medium stage 4": 384, "tiny": 8}
"""Width of each level in front of the projection."""


def projections(draw: Draw) -> Iterator[Job]:
    """The end of a mixer: norm, projection and sum of both levels, as autocast has them."""
    cuts, B = _cuts(draw)
    for name, inner in INNER.items():
        if name in cuts:
            cut, n = cuts[name], 24 if draw.quick else MAPS[name][2]
            shape, dtype = f"({B},{cut.height},{cut.width},{inner}->{n})", FP32 if draw.quick else BF16
            yield Job(
                "project_levels", name, shape, dtype, functools.partial(_levels_work, draw, cut, B, inner, n, dtype)
            )


def _levels_work(draw: Draw, cut: Cut, B: int, inner: int, n: int, dtype: torch.dtype) -> Work:
    left = inner if cut.cells_y else 0
    k, count = left + inner, cut.height * cut.width * (left + inner)
    layout = (cut.windows, count, 1e-5)
    mean = draw.normal(B, 1, scale=0.2)
    inputs = (
        draw.normal(B, cut.height, cut.width, inner, dtype=dtype),
        draw.normal(B, cut.rows, cut.columns, left, dtype=dtype) if left else None,
        torch.cat([mean, mean.square() + draw.uniform(B, 1, low=0.5, high=2.0)], 1) * count,
        draw.normal(n, k, dtype=dtype, scale=k**-0.5), draw.normal(n, dtype=dtype), draw.normal(k, dtype=dtype),
        draw.normal(k, dtype=dtype), draw.normal(n, dtype=dtype), draw.normal(B, cut.height, cut.width, n),
    )  # fmt: skip

    def definition(*inputs: Any) -> Outputs:
        own, shared, sums, *weights, residual = inputs
        arguments: Any = (own, shared, sums, None, *weights, *layout)
        return (residual + project_levels.reference.project_levels(*arguments),)

    def kernel(*inputs: Any) -> Outputs:
        own, shared, sums, *rest = inputs
        return (project_levels.run_kernels(own, shared, sums, None, *rest, *layout, rest[-1].dtype),)

    flops = 2 * n * inner * B * (cut.height * cut.width + (cut.num_windows if left else 0))
    return Work(inputs, definition, kernel, leaves=tuple(range(9)), flops=flops)


def folds(draw: Draw) -> Iterator[Job]:
    """The weights of a projection and of an MLP with what stands around them inside."""
    sizes = {"projection": (320, 768), "first of an MLP": (1280, 320)}
    for name, (n, k) in ({"tiny": (9, 20)} if draw.quick else sizes).items():
        yield Job("fold_norm", name, f"({n},{k})", FP32, functools.partial(_fold_work, draw, n, k))


def _fold_work(draw: Draw, n: int, k: int) -> Work:
    inputs = (draw.normal(n, k), draw.normal(n), draw.normal(k), draw.normal(k), draw.normal(n))

    def grad(inputs: Sequence[Any], outs: Outputs, grads: Outputs) -> Sequence[Tensor | None]:
        everything: Any = (*inputs, *grads)
        return fold_norm.fold_norm_grad(*everything)

    return Work(
        inputs,
        lambda w, b, scale, offset, f: fold_norm.reference.fold_norm(w, b, scale, offset, f, w.dtype),
        lambda w, b, scale, offset, f: fold_norm.fold_norm(w, b, scale, offset, f, FP32),
        leaves=tuple(range(5)),
        kernel_grad=grad,
    )


MLP_RATIOS = {"medium stage 1": 8, "medium stage 2": 8, "medium stage 3": 4, "medium stage 4": 4}


def hidden_maps(draw: Draw) -> Iterator[Job]:
    """Between the two products of an MLP."""
    sizes = {name: (BATCH * MAPS[name][0] * MAPS[name][1], MAPS[name][2] * times) for name, times in MLP_RATIOS.items()}
    for name, (R, h) in ({"tiny": (70, 40)} if draw.quick else sizes).items():
        dtype = FP32 if draw.quick else BF16
        yield Job("gelu_grad", name, f"({R},{h})", dtype, functools.partial(_gelu_work, draw, R, h, dtype))


def _gelu_work(draw: Draw, R: int, h: int, dtype: torch.dtype) -> Work:
    def rival(x: Tensor, grad: Tensor) -> Outputs:
        to_x = torch.ops.aten.gelu_backward(grad, x)
        return to_x, F.gelu(x), to_x.sum(0)

    return Work(
        (draw.normal(R, h, dtype=dtype, scale=1.5), draw.normal(R, h, dtype=dtype)),
        lambda x, grad: gelu_grad.reference.gelu_grad(x, grad),
        lambda x, grad: gelu_grad.gelu_grad(x, grad, backend="triton"),
        rival=("gelu, its gradient, sum", rival),
    )


# ---------------------------------------------------------------------------------------------------- pairs of points

SETS = ((512, 49, 16, 32), (64, 196, 196, 64), (8, 2048, 2048, 128))
QUICK_SETS = ((2, 17, 6, 16),)
FORMS = ("exact", "matmul", "softmax", "nearest")


def lorentz_pairs(draw: Draw) -> Iterator[Job]:
    return _pairs(draw, "pairwise_lorentz")


def poincare_pairs(draw: Draw) -> Iterator[Job]:
    return _pairs(draw, "pairwise_poincare")


def _pairs(draw: Draw, op: str) -> Iterator[Job]:
    """Every form in float32; the largest sets in bfloat16 too."""
    sets = QUICK_SETS if draw.quick else SETS
    for form in FORMS:
        for sizes in sets:
            for dtype in (FP32, BF16) if sizes == SETS[-1] else (FP32,):
                shape = f"({','.join(map(str, sizes))})"
                make = functools.partial(_pairs_work, draw, op, form, sizes, dtype)
                yield Job(op, form, shape, dtype, make)


def _pairs_work(draw: Draw, op: str, form: str, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Work:
    b, n, m, d = sizes
    is_lorentz = op == "pairwise_lorentz"
    pairwise: Any = pairwise_lorentz if is_lorentz else pairwise_poincare
    space = lorentz if is_lorentz else poincare
    tangent = form == "softmax"  # as one operation: points, distances, softmax

    def points(count: int) -> Tensor:
        v = draw.tangent(b, count, d) * (1.0 if is_lorentz else 0.5)
        return (v if tangent or draw.generator is None else space.expmap0(v, C)).to(dtype)

    x, y = points(n), points(m)
    flops = 2 * b * n * m * d
    if form == "softmax":
        is_largest = sizes == SETS[-1]
        return Work(
            (x, y),
            lambda x, y: (plain_pairs.distance_softmax(x, y, C, 1.0, True, space),),
            lambda x, y: (pairwise.distance_softmax(x, y, C, tangent=True, backend="triton"),),
            leaves=(0, 1),
            rival=("softmax(-cdist)", lambda x, y: torch.softmax(-torch.cdist(x, y), -1)),
            flops=flops,
            most_of_bytes=3.0 if is_largest and is_lorentz else None,
        )
    if form == "nearest":
        return Work(
            (x, y),
            lambda x, y: plain_pairs.nearest(x, y, C, False, space),
            lambda x, y: pairwise.nearest(x, y, C, backend="triton"),
            rival=("cdist.min", lambda x, y: torch.cdist(x, y).min(-1)),
            flops=flops,
            # of two points that float32 cannot tell apart either may be meant: its true distance is what counts
            seen=lambda outputs: (outputs[1], _true_distances(space, x, y).gather(-1, outputs[0].unsqueeze(-1))),
        )
    return Work(
        (x, y),
        lambda x, y: (plain_pairs.pairwise_dist(x, y, C, form, False, space),),  # type: ignore[arg-type]
        lambda x, y: (pairwise.pairwise_dist(x, y, C, mode=form, backend="triton"),),
        leaves=(0, 1),
        rival=("cdist", torch.cdist),
        flops=flops,
        most_of_rival=1.0 if is_lorentz and sizes in SETS and dtype == FP32 else None,
    )


def _true_distances(space: Any, x: Tensor, y: Tensor) -> Tensor:
    distances: Tensor = space.pairwise_dist(x.double(), y.double(), C, mode="exact")
    return distances


# ---------------------------------------------------------------------------------------------------------- classifiers

HEADS = ((128, 512, 1000), (4096, 512, 1000), (128 * 56 * 56, 256, 150))
"""Points, components, classes: a classifier of pictures, of many of them, and one of every patch."""


def classifiers(draw: Draw) -> Iterator[Job]:
    for R, n, K in ((5, 7, 9),) if draw.quick else HEADS:
        for form in ("epilogue", "whole head"):
            dtype = FP32 if draw.quick else BF16
            make = functools.partial(_mlr_work, draw, form, R, n, K, dtype)
            yield Job("lorentz_mlr", form, f"({R},{n},{K})", dtype, make)


def _mlr_work(draw: Draw, form: str, R: int, n: int, K: int, dtype: torch.dtype) -> Work:
    x = draw.normal(R, n, dtype=dtype, scale=n**-0.5)
    time_column, scale = draw.normal(K, scale=0.3), draw.uniform(K, low=0.5, high=1.5)
    if form == "epilogue":
        return Work(
            (draw.normal(R, K, dtype=dtype), x, time_column, scale),
            lambda p, x, time, scale: (lorentz_mlr.reference.mlr_logits(p, x, time, scale, C),),
            lambda p, x, time, scale: (lorentz_mlr.mlr_logits(p, x, time, scale, C, backend="triton"),),
            leaves=(0, 1, 2, 3),
        )

    def head(logits: Callable[..., Tensor]) -> Callable[..., Outputs]:
        def run(x: Tensor, weight: Tensor, time_column: Tensor, scale: Tensor) -> Outputs:
            return (logits(F.linear(x, weight), x, time_column, scale, C),)

        return run

    return Work(
        (x, draw.normal(K, n, dtype=dtype), time_column, scale),
        head(lorentz_mlr.reference.mlr_logits),
        head(functools.partial(lorentz_mlr.mlr_logits, backend="triton")),
        leaves=(0, 1, 2, 3),
        rival=("linear", lambda x, weight, time_column, scale: F.linear(x, weight, scale.to(x.dtype))),
        flops=2 * R * n * K,
    )
