"""Captions from general to specific, and for each one as specific that contradicts the picture.

The four levels of the main object: its group, its family, colour and class, everything (with the count of a part, the
place and the time). A contradiction changes exactly one thing at its level, never into something else that is in the
picture: the smaller objects count as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from hyptree.data.world.classes import FAMILIES, GROUP_OF, GROUPS, LEAVES
from hyptree.data.world.draws import Draws, derive
from hyptree.data.world.scene import COLOUR_NAMES, PLACES, TIMES, Scenes

T = TypeVar("T")

NUM_DICE = 6
"""Random bytes behind the contradictions of one picture."""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_PLURALS = {"leaf": "leaves", "crown": "tiers", "fruit": "fruits"}
_SINGULARS = {"crown": "tier"}


@dataclass(frozen=True)
class Facts:
    """What the most specific caption says.

    Attributes:
        leaf: class of the main object, as an index into ``LEAVES``.
        colour: its main colour, index into ``COLOUR_NAMES``.
        count: how many of its countable part it has.
        place: index into ``PLACES``.
        time: index into ``TIMES``.
    """

    leaf: int
    colour: int
    count: int
    place: int
    time: int

    def coloured(self) -> str:
        """Colour and class: ``a red truck``."""
        return _with_article(f"{COLOUR_NAMES[self.colour]} {LEAVES[self.leaf].name}")

    def everything(self) -> str:
        """All of it: ``a red truck with three wheels by the sea at dusk``."""
        part = LEAVES[self.leaf].counted
        name = _SINGULARS.get(part, part) if self.count == 1 else _PLURALS.get(part, part + "s")
        return f"{self.coloured()} with {NUMBERS[self.count]} {name} {PLACES[self.place]} {TIMES[self.time]}"

    def captions(self) -> tuple[str, str, str, str]:
        """From general to specific."""
        family = LEAVES[self.leaf].family
        return _with_article(GROUP_OF[family]), _with_article(family), self.coloured(), self.everything()


def facts_of(scenes: Scenes) -> np.ndarray:
    """(n, 4 + NUM_DICE) uint8: colour, count, place and time of every scene, and the dice for its contradictions."""
    draws = Draws(derive(scenes.key, 900))  # its own stream: the words never change the picture
    dice = [draws.integer(0, 255) for _ in range(NUM_DICE)]
    facts = [scenes.colour[:, 0], scenes.count[:, 0], scenes.place, scenes.time, *dice]
    return np.stack(facts, -1).astype(np.uint8)


def captions(leaves: list[int], row: list[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Four captions and four contradictions.

    Args:
        leaves: classes of all objects in the picture, the main one first.
        row: of ``facts_of``.
    """
    facts = Facts(leaves[0], *row[:4])
    roll = iter(row[4:])
    families = {LEAVES[k].family for k in leaves}
    groups = {GROUP_OF[family] for family in families}
    group = _pick(next(roll), [name for name in GROUPS if name not in groups])
    mine = GROUP_OF[LEAVES[facts.leaf].family]
    # A family of the same group is the closest mistake; where the picture holds them all, any absent one will do.
    absent = [name for name in FAMILIES if name not in families]
    family = _pick(next(roll), [name for name in absent if GROUP_OF[name] == mine] or absent)
    wrong = _wrong_class_or_colour(facts, leaves, next(roll), next(roll)).coloured()
    detail = _one_thing_wrong(facts, next(roll), next(roll)).everything()
    return facts.captions(), (_with_article(group), _with_article(family), wrong, detail)


def _wrong_class_or_colour(facts: Facts, leaves: list[int], which: int, die: int) -> Facts:
    """Another class of the same family that is not in the picture, or another colour."""
    family = LEAVES[facts.leaf].family
    siblings = [k for k, leaf in enumerate(LEAVES) if leaf.family == family and k not in leaves]
    if which < 128 or not siblings:
        return replace(facts, colour=_other(die, facts.colour, len(COLOUR_NAMES)))
    return replace(facts, leaf=_pick(die, siblings))


def _one_thing_wrong(facts: Facts, which: int, die: int) -> Facts:
    """Another count, place or time."""
    kind = LEAVES[facts.leaf]
    if which % 3 == 0:
        counts = [k for k in range(kind.low, kind.high + 1, kind.step) if k != facts.count]
        return replace(facts, count=_pick(die, counts))
    if which % 3 == 1:
        return replace(facts, place=_other(die, facts.place, len(PLACES)))
    return replace(facts, time=_other(die, facts.time, len(TIMES)))


def _pick(die: int, choices: list[T]) -> T:
    """One of the choices by a number from 0 to 255."""
    return choices[die * len(choices) // 256]


def _other(die: int, value: int, num: int) -> int:
    return (value + 1 + die * (num - 1) // 256) % num


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
