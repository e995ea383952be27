"""The norm of a map: one mean and one variance per sample, the result in the dtype that the next product reads.

``map_norm`` is the door and ``MapNorm`` the layer, ``reference`` holds the definition, ``triton`` the kernels. The
gradient needs no mean of the map, ``rstd (g - mean(g) - normed mean(g normed))``, for any ``eps``; second derivatives
are those of this formula.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator, on_host, operator
from hyptree.ops.derivatives import in_transform, is_plain_call, wants_graph
from hyptree.ops.map_norm import reference

__all__ = ["MapNorm", "map_norm", "reference"]

MAX_NUMBERS = 2**30
"""Numbers of a sample that a kernel can count."""


def _unsupported(x: Tensor, dtype: torch.dtype) -> str | None:
    if x.dtype not in KERNEL_DTYPES or dtype not in KERNEL_DTYPES:
        return f"{x.dtype} to {dtype}, the kernel takes float32, bfloat16 and float16"
    if x.shape[1:].numel() > MAX_NUMBERS:
        return f"samples of {x.shape[1:].numel()} numbers, the kernel takes up to {MAX_NUMBERS}"
    return None


def map_norm(x: Tensor, eps: float, dtype: torch.dtype, *, backend: str = "auto") -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` with mean and variance of each sample: all axes but the first.

    For the backward pass it keeps its result, which the product behind it keeps as well for the gradient of its weight,
    and not ``x``: fewer bytes to read, and no map to keep for the norm alone. The gradient that arrives is rounded to
    the dtype of the result, and so is what it is multiplied with.

    Args:
        x: (B, ...). dtype: of the result, computed in float32 at least.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        The shape of ``x``, in ``dtype``; its gradient is in the dtype of ``x``.
    """
    if in_transform() or choose(backend, x, _unsupported(x, dtype)) == "torch":
        return reference.map_norm(x, eps, dtype)
    rows = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    if is_plain_call(x) and not needs_operator(x):
        return _forward(rows.contiguous(), eps, dtype)[0].view(x.shape)
    normed, _ = _MapNorm.apply(rows, eps, dtype)
    return normed.view(x.shape)


class MapNorm(nn.Module):
    """Group normalisation with one group for channels-last maps: one mean and variance per sample.

    Shape:
        (B, H, W, C) -> (B, H, W, C)
    """

    def __init__(self, dim: int, eps: float = 1e-5, **factory: Any):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim, **factory))
        self.bias = nn.Parameter(torch.zeros(dim, **factory))

    def reset_parameters(self) -> None:
        """Set weight to one and bias to zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if on_host(x):  # the only device whose group norm reads channels-last maps as they lie
            return F.group_norm(x.permute(0, 3, 1, 2), 1, self.weight, self.bias, self.eps).permute(0, 2, 3, 1)
        is_cast = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which has norms in float32
        dtype = torch.promote_types(x.dtype, torch.float32) if is_cast else x.dtype
        return torch.addcmul(self.bias, map_norm(x, self.eps, dtype), self.weight)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


def _forward(x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from hyptree.ops.map_norm import triton

    return triton.forward(x, eps, dtype)


def _backward(normed: Tensor, rstd: Tensor, grad: Tensor, dtype: torch.dtype, grad_rstd: Tensor | None) -> Tensor:
    from hyptree.ops.map_norm import triton

    return triton.backward(normed, rstd, grad, dtype, grad_rstd)


_forward_operator = operator("map_norm", _forward)
_backward_operator = operator("map_norm_grad", _backward)


class _MapNorm(torch.autograd.Function):
    """(B, N) rows to their norm and ``rstd`` (B,), which has a gradient so that the first gradient has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        run = _forward_operator if needs_operator(x) else _forward
        normed, rstd = run(x.contiguous(), eps, dtype)
        ctx.save_for_backward(normed, rstd)
        ctx.set_materialize_grads(False)
        ctx.dtype = x.dtype
        return normed, rstd

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_rstd: Tensor | None) -> tuple[Tensor | None, None, None]:
        normed, rstd = ctx.saved_tensors
        if grad is None and grad_rstd is None:
            return None, None, None
        grad = torch.zeros_like(normed) if grad is None else grad
        if wants_graph():
            return reference.map_norm_grad(normed, rstd, grad, ctx.dtype, grad_rstd), None, None
        run = _backward_operator if needs_operator(normed) else _backward
        return run(normed, rstd, grad.contiguous(), ctx.dtype, grad_rstd), None, None
