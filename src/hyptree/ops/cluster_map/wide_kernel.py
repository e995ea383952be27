# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The kernels of ``triton`` for large windows, which go by in tiles of patches.

What all patches of a window decide, its centres and what they gather, takes a pass of its own each time: a program
reads its points and values again, out of the cache, and finds assignments anew instead of keeping them. A program has
one head of one window of one image. Averages over the patches of a centre, and what a centre hands back to them, are
loads at their places: a matrix of who belongs to whom would take longer to write down than to multiply.

Forward keeps what such passes found where a gradient is wanted: directions of the centres and what they gathered (as
wide as the input), lengths of the centres and one over their masses, and for each patch the logarithm of the sum of its
softmax, in all a quarter of the bytes of the input for 196 patches and 49 centres. With these and the mixed values,
which the projection behind keeps anyway, the backward pass finds assignments twice, by one exponential each and without
a maximum or a sum, in eight products of a tile. Counted in the code for Hopper: 2.0 thousand instructions of a warp
for a tile of 64 patches, 64 centres and 32 features, and 1.5 thousand forward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyptree.ops.cluster_map.patch_kernel import in_parts, of_part, patches, product

LOG2_E = tl.constexpr(1.4426950408889634)
UNROLLED = tl.constexpr(16)
"""Patches of a centre that are read without a loop."""


