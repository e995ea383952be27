"""Queries, keys and values of Lorentz attention from their projection: turned, scaled, with their time columns.

``lift_heads`` is the operation, ``lift_heads_grad`` its gradient from its results, which attention keeps anyway, so
that nobody need keep the projection. ``reference`` holds the definition, ``triton`` the kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.backend import needs_operator, operator, rows_fit
from hyptree.ops.heads import reference
from hyptree.ops.heads.reference import Heads

__all__ = ["Heads", "fits", "lift_heads", "lift_heads_grad", "reference"]

MAX_WIDTH = 1024
"""Columns of a head that a kernel holds at once."""


def fits(rows: Tensor, cos: Tensor, heads: Heads, backend: str = "auto") -> bool:
    """Whether the kernels run."""
    if cos.dtype != torch.float32:  # in float64 the plain way is taken as a whole
        return False
    return rows_fit(backend, rows, heads.width, MAX_WIDTH)


def lift_heads(
    rows: Tensor, cos: Tensor, sin: Tensor, log_tau: Tensor, heads: Heads, *, queries: Tensor | None = None,
    shared: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries times ``2/tau`` with their times times -1, keys and values with the excess of theirs. No gradient.

    A row becomes ``[s, a, 0, ...]``. Queries and keys turn by the angles; then ``-t_q e_k + q.k`` is the score but for
    a constant in each row, where ``e = t - 1/sqrt(c)`` is the excess of a time over the origin's.

    Args:
        rows: (B, N, 3 H width), queries, keys and values; or (B, N, 2 H width), keys and values, with the next two.
        cos, sin: (B or 1, N, turned), cosines and signed sines of the first components, see ``lm.rotary``.
        log_tau: (1,), logarithm of the temperature.
        queries: (B, N, H, width). shared: (B, N, at least ``heads.shared_dim``), what stands in the first places of the
            keys of all heads and turns there; the other components of keys do not turn.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        Three (B, N, H, width) in the dtype of ``rows``, contiguous.
    """
    if not fits(rows, cos, heads, backend):
        return reference.lift_heads(rows, queries, shared, cos, sin, log_tau, heads)
    run = _forward_operator if needs_operator(rows) else _forward
    flat = [None if x is None else _tokens(x) for x in (queries, shared)]
    q, k, v = run(_tokens(rows), flat[0], flat[1], _table(cos), _table(sin), log_tau, *heads)
    shape = (*rows.shape[:2], heads.num_heads, heads.width)
    return q.view(shape), k.view(shape), v.view(shape)


def lift_heads_grad(
    lifted: tuple[Tensor, Tensor, Tensor], grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor,
    log_tau: Tensor, heads: Heads, *, shared_width: int = 0, backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of rows, queries, shared and log_tau; None for what was left out.

    Args:
        lifted: what :func:`lift_heads` gave. grads: gradients of that, (B, N, H, width) each.
        shared_width: columns of ``shared``.
    """
    if not fits(lifted[0], cos, heads, backend):
        rows, queries, shared, to_tau = reference.lift_heads_grad(lifted, grads, cos, sin, log_tau, heads)
        return rows, queries, None if shared is None else F.pad(shared, (0, shared_width - heads.shared_dim)), to_tau
    B, N = lifted[0].shape[:2]
    run = _backward_operator if needs_operator(lifted[0]) else _backward
    flat = [x.reshape(B * N, heads.num_heads, heads.width).contiguous() for x in (*lifted, *grads)]
    rows, queries, shared, part_tau = run(
        flat[0], flat[1], flat[2], flat[3], flat[4], flat[5], _table(cos), _table(sin), log_tau, shared_width, *heads
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
