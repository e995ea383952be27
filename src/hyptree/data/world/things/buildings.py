"""Blueprints of houses and towers."""

from __future__ import annotations

import numpy as np

from hyptree.data.world.shape_builder import Builder, Value


def _door(b: Builder, x: Value, width: float, height: float) -> None:
    b.box("door", x, -1 + height / 2, width, height / 2, "dark", round=0.1)
    b.ellipse("door", x, -1 + height, width, width, "dark", cut=0)


def cottage(b: Builder) -> None:
    """Wide wall under a broad gable roof, chimney, one to three windows."""
    h, w = b.u(0.4, 0.5), b.u(0.7, 0.8)
    top = -1 + 2 * h
    b.box("chimney", 0.42, top + 0.42, 0.1, 0.3, "dark", round=0.05)
    b.box("wall", 0, -1 + h, w, h, round=0.03)
    b.box("roof", 0, top + 0.36, w + 0.18, 0.38, "second", taper=b.u(0.75, 1.0), round=0.05)
    _door(b, -0.42, 0.14, 0.46)
    for i in range(3):
        x = 0.24 + b.place(i) * 0.42
        b.box("window", x, -1 + h * 1.1, 0.105, 0.14, "glass", round=0.1, show=b.has(i))


def church(b: Builder) -> None:
    """Nave beside a tower with a steep spire and a cross, one to three pointed windows."""
    h = b.u(0.3, 0.38)
    b.box("wall", 0.28, -1 + h, 0.68, h, round=0.03)
    b.box("roof", 0.28, -1 + 2 * h + 0.17, 0.76, 0.2, "second", taper=0.3, round=0.05, skew=0)
    b.box("wall", -0.5, -0.48, 0.26, 0.52, round=0.03)
    b.box("spire", -0.5, 0.36, 0.32, 0.36, "second", taper=1, round=0.03)
    b.line("spire", -0.5, 0.66, -0.5, 0.97, 0.03, "dark")
    b.line("spire", -0.6, 0.86, -0.4, 0.86, 0.03, "dark")
    _door(b, -0.5, 0.12, 0.4)
    b.ellipse("window", -0.5, -0.2, 0.1, 0.1, "glass")
    for i in range(3):
        x = 0.34 + b.place(i) * 0.5
        b.lens("window", x, -1 + h, h * 0.66, 0.085, "glass", angle=1.57, show=b.has(i))


def temple(b: Builder) -> None:
    """Steps, three to six columns, a flat gable."""
    h = b.u(0.36, 0.46)
    top = -0.78 + 2 * h
    b.box("step", 0, -0.94, 0.98, 0.07, "second", round=0.1)
    b.box("step", 0, -0.83, 0.86, 0.07, "second", round=0.1)
    b.box("wall", 0, -0.78 + h, 0.68, h, "dark", round=0.02, shade=0.3)
    for i in range(6):
        x = b.place(i) * 0.78
        b.box("column", x, -0.78 + h, 0.37 / b.count + 0.02, h, round=0.1, shade=1.3, taper=0.06, show=b.has(i))
    b.box("roof", 0, top + 0.04, 0.9, 0.075, "second", round=0.1)
    b.box("gable", 0, top + 0.28, 0.92, 0.2, taper=1, round=0.06)
    b.ellipse("window", 0, top + 0.22, 0.085, 0.085, "glass")


def lighthouse(b: Builder) -> None:
    """Slim tapering tower with one to three bands, gallery, lamp and dome."""
    w = b.u(0.3, 0.36)
    b.box("wall", 0, -0.3, w, 0.72, taper=0.22, round=0.02, shade=1.2)
    for i in range(3):
        y = b.place(i) * 0.8
        b.box(
            "band",
            0,
            -0.3 + y * 0.72,
            w * (1 - 0.22 * y) / 1.22 * 1.01,
            0.1,
            "second",
            shade=1.2,
            round=0.1,
            show=b.has(i),
        )
    _door(b, 0, 0.09, 0.3)
    b.box("gallery", 0, 0.45, w * 0.95, 0.05, "dark", round=0.3)
    b.box("lamp", 0, 0.6, w * 0.5, 0.14, "glass", round=0.1)
    b.ellipse("dome", 0, 0.72, w * 0.66, 0.2, "second", cut=0)
    b.line("dome", 0, 0.85, 0, 1.0, 0.025, "dark")


def windmill(b: Builder) -> None:
    """Stout tapering tower with three to five big blades."""
    w, spin = b.u(0.38, 0.46), b.u(0, 1)
    b.box("wall", 0, -0.45, w, 0.56, taper=0.25, round=0.03, shade=1.2)
    b.ellipse("roof", 0, 0.08, w * 0.72, 0.32, "second", cut=0)
    _door(b, 0, 0.11, 0.34)
    b.box("window", 0, -0.36, 0.08, 0.1, "glass", round=0.2)
    for i in range(5):
        angle = (2 * np.pi * (i + spin) / b.count).astype(np.float32)
        x, y = np.cos(angle), np.sin(angle)
        b.line("blade", 0, 0.2, x * 0.8, 0.2 + y * 0.8, 0.03, "dark", show=b.has(i))
        cx, cy = x * 0.5 - y * 0.085, 0.2 + y * 0.5 + x * 0.085
        b.box("blade", cx, cy, 0.3, 0.1, "pale", angle=angle, round=0.1, show=b.has(i))
    b.ellipse("hub", 0, 0.2, 0.09, 0.09, "dark")


def castle(b: Builder) -> None:
    """Broad keep between two turrets, battlements all along, one to three windows."""
    h, side = b.u(0.44, 0.56), b.u(0.72, 0.86)
    top = -1 + 2 * h
    for i in range(5):
        b.box("battlement", -0.48 + 0.24 * i, top + 0.06, 0.07, 0.1, round=0.05)
    b.box("wall", 0, -1 + h, 0.6, h, round=0.02)
    for x in (-0.68, 0.68):
        for i in range(3):
            b.box("battlement", x + 0.17 * (i - 1), -1 + 2 * side + 0.07, 0.055, 0.1, "second", round=0.05)
        b.box("wall", x, -1 + side, 0.24, side, "second", round=0.02, shade=1.2)
        b.box("window", x, -1 + 1.5 * side, 0.06, 0.12, "dark", round=0.9)
    _door(b, 0, 0.2, 0.4)
    for i in range(3):
        b.box("window", b.place(i) * 0.44, top - 0.2, 0.085, 0.11, "glass", round=0.3, show=b.has(i))
