"""The sum of all rows, which is the gradient of a bias.

``sum_rows`` is the operation, ``reference`` holds the definition, ``triton`` the kernel.
"""

from __future__ import annotations

from torch import Tensor

from ..backend import KERNEL_DTYPES, choose, needs_operator, operator
from . import reference

__all__ = ["reference", "sum_rows"]


def fits(x: Tensor, backend: str = "auto") -> bool:
    """Whether the kernel runs."""
    misfit = None
    if x.dtype not in KERNEL_DTYPES:
        misfit = f"{x.dtype}, the kernel takes float32, bfloat16 and float16"
    return choose(backend, x, misfit) == "triton"


def sum_rows(x: Tensor, *, backend: str = "auto") -> Tensor:
    """The sum of ``x`` over all axes but the last, in the same order every time; no gradient.

    Args:
        x: (..., n). backend: "auto", "torch" or "triton" (CUDA, float32 or half precision).

    Returns:
        (n,) float32 at least: nothing is rounded to half precision on the way.
    """
    if not fits(x, backend):
        return reference.sum_rows(x)
    rows = x.reshape(x.numel() // x.shape[-1] if x.shape[-1] else 0, x.shape[-1]).contiguous()
    return _run_operator(rows) if needs_operator(x) else _run(rows)


def _run(x: Tensor) -> Tensor:
    from . import triton

    return triton.sum_rows(x)


_run_operator = operator("sum_rows", _run)
