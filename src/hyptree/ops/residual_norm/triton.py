"""Residual, norm and lift in one pass over the row, forward and backward.

At 8192 rows of 384 in bfloat16 the forward moves 25 MB and the backward 44 MB: 6 and 11 microseconds at 4.2 TB/s. Rows
of 1536 take 4 times that, in which a multiprocessor starts about 95 instructions for 32 columns; the backward has 63.
Settings are constants of the kernels: as arguments a compiler may make them float64, and everything with them.
Gradients of what all rows share are summed by each program over its own rows, then over programs, in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyptree.geometry.core.launch import launch
from hyptree.ops.backend import has_data

PROCESSORS = 132
"""Multiprocessors of a Hopper GPU."""
STAGED = 65536
"""Most bytes of shared memory for the rows that a program of the backward pass reads ahead."""


@triton.jit
def _softplus(raw):
    return tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))


@triton.jit
def _joined(of_x, of_y, of_both, w, OVER_C: tl.constexpr, SCALE: tl.constexpr):
    """What a centroid and its gradient need, from x.x, y.y and x.y; SCALE is the gain over the root of c."""
    time_x = tl.sqrt(of_x + OVER_C)
    time_y = tl.sqrt(of_y + OVER_C)
    apart = time_x * time_y - of_both
    is_free = apart >= OVER_C  # else rounding broke the bound
    apart = tl.where(apart < OVER_C, OVER_C, apart)
    q = (1.0 + w * w) * OVER_C + 2.0 * w * apart
    scale = SCALE / tl.sqrt(q)
    return scale, q, apart, is_free, time_x, time_y


@triton.jit
def _normed(x, gamma, n, EPS: tl.constexpr, OVER_C: tl.constexpr, stored: tl.constexpr, to: tl.constexpr):
    """1 / root mean square, the normed row as it is stored, its time."""
    rms = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / n + EPS)
    s = (x * rms * gamma).to(stored).to(tl.float32).to(to).to(tl.float32)
    return rms, s, tl.sqrt(tl.sum(s * s, axis=0) + OVER_C)


@triton.jit
def _store_tail(lifted, row, time, n, width, BIAS: tl.constexpr):
    """``[t, 1, 0, ...]``, the few columns of a lifted row behind the normed point."""
    tail = n + tl.arange(0, 16)
    rest = tl.where(tail == n, time, 0.0)
    if BIAS:
        rest = tl.where(tail == n + 1, 1.0, rest)
    tl.store(lifted + row * width + tail, rest, mask=tail < width)


@triton.jit
def _residual_norm_kernel(x, y, raw, gamma, joined, lifted, n, WIDTHS, SCALE: tl.constexpr, EPS: tl.constexpr,
                    OVER_C: tl.constexpr, HAS_Y: tl.constexpr, HAS_NORM: tl.constexpr, BIAS: tl.constexpr,
                    STEP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n
    stored: tl.constexpr = x.dtype.element_ty
    point = tl.load(x + row * n + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_Y:
        other = tl.load(y + row * n + column, mask=inside, other=0.0).to(tl.float32)
        w = _softplus(tl.load(raw).to(tl.float32))
        scale, _, _, _, _, _ = _joined(
            tl.sum(point * point, axis=0),
            tl.sum(other * other, axis=0),
            tl.sum(point * other, axis=0),
            w,
            OVER_C,
            SCALE,
        )
        point = (scale * (point + w * other)).to(stored)
        tl.store(joined + row * n + column, point, mask=inside)
        point = point.to(tl.float32)
    if HAS_NORM:
        g = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
        _, s, time = _normed(point, g, n, EPS, OVER_C, stored, lifted.dtype.element_ty)
        tl.store(lifted + row * (WIDTHS * STEP) + column, s, mask=inside)
        _store_tail(lifted, row, time, n, WIDTHS * STEP, BIAS)


@triton.jit
def _sums(a, b, c, d, e, f, g):
    """Sums of seven rows with one exchange between warps, where seven calls would have them wait seven times."""
    first = tl.join(tl.join(a, b), tl.join(c, d))
    second = tl.join(tl.join(e, f), tl.join(g, g))
    first, second = tl.split(tl.sum(tl.join(first, second), axis=0))
    a_b, c_d = tl.split(first)
    e_f, g_g = tl.split(second)
    a, b = tl.split(a_b)
    c, d = tl.split(c_d)
    e, f = tl.split(e_f)
    g, _ = tl.split(g_g)
    return a, b, c, d, e, f, g


@triton.jit
def _residual_norm_grad_kernel(x, y, raw, gamma, grad_joined, grad_lifted, grad_x, grad_y, lifted, parts, R, n,
                     WIDTHS, SCALE: tl.constexpr, EPS: tl.constexpr, OVER_C: tl.constexpr, HAS_Y: tl.constexpr,
                     HAS_NORM: tl.constexpr, BIAS: tl.constexpr, HAS_JOINED: tl.constexpr, STEP: tl.constexpr,
                     STAGES: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One round of sums for a row, after which all its scalars are known.

    With ``a = x + w y`` the point is ``p = scale a`` and the normed one ``s = k gamma a`` for ``k = rms scale``. For
    ``g`` the gradient of ``s``, that through the time included, ``h = gamma g`` goes back through the norm as
    ``rms (h - k^2 a (h . a) / n)``. Of that, what lies along ``a`` is ``eps rms^3 (h . a)``: the rest cancels and is
    left out here. The point is not rounded on the way to ``s``, which may move an entry of ``lifted`` by one unit.
    A row comes in PIECES, so that its width need not be near a power of two.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = ()
    norm_gains = ()
    sum_gamma = ()
    nothing = tl.zeros((BLOCK,), tl.float32)
    for piece in tl.static_range(PIECES):
        column = piece * BLOCK + tl.arange(0, BLOCK)
        columns += (column,)  # type: ignore[assignment]
        sum_gamma += (nothing,)  # type: ignore[assignment]
        if HAS_NORM:
            norm_gains += (tl.load(gamma + column, mask=column < n, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    stored: tl.constexpr = x.dtype.element_ty
    width = WIDTHS * STEP
    sum_w = nothing
    sum_raw = 0.0
    to_next_time = 0.0
    if HAS_NORM:
        to_next_time = tl.load(grad_lifted + program * width + n).to(tl.float32)
    if HAS_Y:
        raw_value = tl.load(raw).to(tl.float32)
        w = _softplus(raw_value)
    programs = tl.num_programs(0)
    for turn in tl.range(tl.cdiv(R - tl.program_id(0), programs), num_stages=STAGES):
        row = program + turn * programs
        firsts = ()
        others = ()
        grads = ()
        to_normed = ()
        square = nothing
        of_gained = nothing
        to_gained = nothing
        to_summed = nothing
        of_x = nothing
        of_y = nothing
        of_both = nothing
        for piece in tl.static_range(PIECES):
            column = columns[piece]
            inside = column < n
            first = tl.load(x + row * n + column, mask=inside, other=0.0).to(tl.float32)
            firsts += (first,)  # type: ignore[assignment]
            summed = first
            if HAS_Y:
                other = tl.load(y + row * n + column, mask=inside, other=0.0).to(tl.float32)
                others += (other,)  # type: ignore[assignment]
                summed = first + w * other
                of_x += first * first
                of_y += other * other
                of_both += first * other
            square += summed * summed
            if HAS_JOINED:
                grad = tl.load(grad_joined + row * n + column, mask=inside, other=0.0).to(tl.float32)
                grads += (grad,)  # type: ignore[assignment]
                to_summed += grad * summed
            if HAS_NORM:
                to_s = tl.load(grad_lifted + row * width + column, mask=inside, other=0.0).to(tl.float32)
                to_normed += (to_s,)  # type: ignore[assignment]
                gained = norm_gains[piece] * summed
                of_gained += gained * gained
                to_gained += to_s * gained
        if HAS_NORM:  # a row ahead, as nobody reads a single number ahead of itself
            to_time = to_next_time
            next_row = tl.minimum(row + programs, R - 1)
            to_next_time = tl.load(grad_lifted + next_row * width + n).to(tl.float32)
        square, of_gained, to_gained, to_summed, of_x, of_y, of_both = _sums(
            square, of_gained, to_gained, to_summed, of_x, of_y, of_both
        )
        scale = 1.0
        if HAS_Y:
            scale, q, apart, is_free, time_x, time_y = _joined(of_x, of_y, of_both, w, OVER_C, SCALE)
        if HAS_NORM:
            rms = 1.0 / tl.sqrt(scale * scale * square / n + EPS)
            k = rms * scale
            time = tl.sqrt(k * k * of_gained + OVER_C)
            through_time = k * to_time / time
            along = to_gained + through_time * of_gained
            along_point = k * k * k * along / n
            to_summed += EPS * rms * rms * rms * along
            _store_tail(lifted, row, time, n, width, BIAS)
        if HAS_Y:
            to_q = -0.5 * to_summed * scale / q
            to_apart = tl.where(is_free, 2.0 * w * to_q, 0.0)
            sum_raw += to_q * 2.0 * (w * OVER_C + apart)
            to_x_along = to_apart * time_y / time_x
            to_y_along = to_apart * time_x / time_y
        sums = ()
        for piece in tl.static_range(PIECES):
            column = columns[piece]
            inside = column < n
            first = firsts[piece]
            summed = first
            if HAS_Y:
                other = others[piece]
                summed = first + w * other
            to_sum = nothing
            if HAS_JOINED:
                to_sum = scale * grads[piece]
            if HAS_NORM:
                gained = norm_gains[piece] * summed
                s = scale * summed * rms * norm_gains[piece]  # in the order of the forward pass
                tl.store(lifted + row * width + column, s.to(stored), mask=inside)
                to_gain = k * (to_normed[piece] + through_time * gained)
                sums += (sum_gamma[piece] + to_gain * summed,)  # type: ignore[assignment]
                to_sum += to_gain * norm_gains[piece]
                to_sum -= along_point * summed
            if HAS_Y:
                sum_w += to_sum * other
                to_y = w * to_sum + to_y_along * other - to_apart * first
                tl.store(grad_y + row * n + column, to_y, mask=inside)
                to_sum += to_x_along * first
                to_sum -= to_apart * other
            tl.store(grad_x + row * n + column, to_sum, mask=inside)
        if HAS_NORM:
            sum_gamma = sums
    parts += program * ((n if HAS_NORM else 0) + (1 if HAS_Y else 0))
    if HAS_NORM:
        for piece in tl.static_range(PIECES):
            tl.store(parts + columns[piece], sum_gamma[piece], mask=columns[piece] < n)
    if HAS_Y:
        sum_raw += tl.sum(sum_w, axis=0)
        tl.store(parts + (n if HAS_NORM else 0), sum_raw / (1.0 + tl.exp(-raw_value)))


@functools.cache
def _sizes(n: int) -> dict[str, int]:
    block = triton.next_power_of_2(n)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


@functools.cache
def _grad_sizes(n: int, item: int) -> dict[str, int]:
    """Widths of three quarters of a power of two are read in three pieces, with no thread left idle.

    STAGES - 1 rows are on their way while one is computed. The limits of registers hold what is known of a row, nearly
    all of it; where n is no multiple of 16 entries are loaded one by one, and each has an address as well.
    """
    sizes = {"PIECES": 1, **_sizes(n)}
    if is_three := n >= 384 and 4 * n == 3 * sizes["BLOCK"]:
        sizes |= {"PIECES": 3, "BLOCK": n // 3}
    few = is_three or sizes["num_warps"] >= 8
    sizes["STAGES"] = 1 + min(1 if is_three else 2, STAGED // (4 * n * item))
    return sizes if n % 16 else sizes | {"maxnreg": 128 if few else 168}


def _grad_programs(sizes: dict[str, int]) -> int:
    """As many as are resident by their registers: each sums gradients over its rows."""
    return PROCESSORS * (65536 // (32 * sizes["num_warps"] * sizes.get("maxnreg", 128)))


def _settings(y: Tensor | None, gamma: Tensor | None, gain: float, eps: float, c: float, bias: bool) -> dict[str, Any]:
    return {
        "SCALE": gain / c**0.5, "EPS": eps, "OVER_C": 1 / c, "HAS_Y": y is not None, "HAS_NORM": gamma is not None,
        "BIAS": bias,
    }  # fmt: skip


def _step(width: int) -> int:
    """Columns that a row's width is counted in; a compiler that sees eight reads and writes 16 bytes at a time."""
    return 8 if width % 8 == 0 else 1


