"""Blueprints of trees and flowers."""

from __future__ import annotations

import numpy as np

from hyptree.data.world.shape_builder import Builder


def pine(b: Builder) -> None:
    """Straight trunk under two to four triangles, each narrower than the one below."""
    w = b.u(0.52, 0.66)
    b.box("trunk", 0, -0.8, 0.1, 0.22, "second", round=0.1)
    for i in range(4):
        step = 1.5 / (b.count + 0.6)
        y, shrink = -0.62 + step * (i + 0.78), 1 - 0.6 * i / b.count
        b.box("crown", 0, y, w * shrink, step * 0.8, taper=1, round=0.12, show=b.has(i))


def palm(b: Builder) -> None:
    """Thin bent trunk with four to seven long leaves from one point."""
    lean = b.u(-0.16, 0.16)
    for i in range(4):
        x1, x2 = lean * (i / 4) ** 2, lean * ((i + 1) / 4) ** 2
        b.line("trunk", x1, -0.97 + 0.31 * i, x2, -0.66 + 0.31 * i, 0.1 - 0.01 * i, "second", round=0.4)
    for i in range(7):
        angle = np.pi / 2 - b.place(i) * 2.0
        length = b.u(0.38, 0.46)
        x, y = lean + np.cos(angle) * length, 0.3 + np.sin(angle) * length
        b.lens("leaf", x, y, length + 0.06, 0.11, angle=angle, show=b.has(i))
    b.ellipse("fruit", lean - 0.08, 0.2, 0.09, 0.09, "dark")
    b.ellipse("fruit", lean + 0.1, 0.22, 0.08, 0.08, "dark")


def oak(b: Builder) -> None:
    """Thick trunk, wide bumpy crown, one to four fruits in it."""
    y, w = b.u(0.24, 0.34), b.u(0.68, 0.8)
    b.box("trunk", 0, -0.6, 0.16, 0.42, "second", taper=0.2, round=0.1)
    b.line("trunk", 0.04, -0.4, 0.34, -0.05, 0.07, "second")
    b.blob("crown", 0, y, w, b.u(0.52, 0.6), bumps=9, depth=0.07, angle=b.u(0, 0.6))
    b.blob("crown", -0.2, y + 0.14, w * 0.5, 0.28, bumps=7, depth=0.08)
    for i in range(4):
        dy = (0.08, -0.2, 0.2, -0.1)[i]
        b.ellipse("fruit", b.place(i) * 0.5, y + dy, 0.095, 0.095, "dark", show=b.has(i))


def _stem(b: Builder, top: np.ndarray, lean: np.ndarray) -> None:
    b.line("stem", 0, -0.98, lean, top, 0.05, "second", round=0.5)


def tulip(b: Builder) -> None:
    """Closed cup of three upright petals on a stem with one to three long leaves."""
    lean, y, h = b.u(-0.08, 0.08), b.u(0.36, 0.44), b.u(0.44, 0.52)
    _stem(b, y - 0.2, lean)
    for i, (x, angle) in enumerate(((0.26, 1.05), (-0.26, 2.1), (0.16, 1.3))):
        b.lens("leaf", x, -0.58, 0.42, 0.12, "second", angle=angle, show=b.has(i))
    for x, angle in ((-0.26, 1.75), (0.26, 1.4)):
        b.lens("petal", lean + x, y + 0.04, h, 0.25, angle=angle)
    b.lens("petal", lean, y - 0.02, h, 0.28, angle=1.57)


def daisy(b: Builder) -> None:
    """Flat ring of five to nine petals around a disc, one leaf on the stem."""
    lean, y, spin = b.u(-0.1, 0.1), b.u(0.28, 0.36), b.u(0, 1)
    _stem(b, y, lean)
    b.lens("leaf", 0.24, -0.55, 0.3, 0.11, "second", angle=0.7)
    wide = 0.62 / b.count + 0.08
    for i in range(9):
        angle = (2 * np.pi * (i + spin) / b.count).astype(np.float32)
        x, dy = np.cos(angle) * 0.4, np.sin(angle) * 0.4
        b.ellipse("petal", lean + x, y + dy, 0.24, wide, angle=angle, show=b.has(i))
    b.ellipse("disc", lean, y, 0.21, 0.21, "dark")


def bellflower(b: Builder) -> None:
    """Bowed stem from which two to four bells hang."""
    r = b.u(0.16, 0.2)
    b.line("stem", -0.42, -0.98, -0.42, 0.25, 0.045, "second")
    b.arc("stem", 0.13, 0.25, 0.55, 0.045, 1.4, "second", angle=0.17)
    b.lens("leaf", -0.2, -0.62, 0.3, 0.1, "second", angle=0.9)
    b.lens("leaf", -0.6, -0.5, 0.26, 0.09, "second", angle=2.2)
    for i in range(4):
        angle = -0.75 + 2.1 * (i + 0.5) / b.count
        x, y = 0.13 + np.sin(angle) * 0.55, 0.25 + np.cos(angle) * 0.55
        b.line("stem", x, y, x, y - 0.14, 0.03, "second", show=b.has(i))
        b.ellipse("bell", x, y - 0.3, r, 0.22, cut=0, show=b.has(i))
        b.box("bell", x, y - 0.37, r * 1.35, 0.1, taper=0.25, round=0.2, shade=1, show=b.has(i))
        b.ellipse("disc", x, y - 0.49, 0.05, 0.05, "dark", show=b.has(i))
