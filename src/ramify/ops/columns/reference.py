"""One aligned matrix out of the parts of a linear map, and back, in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Layout


def join(weight: Tensor, time: Tensor, bias: Tensor | None, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The matrix (rows, width) in ``dtype``; see ``ops.columns.join``."""
    points, m = layout.points, weight.shape[0]
    parts = [weight.view(m, points, -1), time.view(m, points, 1)]
    if bias is not None:
        parts.append(bias.view(m, 1, 1))
    full = torch.cat([part.to(dtype) for part in parts], -1)
    full = F.pad(full, (0, layout.point_width - full.shape[-1])).flatten(1)
    grouped = full.unflatten(0, (layout.groups, layout.rows))
    return F.pad(grouped, (0, 0, 0, layout.padded_rows - layout.rows)).flatten(0, 1)


def split(matrix: Tensor, layout: Layout, size: int, has_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weight (m, points size), time (m, points) and bias (m,) of such a matrix, or of its gradient."""
    kept = matrix.unflatten(0, (layout.groups, layout.padded_rows))[:, : layout.rows].flatten(0, 1)
    cells = kept.unflatten(1, (layout.points, layout.point_width))
    bias = cells[:, 0, size + 1].contiguous() if has_bias else None
    return cells[..., :size].flatten(1).contiguous(), cells[..., size].contiguous(), bias
