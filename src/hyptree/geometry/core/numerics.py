"""Scalar building blocks that are right for tiny, ordinary and huge arguments, with finite gradients everywhere.

The one pattern used throughout is the double ``where``: a function with a removable singularity is given a harmless
argument on the singular set *before* it is evaluated, and its limit value *after*. A single ``where`` is not enough,
because the backward pass would still multiply zero by the infinity of the branch that was not chosen, and one such
row would poison the gradient of every shared weight. A NaN that comes in goes out: conditions are written so that it is
never taken for the singular case.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

Scalar = Tensor | float
"""A curvature ``c``, or its root ``s``: a Python float, or a tensor that broadcasts with a trailing 1."""

F = TypeVar("F", bound=Callable[..., Any])


def root(c: Scalar) -> Scalar:
    """``s = sqrt(c)``, the inverse of the radius of curvature."""
    return c.sqrt() if isinstance(c, Tensor) else math.sqrt(c)


def sqnorm(x: Tensor) -> Tensor:
    """Squared Euclidean norm over the last axis, which is kept: (..., n) -> (..., 1)."""
    return (x * x).sum(-1, keepdim=True)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean inner product over the last axis, which is kept: (..., n), (..., n) -> (..., 1)."""
    return (x * y).sum(-1, keepdim=True)


def safe_sqrt(q: Tensor) -> Tensor:
    """Square root of ``q >= 0`` whose gradient at 0 is 0; anything below the smallest normal number counts as 0."""
    ok = ~(q <= torch.finfo(q.dtype).tiny)  # written so that NaN is not mistaken for 0
    return torch.where(ok, torch.where(ok, q, 1.0).sqrt(), 0.0)


def safe_norm(x: Tensor) -> Tensor:
    """Euclidean norm over the last axis, kept; the gradient of a zero row is zero, not NaN."""
    return safe_sqrt(sqnorm(x))


def transverse_norm(across: Tensor, size: Tensor) -> Tensor:
    """Length of the part ``across`` that projection left of a vector of length ``size``, both float64: (..., 1).

    On the ray itself nothing is left but rounding, whose direction means nothing: there it is zero, with zero gradient,
    which is in the middle of all slopes that meet at this kink.
    """
    length = safe_norm(across)
    return torch.where(length <= 8 * torch.finfo(across.dtype).eps * size, 0.0, length)


def safe_hypot(a: Tensor, b: Tensor) -> Tensor:
    """``sqrt(a^2 + b^2)`` without overflow; the gradient at (0, 0) is zero."""
    ok = (a != 0) | (b != 0)
    return torch.where(ok, torch.hypot(torch.where(ok, a, 1.0), torch.where(ok, b, 1.0)), 0.0)


def unit(x: Tensor, norm: Tensor) -> Tensor:
    """``x / norm`` where ``norm`` is positive, else the zero vector with zero gradient."""
    ok = norm != 0
    return torch.where(ok, x / torch.where(ok, norm, 1.0), 0.0)


@overload
def wide(x: Tensor) -> Tensor: ...
@overload
def wide(x: float) -> float: ...
def wide(x: Scalar) -> Scalar:
    """``x`` in float64 where the device has it: for the few sums whose rounding error would be amplified later."""
    return x.double() if isinstance(x, Tensor) and x.device.type != "mps" else x


def ball_gap(x: Tensor, c: Scalar) -> Tensor:
    """``1 - c|x|^2`` (..., 1) with every digit: near the boundary the rounding of ``|x|`` is all that is left of it.

    float32 sums in float64. float64 has no wider type: there the value is corrected by what the plain formula rounds
    away, and autograd sees the plain formula.
    """
    if x.dtype != torch.float64:
        return (1 - wide(c) * sqnorm(wide(x))).to(x.dtype)
    plain = 1 - c * sqnorm(x)
    return plain + (_exact_gap(x.detach(), c.detach() if isinstance(c, Tensor) else c) - plain.detach())


def _exact_gap(x: Tensor, c: Scalar) -> Tensor:
    """``1 - c|x|^2`` of float64 points inside the ball, rounded about once."""
    factor = c.double() if isinstance(c, Tensor) else torch.tensor(c, dtype=x.dtype, device=x.device)
    square = x * x
    term = factor * square
    lost = _product_error(factor, square, term) + factor * _product_error(x, x, square)
    # Cut each term on a grid of 2^-52: below 1, sums of such numbers are exact, and the rest is too small to matter.
    top = (term + 1.5) - 1.5
    return (1 - top.sum(-1, keepdim=True)) - ((term - top) + lost).sum(-1, keepdim=True)


