"""Attention of one token per sequence to cached latents, whose keys and values are never made, up to the centroids.

``absorb_token`` makes of a token's projections what meets the cache and what goes into it, ``latent_decode`` attends.
Who asks for gradients gets those of the definitions, which ``reference`` holds; ``triton`` has the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator, operator
from hyptree.ops.heads.reference import Heads
from hyptree.ops.latent_decode import reference

__all__ = ["absorb_token", "latent_decode", "reference"]

MAX_LATENT, MAX_HEADS, MAX_VALUE = 512, 64, 256
"""Columns of a latent, heads, and columns of a value that programs hold at once."""


def _fits(rows: Tensor, maps: Sequence[int], mask: Tensor | None, backend: str, inputs: Sequence[Tensor]) -> bool:
    """Whether the kernels run on rows like these, with maps of a shape (H, D, L) and this mask, without gradients."""
    num_heads, dim, latent = maps
    unsupported = None
    if backend == "auto" and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return False
    if rows.dtype not in KERNEL_DTYPES:
        unsupported = f"{rows.dtype}, the kernel takes float32, bfloat16 and float16"
    elif latent > MAX_LATENT or num_heads > MAX_HEADS or dim >= MAX_VALUE:
        unsupported = f"maps {tuple(maps)}, the kernel takes up to {(MAX_HEADS, MAX_VALUE - 1, MAX_LATENT)}"
    elif mask is not None and (mask.dtype != torch.bool or mask.dim() != 2):
        unsupported = f"a mask {tuple(mask.shape)} of {mask.dtype}, the kernel takes a boolean (B, M)"
    return choose(backend, rows, unsupported) == "triton"


def absorb_token(
    queries: Tensor, latent: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, log_tau: Tensor, gain: Tensor,
    up: Tensor, heads: Heads, *, eps: float, bias: bool, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What one token per sequence has for :func:`latent_decode`, and what the cache keeps of it.

    Queries turn and are multiplied by ``2/tau``; the latent is normed and lifted; the maps of keys take queries to
    latents; keys and values of heads are made, for the excess of their times alone.

    Args:
        queries: (B, H, width). latent: (B, at least r). shared: (B, at least ``heads.shared_dim``), before it turns.
        cos, sin: (B or 1, turned), float32. log_tau: (1,). gain: (r,) of the latent's RMS norm, and its ``eps``.
        up: (2 H width, at least L), rows of keys, zero for the shared components, and of values; ``L = r + 1 + bias``.
        heads: see ``ops.heads``; ``shared_dim`` at least 1.
        bias: whether a lifted latent has a one behind its time.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        queries (B, H, L + shared_dim) and their times (B, H); keys (B, L + shared_dim) and times (B, 2H or 4H), new
        rows of what :func:`latent_decode` calls so.
    """
    maps = (heads.num_heads, heads.value_dim, gain.shape[0] + 1 + int(bias))
    if cos.dtype == torch.float64 or not _fits(queries, maps, None, backend, (queries, latent, shared, gain, up)):
        return reference.absorb_token(queries, latent, shared, cos, sin, log_tau, gain, up, heads, eps, bias)
    run = _absorb_operator if needs_operator(queries) else _absorb
    out: tuple[Tensor, Tensor, Tensor, Tensor] = run(
        _side_by_side(queries), _side_by_side(latent), _side_by_side(shared), cos.contiguous(), sin.contiguous(),
        log_tau, gain, _side_by_side(up), *heads[:-1], eps, bias,
    )  # fmt: skip
    return out


def _side_by_side(x: Tensor) -> Tensor:
    """All of a sequence in one piece of memory, the sequences apart."""
    is_whole = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if is_whole else x.contiguous()


def latent_decode(
    queries: Tensor, time: Tensor, keys: Tensor, times: Tensor, up_value: Tensor, mask: Tensor | None = None, *,
    value_scale: float = 1.0, width: int, c: float = 1.0, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """``[s, t, 0, ...]``, for each head the centroid of the values of all cached tokens.

    The weight of a token is ``softmax(q.k - t_q e)``, e the excess of the time of the head's key over the origin's; the
    value of a token is ``v = value_scale W l`` with l the first L columns of its key, and an excess of its own. Means
    of values are W of means of latents, so that only latents are read, once for all heads.

    Args:
        queries: (B, H, W), already through the transposed map of keys. time: (B, H), t_q.
        keys: (B, M, W), latents and whatever else meets the queries.
        times: (B, M, 2H), excess of keys, then of values; in half precision (B, M, 4H), what rounding left behind them.
        up_value: (H, D, L), W. mask: (B or 1, at least M), boolean, True where a token may be seen.
        width: columns of the result. c: curvature -c.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        (B, H, width) in the dtype of ``keys``. Where a sequence may see nothing the kernels give the origin, the
        definition the mean of all tokens.
    """
    if not _fits(keys, up_value.shape, mask, backend, (queries, keys, times, up_value)):
        return reference.latent_decode(queries, time, keys, times, up_value, mask, value_scale, width, c)
    run = _operator if needs_operator(keys) else _forward
    keys, times, up_value = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, times, up_value))
    queries = queries.to(keys.dtype).contiguous()
    return run(queries, time.float().contiguous(), keys, times, up_value, mask, value_scale, width, c)


def _forward(
    queries: Tensor, time: Tensor, keys: Tensor, times: Tensor, up_value: Tensor, mask: Tensor | None,
    value_scale: float, width: int, c: float,
) -> Tensor:  # fmt: skip
    from hyptree.ops.latent_decode import triton

    return triton.forward(queries, time, keys, times, up_value, mask, value_scale, width, c)


def _absorb(
    queries: Tensor, latent: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, log_tau: Tensor, gain: Tensor,
    up: Tensor, num_heads: int, width: int, key_dim: int, value_dim: int, score_scale: float, value_scale: float,
    c: float, interleaved: bool, shared_dim: int, eps: float, bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.latent_decode import triton

    heads = Heads(num_heads, width, key_dim, value_dim, score_scale, value_scale, c, interleaved, shared_dim)
    return triton.absorb(queries, latent, shared, cos, sin, log_tau, gain, up, heads, eps, bias)


_operator = operator("latent_decode", _forward)
_absorb_operator = operator("latent_absorb", _absorb)
