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
from hyptree.geometry.core.launch import launch
from hyptree.geometry.core.row_trace import Trace, source
from hyptree.geometry.core.rows import LONGEST, NotByRows, is_ordinary, plain_gradients

_PLANS = 4096  # kept, one for each shape
_PROGRAMS = 1024  # at most, where each leaves a sum over its rows behind


class RowKernels:
    """The kernels of one plain function, each made when it is first needed.

    Args:
        function: see :class:`~hyptree.geometry.core.row_trace.Trace`; also called itself for second derivatives.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.plans: dict[Any, Plan | None] = {}
        self.traces: dict[Any, Trace] = {}
        self.kernels: dict[Any, _Kernel] = {}

    def plan(self, arguments: Sequence[Tensor | float]) -> Plan | None:
        """How kernels read arguments like these; None if they do not."""
        key = tuple(
            [
                (type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg())
                if isinstance(x, Tensor) and x.layout is torch.strided
                else type(x)
                for x in arguments
            ]
        )
        if key not in self.plans:
            if len(self.plans) >= _PLANS:
                self.plans.clear()
            try:
                self.plans[key] = Plan(self, arguments) if all(map(is_ordinary, arguments)) else None
            except NotByRows:
                self.plans[key] = None
        return self.plans[key]

    def __call__(self, plan: Plan, arguments: Sequence[Tensor | float]) -> Any:
        """The function of rows (..., n) and of numbers per row (..., 1) or for all rows; leading axes broadcast."""
        if torch.is_grad_enabled():
            for x in arguments:
                if isinstance(x, Tensor) and x.requires_grad:
                    return _RowFunction.apply(self, plan, *arguments)
        return plan.forward(arguments)

    def kernel(self, trace: Trace, codes: tuple[Any, ...], needed: tuple[bool, ...] | None) -> _Kernel:
        key = (trace.widths, trace.dtypes, codes, needed)
        if key not in self.kernels:
            self.kernels[key] = _Kernel(self.function, trace, codes, needed)
        return self.kernels[key]


class Plan:
    """How kernels read arguments of these shapes and steps, and what they write."""

    def __init__(self, owner: RowKernels, arguments: Sequence[Any]):
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        try:
            self.batch = torch.broadcast_shapes(*(x.shape[:-1] for x in tensors))
        except RuntimeError as error:
            raise NotByRows("each row of one argument goes with a row of the others") from error
        self.count, self.device = math.prod(self.batch), tensors[0].device
        self.widths = tuple(x.shape[-1] if isinstance(x, Tensor) and x.dim() else 1 for x in arguments)
        self.dtypes = tuple(x.dtype if isinstance(x, Tensor) else torch.float32 for x in arguments)
        if not 0 < min(self.widths) <= max(self.widths) <= LONGEST or any(x.device != self.device for x in tensors):
            raise NotByRows("rows too long for a program, or not on one device")
        self.codes = tuple(self._code(x, width) for x, width in zip(arguments, self.widths, strict=True))
        self.copies = [
            isinstance(x, Tensor)
            and not (x.is_contiguous() if code == "one" else code != "packed" or _is_packed(x, self.batch))
            for x, code in zip(arguments, self.codes, strict=True)
        ]
        place = (self.widths, self.dtypes)
        if place not in owner.traces:
            owner.traces[place] = Trace(owner.function, self.widths, self.dtypes)
        self.owner, self.trace = owner, owner.traces[place]
        self.kernels: dict[Any, _Kernel] = {None: owner.kernel(self.trace, self.codes, None)}
        shapes = zip(self.trace.out_shapes, self.trace.out_dtypes, strict=True)
        self.outs = [((*self.batch, *shape), dtype) for shape, dtype in shapes]

    def _code(self, x: Any, width: int) -> Any:
        if not isinstance(x, Tensor):
            return "number"
        if x.numel() == width and self.count != 1:
            return "one"
        return _groups(x.expand(*self.batch, width))

    def read(self, arguments: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
        """The tensors and the bits of the numbers."""
        tensors, numbers = [], []
        for x, code, width, copied in zip(arguments, self.codes, self.widths, self.copies, strict=True):
            if code == "number":
                numbers.append(struct.unpack("<q", struct.pack("<d", x))[0])
            else:
                if copied:
                    x = (x if code == "one" else x.expand(*self.batch, width)).contiguous()
                tensors.append(x)
        return tensors, numbers

    def forward(self, arguments: Sequence[Tensor | float], outs: Sequence[Tensor] | None = None) -> Any:
        """The results, written to ``outs``, which are packed and may be among the arguments."""
        tensors, numbers = self.read(arguments)
        if outs is None:
            outs = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.outs]
        self.kernels[None].launch([*tensors, *outs], self.count, numbers)
        return tuple(outs) if self.trace.is_tuple else outs[0]

    def backward(
        self, arguments: Sequence[Tensor | float], grads: Sequence[Tensor], needed: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of the arguments from those of the results."""
        if not any(needed):
            return [None] * len(needed)
        if needed not in self.kernels:
            self.kernels[needed] = self.owner.kernel(self.trace, self.codes, needed)
        kernel = self.kernels[needed]
        tensors, numbers = self.read(arguments)
        results: list[Any] = [None] * len(needed)
        shared = []
        for i, (need, code, width) in enumerate(zip(needed, self.codes, self.widths, strict=True)):
            if need and code == "one":
                shared.append(width)
            elif need:
                results[i] = torch.empty((*self.batch, width), dtype=self.dtypes[i], device=self.device)
        written = [x for x in results if x is not None]
        if shared:
            written.append(torch.empty(kernel.programs(self.count), sum(shared), device=self.device))
        incoming = [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]
        kernel.launch([*tensors, *incoming, *written], self.count, numbers)
        sums = iter(written[-1].sum(0).split(shared)) if shared else iter(())
        for i, (x, need, code) in enumerate(zip(arguments, needed, self.codes, strict=True)):
            if need and isinstance(x, Tensor):
                result = next(sums).to(x.dtype) if code == "one" else results[i]
                if result.shape != x.shape:
                    result = result.view(x.shape) if result.numel() == x.numel() else result.sum_to_size(x.shape)
                results[i] = result
        return results


