"""From scenes to strokes: every shape of every object, with its place in the picture, its colour and its texture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ramify.data.world.build import COLOURS, Builder
from ramify.data.world.classes import LEAVES
from ramify.data.world.draws import Draws, derive
from ramify.data.world.scene import COLOUR_VALUES, MAX_OBJECTS, Scenes
from ramify.data.world.shapes import ARC, BLOB, BOX, ELLIPSE

TINTS = np.array([(1.0, 1.0, 1.0), (1.0, 0.82, 0.72), (0.5, 0.56, 0.78), (0.92, 0.94, 0.97)], np.float32)
"""Colour of the light at each of ``TIMES``."""

FLOATS = (
    "x", "y", "a", "b", "cos", "sin", "e", "f", "skew", "shade", "red", "green", "blue", "opacity", "soft",
    "wave_x", "wave_y", "phase", "cross", "grain", "weave",
)  # fmt: skip


@dataclass
class Strokes:
    """P shapes to be painted, sorted by (rank, kind): within a rank every picture has at most one."""

    values: dict[str, np.ndarray]
    """``FLOATS``, each (P,) float32."""
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


class _Table:
    """Collects rows of strokes in any order."""

    def __init__(self) -> None:
        self.rows: list[dict[str, np.ndarray]] = []

    def add(self, picture: np.ndarray, depth: np.ndarray | float, **fields: Any) -> None:
        shape = np.shape(picture)
        row: dict[str, np.ndarray] = {
            name: np.broadcast_to(np.asarray(fields.get(name, 0.0), np.float32), shape).ravel() for name in FLOATS
        }
        for name in ("kind", "object", "part"):
            row[name] = np.broadcast_to(np.asarray(fields.get(name, 0)), shape).ravel()
        row["picture"] = np.ravel(picture)
        row["depth"] = np.broadcast_to(np.asarray(depth, np.float64), shape).ravel()
        self.rows.append(row)


def make_strokes(scenes: Scenes) -> Strokes:
    """All strokes of all scenes."""
    table = _Table()
    _scenery(table, scenes)
    order = np.argsort(np.argsort(-scenes.floor, axis=1, kind="stable"), axis=1)  # far objects first
    for slot in range(MAX_OBJECTS):
        for leaf in range(len(LEAVES)):
            chosen = np.flatnonzero(scenes.leaf[:, slot] == leaf)
            if len(chosen):
                _object(table, scenes, chosen, slot, leaf, 1000.0 * (1 + order[chosen, slot]))
    fields = {name: np.concatenate([row[name] for row in table.rows]) for name in table.rows[0]}
    sequence = np.lexsort((fields["depth"], fields["picture"]))
    picture = fields["picture"][sequence]
    first = np.searchsorted(picture, np.arange(len(scenes)))
    rank = np.arange(len(picture)) - first[picture]
    by_rank = np.lexsort((fields["kind"][sequence], rank))
    final = sequence[by_rank]
    return Strokes(
        {name: fields[name][final] for name in FLOATS},
        picture[by_rank],
        fields["kind"][final],
        fields["object"][final].astype(np.uint8),
        fields["part"][final].astype(np.uint8),
        rank[by_rank],
    )


def _object(table: _Table, s: Scenes, chosen: np.ndarray, slot: int, leaf: int, depth: np.ndarray) -> None:
    """Shadow and shapes of the objects of one class in one slot."""
    key = derive(s.key[chosen], 1000 + slot)
    builder = Builder(key, s.count[chosen, slot])
    LEAVES[leaf].blueprint(builder)
    shapes = builder.shapes()
    half, flip, tilt = (getattr(s, name)[chosen, slot, None] for name in ("half", "flip", "tilt"))  # (m, 1)
    middle_x, middle_y = s.x[chosen, slot, None], s.base[chosen, slot, None] + half
    x, y = shapes.field("x") * flip * half, shapes.field("y") * half
    cos, sin = np.cos(tilt), np.sin(tilt)
    angle = shapes.field("angle") * flip + tilt
    palette = _palette(s, chosen, slot, Draws(derive(key, 1)))
    rgb = palette[:, shapes.colour]  # (m, P, 3)
    shape = rgb.shape[:2]
    painted = np.isin(shapes.colour, [COLOURS.index("main"), COLOURS.index("second")]).astype(np.float32)
    weave = _texture(Draws(derive(key, 2)), half[:, 0])
    shown = np.where(shapes.field("show") > 0, 1.0, 0.0)

    flying = s.base[chosen, slot] - s.floor[chosen, slot]
    table.add(
        chosen,
        depth - 1,
        kind=ELLIPSE,
        x=s.x[chosen, slot] - s.light[chosen, 0] * (0.25 * half[:, 0] + 0.3 * flying),
        y=s.floor[chosen, slot] + 0.03 * half[:, 0],
        a=half[:, 0] * 1.05,
        b=half[:, 0] * 0.16,
        cos=1.0,
        e=-1.0,
        opacity=np.where(s.time[chosen] == 3, 0.2, 0.42) / (1 + 2 * flying),
        soft=half[:, 0] * (0.22 + 0.3 * flying),
    )
    table.add(
        np.broadcast_to(chosen[:, None], shape),
        depth[:, None] + np.arange(shape[1]),
        kind=shapes.kind,
        object=slot + 1,
        part=shapes.part,
        x=middle_x + cos * x - sin * y,
        y=middle_y + sin * x + cos * y,
        a=shapes.field("a") * half,
        b=shapes.field("b") * half,
        cos=np.cos(angle),
        sin=np.sin(angle),
        # sizes scale with the object; an arc's reach and a taper do not
        e=shapes.field("e"),
        f=shapes.field("f"),
        skew=shapes.field("skew") * flip,
        shade=shapes.field("shade"),
        red=rgb[..., 0],
        green=rgb[..., 1],
        blue=rgb[..., 2],
        opacity=shown,
        **{
            name: value[:, None] * painted if name in ("grain", "weave") else value[:, None]
            for name, value in weave.items()
        },
    )


def _palette(s: Scenes, chosen: np.ndarray, slot: int, draws: Draws) -> np.ndarray:
    """(m, len(COLOURS), 3) the actual colours, lit by the time of day."""
    m = len(chosen)
    wobble = np.stack([draws.uniform(-0.06, 0.06) for _ in range(9)], -1).reshape(m, 3, 3)
    bright = draws.uniform(0.85, 1.1)[:, None]
    main = COLOUR_VALUES[s.colour[chosen, slot]] * bright + wobble[:, 0]
    second = COLOUR_VALUES[s.second[chosen, slot]] * bright + wobble[:, 1]
    dark = draws.uniform(0.12, 0.3)[:, None] + wobble[:, 2] * 0.8
    pale = draws.uniform(0.72, 0.9)[:, None] + wobble[:, 2]
    glass = np.stack([draws.uniform(0.5, 0.75), draws.uniform(0.7, 0.86), draws.uniform(0.82, 0.96)], -1)
    white, black = np.full((m, 3), 0.95), np.full((m, 3), 0.06)
    colours = np.stack([main, second, dark, pale, glass, white, black], 1) * TINTS[s.time[chosen], None]
    lit = np.isin(s.time[chosen], (1, 2))[:, None]  # lamps are on at dusk and at night
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
    """Sun or moon, clouds, bushes and stones: what is painted behind all objects and belongs to none."""
    draws = Draws(derive(s.key, 500))
    everyone, outdoors = np.arange(len(s)), s.place < 5
    tint = TINTS[s.time]
    sun = np.where(s.time[:, None] == 2, (0.92, 0.93, 0.98), (1.0, 0.9, 0.6))
    radius = draws.uniform(0.03, 0.065)
    sun_x = 0.5 + np.sign(s.light[:, 0]) * draws.uniform(0.1, 0.42)
    sun_y = s.horizon + (0.98 - s.horizon) * draws.uniform(0.35, 0.9)
    disc = {"kind": ELLIPSE, "cos": 1.0, "e": -1.0, "red": sun[:, 0], "green": sun[:, 1], "blue": sun[:, 2]}
    seen = outdoors & (s.time < 3)
    table.add(everyone, 0, x=sun_x, y=sun_y, a=radius * 3, b=radius * 3, opacity=seen * 0.25, soft=radius * 3, **disc)
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
    for _ in range(4):
        seen, size, far = draws.uniform() < 0.55, draws.uniform(0.025, 0.06), draws.uniform()
        leafy = (draws.uniform() < 0.6) & outdoors
        y = s.horizon * (1 - 0.95 * far)
        size = size * (0.6 + 0.8 * far)
        base = np.where(leafy[:, None], (0.24, 0.4, 0.18), (0.46, 0.43, 0.42))
        colour = (base + (draws.uniform(-0.12, 0.12))[:, None]) * tint
        spin, x = draws.uniform(-0.3, 0.3), draws.uniform(0, 1)
        table.add(
            everyone, 100 + 20 * far, kind=ELLIPSE, x=x, y=y, a=size * 1.3, b=size * 0.35, cos=1.0, e=-1.0,
            opacity=seen * 0.3, soft=size * 0.5,
        )  # fmt: skip
        table.add(
            everyone, 100.5 + 20 * far, kind=np.where(leafy, BLOB, BOX), x=x, y=y + size * 0.6, a=size * 1.2,
            b=size * np.where(leafy, 1.0, 0.7), cos=np.cos(spin), sin=np.sin(spin), e=np.where(leafy, 0.14, 0.25),
            f=np.where(leafy, draws.integer(6, 9), 0.8), shade=1.0, red=colour[:, 0], green=colour[:, 1],
            blue=colour[:, 2], opacity=seen, grain=0.5,
        )  # fmt: skip


_REACH = {ARC: 1.0, BLOB: 1.0}


def extents(strokes: Strokes) -> tuple[np.ndarray, np.ndarray]:
    """(P,) half width and half height of a box that holds each shape, its soft edge and its contact shadow."""
    v = strokes.values
    a, b = v["a"], v["b"]
    a = np.where(strokes.kind == ARC, a + b, np.where(strokes.kind == BLOB, a * (1 + np.abs(v["e"])), a))
    b = np.where(strokes.kind == ARC, a, np.where(strokes.kind == BLOB, b * (1 + np.abs(v["e"])), b))
    a = a + np.abs(v["skew"]) * b
    cos, sin = np.abs(v["cos"]), np.abs(v["sin"])
    ellipse = (strokes.kind == ELLIPSE) | (strokes.kind == BLOB)
    wide = np.where(ellipse, np.hypot(a * cos, b * sin), a * cos + b * sin)
    high = np.where(ellipse, np.hypot(a * sin, b * cos), a * sin + b * cos)
    return wide + v["soft"], high + v["soft"]
