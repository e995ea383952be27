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
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from hyptree.geometry.core import row_math
from hyptree.geometry.core.row_trace import Trace, source
from hyptree.geometry.core.rows import is_ordinary, plain_gradients

_ALIGNED = 16  # bytes, what Triton takes for granted in the form it compiles for aligned pointers
_PROGRAMS = 1024  # at most, where each leaves a sum over its rows behind
_INT32 = 2**31


class RowKernels:
    """The kernels of one plain function, each made when it is first needed.

    Args:
        function: see :class:`~hyptree.geometry.core.row_trace.Trace`; also called itself for second derivatives.
    """

    longest = 4096
    """A row that one program holds; longer ones are left to the plain function."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.traces: dict[Any, Trace] = {}
        self.kernels: dict[Any, _Kernel] = {}

    def __call__(self, *arguments: Tensor | float) -> Any:
        """The function of rows (..., n) and of numbers per row (..., 1) or for all rows; leading axes broadcast."""
        if torch.is_grad_enabled():
            for x in arguments:
                if isinstance(x, Tensor) and x.requires_grad:
                    return _RowFunction.apply(self, *arguments)
        return self.forward(arguments)[0]

    def trace(self, call: _Call) -> Trace:
        if call.key not in self.traces:
            self.traces[call.key] = Trace(self.function, call.widths, call.dtypes)
        return self.traces[call.key]

    def kernel(self, call: _Call, needed: tuple[bool, ...] | None) -> _Kernel:
        key = (call.key, call.codes, needed)
        if key not in self.kernels:
            self.kernels[key] = _Kernel(self.function, self.trace(call), call.codes, needed)
        return self.kernels[key]

    def forward(self, arguments: Sequence[Tensor | float]) -> tuple[Any, _Call]:
        """The results, and how the arguments were read."""
        call = _Call(arguments)
        kernel, device = self.kernel(call, None), call.tensors[0].device
        outs = [torch.empty((*call.batch, *shape), dtype=dtype, device=device) for shape, dtype in kernel.outs]
        kernel.launch([*call.tensors, *outs], call)
        return (tuple(outs) if kernel.is_tuple else outs[0]), call

    def backward(
        self, arguments: Sequence[Tensor | float], grads: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of the arguments from those of the results."""
        call = _Call(arguments)
        kernel = self.kernel(call, tuple(needed))
        results: list[Any] = [None] * len(needed)
        shared = []
        for i in (i for i, need in enumerate(needed) if need):
            x, width = arguments[i], call.widths[i]
            if call.codes[i] == "one":
                shared.append((i, width))
            else:
                results[i] = torch.empty((*call.batch, width), dtype=call.dtypes[i], device=call.tensors[0].device)
        written = [x for x in results if x is not None]
        if shared:
            programs = max(1, min(kernel.blocks(call), _PROGRAMS))
            written.append(torch.empty(programs, sum(width for _, width in shared), device=call.tensors[0].device))
        kernel.launch([*call.tensors, *(grad.contiguous() for grad in grads), *written], call)
        if shared:
            sums = written[-1].sum(0).split([width for _, width in shared])
            for (i, _), total in zip(shared, sums, strict=True):
                results[i] = total.to(call.dtypes[i])
        for i, result in enumerate(results):
            x = arguments[i]
            if result is not None and isinstance(x, Tensor) and result.shape != x.shape:
                same = result.numel() == x.numel()
                results[i] = result.view(x.shape) if same else result.sum_to_size(x.shape)
        return results


