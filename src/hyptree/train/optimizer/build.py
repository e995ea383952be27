"""AdamW or SGD with timm's parameter groups and ours for points and curvatures; the learning rate; the average.

The learning rate is a function of the step: no state, so nothing to save and nothing to get wrong on resume.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyptree.errors import UserError
from hyptree.geometry import curvature_parameters, manifold_of, mark_points
from hyptree.train.run.recipe import OptimSettings, ScheduleSettings

Marks = dict[str, tuple[bool | None, float]]
"""By a parameter's name: whether it is spared weight decay (None: as usual), its share of the learning rate."""


def param_groups(model: nn.Module, settings: OptimSettings, marks: Marks | None = None) -> list[dict[str, Any]]:
    """timm's groups (decay or not, layer by layer), with points and curvatures split off into groups of their own.

    Every group has ``lr_scale``, its learning rate relative to the schedule's. The model's ``no_weight_decay()`` and
    ``group_matcher()`` are honoured. Points and curvatures are never decayed. A parameter may say about itself
    ``_no_weight_decay`` (True; False decays it although it is a vector) and ``_lr_scale``, or its layer about it in
    ``PARAMETER_MARKS``, by name, which copies and loaded parameters keep.

    Args:
        marks: what parameters said about themselves before the model was wrapped; by default they are asked now.
    """
    mark_points(model)
    parameters = dict(model.named_parameters())
    named = parameter_marks(model) if marks is None else marks
    of_parameter = {id(parameters[name]): mark for name, mark in named.items()}
    groups = _timm_groups(model, settings)
    curvatures = {id(p) for p in curvature_parameters(model)}
    rates = {"points": settings.point_lr, "curvature": settings.curvature_lr}
    result = []
    for group in groups:
        members: dict[tuple[str, bool, float, float], list[nn.Parameter]] = {}
        for p in group["params"]:
            kind = "curvature" if id(p) in curvatures else "points" if manifold_of(p) is not None else "plain"
            decay = group["weight_decay"] if kind == "plain" else 0.0
            undecayed, own_scale = of_parameter.get(id(p), (None, 1.0))
            if undecayed is not None:
                decay = 0.0 if undecayed else settings.weight_decay
            # Sharded and whole parameters cannot share a kernel.
            members.setdefault((kind, isinstance(p, DTensor), decay, own_scale), []).append(p)
        for (kind, _, decay, own_scale), params in members.items():
            rate = rates.get(kind)  # of its own: then what the layer says about itself does not count
            scale = group.get("lr_scale", 1.0) * (own_scale if rate is None else rate / settings.lr)
            result.append({"params": params, "weight_decay": decay, "lr_scale": scale, "kind": kind})
    return result


def _timm_groups(model: nn.Module, settings: OptimSettings) -> list[dict[str, Any]]:
    """timm's own groups of all parameters that are trained."""
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    ask = getattr(model, "no_weight_decay", None)
    excluded = ask() if callable(ask) else ()
    if settings.layer_decay is None:
        return param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=excluded)
    plain: Any = model.to_plain() if hasattr(model, "to_plain") else None  # type: ignore[operator]
    if plain is None:
        return param_groups_layer_decay(
            model, settings.weight_decay, no_weight_decay_list=excluded, layer_decay=settings.layer_decay
        )
    # Layers are those of the model below a plug-in; the plug-in stands above them, at the full learning rate.
    below = {id(p) for p in plain.parameters()}
    groups = _timm_groups(plain, settings)
    for group in param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=excluded):
        groups.append(group | {"params": [p for p in group["params"] if id(p) not in below]})
    return [group for group in groups if group["params"]]


def parameter_marks(model: nn.Module) -> Marks:
    """What parameters or their layers say about them (:func:`param_groups`), by name.

    Ask before the model is wrapped: what shards a model puts other parameters in their places.
    """
    marks: Marks = {}
    for prefix, module in model.named_modules():
        for name, mark in getattr(module, "PARAMETER_MARKS", {}).items():
            if module._parameters.get(name) is not None:
                marks[f"{prefix}.{name}".lstrip(".")] = mark
    for name, p in model.named_parameters():
        undecayed, scale = getattr(p, "_no_weight_decay", None), getattr(p, "_lr_scale", None)
        if undecayed is not None or scale is not None:
            marks[name] = (undecayed, 1.0 if scale is None else float(scale))
    return marks


