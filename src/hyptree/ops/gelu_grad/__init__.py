"""The gradient of GELU, its values again, and the gradient's column sums: what an MLP's backward pass needs between
its two products.

``gelu_grad`` is the operation, ``reference`` holds the definition, ``triton`` the kernel.
"""

from __future__ import annotations

from torch import Tensor

from hyptree.ops.backend import KERNEL_DTYPES, choose, needs_operator, operator
from hyptree.ops.gelu_grad import reference

__all__ = ["gelu_grad", "reference"]


def gelu_grad(
    x: Tensor, grad: Tensor, *, overwrite: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """What follows from ``x`` and the gradient of ``gelu(x)``, which has the exact error function, in one pass.

    Args:
        x: (..., h). grad: (..., h) in the same dtype.
        overwrite: the gradient of ``x`` may take the place of ``grad``, which nobody reads any more.
        backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        gradient of ``x`` (..., h), ``gelu(x)`` (..., h), and the sums (h,) of the former over all other axes: float32
        at least, of numbers not yet rounded, in the same order every time.
    """
    is_wide = x.dtype not in KERNEL_DTYPES
    unsupported = f"{x.dtype}, the kernel takes float32, bfloat16 and float16" if is_wide else None
    if choose(backend, x, unsupported) != "triton":
        return reference.gelu_grad(x, grad)
    width = x.shape[-1]
    rows, grads = (tensor.reshape(tensor.numel() // width, width).contiguous() for tensor in (x, grad))
    # an operator gives tensors of its own; graphs that are traced plan their memory themselves
    out = _run_operator(rows, grads) if needs_operator(x) else _run(rows, grads, overwrite)
    return out[0].view(x.shape), out[1].view(x.shape), out[2]


def _run(x: Tensor, grad: Tensor, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    from hyptree.ops.gelu_grad import triton

    return triton.gelu_grad(x, grad, overwrite)


_run_operator = operator("gelu_grad", _run)
