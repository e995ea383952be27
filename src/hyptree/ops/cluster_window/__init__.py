"""Windows of a map clustered around centres of the whole map by the Lorentz distance, from sums over their parts.

``cluster_window`` is the operation with its gradient; the parts come from ``ops.cluster_patch``. ``reference`` holds
the definition, ``triton`` the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator, operator
from hyptree.ops.cluster_patch import Cut
from hyptree.ops.cluster_window import reference
from hyptree.ops.derivatives import is_plain_call

__all__ = ["cluster_window", "fits", "reference"]

MAX_WINDOWS, MAX_CENTRES, MAX_DIM, MAX_RADIUS = 64, 16, 64, 20.0
"""Windows and centres of a map, width of a head and radius ``sqrt(c) clip`` that a kernel takes."""


def fits(parts: Tensor, cut: Cut, c: float, clip: float, backend: str = "auto") -> bool:
    """Whether the kernels run; ``parts`` is any tensor of the dtype and device that the parts will have."""
    unsupported = None
    if parts.dtype not in KERNEL_DTYPES:
        unsupported = f"{parts.dtype}, the kernel takes float32, bfloat16 and float16"
    elif cut.num_windows > MAX_WINDOWS or cut.cells_y * cut.cells_x > MAX_CENTRES or cut.dim > MAX_DIM:
        unsupported = (
            f"{cut.num_windows} windows, {cut.cells_y * cut.cells_x} centres and heads of {cut.dim}, the kernel takes "
            f"up to {MAX_WINDOWS}, {MAX_CENTRES} and {MAX_DIM}"
        )
    elif not cut.has_simple_cells():
        unsupported = "centres that share patches, or windows that reach beyond the map"
    elif c**0.5 * clip > MAX_RADIUS:
        unsupported = (
            f"points up to {c**0.5 * clip:g} curvature radii from the origin, the kernel takes up to {MAX_RADIUS:g}"
        )
    return choose(backend, parts, unsupported) == "triton"


def cluster_window(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, cut: Cut, c: float = 1.0, clip: float = 1.0, *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Soft clustering of windows, each the mean of its patches, around the cells of the map.

    Args:
        parts: (B, windows, 4, 2 heads dim), points then values, as ``ops.cluster_patch`` gives them.
        alpha: () factor of the distances; None where there is one cell, which every window belongs to.
        bias: (1, heads, cells, windows) added to the logits, or None.
        cut: windows and cells. c: curvature -c. clip: longest tangent vector of a point or centre.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        One vector per window, (B, windows, heads dim), and moments (B, 2) in float32, the sums of what all patches get
        and of its squares.
    """
    if not fits(parts, cut, c, clip, backend):
        return reference.cluster_window(parts, alpha, bias, cut, c, clip)
    if is_plain_call(parts, alpha, bias) and not needs_operator(parts):
        from hyptree.ops.cluster_window import triton

        held = None if bias is None else bias.contiguous()
        return triton.forward(parts.contiguous(), alpha, held, cut, c, clip)
    out: tuple[Tensor, Tensor] = _ClusterWindow.apply(parts, alpha, bias, cut, c, clip)
    return out


class _ClusterWindow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: Tensor, alpha: Tensor | None, bias: Tensor | None, cut: Cut, c: float, clip: float
    ) -> tuple[Tensor, Tensor]:
        parts, held = parts.contiguous(), None if bias is None else bias.contiguous()
        run = _forward_operator if needs_operator(parts) else _forward
        out, moments = run(parts, alpha, held, c, clip, *cut)
        ctx.save_for_backward(parts, alpha, held)
        ctx.settings = cut, c, clip
        ctx.set_materialize_grads(False)
        return out, moments

    @staticmethod
    @once_differentiable  # a second derivative is refused, not zero: backend="torch" has it
    def backward(ctx: Any, grad: Tensor | None, grad_moments: Tensor | None) -> Any:
        parts, alpha, bias = ctx.saved_tensors
        cut, c, clip = ctx.settings
        B = parts.shape[0]
        if grad is None:
            grad = parts.new_zeros(B, cut.num_windows, cut.inner)
        if grad_moments is None:
            grad_moments = parts.new_zeros(B, 2, dtype=torch.float32)
        run = _backward_operator if needs_operator(parts) else _backward
        to_parts, to_alpha, to_bias = run(
            parts, alpha, bias, grad.contiguous(), grad_moments.contiguous(), c, clip, *cut
        )
        return (
            to_parts,
            None if alpha is None else to_alpha.to(alpha.dtype).view(alpha.shape),
            None if bias is None else to_bias.to(bias.dtype).view(bias.shape),
            None,
            None,
            None,
        )


def _forward(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, c: float, clip: float, height: int, width: int,
    rows: int, columns: int, wy: int, wx: int, top: int, left: int, my: int, mx: int, num_heads: int, dim: int,
    cells_y: int, cells_x: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.cluster_window import triton

    cut = Cut(height, width, rows, columns, wy, wx, top, left, my, mx, num_heads, dim, cells_y, cells_x)
    return triton.forward(parts, alpha, bias, cut, c, clip)


def _backward(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, grad: Tensor, grad_moments: Tensor, c: float,
    clip: float, height: int, width: int, rows: int, columns: int, wy: int, wx: int, top: int, left: int, my: int,
    mx: int, num_heads: int, dim: int, cells_y: int, cells_x: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.cluster_window import triton

    cut = Cut(height, width, rows, columns, wy, wx, top, left, my, mx, num_heads, dim, cells_y, cells_x)
    return triton.backward(parts, alpha, bias, grad, grad_moments, cut, c, clip)


_forward_operator = operator("cluster_window", _forward)
_backward_operator = operator("cluster_window_grad", _backward)
