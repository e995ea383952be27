"""Products of many small float32 matrices, ReLU included: what the superposition lab spends its time on.

``product`` is the operation, ``reference`` its definition, ``triton`` its kernel. No gradient: the lab writes its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import choose
from . import reference

__all__ = ["product", "reference"]

MAX_GROUPS = 65535  # of a launch


def product(a: Tensor, b: Tensor, *, relu: bool = False, backend: str = "auto") -> Tensor:
    """``a @ b`` for a batch of matrices, as exact as float32 products are; with ``relu`` its positive part.

    Args:
        a: (G, M, K). b: (G, K, N); both of any strides.
        relu: set negative entries to zero.
        backend: "auto", "torch" or "triton" (CUDA, float32).

    Returns:
        (G, M, N)
    """
    misfit = None
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        misfit = f"{a.dtype} and {b.dtype}, the kernel takes float32"
    elif a.shape[0] > MAX_GROUPS:
        misfit = f"{a.shape[0]} matrices, the kernel takes up to {MAX_GROUPS}"
    if choose(backend, a, misfit) == "triton":
        from . import triton

        return triton.product(a, b, relu)
    return reference.product(a, b, relu)