class _Call:
    """Arguments as a kernel reads them."""

    __slots__ = ("batch", "codes", "count", "dtypes", "key", "numbers", "tensors", "widths")

    def __init__(self, arguments: Sequence[Any]):
        given = [x for x in arguments if isinstance(x, Tensor)]
        self.batch = batch = max((x.shape[:-1] for x in given), key=len)
        for x in given:
            if x.shape[:-1] != batch and x.dim():
                self.batch = batch = torch.broadcast_shapes(*(y.shape[:-1] for y in given))
                break
        self.count = count = math.prod(batch)
        self.tensors: list[Tensor] = []
        self.numbers: list[int] = []
        codes, widths, dtypes = [], [], []
        for x in arguments:
            if not isinstance(x, Tensor):
                self.numbers.append(struct.unpack("<q", struct.pack("<d", x))[0])
                code, width, dtype = "number", 1, torch.float32
            else:
                width, dtype = x.shape[-1] if x.dim() else 1, x.dtype
                if x.shape[:-1] == batch and x.dim() and x.is_contiguous():
                    code = "packed"
                elif x.numel() == width and count != 1:
                    code, x = "one", x.contiguous()
                else:
                    x = x.expand(*batch, width)
                    code = _groups(x)
                    x = x.contiguous() if code == "packed" else x
                self.tensors.append(x)
            codes.append(code)
            widths.append(width)
            dtypes.append(dtype)
        self.codes, self.widths, self.dtypes = tuple(codes), tuple(widths), tuple(dtypes)
        self.key = (self.widths, self.dtypes)


def _groups(x: Tensor) -> Any:
    """The length of groups of rows, the step from row to row and from group to group; "packed" if it takes more."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return "packed"
    groups: list[list[int]] = []  # the last axis first
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if groups and step == groups[-1][0] * groups[-1][1]:
            groups[-1][0] *= size
        else:
            groups.append([size, step])
    (length, step), (_, outer) = [*groups, [1, 0], [1, 0]][:2]
    return (length, step, outer) if len(groups) <= 2 else "packed"


class _Kernel:
    """One kernel and its compiled forms, by the device and the alignment of the tensors."""

    def __init__(
        self, function: Callable[..., Any], trace: Trace, codes: tuple[Any, ...], needed: tuple[bool, ...] | None
    ):
        block = triton.next_power_of_2(max(*trace.widths, *trace.out_widths))
        # What is done once per row every thread of the row does, so a thread has up to 16 numbers of it, and up to 8 on
        # the way back, where more would not stay in registers.
        share = 512 if needed is None else 256
        self.rows = max(1, min(128, 2 * share // block)) if block <= 128 else 1
        self.warps = 4 if block <= 128 else max(1, block // share)
        self.sums = needed is not None and any(n and code == "one" for n, code in zip(needed, codes, strict=True))
        self.outs, self.is_tuple = list(zip(trace.out_shapes, trace.out_dtypes, strict=True)), trace.is_tuple
        name = re.sub(r"\W", "_", getattr(function, "__qualname__", "rows")) + ("" if needed is None else "_backward")
        text = source(trace, codes, self.rows, needed).replace("def run(", f"def {name}(", 1)
        file = f"<{name}, kernel {len(linecache.cache)}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where Triton reads it
        scope = dict(vars(row_math))
        exec(compile(text, file, "exec"), scope)
        numbers = ["count", *(f"x{i}_bits" for i, code in enumerate(codes) if code == "number")]
        self.run = triton.jit(scope[name], do_not_specialize=numbers)
        self.compiled: dict[Any, Any] = {}

    def blocks(self, call: _Call) -> int:
        return -(-call.count // self.rows)

    def launch(self, tensors: Sequence[Tensor], call: _Call) -> None:
        """Run on these tensors; without Triton's search for the compiled form where it is known."""
        programs = self.blocks(call)
        if self.sums:
            programs = max(1, min(programs, _PROGRAMS))  # of no rows the sum is zero, and written
        if not programs:
            return
        index = tensors[0].device.index
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.launch(tensors, call)
        is_aligned = True
        for x in tensors:
            if x.data_ptr() % _ALIGNED:
                is_aligned = False
        place = index, call.count >= _INT32
        if is_aligned and place in self.compiled:
            self.compiled[place][programs, 1, 1](*tensors, call.count, *call.numbers)
            return
        compiled = self.run[programs,](*tensors, call.count, *call.numbers, num_warps=self.warps)
        if is_aligned and hasattr(self.run, "device_caches"):  # not the interpreter
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
