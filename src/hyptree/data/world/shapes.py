"""Signed distance of points to the few shapes that every part is made of: negative inside, zero on the edge.

Points come in the shape's own frame: its centre at the origin, y up, ``a`` and ``b`` its half sizes. Every shape is
symmetric in x (up to its skew), so the mirror image of a shape is the same shape turned the other way. Each function
also gives (u, v), where the point lies between the middle (0) and the edge (1): the shading takes it for a normal.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

ELLIPSE, BOX, ARC, LENS, BLOB = range(5)
Field = tuple[np.ndarray, np.ndarray, np.ndarray]


def ellipse(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray, e: np.ndarray, f: np.ndarray) -> Field:
    """Ellipse of half axes a, b, of which only ``y > e b`` is kept (e = -1: all, e = 0: a dome); f is not used.

    First-order distance k (k - 1) / |grad|, exact on the edge, which is where anti-aliasing looks; far from the tips
    of a thin ellipse it comes out too small, so it is never less than the distance to the box around it.
    """
    u, v = x / a, y / b
    k = np.sqrt(u * u + v * v)
    slope = np.sqrt(np.square(u / a) + np.square(v / b)) + 1e-6
    outside = np.maximum(np.maximum(np.abs(x) - a, np.abs(y) - b), e * b - y)
    return np.maximum(k * (k - 1) / slope, outside), u, v


def box(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray, e: np.ndarray, f: np.ndarray) -> Field:
    """Box with corners rounded by f (a share of the smaller half size) whose width shrinks upwards by the taper e.

    e = 1 is a triangle standing on its side, e = -1 one on its tip, 0 a rectangle.
    """
    v = y / b
    half = a * (1 - e * v) if np.any(e) else a  # half width at this height; |e| = 1 reaches zero at one end
    half = half * (1 / (1 + np.abs(e)))
    radius = f * np.minimum(a, b)
    lean = b / np.sqrt(
        b * b + np.square(a * e / (1 + np.abs(e)))
    )  # a slanted side is nearer than its horizontal distance
    dx = (np.abs(x) - half) * lean + radius
    dy = np.abs(y) - b + radius
    outside = np.sqrt(np.square(np.maximum(dx, 0)) + np.square(np.maximum(dy, 0)))
    return outside + np.minimum(np.maximum(dx, dy), 0) - radius, x / (half + 1e-4), v


def arc(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray, e: np.ndarray, f: np.ndarray) -> Field:
    """Round-ended piece of a circle of radius a, thickness 2 b, that reaches the angle e to both sides of +y."""
    x = np.abs(x)
    end_x, end_y = np.sin(e), np.cos(e)
    r = np.sqrt(x * x + y * y) + 1e-6
    inside = end_y * x < end_x * y  # turned towards the piece; for e > pi / 2 the cross product still splits at the end
    ring = np.abs(r - a)
    tip = np.sqrt(np.square(x - a * end_x) + np.square(y - a * end_y))
    across = (r - a) / b
    return np.where(inside, ring, tip) - b, across * x / r, across * y / r


def lens(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray, e: np.ndarray, f: np.ndarray) -> Field:
    """What two equal discs share: a leaf with its tips at x = -a and a, 2 b wide."""
    radius = (a * a + b * b) / (2 * b)
    away = np.abs(y) + (radius - b)
    return np.sqrt(x * x + away * away) - radius, x / a, y / b


def blob(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray, e: np.ndarray, f: np.ndarray) -> Field:
    """Ellipse with f bumps of relative depth e around it; its edge softens in proportion to a and b, as shadows do."""
    u, v = x / a, y / b
    k = np.sqrt(u * u + v * v) + 1e-6
    rim = 1 + e * np.cos(f * np.arctan2(u, v)) if e.any() else np.float32(1)
    return (k - rim) * np.minimum(a, b), u / rim, v / rim


SHAPES: tuple[Callable[..., Field], ...] = (ellipse, box, arc, lens, blob)
"""By kind: ``SHAPES[BOX]``."""
