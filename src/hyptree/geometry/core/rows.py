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

On a GPU launches are what costs. There :func:`by_kernels` makes one kernel each way of the plain function itself, see
:mod:`row_trace`; no form is needed, and it serves layers and optimisers too.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hyptree.geometry.core import debug

try:
    import numpy as np
except ImportError:  # the geometry needs torch alone: without numpy there is the plain form
    np = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from numpy.typing import NDArray

Numbers: TypeAlias = "NDArray[Any]"
"""One number per row (N,), float64 but where a form says that float32 will do; in this module also rows (N, n)."""
Pull = Callable[..., "tuple[Numbers, ...]"]
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
    """``compute`` also takes sums in float32, and knows which rows it may trust with them."""


class _Piece(NamedTuple):
    """Some of the rows, and all that their numbers per row give."""

    where: Any
    """A slice, or the indices of rows that float32 sums could not serve."""
    narrow: bool
    """The sums are in float32."""
    c: Any
    sums: list[Numbers]
    outputs: tuple[Any, ...]
    trusted: Any
    pull: Pull


_PIECE = 1 << 17  # numbers of one argument, one MiB in float64
_MOST_PIECES = 4  # as many times more with several threads
_SMALL = 1 << 12  # numbers for which memory costs nothing
_NARROW, _NARROW_SIZE = 1 << 15, 256  # from how many numbers on float32 sums pay, and how long they may be
_CURVATURES = (1e-12, 1e12)
_TENSORS = (Tensor, torch.nn.Parameter)


def fits(rows: Sequence[Any], c: Any) -> bool:
    """Whether the fast form may take these arguments: good float32 tensors on a CPU that nobody looks into."""
    if np is None or torch.compiler.is_compiling():
        return False
    size = None
    for x in rows:
        if type(x) not in _TENSORS or x.dtype is not torch.float32 or not x.is_cpu:
            return False
        if x.layout is not torch.strided or x.is_neg():
            return False
        shape = x.shape
        if not shape or size not in (None, shape[-1]):
            return False
        size = shape[-1]
    if isinstance(c, Tensor):
        if type(c) not in _TENSORS or c.dtype is not torch.float32 or not c.is_cpu or (c.dim() and c.shape[-1] != 1):
            return False
        c = c.item() if c.numel() == 1 else 1.0  # one for each row is looked at with the rows
    if not isinstance(c, float | int) or not _CURVATURES[0] <= c <= _CURVATURES[1]:
        return False
    return is_eager()


def is_eager() -> bool:
    """Whether numbers may decide what is done next: nobody compiles, traces, transforms or watches the operations."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def on_gpu(x: Any) -> bool:
    """Whether kernels may be asked about a call with this argument."""
    return isinstance(x, Tensor) and x.is_cuda


def is_ordinary(x: Any) -> bool:
    """Whether a kernel can read this: a number, or a tensor of good numbers on a GPU, of at most 32 bits."""
    if not isinstance(x, Tensor):
        return type(x) in (float, int)
    return (
        type(x) in _TENSORS
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and on_gpu(x)
        and x.layout is torch.strided
        and not x.is_neg()
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


def by_kernels(function: Callable[..., Any], /, *arguments: Any, **settings: Any) -> Any:
    """A function of rows on a GPU by one kernel each way, made from it; or None where that does not fit.

    Args:
        arguments: rows (..., n) and numbers per row (..., 1), whose leading axes broadcast, and numbers for all rows.
            What the function gives has the leading axes of all.
        settings: its other arguments, which become part of the kernel.
    """
    plan = row_plan(function, *arguments, **settings)
    return plan and plan.owner(plan, arguments)


def row_plan(function: Callable[..., Any], /, *arguments: Any, **settings: Any) -> Any:
    """The same to be called later, forward and backward: a ``Plan`` of ``row_kernels``, or None."""
    if not is_eager() or debug.is_enabled() or os.environ.get("HYPTREE_BACKEND") == "torch":
        return None
    key = (function, *settings.items()) if settings else function
    if key not in _kernels:
        _kernels[key] = _make_kernels(functools.partial(function, **settings) if settings else function)
    kernels = _kernels[key]
    return kernels and kernels.plan(arguments)


LONGEST = 4096
"""A row that one program of a kernel holds; longer ones are left to the plain function."""


class NotByRows(Exception):
    """A function does something that is not done row by row, or that no kernel knows."""


_kernels: dict[Any, Any] = {}


def _make_kernels(function: Callable[..., Any]) -> Any:
    """The kernels of a function, or None without Triton."""
    try:
        from hyptree.geometry.core.row_kernels import RowKernels
    except ImportError:
        return None
    return RowKernels(function)


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
        out, ctx.pieces, ctx.left = _forward(form, plain, rows, c)
        ctx.form, ctx.plain, ctx.c = form, plain, None if isinstance(c, Tensor) else c
        ctx.save_for_backward(*rows, *([c] if isinstance(c, Tensor) else []))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        rows, c = (saved, ctx.c) if ctx.c is not None else (saved[:-1], saved[-1])
        needed = ctx.needs_input_grad[2:]
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)  # many gradients at once
        if torch.is_grad_enabled() or batched or not fits((grad,), 1.0):
            return None, None, *_plain_gradient(ctx.plain, rows, c, grad, needed)
        return None, None, *_backward(ctx, rows, c, grad, needed)


def plain_gradients(
    plain: Callable[..., Any], arguments: Sequence[Any], grads: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the arguments through the plain function, differentiable if gradients are enabled."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # One tensor passed twice has two gradients here.
        leaves = [x.view_as(x) if isinstance(x, Tensor) else x for x in arguments]
        wanted: Any = [x for x, need in zip(leaves, needed, strict=True) if need]
        gradients = torch.autograd.grad(plain(*leaves), wanted, grads, create_graph=again, materialize_grads=True)
    each = iter(gradients)
    return [next(each) if need else None for need in needed]


def _plain_gradient(
    plain: Plain, rows: Sequence[Tensor], c: Tensor | float, grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The same with the curvature first."""
    *in_rows, in_c = plain_gradients(plain, (*rows, c), (grad,), (*needed[1:], needed[0]))
    return [in_c, *in_rows]


