"""Plain functions of rows as the text of one Triton kernel: the operations that torch makes are written down once.

A function of rows ``x, y, ...`` (..., n) and of numbers per row (..., 1) reads nothing but its own row. So a sample of
five rows shows all that it does, and autograd all that its derivative does; both become straight lines of Triton over a
block of rows that stays in registers, in float64 from the first sum to the last. The plain function is thereby the only
definition: every branch that keeps digits is in the kernel too, chosen for each row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ROWS, _SIZE = 5, 7
_SHAPES = ((_ROWS, _SIZE), (_ROWS, 1), (_ROWS,), ())

_SAME = {"detach", "alias", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "clone", "lift_fresh", "reshape"}
_COMPARED = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_TERMS = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sgn": "sign({0})",
    "sign": "sign({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "1.0 / tl.sqrt({0})",
    "reciprocal": "1.0 / {0}",
    "exp": "tl.exp({0})",
    "expm1": "expm1({0})",
    "log": "tl.log({0})",
    "log1p": "log1p({0})",
    "sinh": "sinh({0})",
    "cosh": "cosh({0})",
    "tanh": "tanh({0})",
    "asinh": "asinh({0})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "asin": "arctan2({0}, tl.sqrt((1.0 - {0}) * (1.0 + {0})))",
    "atan2": "arctan2({0}, {1})",
    "hypot": "hypot({0}, {1})",
    "copysign": "copysign({0}, {1})",
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
    "sigmoid_backward": "{0} * ({1} * (1.0 - {1}))",
    "addcmul": "{0} + {1} * {2}",
    **{name: f"{{0}} {sign} {{1}}" for name, sign in _COMPARED.items()},
}
_POWERS = {1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", -1.0: "1.0 / {0}", 0.5: "tl.sqrt({0})"}


class NotByRows(Exception):
    """The function does something that is not done row by row, or that no kernel knows."""


class _Recorder(TorchDispatchMode):
    """Writes down the operations on a sample as lines ``name = term``, each term once."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.kept: list[Tensor] = []  # a name is that of an object, which must not make way for another
        self.terms: dict[str, str] = {}
        self.wide: set[str] = set()

    def name(self, x: Any) -> str:
        """Of a tensor that was seen, or of a number."""
        if isinstance(x, Tensor):
            if id(x) not in self.names:
                raise NotByRows("a tensor from elsewhere")
            return self.names[id(x)]
        if isinstance(x, bool | int | float):
            number = float(x)
            text = repr(number) if math.isfinite(number) else f'float("{number}")'
            return self.line(f"tl.full((1, 1), {text}, tl.float64)", "k")
        raise NotByRows(f"an argument of type {type(x).__name__}")

    def add(self, x: Tensor, name: str) -> None:
        if tuple(x.shape) not in _SHAPES:
            raise NotByRows(f"a tensor of shape {tuple(x.shape)}")
        self.names[id(x)] = name
        self.kept.append(x)

    def line(self, term: str, letter: str = "v", reduces: bool = False) -> str:
        if term not in self.terms:
            name = f"{letter}{len(self.terms)}"
            if not reduces and any(used in self.wide for used in _used(term)):
                self.wide.add(name)
            self.terms[term] = name
        return self.terms[term]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.add(out, self.record(func.overloadpacket.__name__, out, list(args), kwargs or {}))
        elif func.overloadpacket.__name__ not in ("promote_types", "sym_size", "is_same_size"):
            raise NotByRows(f"{func} gives several results")
        return out

    def record(self, kind: str, out: Tensor, args: list[Any], kwargs: dict[str, Any]) -> str:
        """The name of what an operation gives."""
        if kind in _SAME or kind == "_to_copy":
            name = self.name(args[0])
            if kind == "_to_copy" and args[0].dtype == torch.bool != out.dtype:
                name = self.line(f"{name}.to(tl.float64)")
            return name
        if kind in ("zeros_like", "ones_like", "full_like", "scalar_tensor", "full", "new_zeros", "new_full", "zeros"):
            return self.name({"z": 0.0, "n": 0.0, "o": 1.0}[kind[0]] if "full" not in kind and kind != "scalar_tensor"
                             else args[0] if kind == "scalar_tensor" else args[-1])  # fmt: skip
        if kind in ("sum", "amax", "all", "any"):
            return self.reduce(kind, args)
        if kind in ("add", "sub", "rsub"):
            a, b = (self.name(x) for x in args[:2])
            alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
            if alpha != 1:
                a, b = (f"{self.name(alpha)} * {a}", b) if kind == "rsub" else (a, f"{self.name(alpha)} * {b}")
            return self.line(f"{a} + {b}" if kind == "add" else f"{a} - {b}" if kind == "sub" else f"{b} - {a}")
        if kind == "clamp":
            low, high = [*args[1:], None, None][:2]
            name = self.name(args[0])
            if low is not None:
                name = self.line(_TERMS["clamp_min"].format(name, self.name(low)))
            return name if high is None else self.line(_TERMS["clamp_max"].format(name, self.name(high)))
        if kind == "pow" and float(args[1]) in _POWERS:
            return self.line(_POWERS[float(args[1])].format(self.name(args[0])))
        if kind in _TERMS and not kwargs:
            return self.line(_TERMS[kind].format(*map(self.name, args)))
        raise NotByRows(f"no kernel does {kind}")

    def reduce(self, kind: str, args: list[Any]) -> str:
        """A sum (largest, all, any) over the last axis."""
        x, axes = args[0], args[1] if len(args) > 1 else None
        axes = [axes] if isinstance(axes, int) else axes
        if not axes or any(axis not in (x.dim() - 1, -1) for axis in axes) or x.dim() != 2:
            raise NotByRows("a sum over rows")
        name = self.name(x)
        if x.shape[-1] == 1:
            return name
        if name not in self.wide:
            return self.line(f"{name} * {self.name(_SIZE)}") if kind == "sum" else name
        if kind == "sum":
            return self.line(f"tl.sum(tl.where(is_column, {name}, 0.0), 1, keep_dims=True)", reduces=True)
        if kind == "amax":
            return self.line(f'tl.max(tl.where(is_column, {name}, float("-inf")), 1, keep_dims=True)', reduces=True)
        # of truths: all are true where no one is false
        mark = f"{name}.to(tl.int32)" if kind == "any" else f"({name} == 0).to(tl.int32)"
        found = self.line(f"tl.max(tl.where(is_column, {mark}, 0), 1, keep_dims=True)", reduces=True)
        return self.line(f"{found} {'>' if kind == 'any' else '=='} 0")


