"""What one forward pass knows about its tokens, between blocks (``Flow``) and after a layer (``Record``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hyptree.tokens.attention import SizeMask, log_size_mask


class Record(NamedTuple):
    """What became of the tokens in one layer. (A tuple, because compilers can build one.)

    Attributes:
        layer: 0-based block.
        num: patch tokens after it; (B,) where images differ.
        shape: (B, K) with padding.
        device: where the tokens are.
        size: (B, num_prefix + K) patches per token; None where every token stands for one.
        source: (B, P) token of each input patch, -1 where it was dropped; None unless asked for.
        features: (B, N, D) what was clustered; None unless asked for.
    """

    layer: int
    num: int | Tensor
    shape: tuple[int, int]
    device: torch.device
    size: Tensor | None
    source: Tensor | None
    features: Tensor | None


@dataclass(eq=False)
class Flow:
    """The state of a forward pass between two blocks. It is replaced, never changed.

    Attributes:
        num_patches: patch tokens at the input.
        step: number of the forward pass, for methods that draw random numbers.
        records: the layers so far; shared by all flows of a pass.
        length: tokens, prefix included.
        size: (B, length) patches per token, 1 for prefix tokens, 0 for padding; None while all are 1.
        source: (B, num_patches) token of each input patch; None if nobody asked when the pass began.
        num: (B,) tokens of each image where some are padded, else None.
    """

    num_patches: int
    step: int
    records: dict[int, Record]
    length: int
    size: Tensor | None = None
    source: Tensor | None = None
    num: Tensor | None = None
    _mask: Tensor | SizeMask | None = field(default=None, init=False)

    def mask(self, way: str | None, x: Tensor) -> Tensor | SizeMask | None:
        """What attention adds to its logits, by key; None while there is nothing to add.

        Computed once for all blocks up to the next reduction. Padding is hidden in every case.

        Args:
            way: "mask" or "channel" for proportional attention, None without it.
            x: the tokens; the mask is of the type of the queries made of them here, that of ``x`` or of autocast.
        """
        if self.size is None or (way is None and self.num is None):
            return None
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if self._mask is None or self._mask.dtype != dtype:
            if way == "channel" and self.num is None:
                self._mask = SizeMask(self.size, dtype)
            else:
                self._mask = log_size_mask(self.size if way else (self.size > 0).to(self.size.dtype), dtype)
        return self._mask
