"""Differences added to the weights themselves, also to fused ones of open_clip: of low rank (LoRA), and full ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.vlm.adapters.adapter import AdapterConfig, SlotStack, StackAdapter


@dataclass(frozen=True)
class LoraConfig(AdapterConfig):
    """``W' = W + (alpha / r) B A``, of q and v by default: r (rows + columns) parameters per matrix.

    Rank n / 2 on q, k and v has as many parameters as the scale adapter with blocks of n.

    Attributes:
        rank: r.
        alpha: the update is multiplied by alpha / r.
        seed: of A; B starts at zero.
    """

    method: ClassVar[str] = "lora"
    rank: int = 8
    alpha: float = 16.0
    seed: int = 0
    targets: tuple[str, ...] = field(default=("q", "v"), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise UserError(f"rank must be 1 or more, got {self.rank}")

    def build(self, stack: SlotStack) -> StackAdapter:
        return LoraAdapter(stack, self.rank, self.alpha / self.rank, self.seed)


class LoraAdapter(StackAdapter):
    """A is uniform as in a fresh linear layer and B zero."""

    def __init__(self, stack: SlotStack, rank: int, scale: float, seed: int):
        super().__init__()
        self.scale = scale
        slots, (rows, columns) = len(stack.names), stack.shape
        # Drawn on the CPU, so that a seed means the same everywhere; each stack draws from its own stream.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(map(ord, stack.names[0])))
        bound = columns**-0.5
        down = torch.rand(slots, rank, columns, generator=generator) * (2 * bound) - bound
        self.down = nn.Parameter(down.to(stack.device, stack.dtype))
        self.up = nn.Parameter(torch.zeros(slots, rows, rank, dtype=stack.dtype, device=stack.device))

    def forward(self, base: Tensor, first: int = 0) -> Tensor:
        down, up = (self.of_slots(value, first, len(base)).to(base.dtype) for value in (self.down, self.up))
        return torch.baddbmm(base, up, down, alpha=self.scale)

    def extra_repr(self) -> str:
        return f"rank={self.down.shape[1]}, scale={self.scale}"


@dataclass(frozen=True)
class FullConfig(AdapterConfig):
    """``W' = W + delta``, of q and v by default: every number is a parameter, the upper bound among the baselines."""

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