def _used(term: str) -> list[str]:
    return re.findall(r"\b[vkxg]\d+\b", term)


class Trace:
    """What a function does to one row and what its derivative does, as lines of Triton.

    Args:
        function: takes rows (R, n) and numbers per row (R, 1), gives one or several of these, numbers also as (R,).
        rows: which arguments are rows.
    """

    def __init__(self, function: Callable[..., Any], rows: Sequence[bool]):
        recorder = _Recorder()
        self.rows = tuple(rows)
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            sample = [torch.full((_ROWS, _SIZE if wide else 1), 0.1, device="cpu").requires_grad_() for wide in rows]
            for i, x in enumerate(sample):
                recorder.add(x, f"x{i}")
            recorder.wide = {f"x{i}" for i, wide in enumerate(rows) if wide}
            with recorder:
                result = function(*sample)
                self.is_tuple = isinstance(result, tuple)
                outs = result if isinstance(result, tuple) else (result,)
                self.outs = [recorder.name(out) for out in outs]
                self.out_shapes = [out.shape[1:] for out in outs]
                cotangents = [torch.zeros_like(out) for out in outs]
                for i, (g, out) in enumerate(zip(cotangents, outs, strict=True)):
                    recorder.names[id(g)] = f"g{i}"
                    if out.dim() == 2 and out.shape[-1] == _SIZE:
                        recorder.wide.add(f"g{i}")
                grads = torch.autograd.grad(outs, sample, cotangents, allow_unused=True)
            self.grads = [recorder.name(0.0) if g is None else recorder.name(g) for g in grads]
        self.lines = {name: term for term, name in recorder.terms.items()}

    def body(self, wanted: Sequence[str]) -> tuple[list[str], set[str]]:
        """The lines that these names need, and all names that occur in them."""
        needed, todo = set(), list(wanted)
        while todo:
            name = todo.pop()
            if name not in needed:
                needed.add(name)
                todo += _used(self.lines.get(name, ""))
        return [f"{name} = {term}" for name, term in self.lines.items() if name in needed], needed


