"""The end of a clustering mixer in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.linear import scaled_linear
from hyptree.ops.windows import Windows, add_to_windows


def project_levels(
    own: Tensor, shared: Tensor | None, sums: Tensor | None, more: Tensor | None, weight: Tensor, bias: Tensor | None,
    scale: Tensor | None, offset: Tensor | None, factor: Tensor | None, windows: Windows, count: int, eps: float,
) -> Tensor:  # fmt: skip
    """``factor * (weight @ norm([shared, own]) + bias)``; see ``ops.project_levels.project_levels``.

    Args:
        sums, more: (B, 2) sums over the map and sums of squares, which are added; None without a norm.
        scale, offset: of the norm. count: numbers that it has of a sample.
    """
    left = 0 if shared is None else shared.shape[-1]
    if sums is None or scale is None or offset is None:
        y = scaled_linear(own, weight[:, left:], bias, factor)
        if shared is not None:
            y = add_to_windows(y, scaled_linear(shared, weight[:, :left], None, factor), windows)
        return y
    mean, square = ((sums if more is None else sums + more) / count).unbind(-1)
    # Means over all channels are small beside their spread, so this difference keeps its digits.
    times = torch.rsqrt((square - mean.square()).clamp_min(0) + eps).unsqueeze(-1)  # (B, 1)
    offset = (weight * offset).sum(1)
    weight = weight * scale
    shift = offset - (times * mean.unsqueeze(-1)) * weight.sum(1)  # (B, n)
    shift = shift if bias is None else shift + bias
    if factor is not None:
        times, shift = times * factor, shift * factor
    times, shift = times[:, None, None], shift[:, None, None]
    y = F.linear(own, weight[:, left:])
    dtype = y.dtype if factor is None else torch.promote_types(y.dtype, factor.dtype)
    if shared is None:
        y = torch.addcmul(shift, y, times)
    else:
        of_window = torch.addcmul(shift, F.linear(shared, weight[:, :left]), times)
        if windows.is_padded:
            y = add_to_windows(y * times, of_window, windows)
        else:
            y = y.unflatten(2, (windows.grid[1], -1)).unflatten(1, (windows.grid[0], -1))
            y = torch.addcmul(of_window[:, :, None, :, None], y, times[..., None, None, :]).flatten(3, 4).flatten(1, 2)
    return y.to(dtype)
