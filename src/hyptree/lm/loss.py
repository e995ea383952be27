"""Cross-entropy of a linear head without the logits of all tokens at a time, and its gradients in the same pass.

A vocabulary of 128,000 and 8,192 tokens make 2 GB of logits in bfloat16. Here a chunk of tokens has its logits, its
losses and at once its share of both gradients, then the next chunk takes the same memory. So nothing is computed twice,
and training costs the three matrix products that any head costs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hyptree.ops.cross_entropy import cross_entropy_
from hyptree.ops.rounding import gemm_dtype

CHUNK_BYTES = 2**28
"""Most memory that the logits of a chunk take, by default."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    chunk: int | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T`` against ``labels``: ``F.cross_entropy`` in less memory.

    Labels are not shifted: ``hidden[i]`` predicts ``labels[i]``. Logits are those of one matrix product in the dtype
    of ``hidden`` (lower inside autocast); softmax, loss and the weight's gradient, summed over chunks, are float32 at
    least. The gradients are made in the forward pass, and have no gradient themselves.

    Args:
        hidden: (..., w). weight: (V, w). labels: (...), int64.
        ignore_index: label of tokens that do not count.
        chunk: tokens whose logits are held at a time; by default as many as fit into 256 MiB.
        num_items: what the sum of losses is divided by, where it is not the number of labels that count: all tokens of
            an accumulated step, say.

    Returns:
        Scalar, float32 (float64 for float64 input); 0 with zero gradients if all labels are ignored.
    """
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: hidden (..., w) and weight (V, w) must share w, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)} needs labels of shape {tuple(hidden.shape[:-1])}, "
            f"got {tuple(labels.shape)}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk must be 1 token or more, got {chunk}; None chooses")
    dtype = gemm_dtype(hidden)
    labels = labels.reshape(-1)
    with_grad = torch.is_grad_enabled()
    total = _LMHeadLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels,
        ignore_index,
        chunk or 0,
        dtype,
        with_grad and hidden.requires_grad,
        with_grad and weight.requires_grad,
    )
    if num_items is None:
        num_items = (labels != ignore_index).sum().clamp_min(1)
    return total / num_items


class _LMHeadLoss(torch.autograd.Function):
    """The sum of losses. Backward only scales what forward has found."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *settings: Any) -> Tensor:
        total, grad_hidden, grad_weight = _operator(hidden.detach(), weight.detach(), *settings)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.wanted = settings[-2:]
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy has no second derivatives; use F.cross_entropy for create_graph=True"
            )
        grads = [
            _scaled(grad, scale, dtype) if wanted else None
            for grad, dtype, wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
        ]
        return (*grads, None, None, None, None, None, None)


def _scaled(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``scale grad`` in ``dtype``, without a copy in between: the weight's gradient is the largest tensor around."""
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    chunk: int,
    dtype: torch.dtype,
    with_hidden: bool,
    with_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of losses, and its gradients (or empty ones): (T, w), (V, w), (T,) -> (), (T, w), (V, w)."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    if hidden.device.type == "cpu":
        wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
        if bool(wrong.any()):
            raise ValueError(
                f"linear_cross_entropy: labels must be {ignore_index} or in 0 .. {vocabulary - 1}, got "
                f"{int(labels[wrong][0])}; does the tokenizer belong to the model?"
            )
    total, grad_hidden, grad_weight = _empty(hidden, weight, dtype, with_hidden, with_weight)
    total.zero_()
    if tokens == 0:
        grad_weight.zero_()
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        rows = _rows(tokens, chunk or CHUNK_BYTES // (vocabulary * dtype.itemsize))
        buffer = torch.empty(rows, vocabulary, dtype=dtype, device=hidden.device)
        for first in range(0, tokens, rows):
            part = hidden[first : first + rows]
            logits = buffer[: len(part)]
            torch.mm(part, weight.t(), out=logits)
            losses = cross_entropy_(logits, labels[first : first + rows], ignore_index, with_hidden or with_weight)
            total += losses.sum()
            gradient = logits  # in the same memory
            if with_hidden:
                torch.mm(gradient, weight, out=grad_hidden[first : first + rows])
            if with_weight:
                _add_product(grad_weight, gradient.t(), part, is_first=first == 0)
    return total, grad_hidden, grad_weight


def _rows(tokens: int, most: int) -> int:
    """Tokens per chunk, at most ``most``: chunks of about equal size, in multiples of 128 where there are so many."""
    most = max(1, min(tokens, most))
    if most < tokens and most >= 128:
        most -= most % 128
    rows = -(-tokens // -(-tokens // most)) if tokens else 1
    return min(most, -(-rows // 128) * 128)


def _empty(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, with_hidden: bool, with_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grad_hidden = hidden.new_empty(hidden.shape if with_hidden else (0,), dtype=dtype)
    grad_weight = weight.new_empty(weight.shape if with_weight else (0,), dtype=wide)
    return hidden.new_empty((), dtype=wide), grad_hidden, grad_weight


_operator = torch.library.custom_op("hyptree::linear_cross_entropy", _forward, mutates_args=())


@_operator.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, chunk: int, *settings: Any) -> Any:
    return _empty(hidden, weight, *settings)


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """``total += a @ b`` (or ``=``) without rounding the product to the dtype of its factors."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=0 if is_first else 1, out=total)
    elif a.device.type == "cpu":
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=0 if is_first else 1, out=total)
    elif is_first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    elif _adds_wide_products(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(a, b, out_dtype=total.dtype)


@cache
def _adds_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a product of halves to a float32 matrix in one step; older ones want three halves."""
    a, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
