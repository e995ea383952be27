"""What both optimisers share: who is a point, batches of rows, sparse rows, master weights, state that round-trips."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyptree.geometry import manifold_of
from hyptree.geometry.core.debug import is_enabled as debug_is_enabled
from hyptree.geometry.core.debug import require_finite
from hyptree.geometry.core.numerics import Scalar
from hyptree.geometry.core.rows import on_gpu, row_plan
from hyptree.optim.rows import Part
from hyptree.optim.spaces import (
    check_placements,
    check_point,
    curvature_of_coordinates,
    flat_index,
    is_learned,
    local,
    parts_of,
    round_points,
    row_curvature,
    shared_curvature,
)

_HALF = (torch.bfloat16, torch.float16)
_LARGE = 1 << 18  # numbers; a tensor this large gains nothing from sharing its kernels with others


@dataclass
class Rows:
    """The rows of one point parameter that take part in a step: (R, n) views, or copies that are written back."""

    param: Tensor
    x: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    parts: tuple[Part, ...]
    cs: list[Scalar]
    write_back: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Pairs (target, work) for rows that had to be copied."""
    index: Tensor | None = None

    def finish(self) -> None:
        """Write copied rows back to where they came from, and points that are half precision rounded with care."""
        pairs = list(self.write_back)
        if self.param.dtype in _HALF:
            pairs.append((local(self.param), round_points(self.x, self.param.dtype, self.parts, self.cs)))
        for target, work in pairs:
            if self.index is not None:
                target.view(-1, target.shape[-1]).index_copy_(0, self.index, work)
            else:
                target.copy_(work.view(target.shape))