def is_row(shape: torch.Size) -> bool:
    """Whether a result of this shape, without its first axis, is a row."""
    return len(shape) == 1 and shape[0] == _SIZE


def source(trace: Trace, codes: Sequence[str], size: int, rows: int, needed: Sequence[bool] | None) -> str:
    """The kernel ``run`` over blocks of ``rows`` rows of ``size``.

    Args:
        codes: of each argument: "each" row has its own, all rows share "one", or the "number" comes as its bits.
        needed: which gradients are written; None for the kernel of the results.

    Its parameters are the tensors among the arguments, the gradients that come in, what is written, and then the number
    of rows and the bits of numbers. What rows share has a gradient of each program, to be added up.
    """
    names = trace.outs if needed is None else [g for g, need in zip(trace.grads, needed, strict=True) if need]
    body, used = trace.body(names)
    wide = [is_row(shape) for shape in trace.out_shapes]
    inputs = [(f"x{i}", is_wide, code) for i, (is_wide, code) in enumerate(zip(trace.rows, codes, strict=True))]
    if needed is None:
        outputs = [(f"o{i}", is_wide, "each") for i, is_wide in enumerate(wide)]
    else:
        outputs = [(f"d{i}", inputs[i][1], codes[i]) for i, need in enumerate(needed) if need]
        inputs += [(f"g{i}", is_wide, "each") for i, is_wide in enumerate(wide)]
    sums = [name for name, _, code in outputs if code != "each"]
    pointers = [f"{name}_at" for name, _, code in (*inputs, *outputs) if code != "number"]
    bits = [f"{name}_bits" for name, _, code in inputs if code == "number"]
    text = [f"def run({', '.join([*pointers, 'count', *bits])}):"]
    block = 1 << (size - 1).bit_length()
    top = [f"column = tl.arange(0, {block})[None, :]", f"is_column = column < {size}"]
    inner = [f"row = ((tl.zeros((1,), tl.int64) + start) * {rows} + tl.arange(0, {rows}))[:, None]",
             "is_row = row < count", "inside = is_row & is_column"]  # fmt: skip
    for name, is_wide, code in inputs:
        if name not in used:
            continue
        if code == "number":
            top.append(f"{name} = tl.full((1, 1), 0, tl.float64) + {name}_bits.to(tl.float64, bitcast=True)")
        elif code == "one":
            at, mask = (
                (f"{name}_at + column", "is_column") if is_wide else (f"{name}_at + tl.zeros((1, 1), tl.int32)", None)
            )
            top.append(f"{name} = tl.load({at}{f', mask={mask}, other=0.0' if mask else ''}).to(tl.float64)")
        elif is_wide:
            inner.append(f"{name} = tl.load({name}_at + row * {size} + column, mask=inside, other=0.0).to(tl.float64)")
        else:
            inner.append(f"{name} = tl.load({name}_at + row, mask=is_row, other=1.0).to(tl.float64)")
    top += [line for line in body if line.startswith("k")]
    inner += [line for line in body if not line.startswith("k")]
    after = []
    for (name, is_wide, code), value in zip(outputs, names, strict=True):
        columns, masks = ("row * SIZE + column", "inside") if is_wide else ("row", "is_row")
        if code == "each":
            inner.append(f"tl.store({name}_at + {columns}, {value} + tl.zeros(({rows}, 1), tl.float64), mask={masks})")
            continue
        shape = f"(1, {block if is_wide else 1})"
        top.append(f"{name} = tl.zeros({shape}, tl.float64)")
        inner.append(f"{name} += tl.sum(tl.where(is_row, {value}, 0.0), 0, keep_dims=True)")
        at, mask = ("column", "is_column") if is_wide else ("tl.zeros((1, 1), tl.int32)", "None")
        after.append(f"tl.store({name}_at + tl.program_id(0) * {size if is_wide else 1} + {at}, {name}, mask={mask})")
    if sums:
        loop = f"for start in range(tl.program_id(0), tl.cdiv(count, {rows}), tl.num_programs(0)):"
        text += [f"    {line}" for line in top] + [f"    {loop}"] + [f"        {line}" for line in inner]
    else:
        text += [f"    {line}" for line in (*top, "start = tl.program_id(0)", *inner)]
    return "\n".join([*text, *(f"    {line}" for line in after)]) + "\n"
