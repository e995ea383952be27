"""Clustering of patches in one pass over the map: points and values are read once, mixed values written once.

A program has one head of one window, or of up to four small windows that lie side by side in its tiles with no weight
between them, and goes through several images: position bias and places are found once, and the gradient of the bias is
summed over its images before it is written. Similarities, assignments and centres stay on the chip. Windows with more
than WIDE pairs of a patch and a centre are in ``wide_kernel``.

Bytes at batch 128 and 224 px in bfloat16, and microseconds at 4.2 TB/s, forward and backward, per call:

    medium  stage 1  (56 x 56, 6 heads of 32)    482 and 790 MB   115 and 188 us
            stage 2  (28 x 28, 6 heads of 32)    135 and 212 MB    32 and  50 us
            stage 3  (14 x 14, 12 heads of 32)    58 and 156 MB    14 and  37 us  (the bias of each image counted)
            stage 4  (7 x 7, 12 heads of 32)      14 and  24 MB     4 and   6 us
    nano    stage 1  (56 x 56, 4 heads of 16)    160 and 263 MB    38 and  63 us
            stage 2  (28 x 28, 4 heads of 16)     45 and  70 MB    11 and  17 us
            stage 3  (14 x 14, 8 heads of 16)     19 and  71 MB     5 and  17 us
            stage 4  (7 x 7, 8 heads of 16)        5 and   8 MB     1 and   2 us

A program waits for its own products, seven forward and twelve backward, so what is left depends on how many are
resident: 119 registers forward (four programs per multiprocessor), 168 backward (three, 88 bytes spilt) for 128
threads; in tiles 168 both ways (three).
Sums over images and heads are taken in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data, interpreted
from hyptree.ops.windows import Cut

PARTS = 4
"""Parts of a window that belong to different cells of the map: two down, two across."""


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """The product of two tiles, summed in float32; WIDEN is for Triton's interpreter, which cannot take bfloat16."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")  # float32 in three products that have tensor cores


