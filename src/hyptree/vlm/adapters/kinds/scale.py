"""HyperCLIP's scale adapter: block-diagonal S on the input side of frozen matrices, ``W' = W S^T``, in closed form.

The paper takes every row w of W to the Poincaré ball, multiplies it by S in Möbius's sense and takes it back:
``log0(S (x) exp0(w))``. That is S w exactly, whatever the curvature, until a numerical guard of the released code cuts
its length; ``reference_mobius`` is the long way, and the tests hold the closed form to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from hyptree.errors import UserError, require_one_of
from hyptree.vlm.adapters.adapter import AdapterConfig, SlotStack, StackAdapter

BALL_EDGE = 1 - 1e-3
"""Share of the ball's radius at which the released code stops a point after the product."""
ARTANH_EDGE = 1 - 1e-5
"""Largest argument of artanh in the released code."""


@dataclass(frozen=True)
class ScaleAdapterConfig(AdapterConfig):
    """Block-diagonal scale of q, k and v: 3 L d n parameters per tower of L layers and width d.

    Curvature changes nothing unless cap="paper".

    Attributes:
        block_size: n, the side of a block; must divide the width. 1 is a diagonal scale.
        curvature: c > 0 of the ball, or one for each tower: ``{"text": 1.0, "image": 0.01}`` is what the released code
            runs with.
        share: "none"; "blocks", one block for all positions in a matrix; "layers", the same blocks in every layer.
        cap: "none" gives ``W S^T``. "paper" also shortens rows longer than ``radius_cap(c)``, as the released code
            does; then even a fresh adapter changes a model with longer rows.
        space: "weight", or "embedding" for a scale of what each tower gives in the end.
    """

    method: ClassVar[str] = "scale"
    block_size: int = 128
    curvature: float | Mapping[str, float] = 0.01
    share: Literal["none", "blocks", "layers"] = "none"
    cap: Literal["none", "paper"] = "none"
    space: Literal["weight", "embedding"] = "weight"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise UserError(f"block_size must be 1 or more, got {self.block_size}")
        for tower in self.towers:
            if not (math.isfinite(self.curvature_of(tower)) and self.curvature_of(tower) > 0):
                raise UserError(f"curvature must be above 0 (c means curvature -c), got {self.curvature!r}")
        require_one_of("cap", self.cap, ("none", "paper"))

    def curvature_of(self, tower: str) -> float:
        """c for a tower."""
        if not isinstance(self.curvature, Mapping):
            return float(self.curvature)
        if tower not in self.curvature:
            raise UserError(f"curvature says nothing of the {tower} tower: {dict(self.curvature)!r}")
        return float(self.curvature[tower])

    def build(self, stack: SlotStack) -> StackAdapter:
        check_block_size(self.block_size, stack)
        cap = radius_cap(self.curvature_of(stack.tower)) if self.cap == "paper" else None
        return ScaleAdapter(stack, self.block_size, self.share, cap)


