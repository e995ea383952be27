"""Scenes as pixels: pictures, object maps and part maps.

Painter's algorithm over strokes. Strokes of one rank (one per picture at most) and one kind are evaluated together
on the pixels of their bounding boxes only, as one flat list of fragments, and blended into all pictures at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ramify.data.world.background import look_up, paint_background
from ramify.data.world.scene import Scenes
from ramify.data.world.shapes import SHAPES
from ramify.data.world.strokes import FLOATS, Strokes, extents, make_strokes

HALO = 0.022
"""Reach of the contact shadow around every part, as a share of the picture's side."""
INK = 0.01
"""Width of the darker rim inside every part."""


@dataclass
class Pictures:
    """n rendered scenes."""

    image: np.ndarray
    """(n, 3, S, S) uint8."""
    object: np.ndarray
    """(n, S, S) uint8: slot of the object seen there plus one, 0 for none."""
    part: np.ndarray
    """(n, S, S) uint8: kind of part seen there, 0 for none."""


def render(scenes: Scenes, size: int) -> Pictures:
    """The scenes at ``size`` x ``size`` pixels."""
    n = len(scenes)
    canvas = paint_background(scenes, size).reshape(3, -1)
    objects, parts = np.zeros(n * size * size, np.uint8), np.zeros(n * size * size, np.uint8)
    strokes = make_strokes(scenes)
    left, right, bottom, top = _pixel_boxes(strokes, size)
    wide, high = right - left, top - bottom
    keep = (wide > 0) & (high > 0) & (strokes.values["opacity"] > 0)
    group = strokes.rank * len(SHAPES) + strokes.kind
    edges = np.flatnonzero(np.diff(group, prepend=-1, append=-1))
    for start, stop in pairwise(edges):
        rows = np.arange(start, stop)[keep[start:stop]]
        if len(rows):
            frame = (left[rows], size - top[rows], wide[rows], high[rows])
            _paint(canvas, objects, parts, strokes, rows, int(strokes.kind[start]), frame, size, scenes.light)
    image = np.clip(canvas * 255 + 0.5, 0, 255).astype(np.uint8).reshape(3, n, size, size)
    shape = (n, size, size)
    return Pictures(np.ascontiguousarray(image.transpose(1, 0, 2, 3)), objects.reshape(shape), parts.reshape(shape))


def _pixel_boxes(strokes: Strokes, size: int) -> tuple[np.ndarray, ...]:
    """First and last pixel (excluded) of every stroke to the right and upwards, within the picture."""
    wide, high = extents(strokes)
    x, y = strokes.values["x"], strokes.values["y"]
    margin = HALO + 1 / size
    left, right = np.floor((x - wide - margin) * size), np.ceil((x + wide + margin) * size)
    bottom, top = np.floor((y - high - margin) * size), np.ceil((y + high + margin) * size)
    left, right, bottom, top = (np.clip(edge, 0, size).astype(np.int64) for edge in (left, right, bottom, top))
    return left, right, bottom, top


def _paint(
    canvas: np.ndarray, objects: np.ndarray, parts: np.ndarray, strokes: Strokes, rows: np.ndarray, kind: int,
    frame: tuple[np.ndarray, ...], size: int, light: np.ndarray,
) -> None:  # fmt: skip
    """Blends the strokes ``rows``, all of one kind and in different pictures, into the canvas."""
    left, upper, wide, high = frame
    area = wide * high
    # The fragments: every pixel of every box, flat.
    stroke = np.repeat(np.arange(len(rows), dtype=np.int32), area)
    line = np.repeat(wide.astype(np.int32), area)
    inner = np.arange(len(stroke), dtype=np.int32) - np.repeat((np.cumsum(area) - area).astype(np.int32), area)
    row = inner // line
    column = inner - row * line
    column += np.repeat(left.astype(np.int32), area)
    row += np.repeat(upper.astype(np.int32), area)

    v = {name: strokes.values[name][rows] for name in FLOATS}
    w = {name: np.repeat(v[name], area) for name in ("a", "b", "e", "f", "cos", "sin")}
    x = (column + np.float32(0.5)) * np.float32(1 / size) - np.repeat(v["x"], area)
    y = (size - np.float32(0.5) - row) * np.float32(1 / size) - np.repeat(v["y"], area)
    local_x = w["cos"] * x + w["sin"] * y
    local_y = w["cos"] * y - w["sin"] * x
    if v["skew"].any():
        local_x -= np.repeat(v["skew"], area) * local_y
    distance, across, along = SHAPES[kind](local_x, local_y, w["a"], w["b"], w["e"], w["f"])

    sharpness = np.repeat(1 / np.maximum(v["soft"] * 2, np.float32(1 / size)), area)
    opacity = np.repeat(v["opacity"], area)
    alpha = np.clip(np.float32(0.5) - distance * sharpness, 0, 1)
    alpha *= opacity
    pixel = np.repeat(strokes.picture[rows].astype(np.int32) * (size * size), area) + row * size + column

    solid = np.repeat((strokes.object[rows] > 0).astype(np.float32) * np.float32(0.45), area)
    shadow = np.clip(1 - distance * np.float32(1 / HALO), 0, 1)
    dim = 1 - solid * opacity * shadow * shadow  # contact shadow on what lies below
    seen = np.flatnonzero((alpha > 0) | (dim < 1))
    if len(seen) < 0.8 * len(alpha):
        pixel, alpha, dim, distance, stroke = (a[seen] for a in (pixel, alpha, dim, distance, stroke))
        local_x, local_y, across, along = (a[seen] for a in (local_x, local_y, across, along))
        x, y = x[seen], y[seen]

    # Light from one side, a darker rim, a pattern in the frame of the object.
    towards = light[strokes.picture[rows]].astype(np.float32)
    light_x = towards[:, 0] * v["cos"] + towards[:, 1] * v["sin"]
    light_y = towards[:, 1] * v["cos"] - towards[:, 0] * v["sin"]
    across, along = np.clip(across, -1, 1), np.clip(along, -1, 1)
    relief = (across * light_x[stroke] + along * light_y[stroke]) * np.float32(0.34)
    relief -= (across * across + along * along) * np.float32(0.1)
    bright = 1 + relief * v["shade"][stroke]
    lit = (strokes.object[rows] > 0) | (v["grain"] > 0)
    if lit.any():
        rim = np.clip(1 + distance * np.float32(1 / INK), 0, 1)
        bright *= 1 - (lit * np.float32(0.28))[stroke] * rim
    if v["grain"].any():
        bright *= 1 + v["grain"][stroke] * look_up(x * 2 + 4 + v["phase"][stroke], y * 2 + 4) * np.float32(0.6)
    if v["weave"].any():
        wave_x, wave_y, phase = v["wave_x"][stroke], v["wave_y"][stroke], v["phase"][stroke]
        wave = np.sin(wave_x * x + wave_y * y + phase)
        cross = v["cross"][stroke]
        wave *= 1 - cross + cross * np.sin(wave_y * x - wave_x * y + phase)
        bright *= 1 + v["weave"][stroke] * np.clip(wave * 4, -1, 1)

    under = dim * (1 - alpha)
    bright *= alpha
    for channel, name in enumerate(("red", "green", "blue")):
        plane = canvas[channel]
        plane[pixel] = plane[pixel] * under + bright * v[name][stroke]
    covers = alpha > 0.5
    if (strokes.object[rows] > 0).any():
        covers &= (strokes.object[rows] > 0)[stroke]
        objects[pixel[covers]] = strokes.object[rows][stroke[covers]]
        parts[pixel[covers]] = strokes.part[rows][stroke[covers]]
