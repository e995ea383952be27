"""Plain functions of rows as the text of one Triton kernel: the operations that torch makes are written down once.

A function of rows (R, n) and of numbers per row (R, 1) reads nothing but its own row. So a sample of a few rows shows
all that it does, and autograd all that its derivative does; both become straight lines of Triton over a block of rows
in registers, in float64 from the first sum to the last. The plain function is thereby the only definition: every branch
that keeps digits is in the kernel too, chosen for each row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hyptree.geometry.core.rows import NotByRows

_ROWS = 11

_SAME = {"detach", "alias", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze"}
_FILLED = {"zeros_like": 0.0, "new_zeros": 0.0, "zeros": 0.0, "ones_like": 1.0}
_NUMBER = {"full_like": 1, "full": 1, "new_full": 2, "scalar_tensor": 0}  # which argument
_HALF = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
_TERMS = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sgn": "sign({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "1.0 / tl.sqrt({0})",
    "reciprocal": "1.0 / {0}",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    **{name: name + "({0})" for name in ("expm1", "log1p", "sinh", "cosh", "tanh", "asinh")},
    "atanh": "0.5 * (log1p({0}) - log1p(-{0}))",
    "asin": "arctan2({0}, tl.sqrt((1.0 - {0}) * (1.0 + {0})))",
    "atan2": "arctan2({0}, {1})",
    "hypot": "tl.sqrt({0} * {0} + {1} * {1})",
    "copysign": "copysign({0}, {1})",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "addcmul": "{0} + {1} * {2}",
    "lerp": "{0} + {2} * ({1} - {0})",
    "clone": "{0}",
    "copy": "{1}",
    "minimum": "least({0}, {1})",
    "maximum": "-least(-{0}, -{1})",
    "clamp_max": "least({0}, {1})",
    "clamp_min": "-least(-{0}, -{1})",
    "where": "tl.where({0}, {1}, {2})",
    "masked_fill": "tl.where({1}, {2}, {0})",
    "bitwise_and": "{0} & {1}",
    "logical_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "logical_or": "{0} | {1}",
    "bitwise_not": "{0} == 0",
    "logical_not": "{0} == 0",
    "tanh_backward": "{0} * (1.0 - {1} * {1})",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
}
_UNKNOWN = "unknown"
_POWERS = {1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", -1.0: "1.0 / {0}", 0.5: "tl.sqrt({0})"}


class _Recorder(TorchDispatchMode):
    """Writes down the operations on a sample as lines ``name = term``, each term once."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.kept: list[Tensor] = []  # a name is that of an object, which must not make way for another
        self.shared: set[int] = set()
        """Tensors with the memory of others, which nobody may write to."""
        self.terms: dict[str, str] = {}
        self.wide: set[str] = set()
        """What is a number per row and column; all else is one per row, whatever the shape."""

    def name(self, x: Any) -> str:
        """Of a tensor that was seen, or of a number."""
        if isinstance(x, Tensor) and id(x) in self.names:
            return self.names[id(x)]
        if not isinstance(x, bool | int | float):
            raise NotByRows(f"an argument from elsewhere, {type(x).__name__}")
        text = repr(float(x)) if math.isfinite(x) else f'float("{float(x)}")'
        return self.line(f"tl.full((1, 1), {text}, tl.float64)", "k")

    def add(self, x: Tensor, name: str) -> None:
        if x.dim() > 2 or (x.dim() and x.shape[0] != _ROWS):
            raise NotByRows(f"a tensor of shape {tuple(x.shape)}")
        self.names[id(x)] = name
        self.kept.append(x)

    def line(self, term: str, letter: str = "v", wide: bool | None = None) -> str:
        if term not in self.terms:
            name = self.terms[term] = f"{letter}{len(self.terms)}"
            if any(used in self.wide for used in used_in(term)) if wide is None else wide:
                self.wide.add(name)
        return self.terms[term]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = func.overloadpacket.__name__
        if isinstance(out, Tensor):
            in_place = kind.endswith("_")
            if in_place and id(out) in self.shared:
                raise NotByRows("a view is written to")
            self.add(out, self.record(kind[:-1] if in_place else kind, out, list(args), kwargs or {}))
        elif kind != "promote_types":
            raise NotByRows(f"no kernel does {kind}")
        return out

    def record(self, kind: str, out: Tensor, args: list[Any], kwargs: dict[str, Any]) -> str:
        """The name of what an operation gives."""
        if kind in _SAME or kind == "slice":
            self.shared |= {id(out), id(args[0])}
        if kind in _SAME:
            return self.name(args[0])
        if kind == "_to_copy":
            name, half = self.name(args[0]), _HALF.get(out.dtype)
            if half and args[0].dtype != out.dtype:
                return self.line(f"{name}.to(tl.float32).to({half}).to(tl.float64)")
            return self.line(f"{name}.to(tl.float64)") if args[0].dtype == torch.bool != out.dtype else name
        if kind in _FILLED or kind in _NUMBER:
            return self.name(_FILLED[kind] if kind in _FILLED else args[_NUMBER[kind]])
        if kind == "linalg_vector_norm" and len(args) > 2 and args[1] == 2:
            return self.line(f"tl.sqrt({self.reduce('sum', [args[0], args[2]], square=True)})")
        if kind in ("sum", "amax", "all", "any"):
            return self.reduce(kind, args)
        if kind in ("slice", "cat", "slice_backward"):
            return self.columns(kind, out, args)
        if kind in ("add", "sub", "rsub"):
            a, b = (self.name(x) for x in args[:2])
            if kind == "rsub":
                a, b = b, a
            if (alpha := kwargs.get("alpha", args[2] if len(args) > 2 else 1)) != 1:
                b = f"{self.name(alpha)} * {b}"
            return self.line(f"{a} {'+' if kind == 'add' else '-'} {b}")
        if kind == "clamp":
            name = self.name(args[0])
            for bound, which in zip(args[1:], ("clamp_min", "clamp_max"), strict=False):
                name = name if bound is None else self.line(_TERMS[which].format(name, self.name(bound)))
            return name
        if kind == "pow" and args[1] in _POWERS:
            return self.line(_POWERS[args[1]].format(self.name(args[0])))
        term = _TERMS.get(kind, "")
        if f"{{{len(args) - 1}}}" not in term or f"{{{len(args)}}}" in term or kwargs:
            raise NotByRows(f"no kernel does {kind}")
        return self.line(term.format(*map(self.name, args)))

    def reduce(self, kind: str, args: list[Any], square: bool = False) -> str:
        """A sum (of squares, largest, all, any) over the last axis."""
        x, axes = args[0], args[1] if len(args) > 1 else None
        if x.dim() != 2 or axes not in ([1], [-1], 1, -1):
            raise NotByRows("a sum over rows")
        name, inside = self.name(x), f"(column < {x.shape[1]})"
        if square:
            name = self.line(f"{name} * {name}")
        if name not in self.wide:
            return self.line(f"{name} * {self.name(x.shape[1])}") if kind == "sum" and x.shape[1] != 1 else name
        if kind == "sum":
            return self.line(f"tl.sum(tl.where({inside}, {name}, 0.0), 1, keep_dims=True)", wide=False)
        if kind == "amax":
            return self.line(f'tl.max(tl.where({inside}, {name}, float("-inf")), 1, keep_dims=True)', wide=False)
        mark = name if kind == "any" else f"({name} == 0)"  # all are true where no one is false
        row_mark = self.line(f"tl.max(tl.where({inside}, {mark}.to(tl.int32), 0), 1, keep_dims=True)", wide=False)
        return self.line(f"{row_mark} {'>' if kind == 'any' else '=='} 0")

    def columns(self, kind: str, out: Tensor, args: list[Any]) -> str:
        """The first columns of rows or a single one, put together or taken apart."""
        if kind == "cat":
            parts, axis = args[0], args[1] if len(args) > 1 else 0
            if axis not in (1, -1) or any(self.name(x) in self.wide for x in parts[1:]):
                raise NotByRows("rows put behind others")
            name, end = self.name(parts[-1]), out.shape[1]
            for x, behind in zip(parts[-2::-1], parts[:0:-1], strict=True):
                end -= behind.shape[1]
                name = self.line(f"tl.where(column < {end}, {self.name(x)}, {name})", wide=True)
            return name
        axis, start, end = args[2:5] if kind == "slice_backward" else [*args[1:], None, None][:3]
        name, width = self.name(args[0]), (args[0] if kind == "slice_backward" else out).shape[-1]
        if axis not in (1, -1) or (width != 1 and start):
            return self.line(_UNKNOWN)  # columns in the middle, which nobody asks about where others were put behind
        if kind == "slice_backward":
            inside = f"column == {start}" if width == 1 else f"column < {end}"
            return self.line(f"tl.where({inside}, {name}, 0.0)", wide=True)
        if width != 1 or name not in self.wide:
            return name
        return self.line(f"tl.sum(tl.where(column == {start or 0}, {name}, 0.0), 1, keep_dims=True)", wide=False)


