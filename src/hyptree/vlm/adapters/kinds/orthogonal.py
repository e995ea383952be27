"""Orthogonal blocks by Cayley's transform: the scale adapter's control, which turns rows and keeps every radius."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.vlm.adapters.adapter import AdapterConfig, SlotStack, StackAdapter
from hyptree.vlm.adapters.kinds.scale import ScaleAdapter, check_block_size


@dataclass(frozen=True)
class OrthogonalConfig(AdapterConfig):
    """``W' = W Q^T`` with orthogonal blocks ``Q = (I - A)(I + A)^-1``, A skew: n (n - 1) / 2 parameters per block.

    Attributes:
        block_size: n, the side of a block, 2 or more; must divide the width.
        share: "none"; "blocks", one block for all positions in a matrix; "layers", the same blocks in every layer.
        space: "weight", or "embedding" for a rotation of what each tower gives in the end.
    """

    method: ClassVar[str] = "orthogonal"
    block_size: int = 128
    share: Literal["none", "blocks", "layers"] = "none"
    space: Literal["weight", "embedding"] = "weight"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise UserError(f"block_size must be 2 or more for rotations, got {self.block_size}")

    def build(self, stack: SlotStack) -> StackAdapter:
        check_block_size(self.block_size, stack)
        return OrthogonalAdapter(stack, self.block_size, self.share)


class OrthogonalAdapter(ScaleAdapter):
    """The scale adapter whose S is orthogonal; its parameter is what lies below the diagonal of A."""

    def _create(self, rows: int, blocks: int, stack: SlotStack) -> None:
        n = self.block_size
        self.skew = nn.Parameter(torch.zeros(rows, blocks, n * (n - 1) // 2, dtype=stack.dtype, device=stack.device))

    def scale_minus_one(self, first: int, slots: int, dtype: torch.dtype) -> Tensor:
        n = self.block_size
        wide = torch.promote_types(dtype, torch.float32)  # there is no bfloat16 solver
        skew = self.of_slots(self.skew, first, slots).to(wide)
        i, j = torch.tril_indices(n, n, offset=-1, device=skew.device)
        lower = skew.new_zeros(*skew.shape[:-1], n * n).index_copy(-1, i * n + j, skew).unflatten(-1, (n, n))
        a = lower - lower.mT
        eye = torch.eye(n, dtype=skew.dtype, device=skew.device)
        # (I - A)(I + A)^-1 - I = -2 A (I + A)^-1, and the factors commute.
        return torch.linalg.solve(eye + a, -2 * a).to(dtype)