def _product_error(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """``a b - product``, exact, for float64 numbers and their rounded product (their halves multiply without error)."""
    a_high, b_high = a.float().double(), b.float().double()
    a_low, b_low = a - a_high, b - b_high
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _ratio(z: Tensor, closed: Callable[[Tensor], Tensor], a: float, b: float) -> Tensor:
    """``closed(z)`` above the series threshold, ``1 + a z^2 + b z^4`` below it (``z >= 0``)."""
    ok = z > (1e-4 if z.dtype == torch.float64 else 1e-2)
    far = closed(torch.where(ok, z, 1.0))
    z2 = torch.where(ok, 0.0, z).square()
    return torch.where(ok, far, 1 + z2 * (a + b * z2))


def sinhc(z: Tensor) -> Tensor:
    """``sinh(z) / z`` for ``z >= 0``."""
    return _ratio(z, lambda z: torch.sinh(z) / z, 1 / 6, 1 / 120)


def asinhc(z: Tensor) -> Tensor:
    """``asinh(z) / z`` for ``z >= 0``."""
    return _ratio(z, lambda z: asinh(z) / z, -1 / 6, 3 / 40)


def tanhc(z: Tensor) -> Tensor:
    """``tanh(z) / z`` for ``z >= 0``."""
    return _ratio(z, lambda z: torch.tanh(z) / z, -1 / 3, 2 / 15)


def atanhc(z: Tensor, gap: Tensor) -> Tensor:
    """``atanh(z) / z`` for ``0 <= z < 1`` and ``gap = 1 - z^2``."""
    small = z <= (1e-4 if z.dtype == torch.float64 else 1e-2)
    safe_z, safe_gap = torch.where(small, 0.5, z), torch.where(small, 0.75, gap)
    z2 = torch.where(small, z, 0.0).square()
    return torch.where(small, 1 + z2 * (1 / 3 + z2 / 5), atanh(safe_z, safe_gap) / safe_z)


def zcoth(z: Tensor) -> Tensor:
    """``z coth(z)`` for ``z >= 0``."""
    return _ratio(z, lambda z: z / torch.tanh(z), 1 / 3, -1 / 45)


def zcot(z: Tensor) -> Tensor:
    """``z cot(z)`` for ``0 <= z < pi``."""
    return _ratio(z, lambda z: z / torch.tan(z), -1 / 3, -1 / 45)


def asinh(u: Tensor) -> Tensor:
    """``asinh(u)`` for any size of ``u``, by one logarithm; the derivative does not overflow.

    ``torch.asinh`` is a scalar function on CPU (twenty times the cost of a logarithm), and its ``1 / sqrt(1 + u^2)`` is
    zero beyond ``u = 1e19`` in float32.
    """
    return _Asinh.apply(u)


class _Asinh(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        size = u.abs()
        far = size > 1e9  # from here on sqrt(1 + u^2) is |u|, in float64 too
        hypotenuse = torch.where(far, size, torch.sqrt(1 + torch.where(far, 1.0, size).square()))
        return torch.copysign(torch.log1p(size + size * (size / (1 + hypotenuse))), u)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        far = u.abs() > 1e9
        slope = torch.rsqrt(1 + torch.where(far, 1.0, u).square())
        return grad * torch.where(far, 1 / torch.where(far, u.abs(), 1.0), slope)


def atanh(z: Tensor, gap: Tensor) -> Tensor:
    """``atanh(z)`` from ``z`` and ``gap = 1 - z^2``: near 1 the gap has the digits that ``1 - z`` has lost."""
    near_one = z > 0.5
    inner = torch.log1p(-torch.where(near_one, 0.0, z))
    return (
        torch.log1p(z) - torch.where(near_one, torch.log(torch.where(near_one, gap, 1.0)) - torch.log1p(z), inner)
    ) / 2


def quick_asinh(u: Tensor) -> Tensor:
    """``asinh(u)`` for tensors as large as a product: to 3e-7 in compiled float32 code, else as :func:`asinh`.

    In compiled code a plain logarithm costs two thirds of ``log1p``. It serves from 1/2 on, a polynomial below.
    """
    if u.dtype == torch.float64 or not torch.compiler.is_compiling():
        return asinh(u)
    quick: Tensor = _QuickAsinh.apply(u)
    return quick


class _QuickAsinh(_Asinh):
    @staticmethod
    def forward(u: Tensor) -> Tensor:
        size = u.abs()
        near = size.clamp_max(1e18)  # the square might overflow; beyond, the excess is added without a root
        square = near * near
        outer = torch.log(size + (size - near) + torch.sqrt(1 + square))
        series = torch.full_like(square, _ASINH[-1])
        for coefficient in reversed(_ASINH[:-1]):
            series = coefficient + square * series
        return torch.where(size < 0.5, u + u * (square * series), torch.copysign(outer, u))


_ASINH = (-0.16666643, 0.07498652, -0.04438452, 0.02816912, -0.01323752)
"""``(asinh(u)/u - 1)/u^2`` as polynomial in ``u^2`` for ``|u| < 1/2``, fitted; ``asinh`` is then right to 2e-9."""


def log_sinhc(z: Tensor) -> Tensor:
    """``log(sinh(z) / z)`` for ``z >= 0``, without overflow."""
    far = z > 15
    mid = torch.log(sinhc(torch.where(far, 1.0, z)))
    safe = torch.where(far, z, 20.0)
    return torch.where(far, safe - torch.log(2 * safe) + torch.log1p(-torch.exp(-2 * safe)), mid)


def lorentz_limit(s: Scalar, dtype: torch.dtype) -> Scalar:
    """Largest ``s * radius`` whose space components, their squares and the product of two of them stay finite.

    40 in float32 and 340 in float64; for very small ``c`` (below 1e-3) the overflow of ``|x|^2`` comes first.
    """
    cap, squares = (340.0, 354.0) if dtype == torch.float64 else (40.0, 43.6)
    if isinstance(s, Tensor):
        return (s.log() + squares).clamp_max(cap)
    return min(cap, math.log(s) + squares)


def ball_limit(dtype: torch.dtype) -> float:
    """Largest ``s |x|`` of a Poincaré or Klein point that the dtype tells apart from the boundary: ``1 - 4 eps``."""
    return 1.0 - 4.0 * torch.finfo(dtype).eps


def sinh(z: Scalar) -> Scalar:
    """``sinh`` of a float or a tensor."""
    return torch.sinh(z) if isinstance(z, Tensor) else math.sinh(z)


def cap_norm(x: Tensor, limit: Scalar) -> Tensor:
    """Rows longer than ``limit`` rescaled to it, shorter rows untouched; safe where the square of a row overflows."""
    # The scale is the largest of the row and of 1, so that the square of any row is finite and of no row underflows.
    scale = x.detach().abs().amax(-1, keepdim=True).clamp_min(1.0) if x.shape[-1] else x.new_ones(())
    norm = safe_norm(x / scale) * scale
    over = norm > limit
    return torch.where(over, x * (limit / torch.where(over, norm, 1.0)), x)


def strict_matmul(a: Tensor, b: Tensor, allow_low_precision: bool = False) -> Tensor:
    """``a @ b`` in the full precision of its inputs: outside autocast, and with TF32 and its CPU cousins off.

    Args:
        a: (..., N, D). b: (..., D, M).
        allow_low_precision: use whatever autocast and ``torch.set_float32_matmul_precision`` allow.
    """
    if allow_low_precision:
        return a @ b
    kind = a.device.type
    if not a.is_meta and torch.is_autocast_enabled(kind):  # shapes alone know no autocast
        with torch.autocast(kind, enabled=False):
            return strict_matmul(a, b)
    # Autocast and TF32 leave float64 alone.
    if a.dtype == torch.float64 or (_products_are_exact() and not torch.is_grad_enabled()):
        return a @ b
    return _StrictMatmul.apply(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != torch.float32 or _products_are_exact():
        return a @ b
    # The user allowed TF32 (or bf16 on CPU) for the network; geometry must not notice, and nothing global is switched:
    # six low-precision products add up to a float32 one, exact to float32 rounding.
    (a0, a1, a2), (b0, b1, b2) = _three_parts(a), _three_parts(b)
    small = (a0 @ b2 + a1 @ b1) + a2 @ b0
    return a0 @ b0 + ((a0 @ b1 + a1 @ b0) + small)


def constant_when_compiled(ask: F) -> F:
    """``torch.compiler.assume_constant_result``, which does no more than this but imports the whole compiler."""
    ask._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return ask


@constant_when_compiled  # compiled code is guarded on this setting by torch itself
def _products_are_exact() -> bool:
    return torch.get_float32_matmul_precision() == "highest"


class _StrictMatmul(torch.autograd.Function):
    """A product whose gradient is as strict: plain autograd would take it in the autocast it meets on the way back."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _product(a, b)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        """One more axis of the product; torch 2.11 cannot map the view of bits in it."""
        a, b = (x[None] if dim is None else x.movedim(dim, 0) for x, dim in zip((a, b), in_dims, strict=True))
        rank = max(a.dim(), b.dim())
        a, b = (x.reshape(x.shape[:1] + (1,) * (rank - x.dim()) + x.shape[1:]) for x in (a, b))
        return strict_matmul(a, b), 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        # Without asking whether autocast is on: a compiler traces this inside the forward pass, where it is off, and
        # places it where it may be on.
        with torch.autocast("cpu" if a.is_meta else a.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_a = strict_matmul(grad, b.mT).sum_to_size(a.shape)
            if ctx.needs_input_grad[1] and b.dim() == 2:  # one product over all rows instead of a sum of many
                grad_b = strict_matmul(a.flatten(0, -2).mT, grad.flatten(0, -2))
            elif ctx.needs_input_grad[1]:
                grad_b = strict_matmul(a.mT, grad).sum_to_size(b.shape)
        return grad_a, grad_b


def _three_parts(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``a`` as a sum of three float32 tensors of 8 significant bits each, which TF32 and bfloat16 hold exactly."""
    first = _leading_bits(a)
    second = _leading_bits(a - first)
    return first, second, a - first - second


def _leading_bits(a: Tensor) -> Tensor:
    """``a`` cut to 8 significant bits. By its bits, because a compiler may drop a cast to bfloat16 and back."""
    return a.view(torch.int32).bitwise_and(-65536).view(torch.float32)