@triton.jit
def _pooled(window, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
            HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MY: tl.constexpr, MX: tl.constexpr,
            BLOCK_M: tl.constexpr):  # fmt: skip
    """Of each centre: first row and column of the patches it averages, how many there are, and how many in the map.

    Places behind the last centre have no rows.
    """
    place = tl.arange(0, BLOCK_M)
    jy, jx = (place // MX) % MY, place % MX
    y, x = jy * WY // MY, jx * WX // MX
    rows = tl.where(place < MY * MX, ((jy + 1) * WY + MY - 1) // MY - y, 0)
    columns = ((jx + 1) * WX + MX - 1) // MX - x
    above = (window // COLUMNS) * WY - TOP + y
    beside = (window % COLUMNS) * WX - LEFT + x
    down = tl.maximum(tl.minimum(above + rows, HEIGHT) - tl.maximum(above, 0), 0)
    across = tl.maximum(tl.minimum(beside + columns, WIDTH) - tl.maximum(beside, 0), 0)
    return y, x, rows, columns, (down * across).to(tl.float32)


@triton.jit
def _pool(both, base, dy, dx, y, x, rows, columns, window, head, centre, value_centre, COLUMNS: tl.constexpr,
          WY: tl.constexpr, WX: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, HEIGHT: tl.constexpr,
          WIDTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Add to the sums of every centre the patch that lies (dy, dx) behind its first."""
    feature = tl.arange(0, BLOCK_D)
    above = (window // COLUMNS) * WY - TOP + y + dy
    beside = (window % COLUMNS) * WX - LEFT + x + dx
    ok = (dy < rows) & (dx < columns) & (above >= 0) & (above < HEIGHT) & (beside >= 0) & (beside < WIDTH)
    at = tl.where(ok, above * WIDTH + beside, 0)[:, None] * (2 * HEADS * D) + head * D + feature[None, :]
    mask = ok[:, None] & (feature < D)[None, :]
    centre += tl.load(both + base + at, mask=mask, other=0.0).to(tl.float32)
    value_centre += tl.load(both + base + HEADS * D + at, mask=mask, other=0.0).to(tl.float32)
    return centre, value_centre


@triton.jit
def _of_centres(held, iy, ix, mask, WY: tl.constexpr, WX: tl.constexpr, MY: tl.constexpr, MX: tl.constexpr,
                D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """For each patch of a tile the sum of what is held, (M, D), of the centres that average it."""
    DOWN: tl.constexpr = 1 if WY % MY == 0 else (MY + WY - 1) // WY + 1  # most centres of a patch
    ACROSS: tl.constexpr = 1 if WX % MX == 0 else (MX + WX - 1) // WX + 1
    feature = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for turn in tl.static_range(DOWN * ACROSS):
        jy, jx = iy * MY // WY + turn // ACROSS, ix * MX // WX + turn % ACROSS
        ok = (jy * WY < (iy + 1) * MY) & (jx * WX < (ix + 1) * MX)
        at = held + (jy * MX + jx)[:, None] * D + feature[None, :]
        total += tl.load(at, mask=mask & ok[:, None], other=0.0).to(tl.float32)
    return total


@triton.jit
def _of_parts(grad_parts, window, y, x, mask, INNER: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr,
              WX: tl.constexpr, CELL_Y: tl.constexpr, CELL_X: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """For each patch of a tile the gradient of the part of its window that it is in."""
    part = of_part(window, y, x, COLUMNS, WY, WX, CELL_Y, CELL_X)
    at = grad_parts + part[:, None] * (2 * INNER) + tl.arange(0, BLOCK_D)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32) * (1.0 / (WY * WX))


@triton.jit
def _tile(both, base, window, head, first, S: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr,
          TOP: tl.constexpr, LEFT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
          D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Points and values of a tile and where they are."""
    _, within, iy, ix, y, x, _, inside = patches(
        window, first, 1, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, BLOCK_N
    )
    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < D)[None, :]
    at = tl.where(inside, y * WIDTH + x, 0)[:, None] * (HEADS * D) + head * D + column[None, :]
    read = at + tl.where(inside, y * WIDTH + x, 0)[:, None] * (HEADS * D)
    points = tl.load(both + base + read, mask=mask, other=0.0)
    values = tl.load(both + base + HEADS * D + read, mask=mask, other=0.0)
    return points, values, within, iy, ix, y, x, inside, mask, at, read


@triton.jit
def _logits(points, towards, alpha, bias, at_bias, within, count, N: tl.constexpr, HAS_BIAS: tl.constexpr,
            WIDEN: tl.constexpr):  # fmt: skip
    """Logits of a tile in units of a factor two; lengths of the points and their inverses."""
    wide = points.to(tl.float32)
    length = tl.sqrt(tl.sum(wide * wide, axis=1))
    over = 1.0 / tl.maximum(length, 1e-6)
    # a centre that averages nothing is chosen by nobody; a window that is not in the map needs something to choose from
    reachable = tl.where(tl.max(count, axis=0) > 0.0, count, 1.0) > 0.0
    beyond = tl.where(reachable, 0.0, float("-inf"))[None, :]
    if HAS_BIAS:
        ok = (within < N)[:, None] & (count > 0.0)[None, :]
        beyond += tl.load(bias + at_bias[None, :] + within[:, None], mask=ok, other=0.0).to(tl.float32) * LOG2_E
    return product(points, tl.trans(towards), WIDEN) * (alpha * LOG2_E * over)[:, None] + beyond, length, over


@triton.jit
def _assign(logits, inside):
    """Assignments of a tile, 0 for patches that do not exist, and the logarithms of their sums."""
    top = tl.max(logits, axis=1)
    weight = tl.exp2(logits - top[:, None])
    total = tl.sum(weight, axis=1)
    share = tl.where(inside, 1.0 / total, 0.0)
    return weight * share[:, None], tl.where(inside, top + tl.log2(total), float("inf"))


@triton.jit
def wide_cluster_patch_kernel(both, alpha, bias, out, parts, moments, kept, sizes, S: tl.constexpr,
        COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
        HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MY: tl.constexpr, MX: tl.constexpr, HEADS: tl.constexpr,
        D: tl.constexpr, CELL_Y: tl.constexpr, CELL_X: tl.constexpr, HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    head, window = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    image = tl.program_id(1).to(tl.int64)
    INNER: tl.constexpr = HEADS * D
    N: tl.constexpr = WY * WX
    M: tl.constexpr = MY * MX
    stored: tl.constexpr = both.dtype.element_ty
    base = image * (HEIGHT * WIDTH * 2 * INNER)
    factor = tl.load(alpha).to(tl.float32)
    place, feature = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    at_bias = (window * HEADS + head) * (M * N) + place * N
    cy, cx, rows, columns, count = _pooled(window, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, MY, MX, BLOCK_M)

    centre = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    value_centre = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    DOWN: tl.constexpr = WY // MY if WY % MY == 0 else (WY + MY - 1) // MY + 1  # most patches of a centre
    ACROSS: tl.constexpr = WX // MX if WX % MX == 0 else (WX + MX - 1) // MX + 1
    if DOWN * ACROSS <= UNROLLED:  # all loads at once
        for turn in tl.static_range(DOWN * ACROSS):
            centre, value_centre = _pool(
                both, base, turn // ACROSS, turn % ACROSS, cy, cx, rows, columns, window, head, centre, value_centre,
                COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_D,
            )  # fmt: skip
    else:
        for turn in range(DOWN * ACROSS):
            centre, value_centre = _pool(
                both, base, turn // ACROSS, turn % ACROSS, cy, cx, rows, columns, window, head, centre, value_centre,
                COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_D,
            )  # fmt: skip
    over_count = 1.0 / tl.maximum(count, 1.0)
    centre *= over_count[:, None]
    length = tl.sqrt(tl.sum(centre * centre, axis=1))
    towards = (centre * (1.0 / tl.maximum(length, 1e-6))[:, None]).to(stored)

    owner = image * (S * HEADS) + tl.program_id(0)
    mass = tl.zeros((BLOCK_M,), tl.float32) + 1.0
    gathered = value_centre * over_count[:, None]
    for first in range(0, N, BLOCK_N):
        points, values, within, _iy, _ix, y, x, inside, mask, at, _read = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        logits, _size, _over = _logits(points, towards, factor, bias, at_bias, within, count, N, HAS_BIAS, WIDEN)
        assign, logsum = _assign(logits, inside)
        if KEEP:
            tl.store(sizes + owner * (2 * M + N) + 2 * M + within, logsum, mask=within < N)
        mass += tl.sum(assign, axis=0)
        gathered += product(tl.trans(assign.to(stored)), values, WIDEN)
    over_mass = 1.0 / mass
    collected = (gathered * over_mass[:, None]).to(stored)
    if KEEP:
        of_centre = kept + owner * (2 * M * D) + place[:, None] * D + feature[None, :]
        is_centre = (place < M)[:, None] & (feature < D)[None, :]
        tl.store(of_centre, towards, mask=is_centre)
        tl.store(of_centre + M * D, collected, mask=is_centre)
        tl.store(sizes + owner * (2 * M + N) + place, length, mask=place < M)
        tl.store(sizes + owner * (2 * M + N) + M + place, over_mass, mask=place < M)

    sums = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    ONE_CELL: tl.constexpr = CELL_Y > 0 and (CELL_Y % WY == 0 and CELL_X % WX == 0)  # then a part is the window
    part_points = tl.zeros((BLOCK_N if ONE_CELL else 16, BLOCK_D), tl.float32)
    part_values = tl.zeros((BLOCK_N if ONE_CELL else 16, BLOCK_D), tl.float32)
    for first in range(0, N, BLOCK_N):
        points, values, within, _iy, _ix, y, x, inside, mask, at, _read = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        logits, _size, _over = _logits(points, towards, factor, bias, at_bias, within, count, N, HAS_BIAS, WIDEN)
        assign, _logsum = _assign(logits, inside)
        mixed = product(assign.to(stored), collected, WIDEN).to(stored)
        tl.store(out + image * (HEIGHT * WIDTH * INNER) + at, mixed, mask=mask)
        of_patches = tl.where(mask, mixed.to(tl.float32), 0.0)
        sums += tl.sum(of_patches, axis=1)
        squares += tl.sum(of_patches * of_patches, axis=1)
        if ONE_CELL:
            part_points += points.to(tl.float32)
            part_values += values.to(tl.float32)
        elif CELL_Y > 0:
            chosen = in_parts(window, tl.zeros_like(y), y, x, inside, 1, COLUMNS, WY, WX, CELL_Y, CELL_X).to(stored)
            part_points += product(tl.trans(chosen), points, WIDEN)
            part_values += product(tl.trans(chosen), values, WIDEN)
    if CELL_Y > 0:
        part = tl.arange(0, 16)
        if ONE_CELL:
            part_points = tl.where((part == 0)[:, None], tl.sum(part_points, axis=0)[None, :], 0.0)
            part_values = tl.where((part == 0)[:, None], tl.sum(part_values, axis=0)[None, :], 0.0)
        ok = (part < 4)[:, None] & (feature < D)[None, :]
        write = parts + (image * S + window) * (4 * 2 * INNER) + part[:, None] * (2 * INNER) + head * D
        tl.store(write + feature[None, :], part_points / N, mask=ok)
        tl.store(write + INNER + feature[None, :], part_values / N, mask=ok)
    tl.store(moments + owner * 2, tl.sum(sums))
    tl.store(moments + owner * 2 + 1, tl.sum(squares))


@triton.jit
def _again(points, towards, alpha, bias, at_bias, logsums, within, count, N: tl.constexpr, HAS_BIAS: tl.constexpr,
           WIDEN: tl.constexpr):  # fmt: skip
    """Assignments of a tile from the sums that were kept; lengths of the points and their inverses."""
    logits, length, over = _logits(points, towards, alpha, bias, at_bias, within, count, N, HAS_BIAS, WIDEN)
    logsum = tl.load(logsums + within, mask=within < N, other=float("inf"))
    return tl.exp2(logits - logsum[:, None]), length, over


@triton.jit
def _to_mixed(grad, out, place, mask, to_sum, to_square, stored: tl.constexpr):
    """Gradients of the mixed values of a tile, with what comes by way of the moments."""
    grad_mixed = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    mixed = tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, grad_mixed + to_sum + 2.0 * to_square * mixed, 0.0).to(stored)


@triton.jit
def wide_cluster_patch_grad_kernel(both, alpha, bias, grad, grad_parts, grad_moments, out, kept, sizes, grad_both,
        part_alpha, part_bias, to_centres, S: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr,
        TOP: tl.constexpr, LEFT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MY: tl.constexpr,
        MX: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, CELL_Y: tl.constexpr, CELL_X: tl.constexpr,
        HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_D: tl.constexpr):  # fmt: skip
    head, window = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    image = tl.program_id(1).to(tl.int64)
    INNER: tl.constexpr = HEADS * D
    N: tl.constexpr = WY * WX
    M: tl.constexpr = MY * MX
    stored: tl.constexpr = both.dtype.element_ty
    base = image * (HEIGHT * WIDTH * 2 * INNER)
    of_image = image * (HEIGHT * WIDTH * INNER)
    owner = image * (S * HEADS) + tl.program_id(0)
    factor = tl.load(alpha).to(tl.float32)
    place, feature = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    at_bias = (window * HEADS + head) * (M * N) + place * N
    to_sum = tl.load(grad_moments + image * 2).to(tl.float32)
    to_square = tl.load(grad_moments + image * 2 + 1).to(tl.float32)
    _y, _x, _rows, _columns, count = _pooled(window, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, MY, MX, BLOCK_M)
    over_count = 1.0 / tl.maximum(count, 1.0)
    is_centre = (place < M)[:, None] & (feature < D)[None, :]
    of_centre = kept + owner * (2 * M * D) + place[:, None] * D + feature[None, :]
    towards = tl.load(of_centre, mask=is_centre, other=0.0)
    gathered = tl.load(of_centre + M * D, mask=is_centre, other=0.0)
    lengths = tl.load(sizes + owner * (2 * M + N) + place, mask=place < M, other=0.0)
    over_mass = tl.load(sizes + owner * (2 * M + N) + M + place, mask=place < M, other=0.0)
    logsums = sizes + owner * (2 * M + N) + 2 * M

    to_gathered = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(0, N, BLOCK_N):
        points, values, within, iy, ix, y, x, _inside, mask, at, read = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        to_mixed = _to_mixed(grad, out, of_image + at, mask, to_sum, to_square, stored)
        assign, size, over = _again(points, towards, factor, bias, at_bias, logsums, within, count, N, HAS_BIAS, WIDEN)
        to_gathered += product(tl.trans(assign.to(stored)), to_mixed, WIDEN)
    to_mass = -over_mass * tl.sum(to_gathered * gathered.to(tl.float32), axis=1)
    to_gathered *= over_mass[:, None]
    to_total = to_gathered.to(stored)
    held = to_centres + owner * (2 * M * D)
    to_held = held + place[:, None] * D + feature[None, :]
    tl.store(to_held + M * D, to_gathered * over_count[:, None], mask=is_centre)
    tl.debug_barrier()  # other threads of the program read this
    to_parts = grad_parts + (image * S + window) * (4 * 2 * INNER) + head * D

    to_towards = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    sum_alpha = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, N, BLOCK_N):
        points, values, within, iy, ix, y, x, _inside, mask, at, read = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        to_mixed = _to_mixed(grad, out, of_image + at, mask, to_sum, to_square, stored)
        assign, size, over = _again(points, towards, factor, bias, at_bias, logsums, within, count, N, HAS_BIAS, WIDEN)
        to_values = _of_centres(held + M * D, iy, ix, mask, WY, WX, MY, MX, D, BLOCK_N, BLOCK_D)
        if CELL_Y > 0:
            to_values += _of_parts(
                to_parts + INNER, window, y, x, mask, INNER, COLUMNS, WY, WX, CELL_Y, CELL_X, BLOCK_D
            )
        to_values += product(assign.to(stored), to_total, WIDEN)
        tl.store(grad_both + base + INNER + read, to_values, mask=mask)

        to_assign = product(to_mixed, tl.trans(gathered), WIDEN)
        to_assign += product(values, tl.trans(to_total), WIDEN) + to_mass[None, :]
        to_logits = assign * (to_assign - tl.sum(assign * to_assign, axis=1)[:, None])
        if HAS_BIAS:
            ok_bias = (within < N)[:, None] & (place < M)[None, :]
            at_part = image * (S * HEADS * M * N) + at_bias[None, :] + within[:, None]
            tl.store(part_bias + at_part, to_logits, mask=ok_bias)
        to_cosine = (to_logits * over[:, None]).to(stored)
        to_towards += product(tl.trans(to_cosine), points, WIDEN)
        to_points = product(to_cosine, towards, WIDEN)
        wide = points.to(tl.float32)
        along = tl.sum(wide * to_points, axis=1)  # sum_j to_logits_ij cosine_ij, without the cosines
        sum_alpha += along
        along = tl.where(size > 1e-6, along * over * over, 0.0)
        # without what comes by way of the centres, which all patches decide: the last pass adds it
        tl.store(grad_both + base + read, factor * (to_points - along[:, None] * wide), mask=mask)
    tl.store(part_alpha + owner, tl.sum(sum_alpha))
    direction = towards.to(tl.float32)
    to_towards *= factor
    along_centre = tl.where(lengths > 1e-6, tl.sum(to_towards * direction, axis=1), 0.0)
    scale = over_count / tl.maximum(lengths, 1e-6)
    tl.store(to_held, (to_towards - along_centre[:, None] * direction) * scale[:, None], mask=is_centre)

    tl.debug_barrier()  # the last pass reads what other threads of the program may have written
    for first in range(0, N, BLOCK_N):
        points, values, within, iy, ix, y, x, _inside, mask, at, read = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        to_points = _of_centres(held, iy, ix, mask, WY, WX, MY, MX, D, BLOCK_N, BLOCK_D)
        if CELL_Y > 0:
            to_points += _of_parts(to_parts, window, y, x, mask, INNER, COLUMNS, WY, WX, CELL_Y, CELL_X, BLOCK_D)
        to_points += tl.load(grad_both + base + read, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_both + base + read, to_points, mask=mask)
