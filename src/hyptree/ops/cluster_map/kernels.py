"""The kernels of both levels with their gradients, and what they can take.

``cluster_patch`` reads the map once and gives, beside the mixed values, sums over parts of every window, from which
``cluster_window`` makes windows and centres of the map. ``reference`` holds their definitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyptree.ops.backend import KERNEL_DTYPES, needs_operator, operator
from hyptree.ops.derivatives import is_plain_call
from hyptree.ops.windows import Cut

MAX_CENTRES, MAX_DIM = 64, 64
"""Centres of a window and width of a head that a kernel holds at once."""
MAX_BOTH = 32
"""Most of both in float32: the gradient of 64 and 64 would need 270 KB of shared memory, of 227 that there are."""
MAX_WINDOWS, MAX_CELLS, MAX_RADIUS = 64, 16, 20.0
"""Windows and centres of a map and radius ``sqrt(c) clip`` that a kernel takes."""


def patch_unsupported(both: Tensor, cut: Cut) -> str | None:
    """Why ``cluster_patch`` cannot take this map, or None."""
    centres = cut.my * cut.mx
    sizes = f"{centres} centres of a window and heads of {cut.dim}"
    if both.dtype not in KERNEL_DTYPES:
        return f"{both.dtype}, the kernel takes float32, bfloat16 and float16"
    if centres > MAX_CENTRES or cut.dim > MAX_DIM:
        return f"{sizes}, the kernel takes up to {MAX_CENTRES} and {MAX_DIM}"
    if both.dtype == torch.float32 and min(centres, cut.dim) > MAX_BOTH:
        return f"{sizes} in float32, of which shared memory holds up to {MAX_BOTH} of one of them"
    return None


def window_unsupported(both: Tensor, cut: Cut, c: float, clip: float) -> str | None:
    """Why ``cluster_window`` cannot take the windows of this map, or None."""
    sizes = f"{cut.num_windows} windows, {cut.cells_y * cut.cells_x} centres and heads of {cut.dim}"
    if both.dtype not in KERNEL_DTYPES:
        return f"{both.dtype}, the kernel takes float32, bfloat16 and float16"
    if cut.num_windows > MAX_WINDOWS or cut.cells_y * cut.cells_x > MAX_CELLS or cut.dim > MAX_DIM:
        return f"{sizes}, the kernel takes up to {MAX_WINDOWS}, {MAX_CELLS} and {MAX_DIM}"
    if not cut.has_simple_cells():
        return "centres that share patches, or windows that reach beyond the map"
    if c**0.5 * clip > MAX_RADIUS:
        return f"points up to {c**0.5 * clip:g} curvature radii from the origin, the kernel takes up to {MAX_RADIUS:g}"
    return None


def cluster_patch(both: Tensor, alpha: Tensor, bias: Tensor | None, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """Soft clustering of the patches of every window by cosine.

    Args:
        both: (B, height, width, 2 heads dim), points then values.
        alpha: () factor of the cosines. bias: (windows, heads, centres, patches of a window), or None.
        cut: windows and centres. With ``cells`` it also wants :meth:`Cut.has_simple_cells`.

    Returns:
        The mixed values g (B, height, width, heads dim); parts (B, windows, 4, 2 heads dim), sums of ``both`` over the
        patches of a window in its first and second cell down and across, divided by the size of a window (of length 0
        without cells); and moments (B, 2) in float32, the sums of g and of its squares over the map.
    """
    if is_plain_call(both, alpha, bias) and not needs_operator(both):
        return _patch(both.contiguous(), alpha, None if bias is None else bias.contiguous(), False, cut)[:3]
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (both, alpha, bias))
    out: tuple[Tensor, Tensor, Tensor] = _ClusterPatch.apply(both, alpha, bias, tuple(cut), keep)
    return out


def cluster_window(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, cut: Cut, c: float = 1.0, clip: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Soft clustering of windows, each the mean of its patches, around the cells of the map.

    Args:
        parts: (B, windows, 4, 2 heads dim), points then values, as :func:`cluster_patch` gives them.
        alpha: () factor of the distances; None where there is one cell, which every window belongs to.
        bias: (1, heads, cells, windows) added to the logits, or None.
        cut: windows and cells. c: curvature -c. clip: longest tangent vector of a point or centre.

    Returns:
        One vector per window, (B, windows, heads dim), and moments (B, 2) in float32, the sums of what all patches get
        and of its squares.
    """
    if is_plain_call(parts, alpha, bias) and not needs_operator(parts):
        return _window(parts.contiguous(), alpha, None if bias is None else bias.contiguous(), c, clip, cut)
    out: tuple[Tensor, Tensor] = _ClusterWindow.apply(parts, alpha, bias, tuple(cut), c, clip)
    return out


