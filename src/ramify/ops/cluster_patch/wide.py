# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The kernels of ``triton`` for large windows, which go by in tiles of patches.

What all patches of a window decide, its centres and what they gather, takes a pass of its own each time: a program
reads its points and values again, out of the cache, and finds assignments anew instead of keeping them. A program has
one head of one window of one image.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton import in_parts, patches, product


@triton.jit
def _near(iy, ix, inside, WY: tl.constexpr, WX: tl.constexpr, MY: tl.constexpr, MX: tl.constexpr,
          BLOCK_M: tl.constexpr):  # fmt: skip
    """(N, M) which centres average each patch of a tile."""
    place = tl.arange(0, BLOCK_M)
    jy, jx = (place // MX) % MY, place % MX
    near = (iy[:, None] >= (jy * WY // MY)[None, :]) & (iy[:, None] < (((jy + 1) * WY + MY - 1) // MY)[None, :])
    near = near & (ix[:, None] >= (jx * WX // MX)[None, :]) & (ix[:, None] < (((jx + 1) * WX + MX - 1) // MX)[None, :])
    return (near & inside[:, None] & (place < MY * MX)[None, :]).to(tl.float32)


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
def _assign(points, towards, alpha, bias, at_bias, within, inside, reachable, N: tl.constexpr, HAS_BIAS: tl.constexpr,
            WIDEN: tl.constexpr):  # fmt: skip
    """Assignments of a tile, 0 for patches that do not exist; cosines; lengths and their inverses."""
    wide = points.to(tl.float32)
    length = tl.sqrt(tl.sum(wide * wide, axis=1))
    over = 1.0 / tl.maximum(length, 1e-6)
    cosine = product(points, tl.trans(towards), WIDEN) * over[:, None]
    logits = alpha * cosine
    if HAS_BIAS:
        ok = (within < N)[:, None] & reachable[None, :]
        logits += tl.load(bias + at_bias[None, :] + within[:, None], mask=ok, other=0.0).to(tl.float32)
    logits = tl.where(reachable[None, :], logits, float("-inf"))
    weight = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    assign = tl.where(inside[:, None], weight / tl.sum(weight, axis=1)[:, None], 0.0)
    return assign, cosine, over, length


@triton.jit
def _centres(both, base, window, head, S: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr,
             TOP: tl.constexpr, LEFT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MY: tl.constexpr,
             MX: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The first pass: means, directions of the centres, and which there are."""
    stored: tl.constexpr = both.dtype.element_ty
    centre = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    value_centre = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    count = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, WY * WX, BLOCK_N):
        points, values, _, iy, ix, _, _, inside, _, _, _ = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        member = _near(iy, ix, inside, WY, WX, MY, MX, BLOCK_M)
        count += tl.sum(member, axis=0)
        mean = tl.trans(member.to(stored))
        centre += product(mean, points, WIDEN)
        value_centre += product(mean, values, WIDEN)
    over_count = 1.0 / tl.maximum(count, 1.0)
    centre *= over_count[:, None]
    length = tl.sqrt(tl.sum(centre * centre, axis=1))
    over_length = 1.0 / tl.maximum(length, 1e-6)
    value_centre *= over_count[:, None]
    return centre * over_length[:, None], value_centre, over_count, count > 0.0, length, over_length


@triton.jit
def _gathered(both, base, window, head, towards, value_centre, alpha, bias, at_bias, reachable, S: tl.constexpr,
              COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
              HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr,
              WIDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """The second pass: what the centres gather, and one over their masses."""
    stored: tl.constexpr = both.dtype.element_ty
    mass = tl.zeros((BLOCK_M,), tl.float32) + 1.0
    total = value_centre
    for first in range(0, WY * WX, BLOCK_N):
        points, values, within, _, _, _, _, inside, _, _, _ = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        assign, _, _, _ = _assign(
            points, towards, alpha, bias, at_bias, within, inside, reachable, WY * WX, HAS_BIAS, WIDEN
        )
        mass += tl.sum(assign, axis=0)
        total += product(tl.trans(assign.to(stored)), values, WIDEN)
    return total / mass[:, None], 1.0 / mass


@triton.jit
def wide_cluster_patch_kernel(both, alpha, bias, out, parts, moments, S: tl.constexpr,
        COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
        HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MY: tl.constexpr, MX: tl.constexpr, HEADS: tl.constexpr,
        D: tl.constexpr, CELL_Y: tl.constexpr, CELL_X: tl.constexpr, HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    head, window = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    image = tl.program_id(1).to(tl.int64)
    INNER: tl.constexpr = HEADS * D
    N: tl.constexpr = WY * WX
    stored: tl.constexpr = both.dtype.element_ty
    base = image * (HEIGHT * WIDTH * 2 * INNER)
    factor = tl.load(alpha).to(tl.float32)
    at_bias = (window * HEADS + head) * (MY * MX * N) + tl.arange(0, BLOCK_M) * N
    # names of their own: a name that a loop below gives another shape would not compile
    towards, value_centre, _counts, reachable, _lengths, _over = _centres(
        both, base, window, head, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, MY, MX, HEADS, D, WIDEN, BLOCK_N,
        BLOCK_M, BLOCK_D,
    )  # fmt: skip
    towards = towards.to(stored)
    gathered, _masses = _gathered(
        both, base, window, head, towards, value_centre, factor, bias, at_bias, reachable, S, COLUMNS, WY, WX, TOP,
        LEFT, HEIGHT, WIDTH, HEADS, D, HAS_BIAS, WIDEN, BLOCK_N, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    gathered = gathered.to(stored)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    part_points = tl.zeros((16, BLOCK_D), tl.float32)
    part_values = tl.zeros((16, BLOCK_D), tl.float32)
    for first in range(0, N, BLOCK_N):
        points, values, within, _, _, y, x, inside, mask, at, _ = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        assign, _, _, _ = _assign(points, towards, factor, bias, at_bias, within, inside, reachable, N, HAS_BIAS, WIDEN)
        mixed = product(assign.to(stored), gathered, WIDEN).to(stored)
        tl.store(out + image * (HEIGHT * WIDTH * INNER) + at, mixed, mask=mask)
        kept = tl.where(mask, mixed.to(tl.float32), 0.0)
        sums += tl.sum(kept, axis=1)
        squares += tl.sum(kept * kept, axis=1)
        if CELL_Y > 0:
            chosen = in_parts(window, tl.zeros_like(y), y, x, inside, 1, COLUMNS, WY, WX, CELL_Y, CELL_X).to(stored)
            part_points += product(tl.trans(chosen), points, WIDEN)
            part_values += product(tl.trans(chosen), values, WIDEN)
    if CELL_Y > 0:
        row, column = tl.arange(0, 16), tl.arange(0, BLOCK_D)
        ok = (row < 4)[:, None] & (column < D)[None, :]
        write = parts + (image * S + window) * (4 * 2 * INNER) + row[:, None] * (2 * INNER) + head * D + column[None, :]
        tl.store(write, part_points / N, mask=ok)
        tl.store(write + INNER, part_values / N, mask=ok)
    at_moments = moments + ((image * S + window) * HEADS + head) * 2
    tl.store(at_moments, tl.sum(sums))
    tl.store(at_moments + 1, tl.sum(squares))


@triton.jit
def _to_logits(values, given, assign, gathered, to_sum, to_square, to_total, to_mass, mask, stored: tl.constexpr,
               WIDEN: tl.constexpr):  # fmt: skip
    """Gradients of the logits of a tile."""
    mixed = product(assign.to(stored), gathered, WIDEN)
    to_mixed = tl.where(mask, given.to(tl.float32) + to_sum + 2.0 * to_square * mixed, 0.0).to(stored)
    to_assign = product(to_mixed, tl.trans(gathered), WIDEN)
    to_assign += product(values, tl.trans(to_total), WIDEN) + to_mass[None, :]
    return assign * (to_assign - tl.sum(assign * to_assign, axis=1)[:, None])


@triton.jit
def wide_cluster_patch_grad_kernel(both, alpha, bias, grad, grad_parts, grad_moments, grad_both, part_alpha, part_bias,
        S: tl.constexpr, COLUMNS: tl.constexpr, WY: tl.constexpr, WX: tl.constexpr, TOP: tl.constexpr,
        LEFT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MY: tl.constexpr, MX: tl.constexpr,
        HEADS: tl.constexpr, D: tl.constexpr, CELL_Y: tl.constexpr, CELL_X: tl.constexpr, HAS_BIAS: tl.constexpr,
        WIDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    head, window = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    image = tl.program_id(1).to(tl.int64)
    INNER: tl.constexpr = HEADS * D
    N: tl.constexpr = WY * WX
    M: tl.constexpr = MY * MX
    stored: tl.constexpr = both.dtype.element_ty
    base = image * (HEIGHT * WIDTH * 2 * INNER)
    given_base = grad + image * (HEIGHT * WIDTH * INNER)
    factor = tl.load(alpha).to(tl.float32)
    place = tl.arange(0, BLOCK_M)
    at_bias = (window * HEADS + head) * (M * N) + place * N
    to_sum = tl.load(grad_moments + image * 2).to(tl.float32)
    to_square = tl.load(grad_moments + image * 2 + 1).to(tl.float32)
    direction, value_centre, over_count, reachable, length, over_length = _centres(
        both, base, window, head, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, MY, MX, HEADS, D, WIDEN, BLOCK_N,
        BLOCK_M, BLOCK_D,
    )  # fmt: skip
    towards = direction.to(stored)
    exact, over_mass = _gathered(
        both, base, window, head, towards, value_centre, factor, bias, at_bias, reachable, S, COLUMNS, WY, WX, TOP,
        LEFT, HEIGHT, WIDTH, HEADS, D, HAS_BIAS, WIDEN, BLOCK_N, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    gathered = exact.to(stored)
    to_gathered = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(0, N, BLOCK_N):
        points, _, within, _, _, _, _, inside, mask, at, _ = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        given = tl.load(given_base + at, mask=mask, other=0.0).to(tl.float32)
        assign, _, _, _ = _assign(points, towards, factor, bias, at_bias, within, inside, reachable, N, HAS_BIAS, WIDEN)
        mixed = product(assign.to(stored), gathered, WIDEN)
        to_mixed = tl.where(mask, given + to_sum + 2.0 * to_square * mixed, 0.0).to(stored)
        to_gathered += product(tl.trans(assign.to(stored)), to_mixed, WIDEN)
    to_mass = -over_mass * tl.sum(to_gathered * exact, axis=1)
    to_gathered *= over_mass[:, None]
    to_total = to_gathered.to(stored)
    to_value_centre = (to_gathered * over_count[:, None]).to(stored)
    if CELL_Y > 0:
        row, column = tl.arange(0, 16), tl.arange(0, BLOCK_D)
        ok = (row < 4)[:, None] & (column < D)[None, :]
        of_part = grad_parts + (image * S + window) * (4 * 2 * INNER) + row[:, None] * (2 * INNER) + head * D
        to_part_points = tl.load(of_part + column[None, :], mask=ok, other=0.0)
        to_part_values = tl.load(of_part + INNER + column[None, :], mask=ok, other=0.0)

    to_towards = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    sum_alpha = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, N, BLOCK_N):
        points, values, within, iy, ix, y, x, inside, mask, at, read = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        given = tl.load(given_base + at, mask=mask, other=0.0)
        assign, cosine, over, _ = _assign(
            points, towards, factor, bias, at_bias, within, inside, reachable, N, HAS_BIAS, WIDEN
        )
        to_logits = _to_logits(
            values, given, assign, gathered, to_sum, to_square, to_total, to_mass, mask, stored, WIDEN
        )
        if HAS_BIAS:
            ok_bias = (within < N)[:, None] & (place < M)[None, :]
            at_part = image * (S * HEADS * M * N) + at_bias[None, :] + within[:, None]
            tl.store(part_bias + at_part, to_logits, mask=ok_bias)
        sum_alpha += tl.sum(to_logits * cosine, axis=1)
        to_towards += product(tl.trans((factor * to_logits * over[:, None]).to(stored)), points, WIDEN)
        member = _near(iy, ix, inside, WY, WX, MY, MX, BLOCK_M).to(stored)
        to_values = product(assign.to(stored), to_total, WIDEN) + product(member, to_value_centre, WIDEN)
        if CELL_Y > 0:
            chosen = in_parts(window, tl.zeros_like(y), y, x, inside, 1, COLUMNS, WY, WX, CELL_Y, CELL_X).to(stored)
            to_values += product(chosen, to_part_values, WIDEN) / N
        tl.store(grad_both + base + INNER + read, to_values, mask=mask)
    tl.store(part_alpha + image * (S * HEADS) + tl.program_id(0), tl.sum(sum_alpha))
    along_centre = tl.where(length > 1e-6, tl.sum(to_towards * direction, axis=1), 0.0)
    to_centre = (to_towards - along_centre[:, None] * direction) * (over_length * over_count)[:, None]
    to_centre = to_centre.to(stored)

    for first in range(0, N, BLOCK_N):
        points, values, within, iy, ix, y, x, inside, mask, at, read = _tile(
            both, base, window, head, first, S, COLUMNS, WY, WX, TOP, LEFT, HEIGHT, WIDTH, HEADS, D, BLOCK_N, BLOCK_D
        )
        given = tl.load(given_base + at, mask=mask, other=0.0)
        assign, cosine, over, size = _assign(
            points, towards, factor, bias, at_bias, within, inside, reachable, N, HAS_BIAS, WIDEN
        )
        to_logits = factor * _to_logits(
            values, given, assign, gathered, to_sum, to_square, to_total, to_mass, mask, stored, WIDEN
        )
        along = tl.where(size > 1e-6, tl.sum(to_logits * cosine, axis=1), 0.0)
        to_points = product(to_logits.to(stored), towards, WIDEN)
        to_points = (to_points - (along * over)[:, None] * points.to(tl.float32)) * over[:, None]
        member = _near(iy, ix, inside, WY, WX, MY, MX, BLOCK_M).to(stored)
        to_points += product(member, to_centre, WIDEN)
        if CELL_Y > 0:
            chosen = in_parts(window, tl.zeros_like(y), y, x, inside, 1, COLUMNS, WY, WX, CELL_Y, CELL_X).to(stored)
            to_points += product(chosen, to_part_points, WIDEN) / N
        tl.store(grad_both + base + read, to_points, mask=mask)
