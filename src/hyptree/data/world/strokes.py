"""From scenes to strokes: every shape of every object, with its place in the picture, its colour and its texture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hyptree.data.world.classes import LEAVES
from hyptree.data.world.draws import Draws, derive
from hyptree.data.world.scene import COLOUR_VALUES, Scenes
from hyptree.data.world.shape_builder import COLOURS, Builder
from hyptree.data.world.shapes import ARC, BLOB, BOX, ELLIPSE

TINTS = np.array([(1.0, 1.0, 1.0), (1.0, 0.82, 0.72), (0.6, 0.66, 0.88), (0.92, 0.94, 0.97)], np.float32)
"""Colour of the light at each of ``TIMES``."""

FLOATS = (
    "x", "y", "a", "b", "cos", "sin", "e", "f", "skew", "shade", "red", "green", "blue", "opacity", "soft",
    "wave_x", "wave_y", "phase", "cross", "grain", "weave", "halo",
)  # fmt: skip


HALO = 0.07
"""Reach of the contact shadow around every part, as a share of half the object's size; the dark rim is half as wide."""

FLAT, SOLID, OBJECT = range(3)
"""How a stroke is finished: sun, clouds and shadows are flat colour; stones and bushes are shaded; the parts of
objects also cast a shadow around them. What is shaded enters the maps of objects and parts, as 0 if scenery."""

_INDEX = {name: i for i, name in enumerate(FLOATS)}


@dataclass
class Strokes:
    """P shapes to be painted, sorted by (rank, kind, finish): within a rank every picture has at most one."""

    values: np.ndarray
    """(len(FLOATS), P) float32."""
    picture: np.ndarray
    """(P,) which picture it is in."""
    kind: np.ndarray
    """(P,) shape kind."""
    object: np.ndarray
    """(P,) uint8: slot of its object plus one, 0 for scenery."""
    part: np.ndarray
    """(P,) uint8."""
    rank: np.ndarray
    """(P,) place in the painting order of its picture."""
    finish: np.ndarray
    """(P,) ``FLAT``, ``SOLID`` or ``OBJECT``."""

    def field(self, name: str) -> np.ndarray:
        """(P,) values of one field."""
        return self.values[_INDEX[name]]


class _Table:
    """Collects strokes in any order."""

    def __init__(self) -> None:
        self.values: list[np.ndarray] = []
        self.tags: list[np.ndarray] = []

    def add(self, picture: np.ndarray, depth: Any, *, kind: Any, object: Any = 0, part: Any = 0, **fields: Any) -> None:
        """Strokes of the pictures ``picture`` (any shape); the other arguments broadcast to it, floats default to 0."""
        values = np.zeros((len(FLOATS), *picture.shape), np.float32)
        for name, value in fields.items():
            values[_INDEX[name]] = value
        tags = np.empty((5, *picture.shape))
        for i, tag in enumerate((picture, depth, kind, object, part)):
            tags[i] = tag
        self.values.append(values.reshape(len(FLOATS), -1))
        self.tags.append(tags.reshape(5, -1))

    def strokes(self) -> Strokes:
        """All that can be seen, with their ranks."""
        values, tags = np.concatenate(self.values, 1), np.concatenate(self.tags, 1)
        shown = np.flatnonzero(values[_INDEX["opacity"]] > 0)
        order = shown[np.lexsort(tags[1::-1, shown])]  # by picture, then by depth
        picture = tags[0, order].astype(np.int64)
        start = np.searchsorted(picture, picture)
        rank = np.arange(len(picture)) - start
        kind = tags[2, order].astype(np.int64)
        solid = values[_INDEX["grain"], order] > 0
        finish = np.where(tags[3, order] > 0, OBJECT, np.where(solid, SOLID, FLAT))
        by_rank = np.lexsort((finish, kind, rank))
        order = order[by_rank]
        objects, parts = tags[3:, order].astype(np.uint8)
        return Strokes(
            values[:, order], picture[by_rank], kind[by_rank], objects, parts, rank[by_rank], finish[by_rank]
        )


def make_strokes(scenes: Scenes) -> Strokes:
    """All strokes of all scenes."""
    table = _Table()
    _scenery(table, scenes)
    order = np.argsort(np.argsort(-scenes.floor, axis=1, kind="stable"), axis=1)  # far objects first
    for leaf in range(len(LEAVES)):
        picture, slot = np.nonzero(scenes.leaf == leaf)
        if len(picture):
            _objects(table, scenes, picture, slot, leaf, 1000.0 * (1 + order[picture, slot]))
    return table.strokes()


