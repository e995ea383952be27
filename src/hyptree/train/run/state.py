"""Where a run is; tensors of a running model and optimiser as full ones on the CPU by name, and back, bit for bit.

Sharded tensors (FSDP2) are put together on the way out and cut up on the way in, so a checkpoint does not know how
many processes wrote it. All processes must call these functions together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hyptree.errors import UserError

_SEPARATOR = "/"
"""Between a parameter's name and the name of its state; no parameter has it in its name."""


def full_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, sharded ones put together."""
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in whole.items()
    }


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by ``parameter/state``, e.g. ``head.weight/exp_avg``."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert isinstance(value, Tensor), f"state {key} of {name} is no tensor"
            tensors[f"{name}{_SEPARATOR}{key}"] = value
    return full_tensors(tensors)


@torch.no_grad()
def fill_tensors(targets: dict[str, Tensor], values: dict[str, Tensor], where: str) -> None:
    """Copy ``values`` into ``targets`` of the same names and shapes.

    Raises:
        UserError: a name or a shape differs; ``where`` says whose values they are.
    """
    for name in [*targets, *(name for name in values if name not in targets)]:
        if name not in values or name not in targets or values[name].shape != targets[name].shape:
            got = tuple(values[name].shape) if name in values else "nothing"
            wanted = tuple(targets[name].shape) if name in targets else "nothing"
            raise UserError(f"{where} has {got} for {name}, the model of this recipe {wanted}; use the same recipe")
    for name, target in targets.items():
        if isinstance(target, DTensor):
            target.to_local().copy_(_shard(values[name], target).to_local())
        else:
            target.copy_(values[name])


@torch.no_grad()
def fill_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Tensor]) -> None:
    """Give the optimiser the state that :func:`optimizer_tensors` read."""
    parameters = dict(model.named_parameters())
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for full_name, value in values.items():
        name, key = full_name.rsplit(_SEPARATOR, 1)
        parameter = parameters[name]
        if value.dim() == 0:  # the step count: beside the parameter only for kernels that want it there
            state = value.to(parameter.device if on_device[id(parameter)] else "cpu", copy=True)
        elif isinstance(parameter, DTensor):
            state = _shard(value, parameter)
        elif value.shape == parameter.shape:  # in the memory format of the parameter, as the optimiser makes it
            state = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        else:
            state = value.to(parameter.device, copy=True)
        optimizer.state[parameter][key] = state


def _shard(value: Tensor, like: DTensor) -> DTensor:
    """This process's part of ``value``, cut as ``like`` is; every process has the whole value, nothing is sent."""
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@dataclass
class RunState:
    """Where a run is; goes into the checkpoint as JSON, which keeps floats to the last bit."""

    step: int = 0
    """Optimiser steps done."""
    num_steps: int = 0
    """Those of the whole run."""
    seconds: float = 0.0
    """Time spent so far, over all the times the run was resumed."""
    best: float | None = None
    """Best value of the task's metric."""
    best_step: int | None = None
    window: dict[str, list[float]] = field(default_factory=dict)
    """Numbers of the steps since the last line of metrics."""
    num_ema_updates: int = 0
    num_skipped_steps: int = 0
    """Steps that were left out because their gradient was not finite (``run.max_skipped_steps``)."""
    num_skipped_in_row: int = 0
    """Of these, the ones at the end without a good one after them."""

    def require_finite(self, count: int, kept: str = "") -> None:
        """Look at loss and gradient of the last ``count`` steps; ``kept`` says what is saved.

        Raises:
            UserError: at the first step whose loss or gradient is not finite.
        """
        for i in range(count):
            for name, what in (("loss", "loss"), ("grad_norm", "gradient")):
                value = self.window[name][len(self.window[name]) - count + i]
                if not math.isfinite(value):
                    raise UserError(
                        f"the {what} is {value} at step {self.step - count + i + 1}{kept}; lower optim.lr or set "
                        "optim.clip, and HYPTREE_DEBUG=1 shows where it starts"
                    )

    def drop_skipped(self, count: int, limit: int) -> int:
        """Count those of the last ``count`` steps that changed nothing and forget their numbers; gives what is left.

        Raises:
            UserError: more than ``limit`` of them in a row.
        """
        first = len(self.window["grad_norm"]) - count
        good = [math.isfinite(value) for value in self.window["grad_norm"][first:]]
        for is_good in good:
            self.num_skipped_in_row = 0 if is_good else self.num_skipped_in_row + 1
            self.num_skipped_steps += not is_good
            if self.num_skipped_in_row > limit:
                raise UserError(
                    f"{self.num_skipped_in_row} steps in a row had a gradient that is not finite (around step "
                    f"{self.step}); lower optim.lr, or HYPTREE_DEBUG=1 shows where it starts"
                )
        for values in self.window.values():
            values[first:] = [value for value, is_good in zip(values[first:], good, strict=True) if is_good]
        return sum(good)
