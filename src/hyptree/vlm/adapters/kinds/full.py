"""Full tuning of the chosen matrices, as a difference that starts at zero: the upper bound among the baselines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from hyptree.vlm.adapters.adapter import AdapterConfig, SlotStack, StackAdapter


@dataclass(frozen=True)
class FullConfig(AdapterConfig):
    """``W' = W + delta``, of q and v by default: every number of the matrix is a parameter."""

    method: ClassVar[str] = "full"
    targets: tuple[str, ...] = field(default=("q", "v"), kw_only=True)

    def build(self, stack: SlotStack) -> StackAdapter:
        return FullAdapter(stack)


class FullAdapter(StackAdapter):
    """``W + delta``; weight decay pulls towards the pretrained weights."""

    def __init__(self, stack: SlotStack):
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(len(stack.names), *stack.shape, dtype=stack.dtype, device=stack.device))

    def forward(self, base: Tensor, first: int = 0) -> Tensor:
        return base + self.of_slots(self.delta, first, len(base)).to(base.dtype)
