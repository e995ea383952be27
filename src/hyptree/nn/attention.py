"""Attention between Lorentz points on one ``scaled_dot_product_attention``: no N x N tensor of our own.

The weight of key j for query i is ``softmax_j((2/c + 2<q_i, k_j>_L)/tau + b_ij)``, which prefers near keys, and the
output is the weighted centroid of the values. Adding a constant to a row of scores changes nothing, so with
``t = 1/s + e`` the product ``<q, k>_L = q.k - t_q t_k`` may be replaced by ``q.k - t_q e_k``: one more coordinate, and
no large constant that low precision would have to carry. Likewise the time of the mean is ``1/s + sum_j w_j e_j``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry import Lorentz
from hyptree.geometry.core.numerics import Scalar, root, sqnorm
from hyptree.geometry.core.rows import by_kernels, on_gpu
from hyptree.nn.linear import LorentzLinear, lorentz_linear
from hyptree.nn.point_layer import require_features, require_space
from hyptree.nn.precision import gemm_dtype, like, store
from hyptree.nn.residual import change_curvature
from hyptree.ops.bare import is_bare
from hyptree.ops.rounding import wide


def lorentz_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Scalar = 1.0,
    tau: Scalar | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Centroids of ``v`` weighted by the softmax of ``(2/c + 2<q,k>_L)/tau + bias``.

    The centroid is normalised by the direct difference with its exact lower bound (``1/c``, as the weights sum to one).
    A query whose keys are all masked gets the origin.

    Args:
        q: (B, H, N, d) Lorentz points; (H, N, d) and (N, d) work too. k: (B, H, M, d). v: (B, H, M, e).
        c: one curvature, or one per head as (H, 1, 1).
        tau: positive temperature, a float or a tensor such as (H, 1, 1); ``sqrt(d)`` if None.
        bias: added to the scores, or a boolean mask of keys to attend to; broadcasts to (B, H, N, M).
        is_causal: query i sees keys 0..i; not together with ``bias``.

    Returns:
        (B, H, N, e) points in the dtype of the product, so bfloat16 inside autocast.
    """
    _check_shapes(q, k, v, bias, is_causal)
    missing = 4 - q.dim()
    for _ in range(missing):  # the fused kernels take four axes
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    scale, c_q = 1.0, c
    if tau is None:
        tau = math.sqrt(q.shape[-1])
    if isinstance(tau, Tensor):
        # The kernel takes a float. A scaled point is a point of another curvature, so q takes the factor with it.
        factor = 2 / like(tau, wide(q))
        q, c_q = wide(q) * factor, like(c, wide(q)) / (factor * factor)
    else:
        scale = 2 / tau
    dtype = gemm_dtype(k)
    width = _fused_width(max(q.shape[-1], v.shape[-1]) + 1, q.device, dtype)
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.to(dtype)
    mean = F.scaled_dot_product_attention(
        _lift(q, c_q, dtype, width, 1.0, excess=False),
        _lift(k, c, dtype, width, -1.0),
        _lift(v, c, dtype, width, 1.0),
        attn_mask=bias,
        is_causal=is_causal,
        scale=scale,
    )
    out = _as_laid_out(_centroid, mean, c, n=v.shape[-1])
    for _ in range(missing):
        out = out.squeeze(0)
    return out


def _lift(x: Tensor, c: Scalar, dtype: torch.dtype, width: int, sign: float, excess: bool = True) -> Tensor:
    """``[x, sign e, 0, ...]`` with ``width`` coordinates and the excess ``e = t - 1/s``, or ``t`` in its place."""
    over_c = 1 / like(c, wide(x))
    if on_gpu(x) and x.dtype != torch.float64 and not torch.compiler.is_compiling():
        return _as_laid_out(
            _lift_row, x.to(dtype), over_c, sign=sign, excess=int(excess), zeros=width - 1 - x.shape[-1]
        )
    if dtype in (torch.bfloat16, torch.float16):  # autograd's many roundings leave the curvature closer to the truth
        return _lifted(x, over_c, dtype, width, sign, excess)[0]
    lifted: Tensor = _Lift.apply(x, over_c, dtype, width, sign, excess)[0]
    return lifted


