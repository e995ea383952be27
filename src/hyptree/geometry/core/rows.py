"""Functions of a few rows in few passes over them: the fast form behind the door of :mod:`registry`.

A function of rows ``x, y, ...`` of one space depends on them through a few sums, ``c |x|^2``, ``c x.y`` and so on. Its
result is a number per row, or ``sum_i a_i r_i`` with one coefficient per argument, and its gradient is again a
combination of the rows and of the incoming gradient, with the derivatives of the coefficients. So a :class:`RowForm` is
written for numbers per row alone, and for curvature -1: a change of curvature only scales the sums. Rows are read and
combined in float64, a piece at a time that stays in the cache; numbers per row are numpy arrays, whose operations cost
a third of a small tensor's.

A form also says which rows it can be trusted with: points that nearly coincide, and points at the limits of the dtype,
are left to the plain function, which is the definition, row by row. So is everything but ordinary float32 tensors on a
CPU in eager mode (compilers fuse the plain function, and transforms look into it), and so are second derivatives.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

Numbers = NDArray[np.float64]
"""One number per row (N,), or, inside this module, rows (N, n)."""
Pull = Callable[..., tuple[Numbers, ...]]
"""From the gradients of the outputs of a form to those of its sums."""
Plain = Callable[..., Tensor]


class RowForm(NamedTuple):
    """A function of rows by its sums, for curvature -1."""

    sums: tuple[tuple[int, int], ...]
    """Which arguments are multiplied with which."""
    compute: Callable[..., tuple[tuple[Any, ...], Any, Pull]]
    """From the sums to the outputs, which rows to trust, and the derivative. The outputs are one coefficient per
    argument, or the value itself, a length."""
    is_length: bool = False
    """The value is a length, which scales as ``1/sqrt(c)``."""
    narrow: bool = False
    """``compute`` knows which rows it may trust with sums in float32, given ``narrow=True``."""


_Evaluated = tuple[Any, list[Numbers], tuple[Any, ...], Any, Pull]
"""Curvature, sums, outputs, trusted rows and derivative of a piece."""

_PIECE = 1 << 17  # numbers of one argument, one MiB in float64
_SMALL = 1 << 12  # numbers for which memory costs nothing
_NARROW, _NARROW_SIZE = 1 << 15, 256  # from how many numbers on float32 sums pay, and how long they may be
_CURVATURES = (1e-12, 1e12)
_TENSORS = (Tensor, torch.nn.Parameter)


def fits(rows: Sequence[Any], c: Any) -> bool:
    """Whether the fast form may take these arguments: good float32 tensors on a CPU that nobody looks into."""
    if torch.compiler.is_compiling():
        return False
    size = None
    for x in rows:
        if type(x) not in _TENSORS or x.dtype is not torch.float32 or not x.is_cpu or x.layout is not torch.strided:
            return False
        shape = x.shape
        if not shape or size not in (None, shape[-1]):
            return False
        size = shape[-1]
    if isinstance(c, Tensor):
        if type(c) not in _TENSORS or c.dtype is not torch.float32 or not c.is_cpu or (c.dim() and c.shape[-1] != 1):
            return False
    elif not isinstance(c, float | int) or not _CURVATURES[0] <= c <= _CURVATURES[1]:
        return False
    return not (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def apply(form: RowForm, plain: Plain, rows: Sequence[Tensor], c: Tensor | float) -> Tensor:
    """The function of rows by its fast form; its arguments must fit."""
    if torch.is_grad_enabled():
        for x in (c, *rows):
            if isinstance(x, Tensor) and x.requires_grad:
                result: Tensor = _RowFunction.apply(form, plain, c, *rows)
                return result
    return _forward(form, plain, rows, c)[0]


class _RowFunction(torch.autograd.Function):
    # The older interface, which is quicker by as much as twenty small operations: transforms do not come here.

    @staticmethod
    def forward(ctx: Any, form: RowForm, plain: Plain, c: Tensor | float, *rows: Tensor) -> Tensor:
        out, ctx.pieces, ctx.others = _forward(form, plain, rows, c)
        ctx.form, ctx.plain, ctx.c = form, plain, None if isinstance(c, Tensor) else c
        ctx.save_for_backward(*rows, *([c] if isinstance(c, Tensor) else []))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        rows, c = (saved, ctx.c) if ctx.c is not None else (saved[:-1], saved[-1])
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or not fits((grad,), 1.0):
            return None, None, *_plain_gradient(ctx.plain, rows, c, grad, needed)
        return None, None, *_backward(ctx, rows, c, grad, needed)


def _plain_gradient(
    plain: Plain, rows: Sequence[Tensor], c: Tensor | float, grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of ``c`` and of the rows through the plain function, differentiable if gradients are enabled."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # One tensor given twice has two gradients here.
        given = [x.view_as(x) if isinstance(x, Tensor) else x for x in (c, *rows)]
        wanted = [x for x, need in zip(given, needed, strict=True) if need]
        out = plain(*given[1:], given[0])
        grads = iter(torch.autograd.grad(out, wanted, grad, create_graph=again, materialize_grads=True))
    return [next(grads) if need else None for need in needed]


def _flatten(rows: Sequence[Tensor], c: Tensor | float) -> tuple[list[Any], Any, torch.Size]:
    """The rows as matrices of one shape, the curvature as one number or one per row, and the shape of the rows."""
    shape = rows[0].shape
    arrays = [x.detach().numpy() for x in rows]
    curvature: Any = c
    if isinstance(c, Tensor):
        curvature = c.item() if c.numel() == 1 else c.detach().double().numpy()
    per_row = isinstance(curvature, np.ndarray)
    same = not per_row
    for x in rows:
        same = same and x.shape == shape
    if not same:
        batch = np.broadcast_shapes(*(x.shape[:-1] for x in arrays), curvature.shape[:-1] if per_row else ())
        shape = torch.Size((*batch, shape[-1]))
        arrays = [np.broadcast_to(x, shape) for x in arrays]
        if per_row:
            curvature = np.broadcast_to(curvature, (*batch, 1)).reshape(-1)
    if len(shape) != 2:
        matrix = (math.prod(shape[:-1]), shape[-1])
        arrays = [x.reshape(matrix) for x in arrays]
    return arrays, curvature, shape


def _parts(x: Numbers, size: int) -> list[slice]:
    """Pieces of the rows of ``x`` of about ``size`` numbers."""
    step = max(1, size // max(1, x.shape[1]))
    return [slice(start, start + step) for start in range(0, len(x), step)]


def _evaluate(form: RowForm, wide: Sequence[Numbers], curvature: Any, part: slice, **options: bool) -> _Evaluated:
    """Curvature, sums, outputs, trust and derivative of a piece of the rows."""
    c = curvature[part] if isinstance(curvature, np.ndarray) else curvature
    sums = [np.vecdot(wide[i], wide[j]) * c for i, j in form.sums]
    outputs, trusted, pull = form.compute(*sums, **options)
    if form.is_length:
        outputs = (outputs[0] / np.sqrt(c),)
    if isinstance(c, np.ndarray):
        trusted &= (c >= _CURVATURES[0]) & (c <= _CURVATURES[1])
    return c, sums, outputs, trusted, pull


def _forward(
    form: RowForm, plain: Plain, rows: Sequence[Tensor], c: Tensor | float
) -> tuple[Tensor, list[_Evaluated], Any]:
    """The result, what the backward pass needs, and which rows were left to the plain function."""
    arrays, curvature, shape = _flatten(rows, c)
    count, size = arrays[0].shape
    result = rows[0].new_empty(shape[:-1] if form.is_length else shape)
    out = result.numpy().reshape((count,) if form.is_length else (count, size))
    pieces: list[_Evaluated] = []
    others = []
    with np.errstate(all="ignore"):
        if form.narrow and count * size >= _NARROW and size <= _NARROW_SIZE:
            for part in _parts(arrays[0], 2 * _PIECE):
                _narrow(form, [x[part] for x in arrays], curvature, part, out[part], others)
        else:
            for part in _parts(arrays[0], _PIECE):
                wide = [_widen(i, x[part]) for i, x in enumerate(arrays)]
                piece = _evaluate(form, wide, curvature, part)
                _, _, outputs, trusted, _ = piece
                if form.is_length:
                    out[part] = outputs[0]
                else:
                    _combine(outputs, wide, out[part])
                if not trusted.all():
                    others.append(np.flatnonzero(~trusted) + part.start)
                pieces.append(piece)
    index = np.concatenate(others) if others else None
    if index is not None:
        with torch.no_grad():
            out[index] = plain(*(torch.from_numpy(x[index]) for x in arrays), _take(curvature, index, c)).numpy()
    return result, pieces, index


def _narrow(
    form: RowForm, rows: Sequence[Numbers], curvature: Any, part: slice, out: Numbers, others: list[Any]
) -> None:
    """A piece of a function that is a length by sums in float32, and in float64 for the rows that need it."""
    c = curvature[part] if isinstance(curvature, np.ndarray) else curvature
    sums = [np.vecdot(rows[i], rows[j]).astype(np.float64) * c for i, j in form.sums]
    (value,), trusted, _ = form.compute(*sums, narrow=True)
    np.divide(value, np.sqrt(c), out=out, casting="same_kind")
    if not trusted.all():
        index = np.flatnonzero(~trusted)
        again = [x[index].astype(np.float64) for x in rows]
        k = c[index] if isinstance(c, np.ndarray) else c
        _, _, outputs, trusted, _ = _evaluate(form, again, k, slice(None))
        out[index] = outputs[0]
        if not trusted.all():
            others.append(index[~trusted] + part.start)


_scratch = threading.local()


def _buffer(which: int, shape: tuple[int, ...]) -> Numbers:
    """Memory for a piece, kept for the next one: asking the system for it anew costs more than the arithmetic."""
    size = shape[0] * shape[1]
    if size > _PIECE or size <= _SMALL:
        return np.empty(shape)
    buffers = _scratch.__dict__
    if which not in buffers:
        buffers[which] = np.empty(_PIECE)
    kept: Numbers = buffers[which][:size].reshape(shape)
    return kept


def _widen(which: int, x: Numbers) -> Numbers:
    """A piece in float64."""
    if x.size <= _SMALL:
        return x.astype(np.float64)
    wide = _buffer(which, x.shape)
    np.copyto(wide, x)
    return wide


def _combine(coefficients: Sequence[Numbers | float], rows: Sequence[Numbers], into: Numbers) -> None:
    """``sum_i a_i r_i`` (N, n), added up in float64."""
    total = torch.from_numpy(_buffer(-1, into.shape))
    for i, (a, row) in enumerate(zip(coefficients, rows, strict=True)):
        column, x = a if isinstance(a, float) else torch.from_numpy(a[:, None]), torch.from_numpy(row)
        if i == 0:
            torch.mul(x, column, out=total)
        elif isinstance(a, float):
            total.add_(x, alpha=a)
        else:
            total.addcmul_(x, column)
    np.copyto(into, total.numpy(), casting="same_kind")


def _take(curvature: Any, index: Any, c: Tensor | float) -> Tensor | float:
    """The curvature of some of the rows, one number each where it is a tensor."""
    if not isinstance(c, Tensor):
        return c
    if c.numel() == 1:
        return c.detach().reshape(1, 1).repeat(len(index), 1)
    return torch.from_numpy(curvature[index][:, None]).to(c.dtype)


def _backward(
    ctx: Any, rows: Sequence[Tensor], c: Tensor | float, grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of ``c`` and of the rows, where they are needed."""
    form: RowForm = ctx.form
    arrays, curvature, shape = _flatten(rows, c)
    count, size = arrays[0].shape
    incoming = grad.numpy().reshape((count,) if form.is_length else (count, size))
    results = [x.new_empty(shape) if need else None for x, need in zip(rows, needed[1:], strict=True)]
    grads = [None if x is None else x.numpy().reshape(count, size) for x in results]
    in_c = np.empty(count) if needed[0] else None
    with np.errstate(all="ignore"):
        for number, part in enumerate(_parts(arrays[0], _PIECE)):
            wide = [_widen(i, x[part]) for i, x in enumerate(arrays)]
            if ctx.pieces:
                k, sums, outputs, trusted, pull = ctx.pieces[number]
            else:
                k, sums, outputs, trusted, pull = _evaluate(form, wide, curvature, part)
            if form.is_length:
                slopes = pull(incoming[part] / np.sqrt(k))
            else:
                wide.append(_widen(len(wide), incoming[part]))
                slopes = pull(*(np.vecdot(wide[-1], x) for x in wide[:-1]))
            if in_c is not None:
                in_c[part] = sum(slope * q for slope, q in zip(slopes, sums, strict=True)) / k
                if form.is_length:
                    in_c[part] -= incoming[part] * outputs[0] / (2 * k)
            for i, into in enumerate(grads):
                if into is not None:
                    factors = [] if form.is_length else [outputs[i]]
                    terms = [] if form.is_length else [wide[-1]]
                    for (a, b), slope in zip(form.sums, slopes, strict=True):
                        if i in (a, b):
                            factors.append(slope * (2 * k if a == b else k))
                            terms.append(wide[a + b - i])
                    _combine(factors, terms, into[part])
    index = ctx.others
    if index is not None:
        given = [torch.from_numpy(x[index]).requires_grad_(need) for x, need in zip(arrays, needed[1:], strict=True)]
        taken = _take(curvature, index, c)
        if isinstance(taken, Tensor):
            taken.requires_grad_(needed[0])
        values = _plain_gradient(ctx.plain, given, taken, torch.from_numpy(incoming[index]), needed)
        for into, value in zip((in_c, *grads), values, strict=True):
            if into is not None and value is not None:
                into[index] = value.numpy().reshape(into[index].shape)
    in_curvature = None
    if in_c is not None and isinstance(c, Tensor):
        whole = torch.from_numpy(in_c)
        whole = whole.sum().view(c.shape) if c.numel() == 1 else whole.view(*shape[:-1], 1).sum_to_size(c.shape)
        in_curvature = whole.to(c.dtype)
    return [in_curvature, *(g if g is None or g.shape == x.shape else g.sum_to_size(x.shape) for x, g in zip(rows, results, strict=True))]
