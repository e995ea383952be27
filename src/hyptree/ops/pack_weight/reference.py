"""One aligned matrix out of the parts of a linear map in plain torch: the definition; autograd is the way back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.pack_weight.layout import Layout


def pack_weight(weight: Tensor, time: Tensor, bias: Tensor | None, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The matrix (rows, width) in ``dtype``; see ``ops.pack_weight.pack_weight``."""
    points, m = layout.points, weight.shape[0]
    parts = [weight.view(m, points, -1), time.view(m, points, 1)]
    if bias is not None:
        parts.append(bias.view(m, 1, 1))
    full = torch.cat([part.to(dtype) for part in parts], -1)
    full = F.pad(full, (0, layout.point_width - full.shape[-1])).flatten(1)
    grouped = full.unflatten(0, (layout.groups, layout.rows))
    return F.pad(grouped, (0, 0, 0, layout.padded_rows - layout.rows)).flatten(0, 1)