class RiemannianOptimizer(Optimizer, ABC):
    """Splits each group into points and ordinary parameters, and hands them to ``_step_points`` and ``_step_plain``."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # groups of torch.optim, or of an older version, lack our newer options
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its options and its points."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for p in group["params"]:
                manifold = manifold_of(p)
                if manifold is not None:
                    check_point(p, manifold)
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise a ``ValueError`` for an option out of range."""
        check_number("lr", group["lr"], 0.0)
        check_number("weight_decay", group["weight_decay"], 0.0)
        if group["max_step"] is not None:
            check_number("max_step", group["max_step"], 0.0, open_left=True)
        if group["retraction"] not in ("exp", "first_order"):
            raise ValueError(f"retraction must be 'exp' or 'first_order', got {group['retraction']!r}")
        if group["foreach"] and group["fused"]:
            raise ValueError("foreach and fused cannot both be True; leave one of them None")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plain: list[tuple[dict[str, Any], list[Tensor]]] = []
        points: list[tuple[dict[str, Any], list[Tensor]]] = []
        for group in self.param_groups:
            if group["rescale_points"]:
                self._remember_curvature(group)
            with_grad = [p for p in group["params"] if p.grad is not None]
            plain.append((group, [p for p in with_grad if manifold_of(p) is None]))
            points.append((group, [p for p in with_grad if manifold_of(p) is not None]))
        # Points first: their gradients belong to the curvatures of the forward pass, which are parameters too.
        for group, params in points:
            if params:
                self._step_points(group, params)
        for group, params in plain:
            if params:
                self._step_plain(group, params)
        for group in self.param_groups:
            if group["rescale_points"]:
                self._rescale(group)
        return loss

    @abstractmethod
    def _step_points(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Move the points ``params`` of ``group`` along their manifolds."""

    @abstractmethod
    def _step_plain(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Step the ordinary parameters ``params`` of ``group`` as ``torch.optim`` would."""

    # ------------------------------------------------------------------------------------------------ points as rows

    def _master(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The float32 copy of a half-precision parameter if the group keeps one, else the parameter itself."""
        if not group["master_weights"] or p.dtype not in _HALF:
            return p
        state = self.state[p]
        if "master_param" not in state:
            state["master_param"] = p.detach().float()
        return state["master_param"]

    def _rows_of(self, params: list[Tensor], group: dict[str, Any], names: list[str]) -> list[Rows]:
        """The rows of each parameter that have a gradient, with its state tensors ``names`` beside them."""
        # Each manifold is asked for its curvature once: that costs, and rows that share it may share kernels.
        spaces: dict[Any, tuple[tuple[Part, ...], list[Scalar]]] = {}
        rows = []
        for p in params:
            manifold = manifold_of(p)
            assert manifold is not None
            key = (id(manifold), p.shape[-1], p.dtype)
            if key not in spaces:
                parts, cs = parts_of(manifold, p.shape[-1])
                dtype = torch.promote_types(p.dtype, torch.float32)
                spaces[key] = parts, [shared_curvature(c, dtype) for c in cs]
            rows.append(self._rows(p, group, names, *spaces[key]))
        return rows

    def _rows(
        self, p: Tensor, group: dict[str, Any], names: list[str], parts: tuple[Part, ...], cs: list[Scalar]
    ) -> Rows:
        grad = p.grad
        assert grad is not None
        state = self.state[p]
        if (  # the common case, without detours
            type(p) is nn.Parameter
            and p.dim() == 2
            and p.is_contiguous()
            and p.dtype not in _HALF
            and grad.layout is torch.strided
            and not any(isinstance(c, Tensor) and c.dim() for c in cs)
        ):
            return Rows(p, p, grad, {name: state[name] for name in names}, parts, cs)
        stored = {name: state[name] for name in names}
        master = self._master(p, group)
        if isinstance(p, DTensor):
            check_placements(p)
            if any(isinstance(c, Tensor) and c.numel() > 1 for c in cs):
                raise ValueError("a sharded point parameter needs one curvature for all its rows, got several")
            master, grad = local(master), local(grad)
            stored = {name: local(t) for name, t in stored.items()}
        compute = torch.float32 if master.dtype in _HALF else master.dtype
        rows = Rows(p, master, grad, {}, parts, cs)
        n = p.shape[-1]
        if grad.is_sparse:
            if grad.sparse_dim() != p.dim() - 1 or p.dim() < 2:
                raise ValueError(
                    f"a sparse gradient of points must be sparse in every axis but the last, got {grad.sparse_dim()} "
                    f"sparse axes for a parameter of shape {tuple(p.shape)}"
                )
            grad = grad.coalesce()
            rows.index = flat_index(grad.indices(), p.shape[:-1])
            rows.grad = grad.values().to(compute)
        else:
            rows.grad = grad.to(compute).reshape(-1, n)

        def work(target: Tensor, dtype: torch.dtype) -> Tensor:
            if rows.index is not None:
                copy = target.view(-1, target.shape[-1]).index_select(0, rows.index).to(dtype)
            elif target.dtype == dtype and target.is_contiguous():
                return target if target.dim() == 2 else target.view(-1, target.shape[-1])
            else:
                copy = target.to(dtype, memory_format=torch.contiguous_format, copy=True).view(-1, target.shape[-1])
            rows.write_back.append((target, copy))
            return copy

        if master.dtype in _HALF:  # written by `finish`, which rounds with care
            chosen = master.reshape(-1, n)
            rows.x = (chosen if rows.index is None else chosen.index_select(0, rows.index)).to(compute)
        else:
            rows.x = work(master, compute)
        rows.state = {name: work(t, t.dtype) for name, t in stored.items()}
        rows.cs = [row_curvature(c, master.shape, rows.index) for c in cs]
        return rows

    def _run(
        self,
        group: dict[str, Any],
        rows: list[Rows],
        key: Callable[[Rows], Any],
        update: Callable[[Rows, list[Rows]], None],
    ) -> None:
        """Call ``update`` once per set of rows that can share kernels: same space, curvature, dtype and ``key``."""
        batches: dict[Any, list[Rows]] = {}
        for i, r in enumerate(rows):
            alone = i if group["foreach"] is False or r.x.numel() >= _LARGE else None
            c_key = tuple(id(c) if isinstance(c, Tensor) else c for c in r.cs)
            batches.setdefault((alone, r.parts, c_key, r.x.dtype, r.x.device, key(r)), []).append(r)
        for batch in batches.values():
            if len(batch) == 1:
                update(batch[0], batch)
            else:
                first = batch[0]
                names = list(first.state)
                joined = Rows(
                    first.param,
                    torch.cat([r.x for r in batch]),
                    torch.cat([r.grad for r in batch]),
                    {name: torch.cat([r.state[name] for r in batch]) for name in names},
                    first.parts,
                    first.cs,
                )
                update(joined, batch)
                sizes = [r.x.shape[0] for r in batch]
                targets = [r.x for r in batch] + [r.state[name] for name in names for r in batch]
                works = [joined.x, *(joined.state[name] for name in names)]
                torch._foreach_copy_(targets, [part for w in works for part in w.split(sizes)])
            for r in batch:
                r.finish()
        if debug_is_enabled():
            for r in rows:
                require_finite(type(self).__name__, f"a point parameter of shape {tuple(r.param.shape)}", r.x)

    def _update_rows(
        self,
        function: Callable[..., None],
        group: dict[str, Any],
        work: Rows,
        tensors: Sequence[Tensor | None],
        numbers: Sequence[Scalar | None],
        **constants: Any,
    ) -> None:
        """Call ``function(x, grad, *tensors, *numbers, cs, parts=..., **constants)``, compiled if the group says so."""
        cs: Sequence[Scalar] = work.cs
        if group["compile"]:
            function = _compiled(function)
            # What changes from step to step goes in as tensors, otherwise each step would be compiled anew.
            numbers = [None if number is None else _as_tensor(number, work.x) for number in numbers]
            cs = [_as_tensor(c, work.x) for c in cs]
        constants |= {
            "parts": work.parts,
            "max_step": group["max_step"],
            "first_order": group["retraction"] == "first_order",
            "maximize": group["maximize"],
        }
        if not on_gpu(work.x) or not _by_kernel(function, work, tensors, numbers, constants):
            function(work.x, work.grad, *tensors, *numbers, cs, **constants)

    # ---------------------------------------------------------------------------------------- curvature, state, plain

    def _remember_curvature(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            manifold = manifold_of(p)
            if manifold is not None and is_learned(manifold) and "c" not in self.state[p]:
                self.state[p]["c"] = curvature_of_coordinates(manifold, p)

    def _rescale(self, group: dict[str, Any]) -> None:
        """Keep ``s x`` of every point where its curvature changed, by this optimiser or by anybody."""
        for p in group["params"]:
            manifold = manifold_of(p)
            if manifold is None or not is_learned(manifold):
                continue
            before, now = self.state[p]["c"], curvature_of_coordinates(manifold, p)
            master = local(self._master(p, group))
            if p.dtype in _HALF or master.dtype != torch.float64:
                scale = torch.sqrt(before / now).float()
            else:
                scale = torch.sqrt(before.double() / now.double())
            master.mul_(scale)
            if master.dtype != p.dtype:
                local(p).copy_(master)
            self.state[p]["c"] = now

    def _plain_lists(self, group: dict[str, Any], params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors to update and their gradients; float32 masters and gradients where the group keeps them."""
        masters = [self._master(p, group) for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        return masters, [g if g.dtype == m.dtype else g.to(m.dtype) for g, m in zip(grads, masters, strict=True)]

    def _publish_plain(self, params: list[Tensor], masters: list[Tensor]) -> None:
        for p, m in zip(params, masters, strict=True):
            if m is not p:
                p.copy_(m)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; unlike the plain method, float32 state of half-precision parameters stays float32."""
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                loaded = self.state[p].get(key)
                if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                    self.state[p][key] = value.detach().to(loaded.device, copy=True)


def check_number(name: str, value: Any, low: float, high: float = math.inf, open_left: bool = False) -> None:
    """Raise unless ``low <= value < high`` (``low < value`` if ``open_left``); NaN and infinity never pass."""
    number = float(value)
    if not (low < number < high if open_left else low <= number < high):
        expected = f"{'more than' if open_left else 'at least'} {low:g}"
        expected += f" and below {high:g}" if high < math.inf else ""
        raise ValueError(f"{name} must be a finite number, {expected}, got {value}")


def decay_factor(group: dict[str, Any]) -> Scalar | None:
    """``1 - lr * weight_decay``, by which a step pulls points to the origin; not below 0, None without weight decay."""
    if group["weight_decay"] == 0:
        return None
    shrink = 1 - group["lr"] * group["weight_decay"]
    return shrink.clamp_min(0.0) if isinstance(shrink, Tensor) else max(0.0, shrink)


def options(arguments: dict[str, Any]) -> dict[str, Any]:
    """What an optimiser's ``__init__`` was given besides parameters, from its ``locals()``: the defaults of groups."""
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}


def subset(group: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options of a group that a function of torch takes by the same names."""
    return {name: group[name] for name in names}


def _by_kernel(
    function: Callable[..., None],
    work: Rows,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[Scalar | None],
    constants: dict[str, Any],
) -> bool:
    """The update of rows by one kernel, in place; False where that does not fit."""
    inputs = (work.x, *tensors, work.grad, *numbers, *work.cs)
    present_inputs = [x for x in inputs if x is not None]
    states = [x for x in (work.x, *tensors) if x is not None]
    if not all(x.is_contiguous() for x in states):
        return False
    present = tuple(x is not None for x in inputs)
    settings = {"function": function, "present": present, "num_tensors": len(tensors), **constants}
    plan = row_plan(_updated, *present_inputs, **settings)
    if plan is None:
        return False
    plan.forward(present_inputs, outs=states)
    torch.autograd.graph.increment_version(states)
    return True


def _updated(
    *present_inputs: Any, function: Callable[..., None], present: tuple[bool, ...], num_tensors: int, **constants: Any
) -> tuple[Tensor, ...]:
    """The update of rows as a function of them, from which the kernel is made."""
    values = iter(present_inputs)
    x, *rest = [next(values) if is_there else None for is_there in present]
    with torch.no_grad():
        x, *tensors = [None if t is None else t.clone() for t in (x, *rest[:num_tensors])]
        grad, *others = rest[num_tensors:]
        num_cs = len(constants["parts"])
        function(x, grad, *tensors, *others[:-num_cs], others[-num_cs:], **constants)
    return tuple(t for t in (x, *tensors) if t is not None)


@functools.cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """The update of rows ``function``, compiled once for all shapes."""
    return torch.compile(function, fullgraph=True, dynamic=True)


def _as_tensor(value: Scalar, like: Tensor) -> Tensor:
    """``value`` as a tensor of the dtype and on the device of ``like``."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)
