"""Blueprints of road vehicles, boats and aircraft, facing right."""

from __future__ import annotations

import numpy as np

from hyptree.data.world.shape_builder import Builder, Value


def _wheel(b: Builder, x: Value, radius: Value, show: Value = 1.0) -> None:
    b.ellipse("wheel", x, radius - 1, radius, radius, "dark", show=show)
    b.ellipse("hub", x, radius - 1, radius * 0.48, radius * 0.48, "pale", show=show)


def car(b: Builder) -> None:
    """Low body, cabin in the middle, one to three panes."""
    r, half, x = b.u(0.2, 0.26), b.u(0.46, 0.58), b.u(-0.16, 0.08)
    y = -0.42 + b.u(-0.04, 0.04)
    b.box("cabin", x, y + 0.4, half, 0.27, taper=0.28, round=0.35)
    for i in range(3):
        pane = half * 0.74 / b.count - 0.03
        b.box("window", x + b.place(i) * half * 0.74, y + 0.4, pane, 0.16, "glass", round=0.2, show=b.has(i))
    b.box("body", 0, y - 0.05, 0.98, 0.26, round=0.55)
    b.box("bumper", 0, y - 0.24, 1.0, 0.06, "dark", round=0.8)
    b.ellipse("lamp", 0.9, y, 0.07, 0.08, "white")
    b.box("door", x, y - 0.04, 0.015, 0.18, "dark", shade=0)
    for place in (-0.56, 0.56):
        _wheel(b, place, r)


def truck(b: Builder) -> None:
    """Tall load behind a lower cab, two to four wheels."""
    r, top = b.u(0.17, 0.21), b.u(0.1, 0.34)
    b.box("bumper", 0, -0.72, 0.96, 0.08, "dark")
    b.box("body", -0.32, (top - 0.68) / 2, 0.66, (top + 0.72) / 2, round=0.08)
    b.box("cabin", 0.68, -0.42, 0.3, 0.34, "second", round=0.3, skew=-0.1)
    b.box("window", 0.74, -0.29, 0.16, 0.14, "glass", round=0.25, skew=-0.1)
    b.ellipse("lamp", 0.93, -0.62, 0.05, 0.06, "white")
    _wheel(b, 0.66, r)
    for i in range(3):
        _wheel(b, -0.74 + 0.42 * i, r, show=b.has(i + 1))


def bus(b: Builder) -> None:
    """One long tall box, a row of three to five windows and a door in front."""
    r, h = b.u(0.17, 0.21), b.u(0.44, 0.54)
    y = -0.74 + h
    b.box("body", 0, y, 0.98, h, round=0.3)
    b.box("band", 0, y - h * 0.42, 0.98, 0.05, "second", round=0)
    for i in range(5):
        pane = 0.7 / b.count - 0.035
        b.box("window", -0.2 + b.place(i) * 0.7, y + h * 0.36, pane, h * 0.34, "glass", round=0.2, show=b.has(i))
    b.box("door", 0.74, y - 0.05, 0.13, h * 0.78, "glass", round=0.15)
    b.ellipse("lamp", 0.92, y - h * 0.7, 0.05, 0.05, "white")
    for place in (-0.6, 0.45):
        _wheel(b, place, r)


def sailboat(b: Builder) -> None:
    """Round hull, one tall mast, one to three triangular sails."""
    tall = b.u(0.75, 1.0)
    b.line("mast", 0, -0.6, 0, tall, 0.035, "dark")
    b.box("sail", 0.36, tall * 0.3 - 0.15, 0.36, 0.55, taper=1.0, skew=-0.62, round=0.05)
    b.box("sail", -0.3, tall * 0.2 - 0.18, 0.3, 0.46, "second", taper=1.0, skew=0.6, round=0.05, show=b.has(1))
    b.box("sail", 0.16, tall - 0.12, 0.15, 0.1, "second", angle=-np.pi / 2, taper=1.0, round=0.05, show=b.has(2))
    b.ellipse("hull", 0, -0.58, b.u(0.78, 0.95), b.u(0.36, 0.44), angle=np.pi, cut=0.0)
    b.box("deck", 0, -0.58, 0.86, 0.05, "second", round=0.5)


def steamer(b: Builder) -> None:
    """Long hull with a raised deck and one to three funnels."""
    tall = b.u(0.3, 0.46)
    for i in range(3):
        b.box(
            "funnel",
            b.place(i) * 0.5 - 0.08,
            -0.05 + tall / 2,
            0.12,
            tall / 2 + 0.1,
            "second",
            show=b.has(i),
            round=0.1,
        )
        b.box("band", b.place(i) * 0.5 - 0.08, tall + 0.02, 0.125, 0.06, "dark", show=b.has(i), round=0.1)
    b.box("deck", -0.08, -0.24, 0.66, 0.18, "pale", round=0.12)
    for i in range(5):
        b.ellipse("window", -0.58 + 0.25 * i, -0.24, 0.055, 0.055, "glass")
    b.box("hull", 0, -0.7, 0.98, 0.3, taper=-0.14, round=0.1, skew=0.12)
    b.box("band", 0, -0.92, 0.84, 0.08, "second", taper=-0.04, round=0.3)


