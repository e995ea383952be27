"""A linear layer with what stands around it inside its weights, in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_norm(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, offset: Tensor | None, factor: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The weight, its sums over inputs, and the bias of ``factor * (weight @ (scale * x + offset) + bias)``.

    Args:
        weight: (n, k). bias: (n,) or None for zero. scale, offset: (k,) or both None. factor: (n,) or None.
        dtype: of the weight that is given.

    Returns:
        (n, k) in ``dtype``; (n,) and (n,) in the dtype of ``weight``.
    """
    shift = weight.new_zeros(weight.shape[0]) if bias is None else bias.to(weight.dtype)
    if scale is not None and offset is not None:
        shift = shift + (weight * offset).sum(1)
        weight = weight * scale
    if factor is not None:
        weight, shift = weight * factor.unsqueeze(1), shift * factor
    return weight.to(dtype), weight.sum(1), shift
