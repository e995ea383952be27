"""The dtypes of a layer: in which a matrix product reads its rows, and in which points leave."""

import torch
from torch import Tensor

from hyptree.geometry.core.numerics import Scalar, cap_norm, root
from hyptree.ops.rounding import gemm_dtype as gemm_dtype

_FP16_MAX = 65504.0


def gemm_input(x: Tensor) -> Tensor:
    """``x`` in the dtype in which a matrix product will read it.

    The time component has to belong to the rounded point, so it is derived after this and not before.
    """
    return x.to(gemm_dtype(x))


def like(c: Scalar, x: Tensor) -> Scalar:
    """The curvature ``c`` in the dtype of ``x``; a float stays a float."""
    return c.to(x.dtype) if isinstance(c, Tensor) else c


def store(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast computed points to the dtype they leave in; a row too long for float16 is shortened, never infinite."""
    return (cap_norm(x, _FP16_MAX) if dtype == torch.float16 else x).to(dtype)


def ball_store(y: Tensor, dtype: torch.dtype, c: Scalar) -> Tensor:
    """Ball points cast to the dtype they leave in; rounding must not carry them across the boundary."""
    if y.dtype == dtype:
        return y
    return cap_norm(y, (1 - torch.finfo(dtype).eps) / root(like(c, y))).to(dtype)
