"""The classes of the built-in world: thing > group > family > leaf, with a blueprint for every leaf."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from hyptree.data.world.shape_builder import Builder
from hyptree.data.world.things import animals, buildings, plants, vehicles
from hyptree.tree import Tree

ROOT = "thing"


@dataclass(frozen=True)
class Leaf:
    """A class that pictures are labelled with.

    Attributes:
        name: of the class.
        family: the class above; its group is in ``GROUPS``.
        blueprint: draws objects of this class.
        counted: the part whose number varies, in the singular (see ``plural``).
        low, high, step: how many there can be of it.
        top: height of its highest point in the object frame, where the ground is at -1.
        flies: whether it may float above the ground.
    """

    name: str
    family: str
    blueprint: Callable[[Builder], None]
    counted: str
    low: int
    high: int
    top: float = 1.0
    flies: bool = False
    step: int = 1


GROUPS = {
    "vehicle": ("road vehicle", "boat", "aircraft"),
    "animal": ("mammal", "bird", "sea animal"),
    "plant": ("tree", "flower"),
    "building": ("house", "tower"),
}
"""Families of every group."""

LEAVES = (
    Leaf("car", "road vehicle", vehicles.car, "window", 1, 3, top=0.3),
    Leaf("truck", "road vehicle", vehicles.truck, "wheel", 2, 4, top=0.35),
    Leaf("bus", "road vehicle", vehicles.bus, "window", 3, 5, top=0.35),
    Leaf("sailboat", "boat", vehicles.sailboat, "sail", 1, 3),
    Leaf("steamer", "boat", vehicles.steamer, "funnel", 1, 3, top=0.55),
    Leaf("submarine", "boat", vehicles.submarine, "window", 2, 4, top=0.45),
    Leaf("plane", "aircraft", vehicles.plane, "window", 2, 5, top=0.35, flies=True),
    Leaf("helicopter", "aircraft", vehicles.helicopter, "window", 1, 3, top=0.45, flies=True),
    Leaf("balloon", "aircraft", vehicles.balloon, "band", 1, 3, flies=True),
    Leaf("elephant", "mammal", animals.elephant, "leg", 2, 4, top=0.6),
    Leaf("giraffe", "mammal", animals.giraffe, "spot", 2, 5),
    Leaf("dog", "mammal", animals.dog, "leg", 2, 4, top=0.6),
    Leaf("duck", "bird", animals.duck, "leg", 1, 2, top=0.7),
    Leaf("flamingo", "bird", animals.flamingo, "leg", 1, 2, top=0.9),
    Leaf("owl", "bird", animals.owl, "spot", 1, 4, top=0.9),
    Leaf("fish", "sea animal", animals.fish, "fin", 1, 3, top=0.3, flies=True),
    Leaf("crab", "sea animal", animals.crab, "leg", 4, 8, top=0.5, step=2),
    Leaf("octopus", "sea animal", animals.octopus, "arm", 4, 7),
    Leaf("pine", "tree", plants.pine, "crown", 2, 4),
    Leaf("palm", "tree", plants.palm, "leaf", 4, 7),
    Leaf("oak", "tree", plants.oak, "fruit", 1, 4),
    Leaf("tulip", "flower", plants.tulip, "leaf", 1, 3),
    Leaf("daisy", "flower", plants.daisy, "petal", 5, 9),
    Leaf("bellflower", "flower", plants.bellflower, "bell", 2, 4),
    Leaf("cottage", "house", buildings.cottage, "window", 1, 3, top=0.7),
    Leaf("church", "house", buildings.church, "window", 1, 3),
    Leaf("temple", "house", buildings.temple, "column", 3, 6, top=0.6),
    Leaf("lighthouse", "tower", buildings.lighthouse, "band", 1, 3),
    Leaf("windmill", "tower", buildings.windmill, "blade", 3, 5),
    Leaf("castle", "tower", buildings.castle, "window", 1, 3, top=0.8),
)

CLASSES = tuple(leaf.name for leaf in LEAVES)
"""Names of the leaf classes: ``Sample.label`` is a place in this list."""

FAMILIES = tuple(family for families in GROUPS.values() for family in families)
"""Names of the families."""

GROUP_OF = {family: group for group, families in GROUPS.items() for family in families}
"""The group of each family."""


@functools.cache
def class_tree() -> Tree:
    """The leaves (first, in the order of ``CLASSES``), then families, then groups, then the root."""
    names = [*CLASSES, *FAMILIES, *GROUPS, ROOT]
    above = {leaf.name: leaf.family for leaf in LEAVES} | GROUP_OF | dict.fromkeys(GROUPS, ROOT)
    return Tree([names.index(above[name]) if name in above else -1 for name in names], label=names)