def _flatten(rows: Sequence[Tensor], c: Tensor | float) -> tuple[list[Any], Any, torch.Size]:
    """The rows as matrices of one shape, the curvature as one number or one per row, and the shape of the rows."""
    shape, per_row = rows[0].shape, False
    curvature: Any = c
    if isinstance(c, Tensor):
        per_row = c.numel() != 1 or c.dim() > len(shape)
        curvature = c.detach().numpy() if per_row else c.item()
    same = not per_row
    for x in rows:
        same = same and x.shape == shape
    arrays = [x.detach() if x.requires_grad else x for x in rows]
    if not same:
        batch = torch.broadcast_shapes(*(x.shape[:-1] for x in rows), curvature.shape[:-1] if per_row else ())
        shape = torch.Size((*batch, shape[-1]))
        arrays = [x.expand(shape) for x in arrays]
        if per_row:
            curvature = np.broadcast_to(curvature, (*batch, 1)).reshape(-1)
    if len(shape) == 2:
        return [x.numpy() for x in arrays], curvature, shape
    return [x.numpy().reshape(math.prod(shape[:-1]), shape[-1]) for x in arrays], curvature, shape


def _parts(count: int, size: int, numbers: int) -> list[slice]:
    """Pieces of ``count`` rows of ``size``, about as many numbers each."""
    if count * size <= numbers:
        return [slice(0, count)]
    step = max(1, numbers // size)
    return [slice(start, start + step) for start in range(0, count, step)]


def _read(arrays: Sequence[Numbers], where: Any, narrow: bool) -> list[Numbers]:
    """Some of the rows, in float64 unless they are to stay as they are."""
    if narrow:
        return [x[where] for x in arrays]
    if isinstance(where, slice):
        return [_widen(i, x[where]) for i, x in enumerate(arrays)]
    return [x[where].astype(np.float64) for x in arrays]


def _evaluate(form: RowForm, rows: Sequence[Numbers], curvature: Any, where: Any, narrow: bool) -> _Piece:
    """What the sums of some of the rows give."""
    c = curvature
    if isinstance(c, np.ndarray):
        c = c[where].astype(rows[0].dtype)
    sums = [np.vecdot(rows[i], rows[j]) * c for i, j in form.sums]
    outputs, trusted, pull = form.compute(*sums)
    if form.is_length:
        outputs = (outputs[0] / _sqrt(c),)
    if isinstance(c, np.ndarray):
        trusted &= (c >= _CURVATURES[0]) & (c <= _CURVATURES[1])
    return _Piece(where, narrow, c, sums, outputs, trusted, pull)


def _sqrt(c: Any) -> Any:
    return np.sqrt(c) if isinstance(c, np.ndarray) else math.sqrt(c)


def _forward(
    form: RowForm, plain: Plain, rows: Sequence[Tensor], c: Tensor | float
) -> tuple[Tensor, list[_Piece], Any]:
    """The result, what the backward pass needs, and which rows were left to the plain function."""
    arrays, curvature, shape = _flatten(rows, c)
    count, size = arrays[0].shape
    out = np.empty(count if form.is_length else (count, size), np.float32)
    pieces: list[_Piece] = []
    narrow = form.narrow and count * size >= _NARROW and size <= _NARROW_SIZE
    left: list[Any] = []
    # Threads share each operation on a piece: the more there are, the larger it should be.
    piece_size = _PIECE * min(torch.get_num_threads(), _MOST_PIECES)
    todo: list[Any] = _parts(count, size, 2 * piece_size if narrow else piece_size)
    with np.errstate(all="ignore"):
        while todo:
            for where in todo:
                read = _read(arrays, where, narrow)
                piece = _evaluate(form, read, curvature, where, narrow)
                pieces.append(piece)
                if form.is_length:
                    out[where] = piece.outputs[0]
                else:
                    _combine(piece.outputs, read, out, where)
                if np.count_nonzero(piece.trusted) != len(piece.trusted):
                    others = np.flatnonzero(~piece.trusted)
                    left.append(others + where.start if isinstance(where, slice) else where[others])
            # What float32 sums could not serve is done again in float64.
            todo, left, narrow = ([np.concatenate(left)], [], False) if narrow and left else ([], left, False)
    index = np.concatenate(left) if left else None
    if index is not None:
        with torch.no_grad():
            out[index] = plain(*(torch.from_numpy(x[index]) for x in arrays), _take(curvature, index, c)).numpy()
    return torch.from_numpy(out.reshape(shape[:-1] if form.is_length else shape)), pieces, index


class _Scratch(threading.local):
    """Memory for pieces, kept for the next ones: asking the system for it anew costs more than the arithmetic."""

    def __init__(self) -> None:
        self.buffers: dict[int, Numbers] = {}


_scratch = _Scratch()


def _buffer(which: int, shape: tuple[int, ...]) -> Numbers:
    """Memory for rows in float64; which one, so that rows of one piece do not share it."""
    size = shape[0] * shape[1]
    if size > _PIECE * _MOST_PIECES or size <= _SMALL:
        return np.empty(shape)
    if which not in _scratch.buffers:
        _scratch.buffers[which] = np.empty(_PIECE * _MOST_PIECES)
    return _scratch.buffers[which][:size].reshape(shape)


def _widen(which: int, x: Numbers) -> Numbers:
    """Rows in float64."""
    if x.size <= _SMALL:
        return x.astype(np.float64)
    wide = _buffer(which, x.shape)
    np.copyto(wide, x)
    return wide


def _combine(coefficients: Sequence[Any], rows: Sequence[Numbers], into: Numbers, where: Any) -> None:
    """``into[where] = sum_i a_i r_i`` (N, n), added up in the dtype of the rows."""
    direct = rows[0].dtype == into.dtype and isinstance(where, slice)
    sum_array = into[where] if direct else _buffer(-1, rows[0].shape)
    total: Any = None
    for a, row in zip(coefficients, rows, strict=True):
        x = torch.from_numpy(row)
        column = torch.from_numpy(a[:, None]) if isinstance(a, np.ndarray) else a
        if total is None:
            total = torch.mul(x, column, out=torch.from_numpy(sum_array))
        elif column is a:
            total.add_(x, alpha=a)
        else:
            total.addcmul_(x, column)
    if not direct:
        into[where] = sum_array


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
    incoming = grad.numpy().reshape(count if form.is_length else (count, size))
    in_c = np.empty(count) if needed[0] else None
    in_rows = [np.empty((count, size), np.float32) if need else None for need in needed[1:]]
    with np.errstate(all="ignore"):
        for where, narrow, k, sums, outputs, _, pull in ctx.pieces:
            read = _read(arrays, where, narrow)
            if form.is_length:
                slopes = pull(incoming[where] / _sqrt(k))
            else:
                read.append(_widen(len(read), incoming[where]))
                slopes = pull(*(np.vecdot(read[-1], x) for x in read[:-1]))
            if in_c is not None:
                in_c[where] = sum(slope * q for slope, q in zip(slopes, sums, strict=True)) / k
                if form.is_length:
                    in_c[where] -= incoming[where] * outputs[0] / (2 * k)
            for i, into in enumerate(in_rows):
                if into is not None:
                    factors = [] if form.is_length else [outputs[i]]
                    terms = [] if form.is_length else [read[-1]]
                    for (a, b), slope in zip(form.sums, slopes, strict=True):
                        if i in (a, b):
                            factors.append(slope * (2 * k if a == b else k))
                            terms.append(read[a + b - i])
                    _combine(factors, terms, into, where)
    if ctx.left is not None:
        index, k = ctx.left, _take(curvature, ctx.left, c)
        doubtful = [torch.from_numpy(x[index]) for x in arrays]
        for x, need in zip((k, *doubtful), needed, strict=True):
            if need and isinstance(x, Tensor):
                x.requires_grad_()
        values = _plain_gradient(ctx.plain, doubtful, k, torch.from_numpy(incoming[index]), needed)
        for whole, value in zip((in_c, *in_rows), values, strict=True):
            if whole is not None and value is not None:
                whole[index] = value.numpy().reshape(whole[index].shape)
    results: list[Tensor | None] = [None]
    if in_c is not None and isinstance(c, Tensor):
        one_each = torch.from_numpy(in_c)
        total = one_each.sum() if c.numel() == 1 else one_each.view(*shape[:-1], 1).sum_to_size(c.shape)
        results = [total.view(c.shape).to(c.dtype)]
    for x, into in zip(rows, in_rows, strict=True):
        result = None if into is None else torch.from_numpy(into.reshape(shape))
        results.append(result if result is None or x.shape == shape else result.sum_to_size(x.shape))
    return results
