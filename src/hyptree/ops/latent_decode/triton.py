"""Cached latents read once for all heads: one kernel goes over pieces of the context, one joins them, one is before.

One query per sequence and few heads are too little work for a GPU unless the context is cut: here into as many pieces
as keep all multiprocessors busy. A program holds all heads of a sequence, so each latent is read once and serves scores
and means. At 8 sequences of 8192 tokens, 6 heads, latents of 64 + 16 in bfloat16 that is 13.6 MB, 3.3 microseconds at
4.2 TB/s; the pieces are 0.8 MB. Weights are rounded before they are summed, so that a mean has exactly the weights of
its sum: rounding then moves the centroid, but never off the hyperboloid. What stands before reads the maps of keys and
values once per sequence, from the cache of the GPU: 0.8 MB for 8 sequences, which a launch takes longer than.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data, interpreted
from hyptree.ops.heads.reference import Heads

PROGRAMS = 528
"""As many as run at once: four on each of 132 multiprocessors."""


@triton.jit
def _turned_row(row, column, cos, sin, D: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first D components in memory, those that turn turned; each is read again as the partner of another."""
    if INTERLEAVED:
        partner = column ^ 1
    else:
        partner = tl.where(column < TURNED // 2, column + TURNED // 2, column - TURNED // 2)
    is_turned = column < TURNED
    x = tl.load(row + column, mask=column < D, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=is_turned & (partner < D), other=0.0).to(tl.float32)
    angle_cos = tl.load(cos + column, mask=is_turned, other=1.0)
    return x * angle_cos + other * tl.load(sin + column, mask=is_turned, other=0.0)


@triton.jit
def _excess(square, OVER_C: tl.constexpr):
    """How far a time lies above the origin's, without cancellation."""
    return square / (tl.sqrt(square + OVER_C) + OVER_C**0.5)


@triton.jit
def _latent_absorb_kernel(queries, latent, shared, cos, sin, log_tau, gain, up, to_keys, time, keys, times, TABLE,
                          query_batch, latent_batch, shared_batch, up_row, H: tl.constexpr, WIDTH: tl.constexpr,
                          KEY: tl.constexpr, R: tl.constexpr, TURNED: tl.constexpr, RANK: tl.constexpr,
                          L: tl.constexpr, BIAS: tl.constexpr, TWICE: tl.constexpr, VALUE_SCALE: tl.constexpr,
                          OVER_C: tl.constexpr, EPS: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
                          LATENT: tl.constexpr, REST: tl.constexpr, IS_HALF: tl.constexpr):  # fmt: skip
    """One head of one token; the head of number 0 also writes the token's row of the cache."""
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    stored: tl.constexpr = to_keys.dtype.element_ty
    line, column, rest = tl.arange(0, ROWS), tl.arange(0, LATENT), tl.arange(0, REST)
    matrix = up + (head * WIDTH + line[:, None]).to(tl.int64) * up_row + column[None, :]
    inside = (line[:, None] < WIDTH) & (column[None, :] < L)
    key_map = tl.load(matrix, mask=inside, other=0.0).to(tl.float32)
    value_map = tl.load(matrix + H * WIDTH * up_row, mask=inside, other=0.0).to(tl.float32)
    cos += (b % TABLE) * TURNED
    sin += (b % TABLE) * TURNED
    # the latent, normed and lifted
    x = tl.load(latent + b * latent_batch + column, mask=column < RANK, other=0.0).to(tl.float32)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / RANK + EPS)
    x *= tl.load(gain + column, mask=column < RANK, other=0.0).to(tl.float32)
    x = x.to(stored).to(tl.float32)
    x = tl.where(column == RANK, tl.sqrt(tl.sum(x * x, axis=0) + OVER_C), x)
    if BIAS:
        x = tl.where(column == RANK + 1, 1.0, x)
    x = x.to(stored).to(tl.float32)
    common = _turned_row(shared + b * shared_batch, rest, cos, sin, R, TURNED, INTERLEAVED)
    common = common.to(stored).to(tl.float32)
    # key and value of this head, for their times
    key = tl.sum(key_map * x[None, :], axis=1).to(stored).to(tl.float32)
    value = tl.sum(value_map * x[None, :], axis=1).to(stored).to(tl.float32)
    value = (value * VALUE_SCALE).to(stored).to(tl.float32)
    key_excess = _excess(tl.sum(key * key, axis=0) + tl.sum(common * common, axis=0), OVER_C)
    value_excess = _excess(tl.sum(value * value, axis=0), OVER_C)
    # the query of this head
    factor = TWICE * tl.exp(-tl.load(log_tau).to(tl.float32))
    query_row = queries + b * query_batch + head * WIDTH
    query = _turned_row(query_row, line, cos, sin, KEY, TURNED, INTERLEAVED)
    query = (query * factor).to(stored).to(tl.float32)
    to_latent = tl.sum(key_map * query[:, None], axis=0)
    place = b * H + head
    tl.store(to_keys + place * (L + R) + column, to_latent, mask=column < L)
    tl.store(to_keys + place * (L + R) + L + line, query, mask=line < R)
    tl.store(time + place, tl.sqrt(tl.sum(query * query, axis=0) + factor * factor * OVER_C))
    parts: tl.constexpr = 4 if IS_HALF else 2
    times += b * (parts * H) + head
    tl.store(times, key_excess)
    tl.store(times + H, value_excess)
    if IS_HALF:
        tl.store(times + 2 * H, key_excess - key_excess.to(stored).to(tl.float32))
        tl.store(times + 3 * H, value_excess - value_excess.to(stored).to(tl.float32))
    if head == 0:
        tl.store(keys + b * (L + R) + column, x, mask=column < L)
        tl.store(keys + b * (L + R) + L + rest, common, mask=rest < R)


