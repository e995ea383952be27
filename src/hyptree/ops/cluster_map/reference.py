"""Both levels of clustering in plain torch: the definition, by matrix products over all windows and heads at once.

With points ``x``, values ``v``, centres ``c`` and value centres ``u`` (their averages on a grid)::

    A_ij = softmax_j(alpha D(x_i, c_j) + b_ij)           D: cosine, or minus the Lorentz distance
    u'_j = (u_j + sum_i A_ij v_i) / (1 + sum_i A_ij)     aggregate
    g_i  = sum_j A_ij u'_j                               dispatch

No (N, M, d) tensor exists. Assignments are kept as (..., M, N), centres first: a softmax over the last of two axes is
slow where there are few centres. Similarities follow autocast, assignments and their sums are float32 at least.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hyptree.geometry.core import numerics
from hyptree.ops.rounding import wide
from hyptree.ops.windows import Cut, Size, Windows, count_patches, cover, cut, join, pool, pool_windows, pooling_weights


class Level(NamedTuple):
    """What a level of clustering compares with.

    Attributes:
        cells: centres down and across, of a window at the patch level and of the map at the window level.
        alpha: () factor of the similarities; None where there is one centre, which everything belongs to.
        bias: (windows, heads, M, N) added to the logits, or None.
        beta: () added to logits of a hard assignment, None for a soft one: each point belongs to its best centre alone,
            with the weight ``sigmoid(logit)``, as in Context Cluster. Which centre is best has no gradient.
        c: curvature -c of the space in which points are compared, None for cosines. clip: longest tangent vector.
    """

    cells: Size
    alpha: Tensor | None = None
    bias: Tensor | None = None
    beta: Tensor | None = None
    c: float | Tensor | None = None
    clip: float = 1.0


class Clustered(NamedTuple):
    """What a level gives, (B, H, W, heads d) or for windows (B, rows, columns, heads d), and how it came to it:
    assignments (B, S, heads, M, N), points (B, S, heads, N, d) and centres (B, S, heads, M, d)."""

    mixed: Tensor
    assign: Tensor
    points: Tensor
    centres: Tensor


def cosines(centres: Tensor, x: Tensor, alpha: Tensor | float = 1.0) -> Tensor:
    """Cosines of all pairs, times ``alpha``: (..., M, d), (..., N, d) -> (..., M, N); finite for zero rows."""
    dtype = wide(x[:0]).dtype
    of_centres, of_x = (
        1 / torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=dtype).clamp_min(1e-6) for y in (centres, x)
    )
    directions = centres * (alpha * of_centres).to(centres.dtype)
    # The points outnumber the centres: their lengths are divided out of the product where that is the smaller tensor.
    if centres.shape[-2] <= x.shape[-1]:
        return (directions @ x.mT) * of_x.mT
    return directions @ (x * of_x.to(x.dtype)).mT


def distances(centres: Tensor, x: Tensor, c: float | Tensor, clip: float) -> Tensor:
    """Hyperbolic distances of all pairs of tangent vectors at the origin: (..., M, d), (..., N, d) -> (..., M, N).

    Vectors longer than ``clip`` are shortened to it before they are mapped to the hyperboloid. With radii ``r`` and
    ``e = cosh(r) - 1``, what ``cosh(distance)`` is above 1 is ``e + e' + e e' - c x.y``; the distance is at least the
    difference of the radii, which points on one ray reach. In float64: a window that is a centre itself is at distance
    0, of which the root of float32's rounding would be left.
    """
    dtype, rows = wide(x[:0]).dtype, []
    for v in map(numerics.wide, (wide(centres), wide(x))):
        length = torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1e-30)
        r = c**0.5 * length.clamp_max(clip)
        square, away = r.square(), torch.where(r < 1e-2, 1.0, r)
        sinhc = torch.where(r < 1e-2, 1 + square / 6 * (1 + square / 20), (away.exp() - (-away).exp()) / (2 * away))
        point = v * (length.clamp_max(clip) / length * sinhc)
        square = c * point.square().sum(-1, keepdim=True)
        rows.append((point, square / (1 + (1 + square).sqrt()), r))
    (one, e, r), (other, f, q) = rows
    beyond = e + f.mT + e * f.mT - c * (one @ other.mT)
    half = torch.where(beyond > 0, torch.where(beyond > 0, beyond / 2, 1.0).sqrt(), 0.0)  # sinh(distance / 2)
    outer = 2 * torch.log1p(half + half.square() / (1 + (1 + half.square()).sqrt()))  # asinh, which is slow on a CPU
    return (torch.maximum(outer, (r - q.mT).abs()) / c**0.5).to(dtype)


def cluster(
    points: Tensor, values: Tensor, centres: Tensor, value_centres: Tensor, level: Level,
    inside: Tensor | None = None, reached: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mixed values (..., N, d) and assignments (..., M, N) of points (..., N, d) and centres (..., M, d).

    Args:
        inside: (..., 1, N), False for points that do not exist. reached: (..., M, 1), False for centres of nothing.
    """
    if level.alpha is None:
        assign = torch.ones_like(wide(points[..., :1])).mT
    else:
        if level.c is None:
            logits = cosines(centres, points, level.alpha)
        else:
            logits = -level.alpha * distances(centres, points, level.c, level.clip)
        if level.bias is not None:
            logits = logits + level.bias
        if level.beta is not None:
            logits = logits + level.beta
        if reached is not None:
            logits = logits.masked_fill(~reached, float("-inf"))
        logits = wide(logits)
        if level.beta is None:
            assign = logits.softmax(-2)
        else:
            best = logits.argmax(-2, keepdim=True)
            assign = torch.zeros_like(logits).scatter(-2, best, logits.gather(-2, best).sigmoid())
    counted = assign if inside is None else assign * inside
    mass = counted.sum(-1, keepdim=True)  # (..., M, 1)
    weight = assign.to(values.dtype)
    gathered = (weight if inside is None else counted.to(values.dtype)) @ values
    return weight.mT @ ((value_centres + gathered) / (1 + mass)).to(values.dtype), assign