class ScaleAdapter(StackAdapter):
    """``W + W delta^T`` by blocks; delta = S - I starts at zero, so that weight decay pulls towards no change."""

    def __init__(self, stack: SlotStack, block_size: int, share: str = "none", cap: float | None = None):
        super().__init__()
        self.block_size, self.cap = block_size, cap
        self.num_blocks = stack.shape[1] // block_size
        kinds = list(dict.fromkeys(stack.targets))
        # Slot i uses row `source[i]` of the parameter; None where each has its own.
        self.source = [kinds.index(target) for target in stack.targets] if share == "layers" else None
        rows = len(kinds) if share == "layers" else len(stack.names)
        self._create(rows, 1 if share == "blocks" else self.num_blocks, stack)

    def _create(self, rows: int, blocks: int, stack: SlotStack) -> None:
        n = self.block_size
        self.delta = nn.Parameter(torch.zeros(rows, blocks, n, n, dtype=stack.dtype, device=stack.device))

    def of_slots(self, parameter: Tensor, first: int, slots: int) -> Tensor:
        if self.source is None:
            return super().of_slots(parameter, first, slots)
        # By stack, whose gradient is a sum in a fixed order, and not by an index, whose gradient is not on CUDA.
        return torch.stack([parameter[row] for row in self.source[first : first + slots]])

    def scale_minus_one(self, first: int, slots: int, dtype: torch.dtype) -> Tensor:
        """S - I (slots, blocks or 1, n, n)."""
        return self.of_slots(self.delta, first, slots).to(dtype)

    def forward(self, base: Tensor, first: int = 0) -> Tensor:
        slots, rows, columns = base.shape
        blocks, n = self.num_blocks, self.block_size
        delta = self.scale_minus_one(first, slots, base.dtype)
        if n == 1:
            scaled = torch.addcmul(base, base, delta.flatten(1).expand(-1, columns).unsqueeze(1))
        else:
            delta = delta.expand(slots, blocks, n, n).reshape(-1, n, n)
            parts = base.unflatten(-1, (blocks, n)).transpose(1, 2).reshape(-1, rows, n)
            scaled = torch.baddbmm(parts, parts, delta.mT).view(slots, blocks, rows, n)
            scaled = scaled.transpose(1, 2).reshape(slots, rows, columns)
        return scaled if self.cap is None else cap_rows(scaled, self.cap)

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, blocks={self.num_blocks}, cap={self.cap}"


def radius_cap(c: float) -> float:
    """``R(c)``, about ``3.8 / sqrt(c)``: the longest row that the released code lets through."""
    return math.atanh(BALL_EDGE) / math.sqrt(c)


def cap_rows(rows: Tensor, longest: float) -> Tensor:
    """The rows, those that are longer cut to this length; the length is measured in float32 or better."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=wide)
    # A row within the cap is multiplied by exactly 1, and its norm (which may be 0) is not divided by.
    return rows * (longest / norms.clamp_min(longest)).to(rows.dtype)


def reference_mobius(weight: Tensor, scale: Tensor, c: float) -> Tensor:
    """``log0(S (x) exp0(w))`` for every row w, with the guards of the released code: the long way, for tests.

    S is (d, d), or its diagonal blocks (d / n, n, n).
    """
    s = math.sqrt(c)
    matrix = scale if scale.dim() == 2 else torch.block_diag(*scale)
    length = _floored_norm(weight)
    point = torch.tanh((s * length).clamp(max=15.0)) * weight / (s * length)
    product = point @ matrix.mT
    point_length, length = _floored_norm(point), _floored_norm(product)
    stretch = torch.atanh((s * point_length).clamp(max=ARTANH_EDGE)) * length / point_length
    moved = torch.tanh(stretch.clamp(max=15.0)) * product / (s * length)
    length = _floored_norm(moved)
    moved = moved * (BALL_EDGE / (s * length)).clamp(max=1.0)
    length = _floored_norm(moved)
    return torch.atanh((s * length).clamp(max=ARTANH_EDGE)) * moved / (s * length)


def _floored_norm(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True).clamp_min(1e-5)


def check_block_size(block_size: int, stack: SlotStack) -> None:
    """Raises unless blocks of this size fill the columns."""
    width = stack.shape[1]
    if width % block_size == 0:
        return
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    near = [max(n for n in divisors if n < block_size)]
    near += [n for n in divisors if n > block_size][:1]
    raise UserError(
        f"block_size {block_size} does not divide the width {width} of {stack.names[0]}; "
        f"the nearest that do: {' and '.join(map(str, near))}"
    )


@dataclass(frozen=True)
class DiagonalConfig(ScaleAdapterConfig):
    """One number for each input of q, k and v: 3 L d parameters per tower. The settings are the scale adapter's."""

    method: ClassVar[str] = "diagonal"
    block_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size != 1:
            raise UserError(f"a diagonal scale has block_size 1, got {self.block_size}; use ScaleAdapterConfig")
