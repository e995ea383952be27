"""From the tensors of a running model and optimiser to full tensors on the CPU by name, and back, bit for bit.

Sharded tensors (FSDP2) are put together on the way out and cut up on the way in, so a checkpoint does not know how
many processes wrote it. All processes must call these functions together.
"""

from __future__ import annotations

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