def _as_laid_out(function: Callable[..., Tensor], x: Tensor, c: Scalar, **settings: float) -> Tensor:
    """``function(x, c, **settings)`` row by row, on a GPU by kernels, in the order in which heads lie in memory."""
    turned = x.dim() > 2 and x.stride(-3) < x.stride(-2)
    if turned:
        x = x.transpose(-3, -2)
        c = c.transpose(-3, -2) if isinstance(c, Tensor) and c.dim() > 2 else c
    out = by_kernels(function, x, c, **settings) if on_gpu(x) else None
    out = function(x, c, **settings) if out is None else out
    return out.transpose(-3, -2) if turned else out


def _lift_row(x: Tensor, over_c: Scalar, *, sign: float, excess: int, zeros: int) -> Tensor:
    """:func:`_lifted` as kernels read it."""
    square = sqnorm(wide(x))
    t = torch.sqrt(over_c + square)
    column = square / (t + root(over_c)) if excess else t
    return torch.cat([x, (sign * column).to(x.dtype), x.new_zeros((*x.shape[:-1], zeros))], -1)


def _lifted(
    x: Tensor, over_c: Scalar, dtype: torch.dtype, width: int, sign: float, excess: bool
) -> tuple[Tensor, Tensor]:
    """The lifted points, and their times in float32 at least."""
    x = x.to(dtype)  # the time has to belong to the rounded point
    square = sqnorm(wide(x))
    t = torch.sqrt(over_c + square)
    column = square / (t + root(over_c)) if excess else t  # nothing cancels
    return _append_time(x, sign * column, width), t