def cluster_patches(both: Tensor, windows: Windows, num_heads: int, level: Level) -> tuple[Clustered, Tensor]:
    """The patch level of a map (B, H, W, 2 heads d) of points and values: every window by itself.

    Also gives the averages of the map over all centres' parts side by side, or the map itself where they do not divide
    the windows: what other averages may be taken of.
    """
    points, values = cut(both, windows, 2, num_heads).unbind(0)  # (B, S, heads, N, d)
    (my, mx), (wy, wx), inside, reached = level.cells, windows.window, None, None
    if not windows.is_padded and wy % my == 0 and wx % mx == 0:
        grid = (windows.grid[0] * my, windows.grid[1] * mx)
        coarse = pool(both, grid)
        centres, value_centres = cut(coarse, Windows(grid, windows.grid, level.cells), 2, num_heads).unbind(0)
    else:
        weights = pooling_weights(windows, level.cells, both.dtype, both.device).unsqueeze(1)  # (S or 1, 1, M, N)
        coarse, centres, value_centres = both, weights @ points, weights @ values
        if windows.is_padded:
            inside = cover(windows, both.device)[:, None, None, :]
            reached = weights.sum(-1, keepdim=True) > 0
            centres = torch.where(reached, centres, 1.0)  # whatever has a direction
    mixed, assign = cluster(points, values, centres, value_centres, level, inside, reached)
    return Clustered(join(mixed, windows), assign, points, centres), coarse


def cluster_windows(both: Tensor, coarse: Tensor, windows: Windows, num_heads: int, level: Level) -> Clustered:
    """The window level of the same map: every window is one point, the mean of its patches.

    Args:
        coarse: averages over equal parts that divide the windows, or the map itself.
    """
    grid, cells = windows.grid, level.cells
    source = coarse if coarse.shape[1] % cells[0] == 0 and coarse.shape[2] % cells[1] == 0 else both
    of_windows, of_cells = pool_windows(coarse, windows), pool(source, cells)
    points, values = cut(of_windows, Windows(grid, (1, 1), grid), 2, num_heads).unbind(0)  # (B, 1, heads, S, d)
    centres, value_centres = cut(of_cells, Windows(cells, (1, 1), cells), 2, num_heads).unbind(0)
    mixed, assign = cluster(points, values, centres, value_centres, level)
    return Clustered(join(mixed, Windows(grid, (1, 1), grid)), assign, points, centres)