def _objects(table: _Table, s: Scenes, picture: np.ndarray, slot: np.ndarray, leaf: int, depth: np.ndarray) -> None:
    """Shadows and shapes of all objects of one class: m of them, in slot ``slot`` of picture ``picture``."""
    at = picture, slot
    key = derive(s.key[picture], slot + 1000)
    builder = Builder(key, s.count[at])
    LEAVES[leaf].blueprint(builder)
    shapes = builder.shapes()
    half, flip, tilt, time = s.half[at], s.flip[at][:, None], s.tilt[at][:, None], s.time[picture]
    size = half[:, None]  # (m, 1)
    x, y = shapes.field("x") * flip * size, shapes.field("y") * size  # (m, P)
    cos, sin = np.cos(tilt), np.sin(tilt)
    angle = shapes.field("angle") * flip + tilt
    rgb = _palette(s, picture, slot, Draws(derive(key, 1)))[:, shapes.colour]  # (m, P, 3)
    painted = np.isin(shapes.colour, [COLOURS.index("main"), COLOURS.index("second")]).astype(np.float32)
    weave = _texture(Draws(derive(key, 2)), half)

    flying = s.base[at] - s.floor[at]
    table.add(
        picture,
        depth - 1,
        kind=BLOB,
        x=s.x[at] - s.light[picture, 0] * (0.25 * half + 0.3 * flying),
        y=s.floor[at] + 0.03 * half,
        a=half * 0.75,
        b=half * 0.13,
        cos=1.0,
        opacity=np.where(time == 3, 0.25, 0.55) / (1 + 2 * flying),
        soft=half * (0.08 + 0.1 * flying),
    )
    table.add(
        np.broadcast_to(picture[:, None], x.shape),
        depth[:, None] + np.arange(x.shape[1]),
        kind=shapes.kind,
        object=slot[:, None] + 1,
        part=shapes.part,
        x=s.x[at][:, None] + cos * x - sin * y,
        y=s.base[at][:, None] + size + sin * x + cos * y,
        a=shapes.field("a") * size,
        b=shapes.field("b") * size,
        cos=np.cos(angle),
        sin=np.sin(angle),
        e=shapes.field("e"),  # a cut, a taper, a reach, a depth: none of them grows with the object
        f=shapes.field("f"),
        skew=shapes.field("skew") * flip,
        shade=shapes.field("shade"),
        red=rgb[..., 0],
        green=rgb[..., 1],
        blue=rgb[..., 2],
        opacity=shapes.field("show") > 0,
        wave_x=weave["wave_x"][:, None],
        wave_y=weave["wave_y"][:, None],
        phase=weave["phase"][:, None],
        cross=weave["cross"][:, None],
        grain=weave["grain"][:, None] * painted,
        weave=weave["weave"][:, None] * painted,
        halo=HALO * size,
    )


def _palette(s: Scenes, picture: np.ndarray, slot: np.ndarray, draws: Draws) -> np.ndarray:
    """(m, len(COLOURS), 3) the actual colours, lit by the time of day."""
    m, time = len(picture), s.time[picture]
    wobble = np.stack([draws.uniform(-0.06, 0.06) for _ in range(9)], -1).reshape(m, 3, 3)
    bright = draws.uniform(0.85, 1.1)[:, None]
    main = COLOUR_VALUES[s.colour[picture, slot]] * bright + wobble[:, 0]
    second = COLOUR_VALUES[s.second[picture, slot]] * bright + wobble[:, 1]
    dark = draws.uniform(0.12, 0.3)[:, None] + wobble[:, 2] * 0.8
    pale = draws.uniform(0.72, 0.9)[:, None] + wobble[:, 2]
    glass = np.stack([draws.uniform(0.5, 0.75), draws.uniform(0.7, 0.86), draws.uniform(0.82, 0.96)], -1)
    white, black = np.full((m, 3), 0.95), np.full((m, 3), 0.06)
    colours = np.stack([main, second, dark, pale, glass, white, black], 1) * TINTS[time, None]
    lit = np.isin(time, (1, 2))[:, None]  # lamps are on at dusk and at night
    colours[:, COLOURS.index("glass")] = np.where(lit, (1.0, 0.86, 0.45), colours[:, COLOURS.index("glass")])
    return np.clip(colours, 0.02, 1.0).astype(np.float32)


def _texture(draws: Draws, half: np.ndarray) -> dict[str, np.ndarray]:
    """Plain, striped, chequered or cloudy: how the painted surfaces of each object are patterned."""
    kind = draws.integer(0, 3)
    angle, turns = draws.uniform(0, np.pi), draws.uniform(3.0, 6.0)
    wave = 2 * np.pi * turns / (2 * half)
    return {
        "wave_x": wave * np.cos(angle),
        "wave_y": wave * np.sin(angle),
        "phase": draws.uniform(0, 6.28),
        "cross": (kind == 2).astype(np.float32),
        "grain": np.where(kind == 3, draws.uniform(0.3, 0.6), 0.1).astype(np.float32),
        "weave": np.where((kind == 1) | (kind == 2), draws.uniform(0.12, 0.3), 0).astype(np.float32),
    }


