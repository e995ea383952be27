"""What stands around a linear layer put into its weights: a norm's factors in front of it, a factor behind it.

``fold_norm`` and ``fold_norm_grad`` are what fused operations call on a GPU, where each is one launch; they are no
functions of autograd's. ``reference`` holds the definition, ``triton`` the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.ops.fold_norm import reference

__all__ = ["fold_norm", "fold_norm_grad", "reference"]


def fold_norm(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, offset: Tensor | None, factor: Tensor | None,
    dtype: torch.dtype, wants_sums: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The weight, its sums over inputs, and the bias of ``factor * (weight @ (scale * x + offset) + bias)``.

    Args:
        weight: (n, k). bias: (n,) or None for zero. scale, offset: (k,) or both None. factor: (n,) or None.
        dtype: of the weight that is given. wants_sums: give sums and bias in float32; otherwise no sums (the second
            is anything), and a bias in ``dtype`` for the product to add.
    """
    from hyptree.ops.fold_norm import triton

    return triton.forward(weight.contiguous(), bias, scale, offset, factor, dtype, wants_sums)


def fold_norm_grad(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, offset: Tensor | None, factor: Tensor | None,
    to_out: Tensor, to_sums: Tensor | None, to_shift: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the first five from those of the three results of :func:`fold_norm`; None for what is None."""
    from hyptree.ops.fold_norm import triton

    return triton.backward(weight.contiguous(), bias, scale, offset, factor, to_out, to_sums, to_shift)
