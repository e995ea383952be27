"""Functions of rows on a GPU: one kernel forward and one backward, made from the plain function when it is first asked.

The kernels read rows once, keep a block of them in registers through all sums and branches, in float64, and write the
result; the backward kernel does the forward arithmetic again rather than keep it. 65,536 pairs of rows of 64 are 34 MB
in and at most 34 MB out, 8 to 25 microseconds on an H200, and the host makes one launch where the plain function makes
30 to 150. Nothing waits for the device, so CUDA graphs may capture the calls.

What others look into (compilers, transforms, second derivatives) is left to the plain function, as in :mod:`rows`.
"""

from __future__ import annotations

import linecache
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from hyptree.geometry.core import row_math, row_trace
from hyptree.geometry.core.row_trace import NotByRows as NotByRows
from hyptree.geometry.core.row_trace import Trace, is_row
from hyptree.geometry.core.rows import is_ordinary, plain_gradients

_ALIGNED = 16  # bytes, what Triton takes for granted in the form it compiles for aligned pointers
_PROGRAMS = 1024  # at most, where each leaves a sum over its rows behind
_INT32 = 2**31


class RowKernels:
    """The kernels of one plain function, each made when it is first needed.

    Args:
        function: see :class:`~hyptree.geometry.core.row_trace.Trace`; also called itself for second derivatives.
        rows: which arguments are rows; the others are numbers per row (..., 1), or one for all.
    """

    longest = 4096
    """A row that one program holds; longer ones are left to the plain function."""

    def __init__(self, function: Callable[..., Any], rows: Sequence[bool]):
        self.function, self.rows = function, tuple(rows)
        self.trace = Trace(function, rows)
        self.wide = [is_row(shape) for shape in self.trace.out_shapes]
        self.made: dict[Any, _Kernel] = {}

    def __call__(self, *arguments: Tensor | float) -> Any:
        """The function of rows that :func:`fits` let through."""
        if torch.is_grad_enabled():
            for x in arguments:
                if isinstance(x, Tensor) and x.requires_grad:
                    return _RowFunction.apply(self, *arguments)
        return self.forward(arguments)[0]

    def forward(self, arguments: Sequence[Tensor | float]) -> tuple[Any, _Call]:
        """The results, and how the arguments were read."""
        call = _Call(self.rows, arguments)
        device = call.tensors[0].device
        outs = []
        for shape, wide in zip(self.trace.out_shapes, self.wide, strict=True):
            full = (*call.batch, call.size) if wide else (*call.batch, 1)[: len(call.batch) + len(shape)]
            outs.append(torch.empty(full, dtype=torch.float32, device=device))
        self.kernel(call, None).launch([*call.tensors, *outs], call)
        return (tuple(outs) if self.trace.is_tuple else outs[0]), call

    def backward(
        self, arguments: Sequence[Tensor | float], grads: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of the arguments from those of the results."""
        call = _Call(self.rows, arguments)
        kernel = self.kernel(call, tuple(needed))
        programs = min(kernel.blocks(call), _PROGRAMS)
        results: list[Tensor | None] = []
        for x, wide, code, need in zip(arguments, self.rows, call.codes, needed, strict=True):
            if not need or not isinstance(x, Tensor):
                results.append(None)
                continue
            width = call.size if wide else 1
            shape = (programs, width) if code == "one" else (*call.batch, width)
            results.append(torch.empty(shape, dtype=torch.float32, device=x.device))
        incoming = [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]
        kernel.launch([*call.tensors, *incoming, *(x for x in results if x is not None)], call)
        for i, (x, code, result) in enumerate(zip(arguments, call.codes, results, strict=True)):
            if result is None or not isinstance(x, Tensor):
                continue
            if code == "one":
                result = result.sum(0).view(x.shape)
            elif result.shape != x.shape:
                result = result.sum_to_size(x.shape)
            results[i] = result if result.dtype == x.dtype else result.to(x.dtype)
        return results

    def kernel(self, call: _Call, needed: tuple[bool, ...] | None) -> _Kernel:
        key = (call.codes, call.size, needed)
        if key not in self.made:
            self.made[key] = _Kernel(self, call, needed)
        return self.made[key]


class _Call:
    """Arguments as a kernel reads them."""

    __slots__ = ("batch", "codes", "count", "numbers", "size", "tensors")

    def __init__(self, rows: Sequence[bool], arguments: Sequence[Any]):
        first = arguments[rows.index(True)]
        self.size = first.shape[-1]
        self.batch = batch = first.shape[:-1]
        for x, wide in zip(arguments, rows, strict=True):
            if isinstance(x, Tensor) and x.shape[:-1] != batch and (wide or x.numel() != 1 or x.dim() > len(batch) + 1):
                every = [y.shape[:-1] for y in arguments if isinstance(y, Tensor)]
                self.batch = batch = torch.broadcast_shapes(*every)
                break
        self.count = math.prod(batch)
        self.tensors: list[Tensor] = []
        self.numbers: list[int] = []
        codes = []
        for x, wide in zip(arguments, rows, strict=True):
            if not isinstance(x, Tensor):
                codes.append("number")
                self.numbers.append(struct.unpack("<q", struct.pack("<d", x))[0])
                continue
            width = self.size if wide else 1
            if x.numel() == width and self.count > 1:
                codes.append("one")
            else:
                codes.append("each")
                if x.shape[:-1] != batch:
                    x = x.expand(*batch, width)
            self.tensors.append(x if x.is_contiguous() else x.contiguous())
        self.codes = tuple(codes)


class _Kernel:
    """One kernel and its compiled forms, by the device and the dtypes of the tensors."""

    def __init__(self, owner: RowKernels, call: _Call, needed: tuple[bool, ...] | None):
        block = triton.next_power_of_2(call.size)
        # What is done once per row every thread of the row does, so a thread has up to 16 numbers of it, and up to 8 on
        # the way back, where more would not stay in registers.
        share = 512 if needed is None else 256
        self.rows = max(1, min(128, 2 * share // block)) if block <= 128 else 1
        self.warps = 4 if block <= 128 else max(1, block // share)
        self.sums = needed is not None and any(
            need and code == "one" for need, code in zip(needed, call.codes, strict=True)
        )
        text = row_trace.source(owner.trace, call.codes, call.size, self.rows, needed)
        name = getattr(owner.function, "__qualname__", "rows").replace(".", "_")
        name = "".join(letter if letter.isalnum() else "_" for letter in name)
        text = text.replace("def run(", f"def {name}_{'forward' if needed is None else 'backward'}(", 1)
        file = f"<{name} of rows, {len(linecache.cache)}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where Triton reads it
        scope = dict(vars(row_math))
        before = set(scope)
        exec(compile(text, file, "exec"), scope)
        (made,) = set(scope) - before
        numbers = ["count", *(f"x{i}_bits" for i, code in enumerate(call.codes) if code == "number")]
        self.run = triton.jit(scope[made], do_not_specialize=numbers)
        self.compiled: dict[Any, Any] = {}

    def blocks(self, call: _Call) -> int:
        return -(-call.count // self.rows)

    def launch(self, tensors: Sequence[Tensor], call: _Call) -> None:
        """Run on these tensors; without Triton's search for the compiled form where it is known."""
        programs = self.blocks(call)
        if not programs or not call.size:
            return
        if self.sums:
            programs = min(programs, _PROGRAMS)
        index = tensors[0].device.index
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self.launch(tensors, call)
            return
        key: list[Any] = [index, call.count >= _INT32]
        aligned = True
        for x in tensors:
            key.append(x.dtype)
            if x.data_ptr() % _ALIGNED:
                aligned = False
        known = self.compiled.get(place := tuple(key)) if aligned else None
        if known is not None:
            known[programs, 1, 1](*tensors, call.count, *call.numbers)
            return
        compiled = self.run[programs,](*tensors, call.count, *call.numbers, num_warps=self.warps)
        if aligned and hasattr(self.run, "device_caches"):  # not the interpreter
            self.compiled[place] = compiled


class _RowFunction(torch.autograd.Function):
    # The older interface, as in rows.py: transforms do not come here.

    @staticmethod
    def forward(ctx: Any, kernels: RowKernels, *arguments: Tensor | float) -> Any:
        ctx.kernels, ctx.numbers = kernels, [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.save_for_backward(*(x for x in arguments if isinstance(x, Tensor)))
        return kernels.forward(arguments)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if x is None else x for x in ctx.numbers]
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or not all(is_ordinary(grad) for grad in grads):
            return None, *plain_gradients(ctx.kernels.function, arguments, grads, needed)
        return None, *ctx.kernels.backward(arguments, grads, needed)