def forward(
    x: Tensor, y: Tensor | None, raw: Tensor | None, gamma: Tensor | None, dtype: torch.dtype, width: int,
    gain: float, eps: float, c: float, bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(R, n) rows -> the joined ones (R, n), empty without y; the lifted ones (R, width), empty without gamma."""
    R, n = x.shape
    joined = torch.empty(R if y is not None else 0, n, dtype=x.dtype, device=x.device)
    lifted = torch.empty(R if gamma is not None else 0, width, dtype=dtype, device=x.device)
    if has_data(x) and R:
        inputs = (x, x if y is None else y, x if raw is None else raw, x if gamma is None else gamma)
        settings = _settings(y, gamma, gain, eps, c, bias) | {"STEP": _step(width)} | _sizes(n)
        launch(_residual_norm_kernel, (R,), (*inputs, joined, lifted), (n, width // _step(width)), settings)
    return joined, lifted


def backward(
    x: Tensor, y: Tensor | None, raw: Tensor | None, gamma: Tensor | None, grad_joined: Tensor | None,
    grad_lifted: Tensor | None, dtype: torch.dtype, width: int, gain: float, eps: float, c: float, bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and y, parts (P, n + 1) whose sum over the first axis is the gradient of gamma and of raw, and the
    lifted rows again; no rows or columns for what there is not."""
    R, n = x.shape
    has_y, has_norm = y is not None, gamma is not None
    sizes = _grad_sizes(n, max(x.element_size(), dtype.itemsize))
    programs = max(1, min(_grad_programs(sizes), R))
    grad_x = torch.empty_like(x)
    grad_y = torch.empty(R if has_y else 0, n, dtype=x.dtype if y is None else y.dtype, device=x.device)
    lifted = torch.empty(R if has_norm else 0, width, dtype=dtype, device=x.device)
    new = torch.empty if R else torch.zeros  # every program writes its own sums
    parts = new(programs, n * has_norm + has_y, dtype=torch.float32, device=x.device)
    if has_data(x) and R:
        inputs = (
            x, x if y is None else y, x if raw is None else raw, x if gamma is None else gamma,
            x if grad_joined is None else grad_joined, x if grad_lifted is None else grad_lifted,
        )  # fmt: skip
        settings = _settings(y, gamma, gain, eps, c, bias) | {"HAS_JOINED": grad_joined is not None}
        settings |= {"STEP": _step(width)} | sizes
        written = (grad_x, grad_y, lifted, parts)
        numbers = (R, n, width // _step(width))
        launch(_residual_norm_grad_kernel, (programs,), (*inputs, *written), numbers, settings)
    return grad_x, grad_y, parts, lifted