def used_in(term: str) -> list[str]:
    """Names in a term."""
    return re.findall(r"\b[vkxg]\d+\b", term)


class Trace:
    """What a function does to one row and what its derivative does, as lines of Triton.

    Args:
        function: takes rows (R, n) and numbers per row (R, 1), gives one or several of these, numbers also as (R,).
        widths, dtypes: of its arguments.
    """

    def __init__(self, function: Callable[..., Any], widths: Sequence[int], dtypes: Sequence[torch.dtype]):
        recorder = _Recorder()
        self.widths, self.dtypes = widths, dtypes
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            sample = [
                torch.full((_ROWS, width), 0.1, dtype=dtype, device="cpu").requires_grad_()
                for width, dtype in zip(widths, dtypes, strict=True)
            ]
            self.start(recorder, "x", sample)
            try:
                with recorder:
                    result = function(*sample)
                    self.is_tuple = isinstance(result, tuple)
                    outs = result if self.is_tuple else (result,)
                    self.outs = [recorder.name(out) for out in outs]
                    cotangents = [torch.zeros_like(out) for out in outs]
                    self.start(recorder, "g", cotangents)
                    grads: Sequence[Tensor | None] = [None] * len(sample)
                    if any(out.requires_grad for out in outs):
                        grads = torch.autograd.grad(outs, sample, cotangents, allow_unused=True)
                    self.grads = [recorder.name(0.0 if grad is None else grad) for grad in grads]
            except (ValueError, RuntimeError) as error:  # what it says about a sample that is not what it takes
                raise NotByRows(str(error)) from error
        self.lines = {name: term for term, name in recorder.terms.items()}
        if _UNKNOWN in self.body([*self.outs, *self.grads]).values():
            raise NotByRows("columns in the middle of rows")
        self.out_shapes, self.out_dtypes = [out.shape[1:] for out in outs], [out.dtype for out in outs]
        self.out_widths = [math.prod(shape) for shape in self.out_shapes]

    @staticmethod
    def start(recorder: _Recorder, letter: str, tensors: Sequence[Tensor]) -> None:
        for i, x in enumerate(tensors):
            recorder.add(x, f"{letter}{i}")
            if x.dim() == 2 and x.shape[1] > 1:
                recorder.wide.add(f"{letter}{i}")

    def body(self, wanted: Sequence[str]) -> dict[str, str]:
        """The lines that these names need, in their order, and the inputs among the names, which have none."""
        needed: dict[str, str] = {}
        todo = list(wanted)
        while todo:
            name = todo.pop()
            if name not in needed:
                needed[name] = self.lines.get(name, "")
                todo += used_in(needed[name])
        order = {name: place for place, name in enumerate(self.lines)}
        return {name: needed[name] for name in sorted(needed, key=lambda name: order.get(name, -1))}


