"""Objects as lists of shapes: what the blueprints write into, for many objects of one class at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyptree.data.world.draws import Draws
from hyptree.data.world.shapes import ARC, BLOB, BOX, ELLIPSE, LENS

PARTS = (
    "body", "head", "neck", "leg", "ear", "eye", "beak", "nose", "tusk", "horn", "tail", "wing", "spot", "fin", "claw",
    "arm", "wheel", "hub", "cabin", "window", "door", "lamp", "bumper", "hull", "deck", "mast", "sail", "funnel",
    "rotor", "skid", "engine", "envelope", "band", "rope", "basket", "trunk", "crown", "leaf", "fruit", "stem",
    "petal", "disc", "bell", "wall", "roof", "chimney", "spire", "step", "column", "gable", "dome", "gallery", "blade",
    "battlement",
)  # fmt: skip
"""Kinds of parts, shared by all classes: ``Sample.parts`` holds the place in this list plus one, 0 for no part."""

COLOURS = ("main", "second", "dark", "pale", "glass", "white", "black")
"""What a part can be painted with; the scene chooses the actual colours of each object."""

Value = float | np.ndarray
_FIELDS = ("x", "y", "a", "b", "angle", "e", "f", "skew", "shade", "show")


@dataclass
class Shapes:
    """All shapes of n objects of one class, in painting order (later ones cover earlier ones).

    Object frame: x to the right, y up, the ground at y = -1, everything roughly within [-1, 1].
    """

    values: np.ndarray
    """(F, P, n) float32: ``_FIELDS`` in order; angles in radians, counter-clockwise."""
    kind: np.ndarray
    """(P,) shape kinds."""
    part: np.ndarray
    """(P,) place in ``PARTS`` plus one."""
    colour: np.ndarray
    """(P,) place in ``COLOURS``."""

    def field(self, name: str) -> np.ndarray:
        """(n, P) values of one field."""
        return self.values[_FIELDS.index(name)].T


class Builder:
    """The sheet a blueprint draws on: n objects at once, their proportions from each object's own random numbers.

    Args:
        key: (n,) one key per object.
        count: (n,) how many of the countable part each object has.
    """

    def __init__(self, key: np.ndarray, count: np.ndarray):
        self.draws = Draws(key)
        self.count = count
        self._rows: list[np.ndarray] = []
        self._tags: list[tuple[int, int, int]] = []

    def u(self, low: float, high: float) -> np.ndarray:
        """(n,) the next random number between low and high."""
        return self.draws.uniform(low, high)

    def _add(self, kind: int, part: str, colour: str, *values: Value) -> None:
        row = np.empty((len(_FIELDS), len(self.draws)), np.float32)
        for i, value in enumerate(values):
            row[i] = value
        self._rows.append(row)
        self._tags.append((kind, PARTS.index(part) + 1, COLOURS.index(colour)))

    def ellipse(
        self, part: str, x: Value, y: Value, a: Value, b: Value, colour: str = "main", *,
        angle: Value = 0.0, cut: Value = -1.0, shade: float = 1.0, show: Value = 1.0,
    ) -> None:  # fmt: skip
        """Ellipse at (x, y) of half sizes a, b; ``cut=0`` keeps its upper half."""
        self._add(ELLIPSE, part, colour, x, y, a, b, angle, cut, 0, 0, shade, show)

    def box(
        self, part: str, x: Value, y: Value, a: Value, b: Value, colour: str = "main", *, angle: Value = 0.0,
        taper: Value = 0.0, round: Value = 0.15, skew: Value = 0.0, shade: float = 0.6, show: Value = 1.0,
    ) -> None:  # fmt: skip
        """Rounded box; ``taper=1`` is a triangle with its tip up, -1 tip down; ``skew`` leans its top to the right."""
        self._add(BOX, part, colour, x, y, a, b, angle, taper, round, skew, shade, show)

    def line(
        self, part: str, x1: Value, y1: Value, x2: Value, y2: Value, width: Value, colour: str = "main", *,
        taper: Value = 0.0, round: Value = 1.0, shade: float = 0.8, show: Value = 1.0,
    ) -> None:  # fmt: skip
        """Thick line (half width ``width``) from the first point to the second, where it is thinner by ``taper``."""
        dx, dy = np.subtract(x2, x1), np.subtract(y2, y1)
        half = np.hypot(dx, dy) / 2 + width * np.asarray(round) * 0.5
        angle = np.arctan2(dy, dx) - np.pi / 2
        self._add(
            BOX, part, colour, np.add(x1, x2) / 2, np.add(y1, y2) / 2, width, half, angle, taper, round, 0, shade, show
        )

    def arc(
        self, part: str, x: Value, y: Value, radius: Value, width: Value, reach: Value, colour: str = "main", *,
        angle: Value = 0.0, shade: float = 0.8, show: Value = 1.0,
    ) -> None:  # fmt: skip
        """Piece of a ring around (x, y) that reaches the angle ``reach`` to both sides of the direction ``angle``."""
        self._add(ARC, part, colour, x, y, radius, width, angle, reach, 0, 0, shade, show)

    def lens(
        self, part: str, x: Value, y: Value, a: Value, b: Value, colour: str = "main", *,
        angle: Value = 0.0, shade: float = 0.9, show: Value = 1.0,
    ) -> None:  # fmt: skip
        """Leaf of half length a along x and half width b."""
        self._add(LENS, part, colour, x, y, a, b, angle, 0, 0, 0, shade, show)

    def blob(
        self, part: str, x: Value, y: Value, a: Value, b: Value, colour: str = "main", *, bumps: Value = 7.0,
        depth: Value = 0.08, angle: Value = 0.0, shade: float = 1.0, show: Value = 1.0,
    ) -> None:  # fmt: skip
        """Ellipse with bumps around it."""
        self._add(BLOB, part, colour, x, y, a, b, angle, depth, bumps, 0, shade, show)

    def has(self, i: int) -> np.ndarray:
        """(n,) float32, 1 for the objects that have an i-th countable part (from 0)."""
        return (self.count > i).astype(np.float32)

    def place(self, i: int) -> np.ndarray:
        """(n,) where the i-th of ``count`` things stands when they are spread evenly over [-1, 1]."""
        return ((2 * i + 1) / self.count - 1).astype(np.float32)

    def shapes(self) -> Shapes:
        """What was drawn."""
        values = np.stack(self._rows, 1)  # (F, P, n)
        kind, part, colour = (np.array(column) for column in zip(*self._tags, strict=True))
        return Shapes(values, kind, part, colour)
