"""A running average of the weights: usually a little better than the last weights, and always smoother."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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

    @contextmanager
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