class _ClusterPatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, both: Tensor, alpha: Tensor, bias: Tensor | None, cut: tuple[int, ...], keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        both, ctx.cut = both.contiguous(), cut
        held = None if bias is None else bias.contiguous()
        run = _patch_operator if needs_operator(both) else _patch
        out, parts, moments, kept, sizes = run(both, alpha, held, keep, cut)
        if keep:
            ctx.save_for_backward(both, alpha, held, out, kept, sizes)
        return out, parts, moments

    @staticmethod
    @once_differentiable  # a second derivative is refused, not zero: backend="torch" has it
    def backward(ctx: Any, grad: Tensor, to_parts: Tensor, to_moments: Tensor) -> Any:
        both, alpha, bias, out, kept, sizes = ctx.saved_tensors
        run = _patch_grad_operator if needs_operator(both) else _patch_grad
        grads = grad.contiguous(), to_parts.contiguous(), to_moments.contiguous()
        to_both, to_alpha, to_bias = run(both, alpha, bias, *grads, out, kept, sizes, ctx.cut)
        to_bias = None if bias is None else to_bias.to(bias.dtype)
        return to_both, to_alpha.to(alpha.dtype).view(alpha.shape), to_bias, None, None


class _ClusterWindow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: Tensor, alpha: Tensor | None, bias: Tensor | None, cut: tuple[int, ...], c: float, clip: float
    ) -> tuple[Tensor, Tensor]:
        parts, held = parts.contiguous(), None if bias is None else bias.contiguous()
        run = _window_operator if needs_operator(parts) else _window
        out, moments = run(parts, alpha, held, c, clip, cut)
        ctx.save_for_backward(parts, alpha, held)
        ctx.settings = c, clip, cut
        return out, moments

    @staticmethod
    @once_differentiable  # a second derivative is refused, not zero: backend="torch" has it
    def backward(ctx: Any, grad: Tensor, grad_moments: Tensor) -> Any:
        parts, alpha, bias = ctx.saved_tensors
        run = _window_grad_operator if needs_operator(parts) else _window_grad
        grads = run(parts, alpha, bias, grad.contiguous(), grad_moments.contiguous(), *ctx.settings)
        to_alpha = None if alpha is None else grads[1].to(alpha.dtype).view(alpha.shape)
        to_bias = None if bias is None else grads[2].to(bias.dtype).view(bias.shape)
        return grads[0], to_alpha, to_bias, None, None, None


def _patch(
    both: Tensor, alpha: Tensor, bias: Tensor | None, keep: bool, cut: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from hyptree.ops.cluster_map import patch_kernel

    return patch_kernel.forward(both, alpha, bias, Cut(*map(int, cut)), keep)


def _patch_grad(
    both: Tensor, alpha: Tensor, bias: Tensor | None, grad: Tensor, grad_parts: Tensor, grad_moments: Tensor,
    out: Tensor, kept: Tensor, sizes: Tensor, cut: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.cluster_map import patch_kernel

    return patch_kernel.backward(
        both, alpha, bias, grad, grad_parts, grad_moments, out, kept, sizes, Cut(*map(int, cut))
    )


def _window(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, c: float, clip: float, cut: Sequence[int]
) -> tuple[Tensor, Tensor]:
    from hyptree.ops.cluster_map import window_kernel

    return window_kernel.forward(parts, alpha, bias, Cut(*map(int, cut)), c, clip)


def _window_grad(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, grad: Tensor, grad_moments: Tensor, c: float,
    clip: float, cut: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.cluster_map import window_kernel

    return window_kernel.backward(parts, alpha, bias, grad, grad_moments, Cut(*map(int, cut)), c, clip)


_patch_operator = operator("cluster_patch", _patch)
_patch_grad_operator = operator("cluster_patch_grad", _patch_grad)
_window_operator = operator("cluster_window", _window)
_window_grad_operator = operator("cluster_window_grad", _window_grad)
