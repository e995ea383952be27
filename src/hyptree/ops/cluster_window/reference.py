"""Windows around centres of the whole map in the Lorentz model, in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.geometry.core.numerics import cap_norm
from hyptree.ops.cluster_patch import Cut
from hyptree.ops.rounding import wide


def cluster_window(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, cut: Cut, c: float, clip: float
) -> tuple[Tensor, Tensor]:
    """What ``ops.cluster_window.cluster_window`` gives."""
    B, S, H = parts.shape[0], cut.num_windows, cut.num_heads
    full = wide(parts)
    share = cut.window * cut.cells_y * cut.cells_x / (cut.height * cut.width)
    member = members(cut, parts.device).to(full.dtype)
    pooled = torch.einsum("skm,bskc->bmc", member, full) * share
    points, values = full.sum(2).unflatten(-1, (2, H, cut.dim)).permute(2, 0, 3, 1, 4)  # (B, H, S, d)
    centres, value_centres = pooled.unflatten(-1, (2, H, cut.dim)).permute(2, 0, 3, 1, 4)  # (B, H, m, d)
    assign = points.new_ones(B, H, centres.shape[2], S)
    if alpha is not None:
        on_x, on_c = (lorentz.expmap0(cap_norm(x, clip), c) for x in (points, centres))
        logits = -alpha.to(full.dtype) * lorentz.pairwise_dist(on_c, on_x, c, mode="matmul")
        assign = (logits if bias is None else logits + bias).softmax(-2)
    gathered = (value_centres + assign @ values) / (1 + assign.sum(-1, keepdim=True))
    out = (assign.mT @ gathered).transpose(1, 2).flatten(2).to(parts.dtype)  # (B, S, H d)
    sums = [cut.window * x.sum((1, 2)) for x in (wide(out), wide(out).square())]
    return out, torch.stack(sums, -1)


def members(cut: Cut, device: torch.device) -> Tensor:
    """Which cell of the map each part of a window is in: (windows, 4, cells)."""
    first = []
    for size, count, window, _, _, cells in cut.axes():
        cell = torch.arange(count, device=device) * window // (size // cells)
        first.append(cell.unsqueeze(1) + torch.arange(2, device=device))  # (count, 2)
    y, x = first[0][:, None, :, None], first[1][None, :, None, :]
    index = torch.where((y < cut.cells_y) & (x < cut.cells_x), y * cut.cells_x + x, -1)
    index = index.reshape(cut.num_windows, 4, 1)
    return index == torch.arange(cut.cells_y * cut.cells_x, device=device)