@triton.jit
def _product(a, b, total, WIDEN: tl.constexpr):
    """``total + a @ b``; WIDEN is for Triton's interpreter, which cannot take bfloat16."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _latent_pieces_kernel(queries, time, keys, times, mask, means, sums, M, PIECES, TILES, keys_batch, keys_row,
                          times_batch, times_row, mask_batch, H: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
                          HEADS: tl.constexpr, LATENT: tl.constexpr, REST: tl.constexpr, TILE: tl.constexpr,
                          HAS_MASK: tl.constexpr, IS_HALF: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """Weights of a piece relative to its largest score, their sum, and the sums of latents and excess."""
    piece, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, column, rest = tl.arange(0, HEADS), tl.arange(0, LATENT), tl.arange(0, REST)
    is_head = head < H
    stored: tl.constexpr = keys.dtype.element_ty
    query = queries + (b * H + head[:, None]) * (L + R)
    q = tl.load(query + column[None, :], mask=is_head[:, None] & (column[None, :] < L), other=0.0)
    q_rest = tl.load(query + L + rest[None, :], mask=is_head[:, None] & (rest[None, :] < R), other=0.0)
    q_time = tl.load(time + b * H + head, mask=is_head, other=0.0)
    keys += b * keys_batch
    times += b * times_batch
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    excess = tl.zeros((HEADS,), tl.float32)
    mean = tl.zeros((HEADS, LATENT), tl.float32)
    for tile in range(TILES):
        row = (piece * TILES + tile) * TILE + tl.arange(0, TILE)
        is_seen = row < M
        if HAS_MASK:
            is_seen = is_seen & (tl.load(mask + b * mask_batch + row, mask=is_seen, other=0) != 0)
        if tl.max(is_seen.to(tl.int32), axis=0) > 0:  # places not yet used, or padding, are not even read
            place = row.to(tl.int64)
            key = keys + place[:, None] * keys_row
            latent = tl.load(key + column[None, :], mask=is_seen[:, None] & (column[None, :] < L), other=0.0)
            other = tl.load(key + L + rest[None, :], mask=is_seen[:, None] & (rest[None, :] < R), other=0.0)
            own = times + place[None, :] * times_row + head[:, None]
            here = is_seen[None, :] & is_head[:, None]
            key_excess = tl.load(own, mask=here, other=0.0).to(tl.float32)
            value_excess = tl.load(own + H, mask=here, other=0.0).to(tl.float32)
            if IS_HALF:
                key_excess += tl.load(own + 2 * H, mask=here, other=0.0).to(tl.float32)
                value_excess += tl.load(own + 3 * H, mask=here, other=0.0).to(tl.float32)
            scores = _product(q, tl.trans(latent), tl.zeros((HEADS, TILE), tl.float32), WIDEN)
            scores = _product(q_rest, tl.trans(other), scores, WIDEN)
            scores = tl.where(is_seen[None, :], scores - q_time[:, None] * key_excess, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            weight = tl.exp(scores - new_top[:, None]).to(stored)
            exact = weight.to(tl.float32)
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.sum(exact, axis=1)
            excess = excess * shrink + tl.sum(exact * value_excess, axis=1)
            mean = _product(weight, latent, mean * shrink[:, None], WIDEN)
            top = new_top
    place = (b * PIECES + piece) * H + head
    tl.store(means + place[:, None] * L + column[None, :], mean, mask=is_head[:, None] & (column[None, :] < L))
    tl.store(sums + place * 3, top, mask=is_head)
    tl.store(sums + place * 3 + 1, total, mask=is_head)
    tl.store(sums + place * 3 + 2, excess, mask=is_head)


@triton.jit
def _latent_join_kernel(means, sums, up_value, out, PIECES, up_head, up_row, H: tl.constexpr, D: tl.constexpr,
                        L: tl.constexpr, WIDTH: tl.constexpr, VALUE_SCALE: tl.constexpr, OVER_C: tl.constexpr,
                        LATENT: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Means of latents from those of all pieces, the value of that, the centroid."""
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, line = tl.arange(0, LATENT), tl.arange(0, VALUE)
    up = up_value + head * up_head + line[:, None] * up_row + column[None, :]
    up = tl.load(up, mask=(line[:, None] < D) & (column[None, :] < L), other=0.0).to(tl.float32)
    first = b * PIECES * H + head
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    excess = tl.zeros((), tl.float32)
    mean = tl.zeros((LATENT,), tl.float32)
    for start in range(0, PIECES, ROWS):
        piece = start + tl.arange(0, ROWS)
        is_piece, place = piece < PIECES, first + piece * H
        own_top = tl.load(sums + place * 3, mask=is_piece, other=float("-inf"))
        own_total = tl.load(sums + place * 3 + 1, mask=is_piece, other=0.0)
        own_excess = tl.load(sums + place * 3 + 2, mask=is_piece, other=0.0)
        own_mean = tl.load(means + place[:, None] * L + column[None, :],
                           mask=is_piece[:, None] & (column[None, :] < L), other=0.0)  # fmt: skip
        new_top = tl.maximum(top, tl.max(own_top, axis=0))
        against = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen so far: weights are 0, not NaN
        weight, shrink = tl.exp(own_top - against), tl.exp(top - against)
        total = total * shrink + tl.sum(weight * own_total, axis=0)
        excess = excess * shrink + tl.sum(weight * own_excess, axis=0)
        mean = mean * shrink + tl.sum(weight[:, None] * own_mean, axis=0)
        top = new_top
    share = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    value = tl.sum(up * (mean * share)[None, :], axis=1) * VALUE_SCALE  # 0 from D on
    excess = excess * share
    gap = excess * (excess + 2.0 * OVER_C**0.5) - tl.sum(value * value, axis=0)
    scale = 1.0 / tl.sqrt(1.0 + tl.maximum(gap, 0.0) / OVER_C)
    point = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    point = tl.where(line == D, tl.sqrt(tl.sum(point * point, axis=0) + OVER_C), point)
    tl.store(out + (b * H + head) * WIDTH + line, point, mask=line < WIDTH)