def source(trace: Trace, codes: Sequence[Any], rows: int, needed: Sequence[bool] | None) -> str:
    """The kernel ``run`` over blocks of ``rows`` rows.

    Its parameters are the tensors among the arguments, the gradients that come in, what is written, the sums over the
    rows of each program, the number of rows, and the bits of arguments that are numbers.

    Args:
        codes: how each argument lies in memory: "packed" rows, "one" for all rows, a "number", or the length of groups
            of rows, the step from row to row and from group to group.
        needed: which gradients are written; None for the kernel of the results.
    """
    block = 1 << (max(*trace.widths, *trace.out_widths) - 1).bit_length()
    inputs = [(f"x{i}", *each) for i, each in enumerate(zip(trace.widths, codes, strict=True))]
    outs = enumerate(zip(trace.out_widths, trace.outs, strict=True))
    results: list[tuple[str, int, Any, str]] = [(f"o{i}", width, "packed", name) for i, (width, name) in outs]
    if needed is not None:
        results = [(f"d{i}", *inputs[i][1:], name) for i, name in enumerate(trace.grads) if needed[i]]
        inputs += [(f"g{i}", width, "packed") for i, width in enumerate(trace.out_widths)]
    body = trace.body([name for *_, name in results])
    top = [f"column = tl.arange(0, {block})[None, :]", "one = tl.zeros((1, 1), tl.int32)"]
    inner = [f"row = ((tl.zeros((1,), tl.int64) + start) * {rows} + tl.arange(0, {rows}))[:, None]"]
    after: list[str] = []
    for name, width, code in inputs:
        if name not in body:
            continue
        if code == "number":
            top.append(f"{name} = tl.zeros((1, 1), tl.float64) + {name}_bits.to(tl.int64).to(tl.float64, bitcast=True)")
        elif code == "one":
            top.append(f"{name} = tl.load({name}_at + one{_columns(width)}{_mask(width)}).to(tl.float64)")
        else:
            at = f"row * {width}" if code == "packed" else "row // {0} * {2} + row % {0} * {1}".format(*code)
            other = f", other={float(width == 1)}"  # a number is a curvature, or what else one may divide by
            inner.append(
                f"{name} = tl.load({name}_at + {at}{_columns(width)}{_mask(width, True)}{other}).to(tl.float64)"
            )
    for name, term in body.items():
        if term:
            (top if name[0] == "k" else inner).append(f"{name} = {term}")
    sums = [width for _, width, code, _ in results if code == "one"]
    offset = 0
    for name, width, code, value in results:
        shape = f"({rows}, {block if width > 1 else 1})"
        value = f"{value} + tl.zeros({shape}, tl.float64)"
        if code == "one":
            top.append(f"{name} = tl.zeros({shape.replace(str(rows), '1', 1)}, tl.float64)")
            inner.append(f"{name} += tl.sum(tl.where(row < count, {value}, 0.0), 0, keep_dims=True)")
            at = f"sums_at + tl.program_id(0) * {sum(sums)} + {offset} + one{_columns(width)}"
            after.append(f"tl.store({at}, {name}.to(tl.float32){_mask(width)})")
            offset += width
        else:
            at = f"{name}_at + row * {width}{_columns(width)}"
            inner.append(f"tl.store({at}, ({value}).to(tl.float32){_mask(width, True)})")
    if sums:
        loop = f"for start in range(tl.program_id(0), tl.cdiv(count, {rows}), tl.num_programs(0)):"
        inner = [loop, *(f"    {line}" for line in inner)]
    else:
        top.append("start = tl.program_id(0)")
    pointers = [f"{name}_at" for name, _, code, *_ in inputs if code != "number"]
    pointers += [f"{name}_at" for name, _, code, _ in results if code != "one"] + ["sums_at"] * bool(sums)
    bits = [f"{name}_bits" for name, _, code in inputs if code == "number"]
    head = f"def run({', '.join([*pointers, 'count', *bits])}):"
    return "\n    ".join([head, *top, *inner, *after]) + "\n"


def _columns(width: int) -> str:
    return " + column" if width > 1 else ""


def _mask(width: int, of_rows: bool = False) -> str:
    masks = ["row < count"] * of_rows + [f"column < {width}"] * (width > 1)
    return f", mask={' & '.join(f'({mask})' for mask in masks)}" if masks else ""
