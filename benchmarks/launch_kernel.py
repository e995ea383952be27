"""A kernel that does next to nothing, for ``hyptree bench launch``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    tl.store(x + place, tl.load(x + place, mask=place < n) + 1, mask=place < n)
