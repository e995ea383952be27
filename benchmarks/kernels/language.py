"""The rest of ``hyptree bench kernels``: operations of language models and of tokens, and the list of all.

Language models have 8192 tokens in a step (four sequences of 2048); sizes are those of the presets HELM-D 115m and 1B
and HELM-MICE 1B, and rows of 2048. Tokens are those of a ViT-S or ViT-B of 224 pixels at batch 256.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.cases import (
    BF16,
    FP32,
    C,
    Draw,
    Job,
    Outputs,
    Work,
    classifiers,
    folds,
    hidden_maps,
    lorentz_pairs,
    norms,
    patches,
    poincare_pairs,
    projections,
    windows,
)
from benchmarks.kernels.latent_cache import latent_steps
from benchmarks.kernels.trees import tree_readers
from hyptree.ops import (
    agglomerate,
    centroid,
    cosine,
    cross_entropy,
    dispatch_rows,
    heads,
    merge,
    merge_points,
    pack_weight,
    residual_norm,
    swiglu,
)

TOKENS, LENGTH = 8192, 2048
"""Tokens of a step, and of a sequence."""


def _padded(n: int) -> int:
    """Columns of a lifted row: components, time, one, up to a multiple of 8; see ``lm.ambient``."""
    return -(-(n + 2) // 8) * 8


# ------------------------------------------------------------------------------------------------- language models


def residual_norms(draw: Draw) -> Iterator[Job]:
    sizes = {"tiny": 6} if draw.quick else {"115m": 384, "1B": 1536, "rows of 2048": 2048}
    R, dtype = (5, FP32) if draw.quick else (TOKENS, BF16)
    for name, n in sizes.items():
        yield Job("residual_norm", name, f"({R},{n})", dtype, functools.partial(_residual_work, draw, R, n, dtype))


def _residual_work(draw: Draw, R: int, n: int, dtype: torch.dtype) -> Work:
    width, plain = _padded(n), residual_norm.reference
    inputs = (
        draw.normal(R, n, dtype=dtype, scale=4.0),
        draw.normal(R, n, dtype=dtype),
        draw.normal(1),
        draw.uniform(n, low=0.5, high=1.5),
    )

    def definition(x: Tensor, y: Tensor, raw: Tensor, gain: Tensor) -> Outputs:
        point = plain.residual(x, y, raw, 3.0, C)
        return point, plain.lift(plain.rms_norm(point, gain, 1e-6), x.dtype, width, C)

    settings: dict[str, Any] = {"dtype": dtype, "width": width, "gain": 3.0, "eps": 1e-6, "c": C}
    return Work(
        inputs,
        definition,
        lambda *x: residual_norm.residual_norm(*x, **settings, backend="triton"),  # type: ignore[arg-type]
        leaves=(0, 1, 2, 3),
        kernel_grad=lambda x, outputs, grads: residual_norm.residual_norm_grad(*x, *grads, **settings)[:4],
        gives_again=True,
        rival=("x + y, rms_norm", lambda x, y, raw, gain: _add_norm(x, y, gain)),
    )


def _add_norm(x: Tensor, y: Tensor, gain: Tensor) -> Outputs:
    joined = x + y
    return joined, F.rms_norm(joined, joined.shape[-1:], gain.to(x.dtype))


def attention_heads(draw: Draw) -> Iterator[Job]:
    scales: dict[str, Any] = {"score_scale": 1.3, "value_scale": 0.6, "c": C}
    kinds = {
        "115m": (heads.Heads(6, 64, 63, 63, **scales), 62),
        "1B": (heads.Heads(24, 64, 63, 63, **scales), 62),
        "latent 1B": (heads.Heads(14, 64, 63, 63, shared_dim=32, **scales), 32),
    }
    if draw.quick:
        kinds = {"tiny": (heads.Heads(2, 8, 7, 7, **scales), 6)}
    B, N, dtype = (1, 3, FP32) if draw.quick else (TOKENS // LENGTH, LENGTH, BF16)
    for name, (kind, turned) in kinds.items():
        make = functools.partial(_heads_work, draw, kind, turned, B, N, dtype)
        yield Job("heads", name, f"({B},{N},{kind.num_heads},{kind.width})", dtype, make)


def _heads_work(draw: Draw, kind: heads.Heads, turned: int, B: int, N: int, dtype: torch.dtype) -> Work:
    H, W, shared_dim = kind.num_heads, kind.width, kind.shared_dim
    column = torch.arange(W, device=draw.device)

    def rows(dim: int, first: int = 0) -> Tensor:
        return draw.normal(B, N, H, W, dtype=dtype) * ((column < dim) & (column >= first))

    query, key, value = rows(kind.key_dim), rows(kind.key_dim, shared_dim), rows(kind.value_dim)
    parts = [key, value] if shared_dim else [query, key, value]
    angle = draw.normal(1, N, turned // 2, scale=3.0)
    sin = torch.stack([-angle.sin(), angle.sin()], -1).flatten(-2)
    inputs = (
        torch.stack(parts, 2).flatten(2),
        query if shared_dim else None,
        draw.normal(B, N, shared_dim, dtype=dtype) if shared_dim else None,
        angle.cos().repeat_interleave(2, -1),
        sin,
        draw.normal(1),
    )

    def kernel(
        rows: Tensor, queries: Tensor | None, shared: Tensor | None, cos: Tensor, sin: Tensor, log_tau: Tensor
    ) -> Outputs:
        return heads.lift_heads(rows, cos, sin, log_tau, kind, queries=queries, shared=shared, backend="triton")

    def grad(x: Sequence[Any], outputs: Outputs, grads: Outputs) -> Sequence[Tensor | None]:
        leaf_grads = heads.lift_heads_grad(
            outputs, grads, x[3], x[4], x[5], kind, shared_width=shared_dim  # type: ignore[arg-type]
        )  # fmt: skip
        return [one for one, leaf in zip(leaf_grads, (x[0], x[1], x[2], x[5]), strict=True) if leaf is not None]

    return Work(
        inputs,
        lambda rows, queries, shared, cos, sin, tau: heads.reference.lift_heads(
            rows, queries, shared, cos, sin, tau, kind
        ),
        kernel,
        leaves=(0, 1, 2, 5),
        kernel_grad=grad,
        rival=None if shared_dim else ("rotary", functools.partial(_rotary, kind)),
    )


def _rotary(
    kind: heads.Heads, rows: Tensor, queries: None, shared: None, cos: Tensor, sin: Tensor, log_tau: Tensor
) -> Outputs:
    """Queries and keys turned as in Llama, values as they are."""
    query, key, value = rows.unflatten(-1, (3, kind.num_heads, kind.width)).unbind(2)
    cos, sin = (F.pad(table, (0, kind.width - table.shape[-1])).to(rows.dtype)[:, :, None] for table in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., kind.width // 2 :], x[..., : kind.width // 2]], -1) * sin

    return turned(query), turned(key), value.contiguous()


def centroids(draw: Draw) -> Iterator[Job]:
    shapes = {"tiny": (1, 3, 2, 8)} if draw.quick else {"115m": (4, 2048, 6, 64), "1B": (4, 2048, 24, 64)}
    dtype = FP32 if draw.quick else BF16
    for name, shape in shapes.items():
        text = f"({','.join(map(str, shape))})"
        yield Job("centroid", name, text, dtype, functools.partial(_centroid_work, draw, shape, dtype))


def _centroid_work(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> Work:
    width, d = shape[-1], shape[-1] - 1
    space = draw.normal(*shape[:-1], d)
    excess = torch.sqrt(space.square().sum(-1, keepdim=True) + 1 / C) * draw.uniform(*shape[:-1], 1, low=1.1, high=2.0)
    mean = torch.cat([space, excess - C**-0.5], -1).to(dtype)
    return Work(
        (mean,),
        lambda x: (centroid.reference.centroid(x, d, width, C),),
        lambda x: (centroid.centroid(x, d, width, C, backend="triton"),),
        leaves=(0,),
        kernel_grad=lambda x, outputs, grads: centroid.centroid_grad(x[0], grads[0], d, C)[:1],
        gives_again=True,
    )


def matrices(draw: Draw) -> Iterator[Job]:
    layouts = {
        "1B gate and up": (pack_weight.Layout(2, 5624, 5632, 1, 1544), 1536, True),
        "1B queries, keys, values": (pack_weight.Layout(72, 63, 64, 1, 1544), 1536, True),
        "1B output of heads": (pack_weight.Layout(1, 1536, 1536, 24, 64), 63, False),
    }
    if draw.quick:
        layouts = {"tiny": (pack_weight.Layout(3, 7, 8, 1, 16), 13, True)}
    for name, (layout, size, has_bias) in layouts.items():
        shape = f"({layout.groups * layout.rows},{layout.points * size})"
        make = functools.partial(_pack_weight_work, draw, layout, size, has_bias)
        yield Job("pack_weight", name, shape, BF16, make)  # float32 weights as autocast has them, packed in bfloat16


def _pack_weight_work(draw: Draw, layout: pack_weight.Layout, size: int, has_bias: bool) -> Work:
    m = layout.groups * layout.rows
    inputs = (
        draw.normal(m, layout.points * size),
        draw.normal(m, layout.points) if layout.points > 1 else draw.normal(m),
        draw.normal(m) if has_bias else None,
    )

    def to(weight: Tensor) -> torch.dtype:
        return torch.float64 if weight.dtype == torch.float64 else BF16

    return Work(
        inputs,
        lambda weight, time, bias: (pack_weight.reference.pack_weight(weight, time, bias, layout, to(weight)),),
        lambda weight, time, bias: (pack_weight.pack_weight(weight, time, bias, layout, BF16, backend="triton"),),
        leaves=(0, 1, 2),
        rival=("cast", lambda weight, time, bias: weight.to(BF16)),
    )


def gates(draw: Draw) -> Iterator[Job]:
    sizes = {"tiny": (6, False), "tiny expert": (6, True)}
    if not draw.quick:
        sizes = {"115m": (1528, False), "1B": (5624, False), "1B expert": (1784, True)}
    dtype = FP32 if draw.quick else BF16
    for name, (hidden, has_factor) in sizes.items():
        R = 4 if draw.quick else TOKENS * (2 if has_factor else 1)
        make = functools.partial(_swiglu_work, draw, R, hidden, has_factor, dtype)
        yield Job("swiglu", name, f"({R},{_padded(hidden)})", dtype, make)


def _swiglu_work(draw: Draw, R: int, hidden: int, has_factor: bool, dtype: torch.dtype) -> Work:
    width = _padded(hidden)
    both = draw.normal(R, 2, width, dtype=dtype)
    if draw.generator is not None:
        both[..., hidden:] = 0.0
    inputs = both.flatten(1), draw.uniform(R, low=0.5, high=1.5) if has_factor else None

    def grad(x: Sequence[Any], outputs: Outputs, grads: Outputs) -> Sequence[Tensor | None]:
        leaf_grads = swiglu.swiglu_grad(x[0], grads[0], hidden, C, True, x[1])
        return [leaf_grads[0], *leaf_grads[2:]]

    return Work(
        inputs,
        lambda both, a: (swiglu.reference.swiglu_lift(both, hidden, C, True, a),),
        lambda both, a: (swiglu.swiglu_lift(both, hidden, C, True, a, backend="triton"),),
        leaves=(0, 1),
        kernel_grad=grad,
        gives_again=True,
        rival=("silu(gate) up", lambda both, a: F.silu(both[:, :width]) * both[:, width:]),
    )


def dispatched_rows(draw: Draw) -> Iterator[Job]:
    T, n, k, dtype = (4, 13, 2, FP32) if draw.quick else (TOKENS, 896, 2, BF16)
    make = functools.partial(_dispatch_work, draw, T, n, k, dtype)
    yield Job("dispatch_rows", "tiny" if draw.quick else "1B", f"({T},{_padded(n)})x{k}", dtype, make)


def _dispatch_work(draw: Draw, T: int, n: int, k: int, dtype: torch.dtype) -> Work:
    one = n + 1
    # an expert for every copy, so that the gradient of its factor can be told from the others
    chosen = torch.arange(T * k, device=draw.device)
    inputs = draw.normal(T, _padded(n), dtype=dtype), draw.order(T * k), draw.uniform(T * k, low=0.5, high=1.5), chosen

    def grad(x: Sequence[Any], outputs: Outputs, grads: Outputs) -> Sequence[Tensor | None]:
        leaf_grads = dispatch_rows.dispatch_rows_grad(
            x[0], grads[0], x[1], k, outputs[1], grads[1], one, backend="triton"
        )
        return leaf_grads[0], leaf_grads[2]

    return Work(
        inputs,
        lambda rows, inverse, a, chosen: dispatch_rows.reference.dispatch_rows(rows, inverse, k, a, chosen, one),  # type: ignore[arg-type,return-value]
        lambda rows, inverse, a, chosen: dispatch_rows.dispatch_rows(
            rows, inverse, k, a, chosen, one, backend="triton"
        ),  # type: ignore[arg-type,return-value]
        leaves=(0, 2),
        kernel_grad=grad,
        gives_again=True,
        rival=("gather", lambda rows, inverse, a, chosen: rows[inverse // k]),
    )


def merged_points(draw: Draw) -> Iterator[Job]:
    T, n, k, dtype = (5, 13, 2, FP32) if draw.quick else (TOKENS, 896, 2, BF16)
    make = functools.partial(_merge_points_work, draw, T, n, k, dtype)
    yield Job("merge_points", "tiny" if draw.quick else "1B", f"({T},{n})x{k}", dtype, make)


def _merge_points_work(draw: Draw, T: int, n: int, k: int, dtype: torch.dtype) -> Work:
    width = -(-n // 8) * 8
    inputs = (
        draw.normal(1, T, width, dtype=dtype),
        draw.normal(T * k, width, dtype=dtype, scale=2.0),
        draw.uniform(T, k, low=0.1, high=1.1),
        draw.order(T * k),
    )
    plain: Any = merge_points.reference.merge_points
    kernel: Any = functools.partial(merge_points.merge_points, backend="triton")
    grad: Any = functools.partial(merge_points.merge_points_grad, backend="triton")

    def rival(shared: Tensor, routed: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
        return (routed[inverse].unflatten(0, (T, k)) * weight[..., None].to(dtype)).sum(1) + shared[0]

    return Work(
        inputs,
        lambda *x: (plain(*x, n, C),),
        lambda *x: (kernel(*x, n, C),),
        leaves=(0, 1, 2),
        kernel_grad=lambda x, outputs, grads: grad(*x, *grads, C),
        rival=("weighted sum", rival),
    )


def losses(draw: Draw) -> Iterator[Job]:
    R, V, dtype = (5, 33, FP32) if draw.quick else (1024, 128256, BF16)
    make = functools.partial(_loss_work, draw, R, V, dtype)
    yield Job("cross_entropy", "with gradient, in place", f"({R},{V})", dtype, make)


def _loss_work(draw: Draw, R: int, V: int, dtype: torch.dtype) -> Work:
    def in_place(run: Callable[..., Tensor]) -> Callable[..., Outputs]:
        return lambda logits, labels: (run(logits, labels, -100, True), logits)

    def rival(logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            return torch.autograd.grad(F.cross_entropy(leaf, labels, reduction="sum"), leaf)[0]

    return Work(
        (draw.normal(R, V, dtype=dtype, scale=3.0), draw.integers(V, R)),
        in_place(cross_entropy.reference.cross_entropy_),
        in_place(functools.partial(cross_entropy.cross_entropy_, backend="triton")),
        rival=("cross_entropy", rival),
    )


# -------------------------------------------------------------------------------------------------------------- tokens


def token_distances(draw: Draw) -> Iterator[Job]:
    B, N, D, dtype = (2, 9, 16, FP32) if draw.quick else (256, 196, 384, BF16)
    make = functools.partial(_cosine_work, draw, B, N, D, dtype)
    yield Job("cosine", "", f"({B},{N},{D})", dtype, make)


def _cosine_work(draw: Draw, B: int, N: int, D: int, dtype: torch.dtype) -> Work:
    def rival(features: Tensor) -> Tensor:
        unit = F.normalize(features, dim=-1)
        return 1 - unit @ unit.mT

    return Work(
        (draw.normal(B, N, D, dtype=dtype),),
        lambda x: (cosine.reference.cosine_distance(x),),
        lambda x: (cosine.cosine_distance(x, backend="triton"),),
        rival=("normalise, matmul", rival),
        flops=2 * B * N * N * D,
    )


def merged_tokens(draw: Draw) -> Iterator[Job]:
    shapes = [(2, 9, 16, 4)] if draw.quick else [(256, 196, 384, 98), (256, 196, 768, 98)]
    for B, N, D, k in shapes:
        dtype = FP32 if draw.quick else BF16
        yield Job("merge", "", f"({B},{N},{D})->{k}", dtype, functools.partial(_merge_work, draw, B, N, D, k, dtype))


def _merge_work(draw: Draw, B: int, N: int, D: int, k: int, dtype: torch.dtype) -> Work:
    inputs = draw.normal(B, N, D, dtype=dtype), draw.uniform(B, N, low=1.0, high=4.0), draw.integers(k, B, N)

    def rival(x: Tensor, size: Tensor, labels: Tensor) -> Tensor:
        index = labels[..., None].expand_as(x)
        return x.new_zeros(B, k, D).scatter_reduce(1, index, x, "mean", include_self=False)

    return Work(
        inputs,
        lambda x, size, labels: merge.reference.merge_mean(x, size, labels, k),
        lambda x, size, labels: merge.merge_mean(x, size, labels, k, backend="triton"),
        leaves=(0,),
        rival=("scatter_reduce", rival),
    )


def clusterings(draw: Draw) -> Iterator[Job]:
    sizes = ((2, 9, 4),) if draw.quick else ((256, 196, 98), (32, 576, 288), (8, 1024, 512), (1, 4096, 2048))
    for B, N, k in sizes:
        for linkage in ("average", "complete", "single"):
            work = functools.partial(_labels_work, draw, B, N, k, linkage)
            yield Job("agglomerate", linkage, f"({B},{N})->{k}", FP32, work)


def _labels_work(draw: Draw, B: int, N: int, k: int, linkage: str) -> Work:
    """Distances stay float32 in the definition too: labels are a function of their bits."""
    distance = draw.normal(B, N, N)
    if draw.generator is not None:
        distance = cosine.cosine_distance(draw.normal(B, N, 16), backend="torch")

    def labels(distance: Tensor, backend: str) -> Any:
        return (agglomerate.agglomerate(distance, k, linkage=linkage, backend=backend, check=False),)

    return Work(
        (distance,),
        lambda distance: labels(distance.float(), "torch"),
        lambda distance: labels(distance, "triton"),
        compiles=False,
    )


JOBS: dict[str, Callable[[Draw], Iterator[Job]]] = {
    "map_norm": norms,
    "gelu_grad": hidden_maps,
    "fold_norm": folds,
    "project_levels": projections,
    "cluster_patch": patches,
    "cluster_window": windows,
    "pairwise_lorentz": lorentz_pairs,
    "pairwise_poincare": poincare_pairs,
    "lorentz_mlr": classifiers,
    "residual_norm": residual_norms,
    "heads": attention_heads,
    "centroid": centroids,
    "pack_weight": matrices,
    "swiglu": gates,
    "dispatch_rows": dispatched_rows,
    "merge_points": merged_points,
    "cross_entropy": losses,
    "cosine": token_distances,
    "merge": merged_tokens,
    "agglomerate": clusterings,
    "tree_reader": tree_readers,
    "latent_decode": latent_steps,
}
"""All of them, those that no GPU has seen yet first."""
