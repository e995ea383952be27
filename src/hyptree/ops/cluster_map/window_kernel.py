"""Clustering of windows in one pass: a program has one head of one image, everything but the parts stays on the chip.

Bytes at batch 128 and 224 px in bfloat16 are those of the parts and of their gradient: 19 MB for the first two stages
of medium (6 heads of 32), 5 microseconds forward and 10 backward at 4.2 TB/s; 6 MB for those of nano, 2 and 3. The
latency of one program, about 10 and 25 microseconds, is what is left of the time.
Distances are float32 from points to logits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data, interpreted
from hyptree.ops.cluster_map.patch_kernel import product
from hyptree.ops.windows import Cut


@triton.jit
def _exact(a, b):
    """The product of two float32 tiles to the last digits."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _members(part: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr, CELL_Y: tl.constexpr,
             CELL_X: tl.constexpr, CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr, BLOCK_S: tl.constexpr,
             BLOCK_M: tl.constexpr):  # fmt: skip
    """(S, M) which cell of the map a part of each window is in."""
    window = tl.arange(0, BLOCK_S)
    y = (window // COLUMNS) * WY // CELL_Y + part // 2
    x = (window % COLUMNS) * WX // CELL_X + part % 2
    cell = tl.where((y < CELLS_Y) & (x < CELLS_X), y * CELLS_X + x, -1)
    return (cell[:, None] == tl.arange(0, BLOCK_M)[None, :]).to(tl.float32)


@triton.jit
def _lifted(vector, C: tl.constexpr, CLIP: tl.constexpr):
    """Rows cut to the length CLIP, ``sinh(z)/z`` with z their length times the root of c, z, and what was cut."""
    square = tl.sum(vector * vector, axis=1)
    norm = tl.sqrt(square)
    is_over = norm > CLIP
    cut = tl.where(is_over, CLIP / tl.where(is_over, norm, 1.0), 1.0)
    z = C**0.5 * tl.where(is_over, CLIP, norm)
    near = z < 0.5
    q = z * z
    safe = tl.where(near, 1.0, z)
    sinhc = tl.where(near, 1.0 + q / 6.0 * (1.0 + q / 20.0 * (1.0 + q / 42.0 * (1.0 + q / 72.0))),
                     0.5 * (tl.exp(safe) - tl.exp(-safe)) / safe)  # fmt: skip
    sinhc = tl.where(z != z, z, sinhc)
    point = vector * (cut * sinhc)[:, None]
    cosh = tl.sqrt(1.0 + C * tl.sum(point * point, axis=1))
    return point, cosh, z, sinhc, cut, is_over, square


@triton.jit
def _excess(point, cosh, C: tl.constexpr):
    """``cosh - 1`` without cancellation."""
    return C * tl.sum(point * point, axis=1) / (1.0 + cosh)


@triton.jit
def _lowered(to_point, vector, cosh, z, sinhc, cut, is_over, square, C: tl.constexpr):
    """The gradient of a row before it was cut and lifted."""
    near = z < 0.5
    q = z * z
    slope = tl.where(near, (1.0 + q / 10.0 * (1.0 + q / 28.0 * (1.0 + q / 54.0))) / 3.0,
                     (cosh - sinhc) / tl.where(near, 1.0, q))  # fmt: skip
    tangent = vector * cut[:, None]
    along = C * slope * tl.sum(to_point * tangent, axis=1)
    to_tangent = sinhc[:, None] * to_point + along[:, None] * tangent
    radial = tl.sum(to_tangent * vector, axis=1) / tl.where(is_over, square, 1.0)
    return cut[:, None] * (to_tangent - tl.where(is_over, radial, 0.0)[:, None] * vector)


@triton.jit
def _assigned(points, centres, alpha, bias, exists, reachable, C: tl.constexpr, CLIP: tl.constexpr,
              BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """(S, M) distances and assignments."""
    point, cosh, z, _, _, _, _ = _lifted(points, C, CLIP)
    centre, centre_cosh, centre_z, _, _, _, _ = _lifted(centres, C, CLIP)
    # cosh(d) - 1 = e + e' + e e' - c x.y with e = cosh - 1 of each point: what is lost is a part of the points' own
    # distances from the origin, not of 1
    excess, centre_excess = _excess(point, cosh, C), _excess(centre, centre_cosh, C)
    beyond = excess[:, None] + centre_excess[None, :] + excess[:, None] * centre_excess[None, :]
    beyond -= C * _exact(point, tl.trans(centre))
    half = tl.sqrt(0.5 * tl.where(beyond < 0.0, 0.0, beyond))  # sinh(d/2); NaN stays
    square = tl.where(half < 0.25, half * half, 0.0)
    series = 1.0 - square * (1.0 / 6.0 - square * (3.0 / 40.0 - square * (5.0 / 112.0 - square * (35.0 / 1152.0))))
    outer = 2.0 * tl.where(half < 0.25, half * series, tl.log(half + tl.sqrt(half * half + 1.0)))
    inner = tl.abs(z[:, None] - centre_z[None, :])
    is_origin = (z == 0.0)[:, None] | (centre_z == 0.0)[None, :]
    distance = tl.where(is_origin | (outer < inner), inner, outer) * C**-0.5
    logits = tl.where(reachable[None, :], bias - alpha * distance, float("-inf"))
    weight = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return distance, weight / tl.sum(weight, axis=1)[:, None]


@triton.jit
def _load(parts, base, row, column, ok, S: tl.constexpr, INNER: tl.constexpr, part: tl.constexpr):
    """One part of all windows, (S, d)."""
    return tl.load(parts + base + (row[:, None] * 4 + part) * (2 * INNER) + column[None, :], mask=ok, other=0.0)


@triton.jit
def _read(parts, base, row, column, ok, S: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr,
          WX: tl.constexpr, CELL_Y: tl.constexpr, CELL_X: tl.constexpr, CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr,
          IS_TRIVIAL: tl.constexpr, WIDEN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_D: tl.constexpr):  # fmt: skip
    """Points and values of the windows (S, d), sums for the centres and their values (M, d)."""
    points = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    values = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    centres = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    value_centres = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for part in tl.static_range(4):
        member = _members(part, COLUMNS, WY, WX, CELL_Y, CELL_X, CELLS_Y, CELLS_X, BLOCK_S, BLOCK_M)
        member = tl.trans(member.to(parts.dtype.element_ty))
        if not IS_TRIVIAL:
            x = _load(parts, base, row, column, ok, S, INNER, part)
            points += x.to(tl.float32)
            centres += product(member, x, WIDEN)  # exact: a sum
        v = _load(parts, base + INNER, row, column, ok, S, INNER, part)
        values += v.to(tl.float32)
        value_centres += product(member, v, WIDEN)
    return points, values, centres, value_centres


@triton.jit
def _cluster_window_kernel(parts, alpha, bias, out, moments, S: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr,
        WX: tl.constexpr, CELL_Y: tl.constexpr, CELL_X: tl.constexpr, CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr,
        HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, CLIP: tl.constexpr, IS_TRIVIAL: tl.constexpr,
        HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_D: tl.constexpr):  # fmt: skip
    head = tl.program_id(0) % HEADS
    image = (tl.program_id(0) // HEADS).to(tl.int64)
    INNER: tl.constexpr = HEADS * D
    M: tl.constexpr = CELLS_Y * CELLS_X
    stored: tl.constexpr = parts.dtype.element_ty
    row, place, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    exists, reachable = row < S, place < M
    ok = exists[:, None] & (column < D)[None, :]
    base = image * (S * 4 * 2 * INNER) + head * D
    points, values, centres, value_centres = _read(
        parts, base, row, column, ok, S, INNER, COLUMNS, WY, WX, CELL_Y, CELL_X, CELLS_Y, CELLS_X, IS_TRIVIAL, WIDEN,
        BLOCK_S, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    SHARE: tl.constexpr = WY * WX / (CELL_Y * CELL_X)
    if IS_TRIVIAL:
        assign = tl.where(reachable[None, :] & exists[:, None], 1.0, tl.zeros((BLOCK_S, BLOCK_M), tl.float32))
    else:
        added = tl.zeros((BLOCK_S, BLOCK_M), tl.float32)
        if HAS_BIAS:
            at = head * (M * S) + place[None, :] * S + row[:, None]
            added = tl.load(bias + at, mask=exists[:, None] & reachable[None, :], other=0.0).to(tl.float32)
        _, assign = _assigned(
            points, centres * SHARE, tl.load(alpha).to(tl.float32), added, exists, reachable, C, CLIP, BLOCK_S, BLOCK_M
        )
        assign = tl.where(exists[:, None], assign, 0.0)
    assigned = assign.to(stored)
    gathered = value_centres * SHARE + product(tl.trans(assigned), values.to(stored), WIDEN)
    gathered = gathered / (1.0 + tl.sum(assign, axis=0))[:, None]
    mixed = product(assigned, gathered.to(stored), WIDEN).to(stored)
    tl.store(out + image * (S * INNER) + head * D + row[:, None] * INNER + column[None, :], mixed, mask=ok)
    kept = tl.where(ok, mixed.to(tl.float32), 0.0)
    at_moments = moments + tl.program_id(0).to(tl.int64) * 2
    tl.store(at_moments, tl.sum(kept) * (WY * WX))
    tl.store(at_moments + 1, tl.sum(kept * kept) * (WY * WX))


@triton.jit
def _cluster_window_grad_kernel(parts, alpha, bias, grad, grad_moments, grad_parts, part_alpha, part_bias,
        S: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr, CELL_Y: tl.constexpr,
        CELL_X: tl.constexpr, CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
        C: tl.constexpr, CLIP: tl.constexpr, IS_TRIVIAL: tl.constexpr, HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    head = tl.program_id(0) % HEADS
    image = (tl.program_id(0) // HEADS).to(tl.int64)
    INNER: tl.constexpr = HEADS * D
    M: tl.constexpr = CELLS_Y * CELLS_X
    stored: tl.constexpr = parts.dtype.element_ty
    row, place, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    exists, reachable = row < S, place < M
    ok = exists[:, None] & (column < D)[None, :]
    base = image * (S * 4 * 2 * INNER) + head * D
    points, values, centres, value_centres = _read(
        parts, base, row, column, ok, S, INNER, COLUMNS, WY, WX, CELL_Y, CELL_X, CELLS_Y, CELLS_X, IS_TRIVIAL, WIDEN,
        BLOCK_S, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    SHARE: tl.constexpr = WY * WX / (CELL_Y * CELL_X)
    if IS_TRIVIAL:
        assign = tl.where(reachable[None, :] & exists[:, None], 1.0, tl.zeros((BLOCK_S, BLOCK_M), tl.float32))
    else:
        centres *= SHARE
        added = tl.zeros((BLOCK_S, BLOCK_M), tl.float32)
        at = head * (M * S) + place[None, :] * S + row[:, None]
        if HAS_BIAS:
            added = tl.load(bias + at, mask=exists[:, None] & reachable[None, :], other=0.0).to(tl.float32)
        factor = tl.load(alpha).to(tl.float32)
        distance, assign = _assigned(points, centres, factor, added, exists, reachable, C, CLIP, BLOCK_S, BLOCK_M)
        assign = tl.where(exists[:, None], assign, 0.0)
    assigned = assign.to(stored)
    over_mass = 1.0 / (1.0 + tl.sum(assign, axis=0))
    gathered = value_centres * SHARE + product(tl.trans(assigned), values.to(stored), WIDEN)
    gathered = gathered * over_mass[:, None]
    mixed = product(assigned, gathered.to(stored), WIDEN)
    offset = image * (S * INNER) + head * D + row[:, None] * INNER + column[None, :]
    to_mixed = tl.load(grad + offset, mask=ok, other=0.0)
    to_sum = tl.load(grad_moments + image * 2).to(tl.float32) * (WY * WX)
    to_square = tl.load(grad_moments + image * 2 + 1).to(tl.float32) * (WY * WX)
    to_mixed = tl.where(ok, to_mixed.to(tl.float32) + to_sum + 2.0 * to_square * mixed, 0.0).to(stored)

    to_gathered = product(tl.trans(assigned), to_mixed, WIDEN)
    to_total = to_gathered * over_mass[:, None]
    to_values = product(assigned, to_total.to(stored), WIDEN)
    if not IS_TRIVIAL:
        to_assign = product(to_mixed, tl.trans(gathered.to(stored)), WIDEN)
        to_assign += product(values.to(stored), tl.trans(to_total.to(stored)), WIDEN)
        to_assign -= (over_mass * tl.sum(to_gathered * gathered, axis=1))[None, :]
        to_logits = assign * (to_assign - tl.sum(assign * to_assign, axis=1)[:, None])
        tl.store(part_alpha + tl.program_id(0), -tl.sum(to_logits * distance))
        if HAS_BIAS:
            tl.store(part_bias + image * (HEADS * M * S) + at, to_logits, mask=exists[:, None] & reachable[None, :])
        scaled = distance * C**0.5
        near, some = scaled < 0.5, scaled != 0.0
        q, decay = scaled * scaled, tl.exp(-scaled)
        series = scaled + scaled * (q / 6.0) * (1.0 + q / 20.0 * (1.0 + q / 42.0))
        sinh = tl.where(near, tl.where(some, series, 1.0), 1.0 - decay * decay)
        slope = tl.where(near, 1.0, 2.0 * decay) / sinh
        to_cosh = tl.where(some, -factor * to_logits * slope, 0.0) * C**-0.5
        point, cosh, z, sinhc, cut, is_over, square = _lifted(points, C, CLIP)
        centre, centre_cosh, centre_z, centre_sinhc, centre_cut, centre_over, centre_square = _lifted(centres, C, CLIP)
        of_point = tl.sum(to_cosh * centre_cosh[None, :], axis=1) / cosh
        to_point = C * (of_point[:, None] * point - _exact(to_cosh, centre))
        to_point = _lowered(to_point, points, cosh, z, sinhc, cut, is_over, square, C)
        of_centre = tl.sum(to_cosh * cosh[:, None], axis=0) / centre_cosh
        to_centre = C * (of_centre[:, None] * centre - _exact(tl.trans(to_cosh), point))
        to_centre = _lowered(to_centre, centres, centre_cosh, centre_z, centre_sinhc, centre_cut, centre_over,
                             centre_square, C) * SHARE  # fmt: skip
    else:
        tl.store(part_alpha + tl.program_id(0), 0.0)
    to_total *= SHARE
    for part in tl.static_range(4):
        member = _members(part, COLUMNS, WY, WX, CELL_Y, CELL_X, CELLS_Y, CELLS_X, BLOCK_S, BLOCK_M).to(stored)
        write = grad_parts + base + (row[:, None] * 4 + part) * (2 * INNER) + column[None, :]
        if IS_TRIVIAL:
            tl.store(write, tl.zeros((BLOCK_S, BLOCK_D), tl.float32), mask=ok)
        else:
            tl.store(write, to_point + product(member, to_centre.to(stored), WIDEN), mask=ok)
        to_part = to_values + product(member, to_total.to(stored), WIDEN)
        tl.store(write + INNER, to_part, mask=ok)


@functools.cache
def _settings(cut: Cut, c: float, clip: float, is_trivial: bool, has_bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {"BLOCK_S": cut.num_windows, "BLOCK_M": cut.cells_y * cut.cells_x, "BLOCK_D": cut.dim}
    return {
        "S": cut.num_windows, "COLUMNS": cut.columns, "WY": cut.wy, "WX": cut.wx, "CELL_Y": cut.height // cut.cells_y,
        "CELL_X": cut.width // cut.cells_x, "CELLS_Y": cut.cells_y, "CELLS_X": cut.cells_x, "HEADS": cut.num_heads,
        "D": cut.dim, "C": c, "CLIP": clip, "IS_TRIVIAL": is_trivial, "HAS_BIAS": has_bias,
        "WIDEN": interpreted() and dtype == torch.bfloat16,
        **{name: max(16, triton.next_power_of_2(n)) for name, n in sizes.items()}, "num_warps": 4,
    }  # fmt: skip


def forward(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, cut: Cut, c: float, clip: float
) -> tuple[Tensor, Tensor]:
    """(B, windows, 4, 2 inner) contiguous -> (B, windows, inner), and moments (B, 2)."""
    B = parts.shape[0]
    out = torch.empty(B, cut.num_windows, cut.inner, dtype=parts.dtype, device=parts.device)
    moments = torch.empty(B, cut.num_heads, 2, dtype=torch.float32, device=parts.device)
    if has_data(parts) and B:
        settings = _settings(cut, c, clip, alpha is None, bias is not None, parts.dtype)
        tensors = (parts, parts if alpha is None else alpha, parts if bias is None else bias, out, moments)
        launch(_cluster_window_kernel, (B * cut.num_heads,), tensors, (), settings)
    return out, moments.sum(1)


def backward(
    parts: Tensor, alpha: Tensor | None, bias: Tensor | None, grad: Tensor, grad_moments: Tensor, cut: Cut, c: float,
    clip: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the parts, of alpha () and of the bias (heads, centres, windows; empty without one), the last two
    in float32."""
    B, device = parts.shape[0], parts.device
    grad_parts = torch.empty_like(parts)
    part_alpha = torch.empty(B, cut.num_heads, dtype=torch.float32, device=device)
    shape = (0,) if bias is None else (B, cut.num_heads, cut.cells_y * cut.cells_x, cut.num_windows)
    part_bias = torch.empty(shape, dtype=torch.float32, device=device)
    if has_data(parts) and B:
        settings = _settings(cut, c, clip, alpha is None, bias is not None, parts.dtype)
        tensors = (parts, parts if alpha is None else alpha, parts if bias is None else bias, grad, grad_moments,
                   grad_parts, part_alpha, part_bias)  # fmt: skip
        launch(_cluster_window_grad_kernel, (B * cut.num_heads,), tensors, (), settings)
    return grad_parts, part_alpha.sum(), part_bias.sum(0)
