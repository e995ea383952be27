"""How many tokens stay after which block: by keep rate, by tokens removed per block, by counts, by a threshold.

A schedule is asked block by block, with the number of patch tokens at the input and now, so that it follows the image
size. Prefix tokens (class, distillation, registers) are never counted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hyptree.errors import UserError


def default_layers(depth: int) -> tuple[int, ...]:
    """The blocks after one, two and three quarters of the depth: (3, 6, 9) of 12."""
    return tuple(sorted({depth * quarter // 4 for quarter in (1, 2, 3)} & set(range(depth))))


def check_layers(layers: Sequence[int], depth: int) -> tuple[int, ...]:
    """The layers in ascending order, or an error for one that the model does not have or that comes twice."""
    for layer in layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < depth:
            raise UserError(
                f"layer {layer!r} does not exist: the model has {depth} blocks, give numbers 0 to {depth - 1}"
            )
    if len(set(layers)) != len(layers):
        raise UserError(f"layers {tuple(layers)} name a block twice: give every block once")
    if not layers:
        raise UserError("layers is empty: give at least one block, e.g. layers=(3, 6, 9)")
    return tuple(sorted(layers))


@dataclass(frozen=True)
class Schedule(ABC):
    """Which blocks reduce. Subclasses say to how many tokens.

    Attributes:
        layers: 0-based blocks, ascending.
        spelled: the numbers of the schedule as text. Compilers take text for what it is, but turn a number that has
            changed once into a variable, and shapes that depend on it with it.
    """

    layers: tuple[int, ...]
    spelled: str = field(init=False, repr=False, compare=False, default="")

    def _spell(self, numbers: Iterable[float]) -> None:
        object.__setattr__(self, "spelled", " ".join(map(repr, numbers)))

    def count(self, layer: int, num_patches: int, num_now: int) -> int:
        """Tokens to keep after this block, at least 1 and at most ``num_now``.

        Args:
            layer: 0-based block.
            num_patches: patch tokens at the input of the model.
            num_now: patch tokens that reach this block.
        """
        if layer not in self.layers:
            return num_now
        return min(max(self._count(self.layers.index(layer), num_patches, num_now), 1), num_now)

    @abstractmethod
    def _count(self, stage: int, num_patches: int, num_now: int) -> int:
        """Tokens to keep after the ``stage``-th of the layers, not yet clipped."""

    def counts(self, num_patches: int) -> list[int]:
        """Patch tokens after each of the layers, e.g. ``[98, 49, 24]``."""
        counts = []
        num_now = num_patches
        for layer in self.layers:
            num_now = self.count(layer, num_patches, num_now)
            counts.append(num_now)
        return counts


@dataclass(frozen=True)
class KeepRate(Schedule):
    """``int(P rate^i)`` tokens after the i-th of the layers; relative: ``int(rate * now)`` at each of them."""

    rate: float = 1.0
    relative: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UserError(f"keep is {self.rate}: give a fraction above 0 and at most 1")
        self._spell([self.rate])

    def _count(self, stage: int, num_patches: int, num_now: int) -> int:
        rate = float(self.spelled)
        exact = rate * num_now if self.relative else num_patches * rate ** (stage + 1)
        return int(exact + 1e-9)  # 100 * 0.7^2 is 48.999999999999993 in floating point, 49 in truth


@dataclass(frozen=True)
class Counts(Schedule):
    """The given number of tokens after each of the layers."""

    num_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.num_tokens) != len(self.layers):
            raise UserError(
                f"counts has {len(self.num_tokens)} numbers for the {len(self.layers)} layers {self.layers}: "
                "give one for each"
            )
        if any(number < 1 for number in self.num_tokens):
            raise UserError(f"counts {self.num_tokens} keeps no token in a layer: give numbers from 1 on")
        self._spell(self.num_tokens)

    def _count(self, stage: int, num_patches: int, num_now: int) -> int:
        return int(self.spelled.split()[stage])


@dataclass(frozen=True)
class Remove(Schedule):
    """``num_removed[i]`` tokens fewer after the i-th of the layers."""

    num_removed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._spell(self.num_removed)

    def _count(self, stage: int, num_patches: int, num_now: int) -> int:
        return num_now - int(self.spelled.split()[stage])


@dataclass(frozen=True)
class Threshold(Schedule):
    """Merges everything closer than ``distance``: the number of tokens differs from image to image.

    ``min_keep`` and ``max_keep`` are fractions of the tokens at the input between which every image stays.
    """

    distance: float = 0.0
    min_keep: float = 0.0
    max_keep: float = 1.0

    def __post_init__(self) -> None:
        if not self.distance >= 0 or math.isinf(self.distance):
            raise UserError(f"threshold is {self.distance}: give a finite distance of at least 0")
        if not 0 <= self.min_keep <= self.max_keep <= 1 or self.max_keep == 0:
            raise UserError(
                f"min_keep is {self.min_keep} and max_keep is {self.max_keep}: give fractions, "
                "0 <= min_keep <= max_keep <= 1"
            )

    def bounds(self, num_patches: int) -> tuple[int, int]:
        """The smallest and the largest number of tokens that an image may have after a layer."""
        smallest = max(1, math.ceil(self.min_keep * num_patches - 1e-9))
        return smallest, max(smallest, int(self.max_keep * num_patches + 1e-9))

    def _count(self, stage: int, num_patches: int, num_now: int) -> int:
        raise UserError(
            "with a threshold the number of tokens depends on the images: read num_tokens after a forward pass"
        )


Removal = int | tuple[int, float] | Sequence[int]


def removed_per_layer(r: Removal, num_layers: int) -> tuple[int, ...]:
    """Tokens to remove in each layer: an integer, ``(r, inflect)``, or a list that is padded with zeros.

    A tuple of two is always ``(r, inflect)`` with inflect from -1 to 1: the counts run linearly from
    ``int(r (1 - inflect))`` to ``2 r`` minus that, so -1 removes most in the first layers and 1 in the last.
    """
    if isinstance(r, int):
        counts: tuple[int, ...] = (r,) * num_layers
    elif isinstance(r, tuple) and len(r) == 2:
        number, inflect = r
        if not isinstance(number, int) or not -1 <= inflect <= 1:
            raise UserError(
                f"r is {r}: a tuple is (tokens per layer, inflect from -1 to 1); give counts per layer as a list"
            )
        first = int(number * (1 - inflect))
        step = (2 * number - 2 * first) / max(num_layers - 1, 1)
        counts = tuple(int(first + step * layer) for layer in range(num_layers))
    else:
        counts = tuple(r)
        if len(counts) > num_layers:
            raise UserError(
                f"r lists {len(counts)} layers, the model reduces in {num_layers}: give at most {num_layers} numbers"
            )
        counts += (0,) * (num_layers - len(counts))
    if any(not isinstance(count, int) or count < 0 for count in counts):
        raise UserError(f"r is {r!r}: give whole numbers of at least 0")
    return counts