def submarine(b: Builder) -> None:
    """Cigar with a tower, a periscope, a screw and two to four portholes."""
    h, x = b.u(0.27, 0.34), b.u(-0.05, 0.2)
    b.line("mast", x + 0.1, 0, x + 0.1, 0.42, 0.035, "dark")
    b.line("mast", x + 0.1, 0.42, x + 0.26, 0.42, 0.035, "dark")
    b.box("cabin", x, -0.18, 0.24, 0.26, "second", taper=0.16, round=0.25)
    b.box("tail", -0.86, -0.6, 0.1, 0.34, "second", round=0.3, taper=0)
    b.ellipse("body", 0, -0.6, 0.97, h)
    b.lens("fin", -0.5, -0.66, 0.22, 0.07, "second", angle=0.15)
    for i in range(4):
        b.ellipse("window", 0.12 + b.place(i) * 0.5, -0.54, 0.085, 0.085, "glass", show=b.has(i))


def plane(b: Builder) -> None:
    """Slender body, swept wings, a tail fin, two to five windows."""
    h = b.u(0.17, 0.22)
    b.box("wing", 0.12, -0.02, 0.16, 0.3, "second", taper=0.5, skew=-0.75, round=0.2)
    b.box("tail", -0.78, 0.02, 0.17, 0.3, "second", taper=0.4, skew=-0.7, round=0.15)
    b.ellipse("body", 0, -0.32, 0.98, h)
    b.lens("tail", -0.82, -0.3, 0.2, 0.06, "second", angle=0.12)
    b.box("cabin", 0.72, -0.25, 0.1, 0.055, "glass", skew=-0.8, round=0.3)
    for i in range(5):
        b.ellipse("window", 0.05 + b.place(i) * 0.5, -0.27, 0.05, 0.05, "glass", show=b.has(i))
    b.box("wing", -0.02, -0.6, 0.2, 0.34, "second", taper=-0.5, skew=0.8, round=0.2)
    b.ellipse("engine", 0.14, -0.52, 0.14, 0.075, "dark")


def helicopter(b: Builder) -> None:
    """Egg with a boom, a long rotor on top, skids below and one to three windows."""
    h, boom = b.u(0.32, 0.4), b.u(-0.02, 0.1)
    b.line("mast", 0.22, 0, 0.22, 0.34, 0.04, "dark")
    b.line("tail", 0.1, -0.3, -0.92, boom - 0.1, 0.09, taper=0.35)
    b.ellipse("rotor", -0.9, boom - 0.06, 0.07, b.u(0.18, 0.26), "dark")
    b.ellipse("rotor", 0.22, 0.36, b.u(0.72, 0.86), 0.05, "dark", angle=b.u(-0.06, 0.06))
    b.line("skid", 0.0, -0.6, -0.06, -0.93, 0.03, "dark")
    b.line("skid", 0.44, -0.6, 0.5, -0.93, 0.03, "dark")
    b.line("skid", -0.2, -0.95, 0.72, -0.95, 0.04, "dark")
    b.ellipse("body", 0.24, -0.34, 0.5, h)
    b.ellipse("cabin", 0.5, -0.28, 0.2, h * 0.66, "glass", angle=0.2)
    for i in range(3):
        b.box("window", 0.2 - 0.2 * i, -0.22, 0.07, 0.09, "glass", show=b.has(i), round=0.4)


def balloon(b: Builder) -> None:
    """Big envelope with one to three bands, a basket on ropes."""
    r = b.u(0.62, 0.72)
    top = 0.98 - r
    b.line("rope", -0.3, top - r * 0.7, -0.13, -0.72, 0.02, "dark")
    b.line("rope", 0.3, top - r * 0.7, 0.13, -0.72, 0.02, "dark")
    b.box("envelope", 0, top - r * 0.82, r * 0.74, r * 0.36, taper=-0.52, round=0.1)
    b.ellipse("envelope", 0, top, r, r)
    for i in range(3):
        y = np.minimum(b.place(i) * 0.62, 0.9)  # the surplus ones are not shown, but their numbers must be numbers
        b.box(
            "band", 0, top + y * r, r * np.sqrt(1 - y * y) * 0.985, 0.075, "second", round=0.3, shade=1, show=b.has(i)
        )
    b.box("basket", 0, -0.85, 0.19, 0.14, "dark", taper=-0.12, round=0.2)
