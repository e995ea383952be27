"""Precision of points and of products: the time component belongs to the point as it will be stored."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in float32 at least, the precision of time components and norms."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def gemm_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product will read ``x``: lower precision inside autocast, else its own."""
    kind = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def rounded(s: Tensor, dtype: torch.dtype) -> Tensor:
    """``s`` as it will be after a cast to ``dtype``, in float32 at least; its gradient is that of the cast.

    By bits for bfloat16, because a compiler may drop a cast to it and back, and with it the rounding.
    """
    if s.dtype == dtype or dtype in (torch.float32, torch.float64):
        return wide(s)
    s = wide(s)
    if dtype != torch.bfloat16 or not torch.compiler.is_compiling():
        return wide(s.to(dtype))
    bits = s.detach().view(torch.int32)
    even = (bits >> 16) & 1  # ties go to the even neighbour
    cast = ((bits + 0x7FFF + even) & -65536).view(torch.float32)
    return s + (cast - s.detach())  # exact: the two are neighbours
