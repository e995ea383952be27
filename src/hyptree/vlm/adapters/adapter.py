"""What an adapter is: a configuration, and a module that turns a stack of frozen matrices into adapted ones.

An adapter holds the parameters of many matrices of one shape at once, stacked along the first dimension ("slots"), so
that all layers of a tower are adapted by a few operations. When and how often it is called is the business of
``hyptree.vlm.adapters.group``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hyptree.errors import UserError, require_known, require_one_of
from hyptree.vlm.adapters.structure import TARGETS, TOWERS


@dataclass(frozen=True)
class SlotStack:
    """What an adapter is built for: matrices of one shape, each with its name, target and layer."""

    names: tuple[str, ...]
    targets: tuple[str, ...]
    layers: tuple[int, ...]
    shape: tuple[int, int]
    tower: str
    dtype: torch.dtype
    device: torch.device


class StackAdapter(nn.Module, ABC):
    """Adapted matrices from frozen ones, for many slots at once. A fresh one changes nothing.

    It is called as a module, so that what others put around modules (offloading, say) holds for it.
    """

    @abstractmethod
    def forward(self, base: Tensor, first: int = 0) -> Tensor:
        """The adapted matrices, in the dtype of the frozen ones.

        Args:
            base: (slots, rows, columns), which are those from slot ``first`` on.
        """

    def of_slots(self, parameter: Tensor, first: int, slots: int) -> Tensor:
        """The rows of a parameter that belong to some of the slots."""
        return parameter if len(parameter) == slots else parameter[first : first + slots]


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(ABC):
    """What all adapters are told: which matrices they go on.

    Attributes:
        targets: some of q, k, v, out, mlp.
        towers: text, image or both.
        layers: "all", or numbers of attention layers, counted from 0 in each tower.
    """

    method: ClassVar[str]
    targets: tuple[str, ...] = ("q", "k", "v")
    towers: tuple[str, ...] = TOWERS
    layers: Literal["all"] | tuple[int, ...] = "all"

    def __post_init__(self) -> None:
        for what, known in (("targets", TARGETS), ("towers", TOWERS)):
            value = getattr(self, what)
            names = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, what, names)
            if not names or len(set(names)) != len(names):
                raise UserError(f"{what} must be some of {', '.join(known)}, each once, got {names!r}")
            require_known(f"unknown {what[:-1]} {{!r}}", names, known)
        layers: Any = self.layers  # what was given, whatever the annotation says
        if not isinstance(layers, str):
            object.__setattr__(self, "layers", tuple(int(layer) for layer in layers))
        if layers != "all" and (isinstance(layers, str) or not self.layers):
            raise UserError(f'layers must be "all" or numbers of layers such as (0, 1, -1), got {layers!r}')
        for name, choices in (("share", ("none", "blocks", "layers")), ("space", ("weight", "embedding"))):
            require_one_of(name, getattr(self, name, choices[0]), choices)

    @property
    def where(self) -> Literal["weight", "embedding"]:
        """weight, or embedding for an adapter on what a tower gives in the end."""
        return getattr(self, "space", "weight")

    @abstractmethod
    def build(self, stack: SlotStack) -> StackAdapter:
        """A fresh adapter for these matrices, its parameters on their device."""

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON can hold them; ``adapter_config`` is the reverse."""
        return {
            name: dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