def absorb(
    queries: Tensor, latent: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, log_tau: Tensor, gain: Tensor,
    up: Tensor, heads: Heads, eps: float, bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries (B, H, W), their times (B, H), keys (B, W), times (B, 2H or 4H); a head of a token is a program."""
    B, H = queries.shape[:2]
    rank = gain.shape[0]
    L, is_half, dtype = rank + 1 + int(bias), queries.element_size() == 2, queries.dtype
    W = L + heads.shared_dim
    to_keys = torch.empty(B, H, W, dtype=dtype, device=queries.device)
    time = torch.empty(B, H, dtype=torch.float32, device=queries.device)
    keys = torch.empty(B, W, dtype=dtype, device=queries.device)
    times = torch.empty(B, (4 if is_half else 2) * H, dtype=dtype, device=queries.device)
    if not has_data(queries) or not B:
        return to_keys, time, keys, times
    rows, columns = triton.next_power_of_2(heads.width), triton.next_power_of_2(L)
    settings = {
        "H": H, "WIDTH": heads.width, "KEY": heads.key_dim, "R": heads.shared_dim, "TURNED": cos.shape[-1],
        "RANK": rank, "L": L, "BIAS": bias, "TWICE": 2 * heads.score_scale, "VALUE_SCALE": heads.value_scale,
        "OVER_C": 1 / heads.c, "EPS": eps, "INTERLEAVED": heads.interleaved, "ROWS": rows, "LATENT": columns,
        "REST": triton.next_power_of_2(heads.shared_dim), "IS_HALF": is_half,
        "num_warps": max(1, min(8, rows * columns // 1024)),
    }  # fmt: skip
    numbers = (cos.shape[0], queries.stride(0), latent.stride(0), shared.stride(0), up.stride(0))
    tensors = (queries, latent, shared, cos, sin, log_tau, gain, up, to_keys, time, keys, times)
    launch(_latent_absorb_kernel, (H, B), tensors, numbers, settings)
    return to_keys, time, keys, times


@functools.cache
def _cut(batch: int, num_keys: int, latent: int, size: int) -> tuple[int, int, int]:
    """Pieces of the context, tiles of a piece, and keys of a tile."""
    tile = max(16, min(64, 16384 // (latent * size)))  # at most 16 KB of latents
    tiles = triton.cdiv(num_keys, tile)
    at_once = PROGRAMS if latent <= 64 else max(1, PROGRAMS * 3 // 4)  # wider ones take more registers
    in_piece = max(1, triton.cdiv(batch * tiles, at_once))
    return triton.cdiv(tiles, in_piece), in_piece, tile


def forward(
    queries: Tensor, time: Tensor, keys: Tensor, times: Tensor, up_value: Tensor, mask: Tensor | None,
    value_scale: float, width: int, c: float,
) -> Tensor:  # fmt: skip
    """(B, H, width) from (B, H, W), (B, H), (B, M, W), (B, M, 2H or 4H), (H, D, L), (B or 1, at least M)."""
    B, M, W = keys.shape
    H, D, L = up_value.shape
    out = torch.empty(B, H, width, dtype=keys.dtype, device=keys.device)
    if not has_data(keys) or not B:
        return out
    latent = max(16, triton.next_power_of_2(L))
    pieces, in_piece, tile = _cut(B, M, latent, keys.element_size())
    means = torch.empty(B, pieces, H, L, dtype=torch.float32, device=keys.device)
    sums = torch.empty(B, pieces, H, 3, dtype=torch.float32, device=keys.device)
    seen, seen_batch = keys, 0
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        seen, seen_batch = mask.view(torch.uint8), 0 if mask.shape[0] == 1 else mask.stride(0)
    settings = {
        "H": H, "L": L, "R": W - L,
        "HEADS": max(16, triton.next_power_of_2(H)),
        "LATENT": latent,
        "REST": max(16, triton.next_power_of_2(W - L)),
        "TILE": tile,
        "HAS_MASK": mask is not None,
        "IS_HALF": keys.element_size() == 2,
        "WIDEN": interpreted() and keys.dtype == torch.bfloat16,
        "num_warps": 4,
    }  # fmt: skip
    if latent <= 64 and H <= 16 and not interpreted():
        settings["maxnreg"] = 128  # four programs on a multiprocessor, nothing spilt
    numbers = (M, pieces, in_piece, keys.stride(0), keys.stride(1), times.stride(0), times.stride(1), seen_batch)
    tensors = (queries, time, keys, times, seen, means, sums)
    launch(_latent_pieces_kernel, (pieces, B), tensors, numbers, settings)
    value = triton.next_power_of_2(max(width, D + 1))
    settings = {
        "H": H, "D": D, "L": L, "WIDTH": width, "VALUE_SCALE": value_scale, "OVER_C": 1 / c, "LATENT": latent,
        "VALUE": value,
        "ROWS": min(triton.next_power_of_2(pieces), max(1, 8192 // latent)),
        "num_warps": 8,
    }  # fmt: skip
    strides = (up_value.stride(0), up_value.stride(1))
    launch(_latent_join_kernel, (H, B), (means, sums, up_value, out), (pieces, *strides), settings)
    return out
