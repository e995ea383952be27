"""``W [t; x] + b`` for points ``x``: the product that linear layers and classifiers share.

The weight of the time component is kept apart from the weight of the space components: the product then has the aligned
shape of its Euclidean twin, ``[t; x]`` is never built, and the time term is added in float32 whatever the precision of
the product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar, sqnorm, strict_matmul
from hyptree.geometry.core.rows import is_eager, is_ordinary, on_gpu, plain_gradients, row_plan
from hyptree.ops.rounding import wide


def affine(x: Tensor, weight: Tensor, weight_time: Tensor, bias: Tensor | None, c: Scalar) -> Tensor:
    """``W [t; x] + b`` in float32 at least, for Lorentz points ``x`` in the dtype of the product.

    Args:
        x: (..., n). weight: (m, n). weight_time: (m,), the column of ``W`` for ``t``. bias: (m,) or None.

    Returns:
        (..., m)
    """
    over_c = 1 / (c.to(wide(x).dtype) if isinstance(c, Tensor) else c)
    if on_gpu(x) and is_eager() and all(map(is_ordinary, (x, weight, weight_time))):
        shifted: Tensor = _AffineByKernels.apply(x, weight, weight_time, bias, over_c)
        return shifted
    return _plain(x, weight, weight_time, bias, over_c)


def _plain(x: Tensor, weight: Tensor, weight_time: Tensor, bias: Tensor | None, over_c: Scalar) -> Tensor:
    out: Tensor = _Affine.apply(x, weight, weight_time, bias, over_c)[0]
    return out


def _shifted(product: Tensor, x: Tensor, weight_time: Tensor, bias: Scalar, over_c: Scalar) -> Tensor:
    """What stands behind the product."""
    return wide(product) + torch.sqrt(over_c + sqnorm(wide(x))) * wide(weight_time) + bias


class _AffineByKernels(torch.autograd.Function):
    """The affine map on a GPU: one pass behind the product, and one over its gradient before the next products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, weight_time: Tensor, bias: Tensor | None, over_c: Scalar
    ) -> Tensor:
        ctx.save_for_backward(x, weight, weight_time, bias, over_c if isinstance(over_c, Tensor) else None)
        ctx.over_c = None if isinstance(over_c, Tensor) else over_c
        rows = F.linear(x, weight, bias), x, weight_time, 0.0, over_c
        plan = row_plan(_shifted, *rows)
        return plan.forward(rows) if plan else _shifted(*rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, over_c = ctx.saved_tensors
        x, weight, weight_time, bias = tensors
        inputs = (*tensors, ctx.over_c if over_c is None else over_c)
        needed = ctx.needs_input_grad
        # Of the bias the kernel gives the gradient, which it adds up on its way over that of the map.
        rows = grad, x, weight_time, 0.0 if bias is None else bias, inputs[4]
        plan = None if torch.is_grad_enabled() or not is_ordinary(grad) else row_plan(_shifted, *rows)
        if plan is None:
            return tuple(plain_gradients(_plain, inputs, (grad,), needed))
        low = grad.to(x.dtype).reshape(-1, grad.shape[-1])  # the products run in the precision of the forward pass
        to_x = to_weight = None
        _, to_x, to_time, to_bias, to_c = plan.backward(rows, (grad,), (False, needed[0], *needed[2:]))
        if needed[0]:
            to_x.view(-1, x.shape[-1]).addmm_(low, weight.to(x.dtype))
        if needed[1]:
            to_weight = (low.mT @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        return to_x, to_weight, to_time, to_bias, to_c


class _Affine(torch.autograd.Function):
    """The affine map, and the times (..., 1) that its gradient needs.

    Autograd alone would bring the two parts of the gradient of ``x`` together in four passes over it; here it is one,
    behind the product. Differences stand where sums are meant, because the compiler turns the sum of a product and
    another tensor into a product that first copies the other tensor.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, weight_time: Tensor, bias: Tensor | None, over_c: Scalar
    ) -> tuple[Tensor, Tensor]:
        t = torch.sqrt(over_c + sqnorm(wide(x)))
        if torch.compiler.is_compiling() and x.device.type == "cpu":
            # The bias joins the time term: one pass over the output instead of two.
            shift = t * -weight_time.to(t.dtype)
            return wide(F.linear(x, weight)) - (shift if bias is None else shift - bias.to(t.dtype)), t
        return torch.addcmul(wide(F.linear(x, weight, bias)), t, weight_time.to(t.dtype)), t

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, weight_time, bias, over_c = inputs
        ctx.save_for_backward(x, weight, weight_time, output[1])
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.c_shape = over_c.shape if isinstance(over_c, Tensor) else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_t: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, weight_time, t = ctx.saved_tensors
        needs_x, needs_weight, needs_time, needs_bias, needs_c = ctx.needs_input_grad
        low = grad.to(x.dtype)  # the products run in the precision of the forward pass
        to_x = to_weight = to_c = None
        to_time: Tensor | None = None
        to_bias: Tensor | None = None
        if needs_x or needs_c:
            slope = ((grad * weight_time.to(t.dtype)).sum(-1, keepdim=True) + grad_t) / t
            to_x = (wide(low @ weight.to(x.dtype)) - -slope * wide(x)).sum_to_size(x.shape).to(x.dtype)
            to_c = None if ctx.c_shape is None else (slope / 2).sum_to_size(ctx.c_shape)
        rows = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            points = x.expand(*grad.shape[:-1], x.shape[-1]).reshape(-1, x.shape[-1])
            to_weight = (low.reshape(rows.shape).mT @ points).to(weight.dtype)
        if needs_time or needs_bias:
            times = t.expand(*grad.shape[:-1], 1).reshape(-1, 1)
            # As a product, because the compiler's sum over rows steps through memory from page to page.
            to_time, to_bias = strict_matmul(torch.cat([times, torch.ones_like(times)], -1).mT, rows)
            to_time = to_time.to(weight_time.dtype) if needs_time else None
            to_bias = to_bias.to(ctx.bias_dtype) if needs_bias else None
        return to_x, to_weight, to_time, to_bias, to_c