class _Lift(torch.autograd.Function):
    """:func:`_lifted` with its gradient: ``x/t`` for ``t`` and its excess alike, where autograd takes more passes."""

    generate_vmap_rule = True
    forward = staticmethod(_lifted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, over_c, ctx.dtype, _, ctx.sign, ctx.excess = inputs
        ctx.learned = isinstance(over_c, Tensor)
        ctx.save_for_backward(x, output[1], *([over_c] if ctx.learned else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_t: Tensor) -> tuple[Tensor | None, ...]:
        x, t, *over_c = ctx.saved_tensors
        n = x.shape[-1]
        to_column = ctx.sign * wide(grad[..., n : n + 1])
        slope = (to_column + grad_t) / t
        to_x = (wide(grad[..., :n]) + slope * wide(x.to(ctx.dtype))).to(x.dtype)
        to_c = None
        if ctx.learned:
            to_c = slope / 2 - (to_column / (2 * root(over_c[0])) if ctx.excess else 0.0)
            to_c = to_c.sum_to_size(over_c[0].shape)
        return to_x.sum_to_size(x.shape), to_c, None, None, None, None


def _centroid(mean: Tensor, c: Scalar, *, n: int) -> Tensor:
    """The point of a lifted mean, whose column ``n`` is the excess of its time."""
    return store(_normalise(wide(mean[..., :n]), wide(mean[..., n : n + 1]), c), mean.dtype)


def _normalise(mean: Tensor, excess: Tensor, c: Scalar) -> Tensor:
    """The point in the direction of the ambient mean ``(1/s + excess, mean)`` of points with weights summing to one."""
    c = like(c, mean)
    gap = excess * (excess + 2 / root(c)) - sqnorm(mean)  # m_t^2 - |m|^2 - 1/c, never negative but for rounding
    return mean / torch.sqrt(1 + c * torch.where(gap > 0, gap, 0.0))


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool) -> None:
    if not 2 <= q.dim() <= 4 or not q.dim() == k.dim() == v.dim():
        raise ValueError(
            f"lorentz_attention: expected q, k, v of shape (B, H, N, d), got {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}; flatten further leading axes into B"
        )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"lorentz_attention: q and k need the same last axis, k and v the same number of points, got q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if bias is not None and is_causal:
        raise ValueError(
            "lorentz_attention: got both bias and is_causal; add the causal mask to bias and pass that alone"
        )


class LorentzAttention(nn.Module):
    """Multi-head attention of Lorentz points: one fused projection, :func:`lorentz_attention`, one output projection.

    Args:
        dim: n, coordinates of a point. num_heads: H, divides ``dim``; each head is a point of dim/H coordinates.
        manifold: Lorentz manifold of input and output.
        head_manifold: where the heads live, by default the same; its ``c`` may be (H, 1, 1), one curvature per head.
        tau: temperature, ``sqrt(dim/H)`` if None.
        learnable_tau: learn one temperature per head (its logarithm is the parameter).
        bias: bias of the projections.

    Shape:
        x (B, N, n), context (B, M, n) or None for self-attention -> (B, N, n)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        manifold: Lorentz,
        head_manifold: Lorentz | None = None,
        tau: float | None = None,
        learnable_tau: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        require_space("LorentzAttention", Lorentz, manifold, head_manifold)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(
                f"LorentzAttention: dim must be a multiple of num_heads, got dim={dim}, num_heads={num_heads}"
            )
        if tau is not None and not tau > 0:
            raise ValueError(f"LorentzAttention: tau must be positive, got {tau}; smaller is sharper")
        self.dim, self.num_heads = dim, num_heads
        self.manifold, self.head_manifold = manifold, head_manifold
        self.tau = math.sqrt(dim // num_heads) if tau is None else float(tau)
        self.log_tau = nn.Parameter(torch.empty(num_heads, 1, 1, device=device)) if learnable_tau else None
        self.qkv = LorentzLinear(dim, 3 * dim, manifold, bias=bias, device=device, dtype=dtype)
        self.proj = LorentzLinear(dim, dim, manifold, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections and set the temperature back."""
        self.qkv.reset_parameters()
        self.proj.reset_parameters()
        if self.log_tau is not None:
            nn.init.constant_(self.log_tau, math.log(self.tau))

    def forward(
        self, x: Tensor, context: Tensor | None = None, bias: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        require_features("LorentzAttention", x, self.dim)
        c = self.manifold.c
        c_head = c if self.head_manifold is None or self.head_manifold is self.manifold else self.head_manifold.c
        if context is None:
            q, k, v = self._heads(self.qkv(x), c, c_head)
        else:
            require_features("LorentzAttention", context, self.dim, "context")
            (q,) = self._heads(self._project(x, 0, self.dim), c, c_head)
            k, v = self._heads(self._project(context, self.dim, 3 * self.dim), c, c_head)
        tau = self.tau if self.log_tau is None else self.log_tau.exp()
        out = change_curvature(lorentz_attention(q, k, v, c_head, tau, bias, is_causal), c_head, c)
        return self.proj(out.transpose(-3, -2).flatten(-2))

    def _project(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` of the fused projection; all of them are computed where it has to be called."""
        rows = slice(start, stop)
        if not is_bare(self.qkv):
            return self.qkv(x)[..., rows]
        bias = None if self.qkv.bias is None else self.qkv.bias[rows]
        return lorentz_linear(x, self.qkv.weight[rows], self.qkv.weight_time[rows], bias, self.manifold.c)

    def _heads(self, x: Tensor, c: Scalar, c_head: Scalar) -> tuple[Tensor, ...]:
        """(B, N, j n) -> j tensors (B, H, N, n/H) with the curvature of the heads."""
        parts = x.unflatten(-1, (x.shape[-1] // self.dim, self.num_heads, self.dim // self.num_heads))
        return tuple(change_curvature(part.transpose(-3, -2), c, c_head) for part in parts.unbind(-3))

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, tau={self.tau:.4g}, learnable_tau={self.log_tau is not None}"
        )


def _fused_width(width: int, device: torch.device, dtype: torch.dtype) -> int:
    """Coordinates of a head that fused attention likes: a multiple of 8; on a CPU 16 in half precision, else any."""
    if device.type != "cpu":
        return -(-width // 8) * 8
    return -(-width // 16) * 16 if dtype in (torch.bfloat16, torch.float16) else width


def _append_time(x: Tensor, time: Tensor, width: int) -> Tensor:
    """``[x, time, 0, ...]`` with ``width`` coordinates: (..., n), (..., 1) -> (..., width)."""
    n, time = x.shape[-1], time.to(x.dtype)
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        # The compiler makes two loops over all rows of a cat, and one of this: whole rows are written at once.
        column = torch.arange(width)
        return torch.where(column < n, F.pad(x, (0, width - n)), torch.where(column == n, time, 0.0))
    return torch.cat([x, F.pad(time, (0, width - n - 1))], -1)