@triton.jit
def patches(group, first, G: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr,
             TOP: tl.constexpr, LEFT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
             BLOCK_N: tl.constexpr):  # fmt: skip
    """Of each patch in the tile: its window among those of the tile, its row and column there and in the map."""
    lane = first + tl.arange(0, BLOCK_N)
    local = tl.minimum(lane // (WY * WX), G - 1)
    within = lane - local * (WY * WX)
    window = group * G + local
    iy, ix = within // WX, within % WX
    y = (window // COLUMNS) * WY + iy - TOP
    x = (window % COLUMNS) * WX + ix - LEFT
    exists = (within < WY * WX) & (window < S)
    inside = exists & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
    return local, within, iy, ix, y, x, exists, inside


@triton.jit
def _members(group, local, iy, ix, inside, G: tl.constexpr, S: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr,
             MY: tl.constexpr, MX: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """(N, M) which centres are of a patch's own window and may be chosen, and which of them average it; 1 / counts."""
    place = tl.arange(0, BLOCK_M)
    owner = place // (MY * MX)
    jy, jx = (place // MX) % MY, place % MX
    own = (local[:, None] == owner[None, :]) & (owner < G)[None, :]
    near = (iy[:, None] >= (jy * WY // MY)[None, :]) & (iy[:, None] < (((jy + 1) * WY + MY - 1) // MY)[None, :])
    near = near & (ix[:, None] >= (jx * WX // MX)[None, :]) & (ix[:, None] < (((jx + 1) * WX + MX - 1) // MX)[None, :])
    member = own & near & inside[:, None]
    count = tl.sum(member.to(tl.float32), axis=0)
    # a centre that averages nothing is chosen by nobody; a window that does not exist needs something to choose from
    if not FULL:
        own = own & ((count > 0.0) | (group * G + owner >= S))[None, :]
    return own, member.to(tl.float32), 1.0 / tl.maximum(count, 1.0)


@triton.jit
def of_part(window, y, x, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr, CELL_Y: tl.constexpr,
            CELL_X: tl.constexpr):  # fmt: skip
    """Which part of its window a patch is in, of four."""
    py = y // CELL_Y - (window // COLUMNS) * WY // CELL_Y
    px = x // CELL_X - (window % COLUMNS) * WX // CELL_X
    return py * 2 + px


@triton.jit
def in_parts(group, local, y, x, inside, G: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr,
              CELL_Y: tl.constexpr, CELL_X: tl.constexpr):  # fmt: skip
    """(N, 16) which part of its window a patch is in, four for each window of the tile."""
    part = local * 4 + of_part(group * G + local, y, x, COLUMNS, WY, WX, CELL_Y, CELL_X)
    return ((part[:, None] == tl.arange(0, 16)[None, :]) & inside[:, None]).to(tl.float32)


@triton.jit
def _spoilt(total, own):
    """Which patches are in a window with something that is not finite, from a sum of tiles."""
    bad = tl.sum(total * 0.0, axis=1)
    bad = (bad != bad).to(tl.float32)
    of_centre = tl.max(tl.where(own, bad[:, None], 0.0), axis=0)
    return tl.max(tl.where(own, of_centre[None, :], 0.0), axis=1) > 0.0


@triton.jit
def _assigned(x, v, member, own, inside, over_count, alpha, bias, FULL: tl.constexpr, WIDEN: tl.constexpr):
    """The way from points and values to the values of the centres."""
    stored: tl.constexpr = x.dtype
    mean = tl.trans(member)
    centre = product(mean, x, WIDEN) * over_count[:, None]
    value_centre = product(mean, v, WIDEN) * over_count[:, None]
    wide = x.to(tl.float32)
    length = tl.sqrt(tl.sum(wide * wide, axis=1))
    centre_length = tl.sqrt(tl.sum(centre * centre, axis=1))
    over = 1.0 / tl.maximum(length, 1e-6)
    over_centre = 1.0 / tl.maximum(centre_length, 1e-6)
    towards = centre * over_centre[:, None]
    cosine = product(x, tl.trans(towards.to(stored)), WIDEN) * over[:, None]
    logits = tl.where(own, alpha * cosine + bias, float("-inf"))
    weight = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    assign = weight * (1.0 / tl.sum(weight, axis=1))[:, None]
    counted = assign
    if not FULL:
        counted = tl.where(inside[:, None], assign, 0.0)
    over_mass = 1.0 / (1.0 + tl.sum(counted, axis=0))
    gathered = (value_centre + product(tl.trans(counted.to(stored)), v, WIDEN)) * over_mass[:, None]
    return towards, over, length, over_centre, centre_length, cosine, assign, counted, over_mass, gathered


@triton.jit
def _cluster_patch_kernel(both, alpha, bias, out, parts, moments, B, IMAGES, GROUPS: tl.constexpr, G: tl.constexpr,
        S: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr, TOP: tl.constexpr,
        LEFT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MY: tl.constexpr, MX: tl.constexpr,
        HEADS: tl.constexpr, D: tl.constexpr, CELL_Y: tl.constexpr, CELL_X: tl.constexpr, HAS_BIAS: tl.constexpr,
        FULL: tl.constexpr, WIDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_D: tl.constexpr):  # fmt: skip
    head = tl.program_id(0) % HEADS
    group = tl.program_id(0) // HEADS
    first = tl.program_id(1).to(tl.int64) * IMAGES
    INNER: tl.constexpr = HEADS * D
    M: tl.constexpr = MY * MX
    stored: tl.constexpr = both.dtype.element_ty
    local, within, iy, ix, y, x, exists, inside = patches(
        group, 0, G, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, BLOCK_N
    )
    if FULL:  # said again, so that the compiler leaves masks out
        inside = tl.full((BLOCK_N,), 1, tl.int1)
    own, member, over_count = _members(group, local, iy, ix, inside, G, S, WY, WX, MY, MX, FULL, BLOCK_M)
    member = member.to(stored)
    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < D)[None, :]
    patch = tl.where(inside, y * WIDTH + x, 0)
    read = patch[:, None] * (2 * INNER) + head * D + column[None, :]
    write = patch[:, None] * INNER + head * D + column[None, :]
    factor = tl.load(alpha).to(tl.float32)
    place = tl.arange(0, BLOCK_M)
    added = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if HAS_BIAS:
        at = ((group * G + local)[:, None] * HEADS + head) * (M * WY * WX) + (place % M)[None, :] * (WY * WX)
        added = tl.load(bias + at + within[:, None], mask=own & exists[:, None], other=0.0).to(tl.float32)
    if CELL_Y > 0:
        chosen = in_parts(group, local, y, x, inside, G, COLUMNS, WY, WX, CELL_Y, CELL_X)
        chosen = tl.trans(chosen.to(stored))
        row = tl.arange(0, 16)
        part_mask = ((row < 4 * G) & (group * G * 4 + row < 4 * S))[:, None] & (column < D)[None, :]
        part_at = (group * G * 4 + row)[:, None] * (2 * INNER) + head * D + column[None, :]
    for turn in range(tl.minimum(IMAGES, B - tl.program_id(1) * IMAGES)):
        image = first + turn
        base = both + image * (HEIGHT * WIDTH * 2 * INNER)
        points = tl.load(base + read, mask=mask, other=0.0)
        values = tl.load(base + INNER + read, mask=mask, other=0.0)
        if CELL_Y > 0:
            part_base = parts + image * (S * 4 * 2 * INNER)
            tl.store(part_base + part_at, product(chosen, points, WIDEN) / (WY * WX), mask=part_mask)
            tl.store(part_base + INNER + part_at, product(chosen, values, WIDEN) / (WY * WX), mask=part_mask)
        if G > 1:
            spoilt = _spoilt(points.to(tl.float32) + values.to(tl.float32), own)
            points = tl.where(spoilt[:, None], 0.0, points.to(tl.float32)).to(stored)
            values = tl.where(spoilt[:, None], 0.0, values.to(tl.float32)).to(stored)
        _, _, _, _, _, _, assign, _, _, gathered = _assigned(
            points, values, member, own, inside, over_count, factor, added, FULL, WIDEN
        )
        mixed = product(assign.to(stored), gathered.to(stored), WIDEN)
        if G > 1:
            mixed = tl.where(spoilt[:, None], float("nan"), mixed)
        mixed = mixed.to(stored)
        tl.store(out + image * (HEIGHT * WIDTH * INNER) + write, mixed, mask=mask)
        kept = tl.where(mask, mixed.to(tl.float32), 0.0)
        at_moments = moments + ((image * GROUPS + group) * HEADS + head) * 2
        tl.store(at_moments, tl.sum(kept))
        tl.store(at_moments + 1, tl.sum(kept * kept))


@triton.jit
def _cluster_patch_grad_kernel(both, alpha, bias, grad, grad_parts, grad_moments, grad_both, part_alpha, part_bias, B,
        IMAGES, GROUPS: tl.constexpr, G: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr,
        WX: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
        MY: tl.constexpr, MX: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, CELL_Y: tl.constexpr,
        CELL_X: tl.constexpr, HAS_BIAS: tl.constexpr, FULL: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    head = tl.program_id(0) % HEADS
    group = tl.program_id(0) // HEADS
    first = tl.program_id(1).to(tl.int64) * IMAGES
    INNER: tl.constexpr = HEADS * D
    M: tl.constexpr = MY * MX
    N: tl.constexpr = WY * WX
    stored: tl.constexpr = both.dtype.element_ty
    local, within, iy, ix, y, x, exists, inside = patches(
        group, 0, G, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, BLOCK_N
    )
    if FULL:  # said again, so that the compiler leaves masks out
        inside = tl.full((BLOCK_N,), 1, tl.int1)
    own, member, over_count = _members(group, local, iy, ix, inside, G, S, WY, WX, MY, MX, FULL, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < D)[None, :]
    patch = tl.where(inside, y * WIDTH + x, 0)
    read = patch[:, None] * (2 * INNER) + head * D + column[None, :]
    offset = patch[:, None] * INNER + head * D + column[None, :]
    factor = tl.load(alpha).to(tl.float32)
    place = tl.arange(0, BLOCK_M)
    added = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    at = ((group * G + local)[:, None] * HEADS + head) * (M * N) + (place % M)[None, :] * N + within[:, None]
    of_bias = (local[:, None] == (place // M)[None, :]) & exists[:, None]
    if HAS_BIAS:
        added = tl.load(bias + at, mask=of_bias, other=0.0).to(tl.float32)
        sum_bias = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if CELL_Y > 0:  # where the gradient of each patch's part is
        part = of_part(group * G + local, y, x, COLUMNS, WY, WX, CELL_Y, CELL_X)
        part_at = ((group * G + local) * 4 + part)[:, None] * (2 * INNER) + head * D + column[None, :]
    handed = (member * over_count[None, :]).to(tl.float32)  # the share of a patch in each centre
    member = member.to(stored)
    sum_alpha = tl.zeros((BLOCK_N,), tl.float32)
    for turn in range(tl.minimum(IMAGES, B - tl.program_id(1) * IMAGES)):
        image = first + turn
        base = image * (HEIGHT * WIDTH * 2 * INNER)
        points = tl.load(both + base + read, mask=mask, other=0.0)
        values = tl.load(both + base + INNER + read, mask=mask, other=0.0)
        to_mixed = tl.load(grad + image * (HEIGHT * WIDTH * INNER) + offset, mask=mask, other=0.0)
        if G > 1:
            spoilt = _spoilt(points.to(tl.float32) + values.to(tl.float32) + to_mixed.to(tl.float32), own)
            points = tl.where(spoilt[:, None], 0.0, points.to(tl.float32)).to(stored)
            values = tl.where(spoilt[:, None], 0.0, values.to(tl.float32)).to(stored)
            to_mixed = tl.where(spoilt[:, None], 0.0, to_mixed.to(tl.float32)).to(stored)
        towards, over, length, over_centre, centre_length, cosine, assign, counted, over_mass, gathered = _assigned(
            points, values, member, own, inside, over_count, factor, added, FULL, WIDEN
        )
        assigned = assign.to(stored)
        mixed = product(assigned, gathered.to(stored), WIDEN)
        to_sum = tl.load(grad_moments + image * 2).to(tl.float32)
        to_square = tl.load(grad_moments + image * 2 + 1).to(tl.float32)
        to_mixed = tl.where(mask, to_mixed.to(tl.float32) + to_sum + 2.0 * to_square * mixed, 0.0).to(stored)

        to_gathered = product(tl.trans(assigned), to_mixed, WIDEN)
        to_total = to_gathered * over_mass[:, None]
        to_mass = -over_mass * tl.sum(to_gathered * gathered, axis=1)
        to_assign = product(to_mixed, tl.trans(gathered.to(stored)), WIDEN)
        to_assign += product(values, tl.trans(to_total.to(stored)), WIDEN) + to_mass[None, :]
        # patches hand their values to centres by assignment and by average
        to_values = product((counted + handed).to(stored), to_total.to(stored), WIDEN)
        if CELL_Y > 0:  # both before the first store, which nothing is read ahead of
            part_base = grad_parts + image * (S * 4 * 2 * INNER)
            to_part = tl.load(part_base + part_at, mask=mask, other=0.0)
            to_values += tl.load(part_base + INNER + part_at, mask=mask, other=0.0).to(tl.float32) * (1.0 / N)
        if G > 1:
            to_values = tl.where(spoilt[:, None], float("nan"), to_values)
        tl.store(grad_both + base + INNER + read, to_values, mask=mask)

        to_logits = counted * (to_assign - tl.sum(counted * to_assign, axis=1)[:, None])
        if G > 1:
            to_logits = tl.where(spoilt[:, None] & own, float("nan"), to_logits)
        if HAS_BIAS:
            sum_bias += to_logits
        slope = tl.sum(to_logits * cosine, axis=1)
        sum_alpha += slope
        if G > 1:
            to_logits = tl.where(spoilt[:, None], 0.0, to_logits)
            slope = tl.where(spoilt, 0.0, slope)
        to_cosine = (to_logits * over[:, None]).to(stored)
        along = tl.where(length > 1e-6, slope * over * over, 0.0)
        to_points = factor * (product(to_cosine, towards.to(stored), WIDEN) - along[:, None] * points.to(tl.float32))
        to_towards = factor * product(tl.trans(to_cosine), points, WIDEN)
        along_centre = tl.where(centre_length > 1e-6, tl.sum(to_towards * towards, axis=1), 0.0)
        to_centre = (to_towards - along_centre[:, None] * towards) * (over_centre * over_count)[:, None]
        to_points += product(member, to_centre.to(stored), WIDEN)
        if CELL_Y > 0:
            to_points += to_part.to(tl.float32) * (1.0 / N)
        if G > 1:
            to_points = tl.where(spoilt[:, None], float("nan"), to_points)
        tl.store(grad_both + base + read, to_points, mask=mask)
    turn_of = tl.program_id(1).to(tl.int64)
    tl.store(part_alpha + turn_of * (GROUPS * HEADS) + tl.program_id(0), tl.sum(sum_alpha))
    if HAS_BIAS:
        tl.store(part_bias + turn_of * (S * HEADS * M * N) + at, sum_bias, mask=of_bias)


PROGRAMS = 1584
"""Programs of a launch, about: twelve per multiprocessor of a Hopper GPU, so that the last ones do not wait long."""


WIDE, FLOAT32_TILE = 2048, 16
"""Pairs of a patch and a centre that a program holds at once; with more, patches go by in tiles, in float32 of this
size. Larger ones of float32 spill 1.7 KB of every thread's registers in the backward pass."""


class LaunchConfig(NamedTuple):
    """How programs are launched in half precision: three or four a multiprocessor are worth some spilt registers."""

    warps: int = 4
    stages: int = 1
    registers: int = 168
    tile: int = 64


LAUNCH_CONFIGS = {
    "forward": LaunchConfig(stages=2, registers=128), "backward": LaunchConfig(),
    "wide forward": LaunchConfig(), "wide backward": LaunchConfig(),
}  # fmt: skip


@functools.cache
def is_wide(cut: Cut) -> bool:
    """Whether windows go by in tiles."""
    sizes = (max(16, triton.next_power_of_2(n)) for n in (cut.window, cut.centres))
    return next(sizes) * next(sizes) > WIDE


@functools.cache
def _settings(cut: Cut, has_bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    group = 1
    while group < 4 and 2 * group * cut.window <= 64 and 2 * group * cut.centres <= 16 and group < cut.num_windows:
        group *= 2
    sizes = {"BLOCK_N": group * cut.window, "BLOCK_M": group * cut.centres, "BLOCK_D": cut.dim}
    sizes = {name: max(16, triton.next_power_of_2(n)) for name, n in sizes.items()}
    return {
        "GROUPS": -(-cut.num_windows // group), "G": group, "S": cut.num_windows, "COLUMNS": cut.columns,
        "WY": cut.wy, "WX": cut.wx, "TOP": cut.top, "LEFT": cut.left, "HEIGHT": cut.height, "WIDTH": cut.width,
        "MY": cut.my, "MX": cut.mx, "HEADS": cut.num_heads, "D": cut.dim,
        "CELL_Y": cut.height // cut.cells_y if cut.cells_y else 0,
        "CELL_X": cut.width // cut.cells_x if cut.cells_x else 0,
        "HAS_BIAS": has_bias,
        "FULL": not cut.windows.is_padded and cut.num_windows % group == 0 and sizes["BLOCK_N"] == group * cut.window,
        "WIDEN": interpreted() and dtype == torch.bfloat16, **sizes,
    }  # fmt: skip


def _wide_settings(cut: Cut, has_bias: bool, dtype: torch.dtype, which: str) -> dict[str, Any]:
    settings = _settings(cut, has_bias, dtype) | _options(dtype, which)
    settings["BLOCK_N"] = FLOAT32_TILE if dtype == torch.float32 else LAUNCH_CONFIGS[which].tile
    return {key: value for key, value in settings.items() if key not in ("GROUPS", "G", "FULL")}


def _options(dtype: torch.dtype, which: str) -> dict[str, Any]:
    """What Triton is told beside the constants of a kernel."""
    config = LAUNCH_CONFIGS[which]
    if dtype == torch.float32 or interpreted():
        return {"num_warps": 4, "num_stages": config.stages}
    return {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}


def _images(B: int, settings: dict[str, Any]) -> int:
    """Images of one program."""
    wanted = max(1, PROGRAMS // (settings["GROUPS"] * settings["HEADS"]))
    return -(-B // min(B, wanted))


def forward(
    both: Tensor, alpha: Tensor, bias: Tensor | None, cut: Cut, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(B, height, width, 2 inner) contiguous -> mixed values, parts and moments.

    With ``keep`` also what the backward pass of wide windows needs: directions of the centres and what they gathered,
    and in float32 their lengths, one over their masses and the logarithms of the sums of every patch.
    """
    B, dtype, device = both.shape[0], both.dtype, both.device
    owners = cut.num_windows * cut.num_heads if keep and is_wide(cut) else 0
    kept = torch.empty(B, owners, 2, cut.centres, cut.dim, dtype=dtype, device=device)
    sizes = torch.empty(B, owners, 2 * cut.centres + cut.window, dtype=torch.float32, device=device)
    settings = _settings(cut, bias is not None, dtype)
    out = torch.empty(B, cut.height, cut.width, cut.inner, dtype=dtype, device=device)
    parts = torch.empty(B, cut.num_windows, PARTS if cut.cells_y else 0, 2 * cut.inner, dtype=dtype, device=device)
    moments = torch.empty(B, settings["GROUPS"] * cut.num_heads, 2, dtype=torch.float32, device=device)
    if has_data(both) and B:
        tensors = (both, alpha, alpha if bias is None else bias, out, parts, moments)
        if is_wide(cut):
            from hyptree.ops.cluster_map.wide_kernel import wide_cluster_patch_kernel as kernel

            grid = (cut.num_windows * cut.num_heads, B)
            options = _wide_settings(cut, bias is not None, dtype, "wide forward") | {"KEEP": keep}
            launch(kernel, grid, (*tensors, kept, sizes), (), options)
        else:
            images = _images(B, settings)
            grid = (settings["GROUPS"] * cut.num_heads, -(-B // images))
            launch(_cluster_patch_kernel, grid, tensors, (B, images), settings | _options(dtype, "forward"))
    return out, parts, moments.sum(1), kept, sizes


def backward(
    both: Tensor, alpha: Tensor, bias: Tensor | None, grad: Tensor, grad_parts: Tensor, grad_moments: Tensor,
    out: Tensor, kept: Tensor, sizes: Tensor, cut: Cut,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``both``, of alpha () and of the bias (empty without one) in float32.

    Args:
        out, kept, sizes: what :func:`forward` gave; of no account for windows that are not wide.
    """
    B, device = both.shape[0], both.device
    settings = _settings(cut, bias is not None, both.dtype)
    images = 1 if is_wide(cut) else _images(max(B, 1), settings)
    grid = (settings["GROUPS"] * cut.num_heads, -(-B // images))
    grad_both = torch.empty_like(both)
    part_alpha = torch.empty(grid[1], grid[0], dtype=torch.float32, device=device)
    shape = () if bias is None else bias.shape
    # one for each image of wide windows: half precision is enough for what is summed over all images in float32
    held = both.dtype if is_wide(cut) else torch.float32
    part_bias = torch.empty(grid[1] if bias is not None else 0, *shape, dtype=held, device=device)
    if has_data(both) and B:
        inputs = (both, alpha, alpha if bias is None else bias, grad, grad_parts, grad_moments)
        outputs = (grad_both, part_alpha, part_bias)
        if is_wide(cut):
            from hyptree.ops.cluster_map.wide_kernel import wide_cluster_patch_grad_kernel as kernel

            options = _wide_settings(cut, bias is not None, both.dtype, "wide backward")
            launch(kernel, grid, (*inputs, out, kept, sizes, *outputs, torch.empty_like(kept)), (), options)
        else:
            options = settings | _options(both.dtype, "backward")
            launch(_cluster_patch_grad_kernel, grid, (*inputs, *outputs), (B, images), options)
    return grad_both, part_alpha.sum(), part_bias.sum(0, dtype=torch.float32)
