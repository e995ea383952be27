"""Patches of windows clustered around centres pooled inside them, straight from the map and back into it.

``cluster_patch`` is the operation with its gradient. ``reference`` holds the definition, ``triton`` the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator, operator
from hyptree.ops.cluster_patch import reference
from hyptree.ops.cluster_patch.reference import Cut
from hyptree.ops.derivatives import is_plain_call

__all__ = ["Cut", "cluster_patch", "fits", "reference"]

MAX_CENTRES, MAX_DIM = 64, 64
"""Centres of a window and width of a head that a kernel holds at once."""
MAX_BOTH = 32
"""Most of both in float32: the gradient of 64 and 64 would need 270 KB of shared memory, of 227 that there are."""


def fits(both: Tensor, cut: Cut, backend: str = "auto") -> bool:
    """Whether the kernels run."""
    unsupported = None
    if both.dtype not in KERNEL_DTYPES:
        unsupported = f"{both.dtype}, the kernel takes float32, bfloat16 and float16"
    elif cut.centres > MAX_CENTRES or cut.dim > MAX_DIM:
        sizes = f"{cut.centres} centres of a window and heads of {cut.dim}"
        unsupported = f"{sizes}, the kernel takes up to {MAX_CENTRES} and {MAX_DIM}"
    elif both.dtype == torch.float32 and min(cut.centres, cut.dim) > MAX_BOTH:
        sizes = f"{cut.centres} centres of a window and heads of {cut.dim}"
        unsupported = f"{sizes} in float32, of which shared memory holds up to {MAX_BOTH} of one of them"
    return choose(backend, both, unsupported) == "triton"


def cluster_patch(
    both: Tensor, alpha: Tensor, bias: Tensor | None, cut: Cut, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Soft clustering of the patches of every window by cosine.

    With points x, values v, and centres c and u that average them::

        A_ij = softmax_j(alpha cos(x_i, c_j) + b_ij)
        g_i  = sum_j A_ij (u_j + sum_k A_kj v_k) / (1 + sum_k A_kj)

    Args:
        both: (B, height, width, 2 heads dim), points then values.
        alpha: () factor of the cosines. bias: (windows, heads, centres, patches of a window), or None.
        cut: windows and centres. With ``cells`` it also wants :meth:`Cut.has_simple_cells`.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        The mixed values g (B, height, width, heads dim); parts (B, windows, 4, 2 heads dim), sums of ``both`` over the
        patches of a window in its first and second cell down and across, divided by the size of a window (of length 0
        without cells); and moments (B, 2) in float32, the sums of g and of its squares over the map.
    """
    if not fits(both, cut, backend):
        return reference.cluster_patch(both, alpha, bias, cut)
    if is_plain_call(both, alpha, bias) and not needs_operator(both):
        from hyptree.ops.cluster_patch import triton

        held = None if bias is None else bias.contiguous()
        return triton.forward(both.contiguous(), alpha, held, cut, False)[:3]
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (both, alpha, bias))
    out: tuple[Tensor, Tensor, Tensor] = _ClusterPatch.apply(both, alpha, bias, cut, keep)
    return out


class _ClusterPatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, both: Tensor, alpha: Tensor, bias: Tensor | None, cut: Cut, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        both, ctx.cut = both.contiguous(), cut
        held = None if bias is None else bias.contiguous()
        run = _forward_operator if needs_operator(both) else _forward
        out, parts, moments, kept, sizes = run(both, alpha, held, keep, *cut)
        if keep:
            ctx.save_for_backward(both, alpha, held, out, kept, sizes)
        ctx.set_materialize_grads(False)
        return out, parts, moments

    @staticmethod
    @once_differentiable  # a second derivative is refused, not zero: backend="torch" has it
    def backward(ctx: Any, grad: Tensor | None, grad_parts: Tensor | None, grad_moments: Tensor | None) -> Any:
        both, alpha, bias, out, kept, sizes = ctx.saved_tensors
        cut: Cut = ctx.cut
        B = both.shape[0]
        if grad is None:
            grad = both.new_zeros(B, cut.height, cut.width, cut.inner)
        if grad_parts is None:
            grad_parts = both.new_zeros(B, cut.num_windows, 4 if cut.cells_y else 0, 2 * cut.inner)
        if grad_moments is None:
            grad_moments = both.new_zeros(B, 2, dtype=torch.float32)
        run = _backward_operator if needs_operator(both) else _backward
        to_both, to_alpha, to_bias = run(
            both, alpha, bias, grad.contiguous(), grad_parts.contiguous(), grad_moments.contiguous(), out, kept, sizes,
            *cut,
        )  # fmt: skip
        return (
            to_both,
            to_alpha.to(alpha.dtype).view(alpha.shape),
            None if bias is None else to_bias.to(bias.dtype),
            None,
            None,
        )


def _forward(
    both: Tensor, alpha: Tensor, bias: Tensor | None, keep: bool, height: int, width: int, rows: int, columns: int,
    wy: int, wx: int, top: int, left: int, my: int, mx: int, num_heads: int, dim: int, cells_y: int, cells_x: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.cluster_patch import triton

    cut = Cut(height, width, rows, columns, wy, wx, top, left, my, mx, num_heads, dim, cells_y, cells_x)
    return triton.forward(both, alpha, bias, cut, keep)


def _backward(
    both: Tensor, alpha: Tensor, bias: Tensor | None, grad: Tensor, grad_parts: Tensor, grad_moments: Tensor,
    out: Tensor, kept: Tensor, sizes: Tensor, height: int, width: int, rows: int, columns: int, wy: int, wx: int,
    top: int, left: int, my: int, mx: int, num_heads: int, dim: int, cells_y: int, cells_x: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from hyptree.ops.cluster_patch import triton

    cut = Cut(height, width, rows, columns, wy, wx, top, left, my, mx, num_heads, dim, cells_y, cells_x)
    return triton.backward(both, alpha, bias, grad, grad_parts, grad_moments, out, kept, sizes, cut)


_forward_operator = operator("cluster_patch", _forward)
_backward_operator = operator("cluster_patch_grad", _backward)