def _scenery(table: _Table, s: Scenes) -> None:
    """Sun or moon, clouds, bushes and stones: what belongs to no object."""
    draws = Draws(derive(s.key, 500))
    everyone, outdoors = np.arange(len(s)), s.place < 5
    tint = TINTS[s.time]
    sun = np.where(s.time[:, None] == 2, (0.92, 0.93, 0.98), (1.0, 0.9, 0.6))
    radius = draws.uniform(0.03, 0.065)
    sun_x = 0.5 + np.sign(s.light[:, 0]) * draws.uniform(0.1, 0.42)
    sun_y = s.horizon + (0.98 - s.horizon) * draws.uniform(0.35, 0.9)
    disc = {"kind": ELLIPSE, "cos": 1.0, "e": -1.0, "red": sun[:, 0], "green": sun[:, 1], "blue": sun[:, 2]}
    seen = outdoors & (s.time < 3)
    table.add(everyone, 0, x=sun_x, y=sun_y, a=radius * 2, b=radius * 2, opacity=seen * 0.25, soft=radius * 1.5, **disc)
    table.add(everyone, 1, x=sun_x, y=sun_y, a=radius, b=radius, opacity=seen * 0.95, soft=0.004, **disc)
    for i in range(2):
        x, y, a = draws.uniform(0, 1), draws.uniform(0.75, 0.97), draws.uniform(0.09, 0.2)
        seen = outdoors & (draws.uniform() < 0.6)
        cloud = {"cos": 1.0, "red": tint[:, 0], "green": tint[:, 1], "blue": tint[:, 2]}
        for j, (dx, dy, size) in enumerate(((0.0, 0.0, 1.0), (0.35, 0.12, 0.6))):
            table.add(
                everyone, 10 + 2 * i + j, kind=BLOB, x=x + dx * a, y=y + dy * a, a=a * size, b=a * size * 0.32, e=0.12,
                f=draws.integer(5, 8), opacity=seen * 0.5, soft=a * 0.12, **cloud,
            )  # fmt: skip
    for i in range(6):
        # Four behind all objects, two in front of them, which is where they cover a little of the main one.
        nearer = i >= 4
        seen, radius, far = draws.uniform() < 0.55, draws.uniform(0.025, 0.06), draws.uniform()
        leafy = (draws.uniform() < 0.6) & outdoors
        bottom = s.floor[:, 0] * (1.05 - 1.1 * far) - 0.04 if nearer else s.horizon * (1 - 0.95 * far)
        radius = radius * 1.5 if nearer else radius * (0.6 + 0.8 * far)
        depth = 9000 + far if nearer else 100 + 20 * far
        base = np.where(leafy[:, None], (0.24, 0.4, 0.18), (0.46, 0.43, 0.42))
        colour = (base + (draws.uniform(-0.12, 0.12))[:, None]) * tint
        spin, left = draws.uniform(-0.3, 0.3), draws.uniform(0, 1)
        table.add(
            everyone, depth, kind=BLOB, x=left, y=bottom, a=radius * 1.1, b=radius * 0.3, cos=1.0,
            opacity=seen * 0.4, soft=radius * 0.15,
        )  # fmt: skip
        table.add(
            everyone, depth + 0.5, kind=np.where(leafy, BLOB, BOX), x=left, y=bottom + radius * 0.6,
            a=radius * 1.2, b=radius * np.where(leafy, 1.0, 0.7), cos=np.cos(spin), sin=np.sin(spin),
            e=np.where(leafy, 0.08, 0.25), f=np.where(leafy, draws.integer(7, 10), 0.8), shade=1.0,
            red=colour[:, 0], green=colour[:, 1], blue=colour[:, 2], opacity=seen, grain=0.5, halo=0.02,
        )  # fmt: skip


def extents(strokes: Strokes) -> tuple[np.ndarray, np.ndarray]:
    """(P,) half width and half height of a box that holds each shape, its soft edge and its contact shadow."""
    a, b, e, soft = (strokes.field(name) for name in ("a", "b", "e", "soft"))
    is_blob = strokes.kind == BLOB
    grown = 1 + np.abs(e) + soft / np.minimum(a, b)  # a blob's soft edge is as wide as its size in every direction
    a = np.where(strokes.kind == ARC, a + b, np.where(is_blob, a * grown, a))
    b = np.where(strokes.kind == ARC, a, np.where(is_blob, b * grown, b))
    a = a + np.abs(strokes.field("skew")) * b
    cos, sin = np.abs(strokes.field("cos")), np.abs(strokes.field("sin"))
    ellipse = (strokes.kind == ELLIPSE) | is_blob
    wide = np.where(ellipse, np.hypot(a * cos, b * sin), a * cos + b * sin)
    high = np.where(ellipse, np.hypot(a * sin, b * cos), a * sin + b * cos)
    reach = np.where(strokes.finish == OBJECT, strokes.field("halo"), np.where(is_blob, 0, soft))
    return wide + reach, high + reach