# -------------------------------------------------------------------------------------------- what the kernels give


def cluster_patch(both: Tensor, alpha: Tensor, bias: Tensor | None, cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """What ``kernels.cluster_patch`` gives."""
    level = Level((cut.my, cut.mx), alpha, bias)
    own = cluster_patches(wide(both), cut.windows, cut.num_heads, level)[0].mixed.to(both.dtype)
    if not cut.cells_y:
        return own, both.new_empty(len(both), cut.num_windows, 0, both.shape[-1]), moments(own)
    held = wide(both).unflatten(2, (cut.columns, cut.wx)).unflatten(1, (cut.rows, cut.wy)).transpose(2, 3)
    parts = _parts(cut, both.device).to(held.dtype) @ held.flatten(3, 4).flatten(1, 2) / cut.window  # (B, S, 4, ...)
    return own, parts.to(both.dtype), moments(own)


def cluster_window(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, cut: Cut, c: float, clip: float
) -> tuple[Tensor, Tensor]:
    """What ``kernels.cluster_window`` gives."""
    full, sizes = wide(parts), (2, cut.num_heads, cut.dim)
    share = cut.window * cut.cells_y * cut.cells_x / (cut.height * cut.width)
    pooled = torch.einsum("skm,bskc->bmc", _members(cut, parts.device).to(full.dtype), full) * share
    points, values = full.sum(2).unflatten(-1, sizes).permute(2, 0, 3, 1, 4)  # (B, heads, S, d)
    centres, value_centres = pooled.unflatten(-1, sizes).permute(2, 0, 3, 1, 4)  # (B, heads, m, d)
    level = Level((cut.cells_y, cut.cells_x), alpha, bias, c=c, clip=clip)
    out = cluster(points, values, centres, value_centres, level)[0].transpose(1, 2).flatten(2).to(parts.dtype)
    return out, cut.window * moments(out)


def moments(x: Tensor, windows: Windows | None = None) -> Tensor:
    """Sums of a map and of its squares, (B, 2) float32 at least; with ``windows`` of what they give to all patches."""
    if windows is not None:
        several, patches = wide(x), count_patches(windows, x.device)
        return torch.stack([(y * patches).sum((1, 2, 3)) for y in (several, several.square())], -1)
    rows, dtype = x.flatten(1), wide(x[:0]).dtype
    return torch.stack([rows.sum(1, dtype=dtype), torch.linalg.vector_norm(rows, dim=1, dtype=dtype).square()], -1)


def _members(cut: Cut, device: torch.device) -> Tensor:
    """Which cell of the map each part of a window is in: (windows, 4, cells)."""
    first = []
    for size, count, window, _, _, cells in cut.axes():
        cell = torch.arange(count, device=device) * window // (size // cells)
        first.append(cell.unsqueeze(1) + torch.arange(2, device=device))  # (count, 2)
    y, x = first[0][:, None, :, None], first[1][None, :, None, :]
    index = torch.where((y < cut.cells_y) & (x < cut.cells_x), y * cut.cells_x + x, -1)
    index = index.reshape(cut.num_windows, 4, 1)
    return index == torch.arange(cut.cells_y * cut.cells_x, device=device)


def _parts(cut: Cut, device: torch.device) -> Tensor:
    """Which patches of every window are in its first and second cell, down and across: (S, 4, N)."""
    sides = []
    for size, count, window, _, _, cells in cut.axes():
        cell = torch.arange(size, device=device).reshape(count, window) // (size // cells)
        sides.append((cell - cell[:, :1]).unsqueeze(1) == torch.arange(2, device=device).unsqueeze(1))
    down, across = sides  # (rows, 2, wy), (columns, 2, wx)
    both = down[:, None, :, None, :, None] & across[None, :, None, :, None, :]
    return both.reshape(cut.num_windows, 4, cut.window)
