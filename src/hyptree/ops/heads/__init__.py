"""Queries, keys and values of Lorentz attention from their projection: turned, scaled, with their time columns.

``lift_heads`` is the door. The kernel's gradient, ``lift_heads_grad``, goes from its results, which attention keeps
anyway, so that nobody need keep the projection. ``reference`` holds the definition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.derivatives import first_derivative
from hyptree.ops.heads import reference
from hyptree.ops.heads.reference import Heads

__all__ = ["Heads", "lift_heads", "lift_heads_grad", "reference"]

MAX_WIDTH = 1024
"""Columns of a head that a kernel holds at once."""


def lift_heads(
    rows: Tensor, cos: Tensor, sin: Tensor, log_tau: Tensor, heads: Heads, *, queries: Tensor | None = None,
    shared: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries times ``2/tau`` with their times times -1, keys and values with the excess of theirs.

    A row becomes ``[s, a, 0, ...]``. Queries and keys turn by the angles; then ``-t_q e_k + q.k`` is the score but for
    a constant in each row, where ``e = t - 1/sqrt(c)`` is the excess of a time over the origin's.

    Args:
        rows: (B, N, 3 H w), queries, keys and values, each with padding up to the width of a head or without; or
            (B, N, 2 H width), keys and values, with the next two.
        cos, sin: (B or 1, N, turned), cosines and signed sines of the first components, see ``lm.rotary``.
        log_tau: (1,), logarithm of the temperature.
        queries: (B, N, H, width). shared: (B, N, at least ``heads.shared_dim``), what stands in the first places of the
            keys of all heads and turns there; the other components of keys do not turn.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        Three (B, N, H, width) in the dtype of ``rows``, contiguous.
    """
    # in float64 the plain way is taken as a whole; the kernel knows one column of times
    if cos.dtype != torch.float32 or heads.split or not rows_fit(backend, rows, heads.width, MAX_WIDTH):
        return reference.lift_heads(rows, queries, shared, cos, sin, log_tau, heads)
    if queries is None and rows.shape[-1] < 3 * heads.num_heads * heads.width:
        rows = rows.unflatten(-1, (3 * heads.num_heads, -1))
        rows = F.pad(rows, (0, heads.width - rows.shape[-1])).flatten(-2)
    q, k, v = _LiftHeads.apply(rows, queries, shared, cos, sin, log_tau, tuple(heads))
    return q, k, v


class _LiftHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, queries: Tensor | None, shared: Tensor | None, cos: Tensor, sin: Tensor,
        log_tau: Tensor, heads: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.heads, ctx.shared_width = heads, 0 if shared is None else shared.shape[-1]
        run = _forward_operator if needs_operator(rows) else _forward
        flat = [None if x is None else _tokens(x) for x in (queries, shared)]
        lifted = run(_tokens(rows), flat[0], flat[1], _table(cos), _table(sin), log_tau, *heads[:-1])
        q, k, v = (x.view(*rows.shape[:2], *x.shape[1:]) for x in lifted)
        ctx.save_for_backward(q, k, v, cos, sin, log_tau)
        return q, k, v

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cos, sin, log_tau = ctx.saved_tensors
        grads, heads = (grad_q, grad_k, grad_v), Heads(*ctx.heads)
        inner_grads = lift_heads_grad((q, k, v), grads, cos, sin, log_tau, heads, shared_width=ctx.shared_width)
        return *inner_grads[:3], None, None, inner_grads[3], None


def lift_heads_grad(
    lifted: tuple[Tensor, Tensor, Tensor], grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor,
    log_tau: Tensor, heads: Heads, *, shared_width: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of rows, queries, shared and log_tau, by kernels; None for what was left out.

    Args:
        lifted: what :func:`lift_heads` gave. grads: gradients of that, (B, N, H, width) each.
        shared_width: columns of ``shared``.
    """
    B, N = lifted[0].shape[:2]
    run = _backward_operator if needs_operator(lifted[0]) else _backward
    flat = [x.reshape(B * N, heads.num_heads, heads.width).contiguous() for x in (*lifted, *grads)]
    rows, queries, shared, part_tau = run(
        flat[0],
        flat[1],
        flat[2],
        flat[3],
        flat[4],
        flat[5],
        _table(cos),
        _table(sin),
        log_tau,
        shared_width,
        *heads[:-1],
    )
    to_tau = part_tau.sum().to(log_tau.dtype).view(log_tau.shape)
    if not heads.shared_dim:
        return rows.view(B, N, rows.shape[-1]), None, None, to_tau
    return rows.view(B, N, rows.shape[-1]), queries.view(lifted[0].shape), shared.view(B, N, shared_width), to_tau


def _tokens(x: Tensor) -> Tensor:
    """(B, N, ...) as (B N, ...) with packed rows; a slice of wider rows stays where it is."""
    x = x.flatten(2).flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _table(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2]).contiguous()


def _forward(
    rows: Tensor, queries: Tensor | None, shared: Tensor | None, cos: Tensor, sin: Tensor, log_tau: Tensor,
    num_heads: int, width: int, key_dim: int, value_dim: int, score_scale: float, value_scale: float, c: float,
    interleaved: bool, shared_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.heads import triton

    heads = Heads(num_heads, width, key_dim, value_dim, score_scale, value_scale, c, interleaved, shared_dim)
    return triton.forward(rows, queries, shared, cos, sin, log_tau, heads)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor,
    log_tau: Tensor, shared_width: int, num_heads: int, width: int, key_dim: int, value_dim: int, score_scale: float,
    value_scale: float, c: float, interleaved: bool, shared_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.heads import triton

    heads = Heads(num_heads, width, key_dim, value_dim, score_scale, value_scale, c, interleaved, shared_dim)
    return triton.backward(q, k, v, grad_q, grad_k, grad_v, cos, sin, log_tau, heads, shared_width)


_forward_operator = operator("lift_heads", _forward)
_backward_operator = operator("lift_heads_grad", _backward)