def _is_packed(x: Tensor, batch: torch.Size) -> bool:
    return x.is_contiguous() and (x.shape[:-1] == batch or math.prod(batch) == 1)


def _groups(x: Tensor) -> Any:
    """The length of groups of rows, the step from row to row and from group to group; "packed" if it takes more."""
    if x.is_contiguous() or (x.shape[-1] > 1 and x.stride(-1) != 1):
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
    """One kernel, made from its text."""

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
        name = re.sub(r"\W", "_", getattr(getattr(function, "func", function), "__qualname__", "rows")) + (
            "" if needed is None else "_backward"
        )
        text = source(trace, codes, self.rows, needed).replace("def run(", f"def {name}(", 1)
        file = f"<{name}, kernel {len(linecache.cache)}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where Triton reads it
        scope = dict(vars(row_math))
        exec(compile(text, file, "exec"), scope)
        numbers = ["count", *(f"x{i}_bits" for i, code in enumerate(codes) if code == "number")]
        self.run = triton.jit(scope[name], do_not_specialize=numbers)

    def programs(self, count: int) -> int:
        """How many programs take these rows; of no rows the sum is zero, and written."""
        blocks = -(-count // self.rows)
        return max(1, min(blocks, _PROGRAMS)) if self.sums else blocks

    def launch(self, tensors: Sequence[Tensor], count: int, numbers: Sequence[int]) -> None:
        """Run on these tensors."""
        programs = self.programs(count)
        if not programs:
            return
        launch(self.run, (programs,), tensors, (count, *numbers), {"num_warps": self.warps})


class _RowFunction(torch.autograd.Function):
    # The older interface, as in rows.py: transforms do not come here.

    @staticmethod
    def forward(ctx: Any, kernels: RowKernels, plan: Plan, *arguments: Tensor | float) -> Any:
        ctx.function, ctx.plan = kernels.function, plan
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.save_for_backward(*[x for x in arguments if isinstance(x, Tensor)])
        return plan.forward(arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if x is None else x for x in ctx.numbers]
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() or not all(map(is_ordinary, grads)):
            return None, None, *plain_gradients(ctx.function, arguments, grads, needed)
        return None, None, *ctx.plan.backward(arguments, grads, needed)
