"""A diagonal scale of the input of frozen matrices: the scale adapter with blocks of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyptree.errors import UserError
from hyptree.vlm.adapters.kinds.scale import ScaleAdapterConfig


@dataclass(frozen=True)
class DiagonalConfig(ScaleAdapterConfig):
    """One number for each input of q, k and v: 3 L d parameters per tower. The settings are the scale adapter's."""

    method: ClassVar[str] = "diagonal"
    block_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size != 1:
            raise UserError(f"a diagonal scale has block_size 1, got {self.block_size}; use ScaleAdapterConfig")