def build_optimizer(model: nn.Module, settings: OptimSettings, marks: Marks | None = None) -> torch.optim.Optimizer:
    """``torch.optim.AdamW`` or ``SGD``, or :mod:`hyptree.optim`'s Riemannian form when some parameter is a point."""
    groups = param_groups(model, settings, marks)
    if not groups:
        raise ValueError("the model has no parameter to train: every one has requires_grad=False")
    has_points = any(group["kind"] == "points" for group in groups)
    of_kind = {"point_lr": "points", "max_step": "points", "curvature_lr": "curvature"}
    for key, kind in of_kind.items():
        value, name = getattr(settings, key), "point" if kind == "points" else "learned curvature"
        if value is not None and all(group["kind"] != kind for group in groups):
            warnings.warn(f"optim.{key} {value:g} has no effect: this model has no {name}", stacklevel=2)
    if settings.name == "sgd":
        options: dict[str, Any] = {"lr": settings.lr, "momentum": settings.momentum}
        if not has_points:
            return torch.optim.SGD(groups, **options)
        from hyptree.optim import RiemannianSGD

        return RiemannianSGD(groups, **options, max_step=settings.max_step)
    options = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if has_points:
        from hyptree.optim import RiemannianAdamW

        return RiemannianAdamW(groups, **options, max_step=settings.max_step)
    parameters = [p for group in groups for p in group["params"]]
    # One kernel for all parameters; on CPUs it is also several times quicker for small ones. Not for shards.
    fused = all(p.is_floating_point() and not isinstance(p, DTensor) for p in parameters)
    return torch.optim.AdamW(groups, fused=fused or None, **options)


def clip_gradients(model: nn.Module, limit: float | None) -> Tensor:
    """Shrink all gradients such that their common norm is at most ``limit``; gives the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, which refuses a mixture of sharded and whole gradients, and of sparse ones
    knows no norm.
    """
    parts: dict[bool, list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.grad is not None:
            if p.grad.is_sparse:
                p.grad = p.grad.coalesce()  # each row once: its norm is that of the sum
            parts.setdefault(isinstance(p.grad, DTensor), []).append(p)
    norms = []
    for params in parts.values():
        grads = [p.grad.values() if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if limit is not None:
        for params in parts.values():
            torch.nn.utils.clip_grads_with_norm_(params, limit, total)
    return total


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
    """One step, or none at all when the norm of the gradients is not finite: weights, moments and counts stay.

    Fused optimisers decide this on the device (the way torch's gradient scalers ask them to), others after a look.
    """
    is_bad = ~torch.isfinite(grad_norm)
    if not all(group.get("fused") for group in optimizer.param_groups):
        if not is_bad.item():
            optimizer.step()
        return
    optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        optimizer.found_inf = None  # type: ignore[attr-defined]


class Schedule:
    """How many steps a run has, and the share of the top learning rate that each one gets."""

    def __init__(self, settings: ScheduleSettings, steps_per_epoch: int):
        self.settings, self.steps_per_epoch = settings, steps_per_epoch
        by_steps = settings.steps is not None
        self.num_steps: int = settings.steps or round(settings.epochs * steps_per_epoch)
        """Optimiser steps of the whole run."""
        self.num_warmup_steps = round(settings.warmup * (1 if by_steps else steps_per_epoch))
        """Steps before the top is reached."""
        if self.num_steps < 1:
            raise UserError(
                f"schedule.epochs {settings.epochs:g} is less than one step (an epoch has {steps_per_epoch})"
            )

    def factor(self, step: int) -> float:
        """Share of the top learning rate at this step (from 0): rises linearly or waits, then falls to ``min_lr``.

        The first step of a warm-up of n has 1/(n + 1), the first after it 1; the last step of the run comes out just
        above ``min_lr``, which would be that of the step after it.
        """
        warmup = self.num_warmup_steps
        if step < warmup and self.settings.warmup_lr is not None:
            return self.settings.warmup_lr
        if step < warmup:
            return (step + 1) / (warmup + 1)
        low = self.settings.min_lr
        done = (step - warmup) / max(1, self.num_steps - warmup)
        if self.settings.name == "constant":
            return 1.0
        if self.settings.name == "poly":
            return low + (1 - low) * (1 - done) ** self.settings.power
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))


class Ema:
    """The average of everything in a model's state dict; whole numbers (counters) are copied.

    The decay warms up, ``min(decay, (1 + t) / (10 + t))`` after ``t`` updates, so that the fresh weights are forgotten
    within a short run too. Sharded parameters are averaged shard by shard.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.num_updates = 0
        self.tensors: dict[str, Tensor] = {name: t.detach().clone() for name, t in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the model's weights as they are now."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        averages, values = [], []
        for name, value in model.state_dict().items():
            mine, value = _local(self.tensors[name]), _local(value)
            if mine.is_floating_point():
                averages.append(mine)
                values.append(value)
            else:
                mine.copy_(value)
        torch._foreach_lerp_(averages, values, 1 - decay)

    @contextlib.contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own again, bit for bit."""
        own = {name: t.detach().clone() for name, t in model.state_dict().items()}
        try:
            _fill(model, self.tensors)
            yield
        finally:
            _fill(model, own)


@torch.no_grad()
def _fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, target in model.state_dict().items():
        _local(target).copy_(_local(tensors[name]))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
