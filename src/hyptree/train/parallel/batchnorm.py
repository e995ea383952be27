"""Batch norms that take the statistics of a whole batch, however many processes share it: two train what one trains.

torch's own conversion to ``SyncBatchNorm`` puts a layer of its own in the place of every batch norm, which loses what a
subclass does around it (ours read other axes, timm's have an activation), and it runs on GPUs alone. Here a layer stays
what it is, and only its call of ``torch.nn.functional.batch_norm`` is answered differently while it trains.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode


def sync_batch_norms(model: nn.Module, num_processes: int, num_parts: int = 1) -> list[str]:
    """Let every batch norm of the model take its statistics over all processes, in place.

    Returns:
        Lines for the log: what was done, and where statistics are still those of less than a batch.
    """
    modules = list(model.modules())
    norms = [module for module in modules if isinstance(module, _BatchNorm)]
    others = {type(m).__name__ for m in modules if hasattr(m, "running_var") and not isinstance(m, _BatchNorm)}
    notes = []
    if num_processes > 1:
        for norm in norms:
            kind: Any = type(norm)
            norm.__class__ = kind if issubclass(kind, nn.SyncBatchNorm) else _synced(kind)
        if norms:
            notes.append(f"batch norm: statistics over all {num_processes} processes")
        for name in sorted(others):
            notes.append(f"{name}: statistics in each process, so that {num_processes} do not train what one would")
    if num_parts > 1 and norms:
        notes.append(f"batch norm: statistics over each of the {num_parts} parts of a batch")
    return notes


def batch_norm_over_all(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm`` of the samples of all processes together; each has its own (B, C, ...).

    On GPUs by torch's kernels. Elsewhere by the definition: mean and variance are sums over all processes, with
    gradients into each.
    """
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    if x.is_cuda:
        options = running_mean, running_var, eps, momentum, dist.group.WORLD, dist.get_world_size()
        out: Tensor = SyncBatchNorm.apply(x, weight, bias, *options)
        return out
    wide = x if x.dtype == torch.float64 else x.float()
    axes, across = [0, *range(2, x.dim())], [-1] + [1] * (x.dim() - 2)
    total = _SumOverAll.apply(torch.cat([wide.sum(axes), wide.new_tensor([x.numel() // x.shape[1]])]))
    count = total[-1].detach()
    mean = total[:-1] / count
    centred = wide - mean.view(across)
    var = _SumOverAll.apply(centred.square().sum(axes)) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * count / (count - 1)).to(running_var.dtype), momentum)
    scale = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    normed = centred * scale.view(across)
    return (normed if bias is None else normed + bias.view(across)).to(x.dtype)


class _SumOverAll(torch.autograd.Function):
    """The sum over processes, of which the gradient is such a sum again: every process has a loss of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class _OverAll(TorchFunctionMode):
    """Inside, a batch norm is one over all processes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (batch_norm_over_all if func is F.batch_norm else func)(*args, **kwargs or {})


@functools.cache
def _synced(kind: Any) -> Any:
    """A class like ``kind`` that trains over all processes; it evaluates alone, as others may have nothing to do."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return kind.forward(self, *args, **kwargs)
        with _OverAll():
            return kind.forward(self, *args, **kwargs)

    # Messages between processes do not belong into a compiled graph.
    return type(kind.__name__, (kind,), {"forward": torch.compiler.disable(forward)})
