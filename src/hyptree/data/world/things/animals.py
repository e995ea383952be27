"""Blueprints of mammals, birds and sea animals, facing right."""

from __future__ import annotations

import numpy as np

from hyptree.data.world.shape_builder import Builder, Value


def _eye(b: Builder, x: Value, y: Value, size: float = 0.07) -> None:
    b.ellipse("eye", x, y, size, size, "white", shade=0.2)
    b.ellipse("eye", np.add(x, size * 0.25), y, size * 0.55, size * 0.6, "black", shade=0)


def _legs(b: Builder, x1: float, x2: float, top: Value, width: Value, order: tuple[int, int, int, int]) -> None:
    """Two to four legs: the outer ones always, the inner ones by count; those behind in the second colour."""
    places = np.linspace(x1, x2, 4)
    for rank, i in enumerate(order):
        colour = "second" if rank >= 2 else "main"
        b.box("leg", float(places[i]), (top - 1) / 2, width, (top + 1) / 2, colour, show=b.has(rank), round=0.45)


def elephant(b: Builder) -> None:
    """Heavy body on two to four thick legs, big ear, long nose, tusk."""
    swing, ear = b.u(-0.12, 0.12), b.u(0.24, 0.32)
    _legs(b, -0.66, 0.3, -0.2, 0.145, (0, 3, 1, 2))
    b.arc("tail", -0.92, -0.12, 0.2, 0.035, 0.9, angle=-0.9)
    b.ellipse("body", -0.18, 0.0, 0.66, b.u(0.44, 0.52))
    b.arc("nose", 1.14 + swing, -0.02, 0.42, 0.1, 0.95, angle=1.8 + swing)
    b.line("nose", 0.7 + swing, -0.15, 0.76 + swing, -0.62, 0.09, taper=0.2)
    b.ellipse("head", 0.56, 0.26, 0.34, 0.34)
    b.lens("tusk", 0.76, -0.06, 0.19, 0.05, "white", angle=-0.5)
    b.ellipse("ear", 0.36, 0.26, ear, ear * 1.3, "second", angle=b.u(-0.2, 0.3))
    _eye(b, 0.72, 0.36, 0.055)


def giraffe(b: Builder) -> None:
    """Small body on long legs, very long neck, two to five spots."""
    lean, high = b.u(0.28, 0.46), b.u(0.68, 0.8)
    for i, x in enumerate((-0.4, -0.22, 0.06, 0.22)):
        b.box("leg", x, -0.62, 0.06, 0.4, "second" if i in (1, 2) else "main", round=0.5)
    b.line("tail", -0.52, -0.05, -0.64, -0.5, 0.03, "dark")
    b.line("neck", 0.14, -0.2, 0.14 + lean, high, 0.15, taper=0.3)
    b.ellipse("body", -0.1, -0.16, b.u(0.42, 0.5), 0.24)
    b.line("horn", 0.1 + lean, high, 0.04 + lean, high + 0.24, 0.03, "dark")
    b.line("horn", 0.18 + lean, high, 0.18 + lean, high + 0.24, 0.03, "dark")
    b.ellipse("head", 0.26 + lean, high + 0.02, 0.22, 0.12, angle=-0.3)
    b.lens("ear", 0.04 + lean, high + 0.06, 0.12, 0.05, "second", angle=-0.4)
    _eye(b, 0.24 + lean, high + 0.06, 0.045)
    for i in range(5):
        y = (0.04, -0.1, 0.02, -0.12, -0.02)[i]
        b.blob("spot", -0.1 + b.place(i) * 0.34, -0.16 + y, 0.075, 0.075, "dark", bumps=5, depth=0.12, show=b.has(i))
    b.blob("spot", 0.14 + lean * 0.55, 0.3, 0.06, 0.075, "dark", bumps=5, depth=0.12)


def dog(b: Builder) -> None:
    """Slim body, raised tail, hanging ear, long snout, two to four legs."""
    head = b.u(0.22, 0.34)
    _legs(b, -0.52, 0.3, -0.3, 0.085, (0, 3, 1, 2))
    b.arc("tail", -0.92, 0.0, 0.34, 0.055, b.u(0.5, 0.8), angle=-1.0)
    b.box("body", -0.12, -0.26, 0.58, 0.24, round=0.9, shade=1)
    b.line("neck", 0.3, -0.2, 0.52, head, 0.18)
    b.ellipse("head", 0.54, head, 0.27, 0.24)
    b.box("nose", 0.8, head - 0.09, 0.18, 0.11, round=0.8)
    b.ellipse("nose", 0.95, head - 0.03, 0.06, 0.055, "black")
    b.ellipse("ear", 0.4, head - 0.04, 0.1, 0.25, "second", angle=b.u(-0.35, 0.0))
    _eye(b, 0.64, head + 0.07, 0.055)


def duck(b: Builder) -> None:
    """Boat-shaped body, short neck, flat beak, one or two legs."""
    y = b.u(0.3, 0.42)
    b.line("leg", -0.02, -0.6, -0.02, -0.94, 0.035, "dark")
    b.ellipse("leg", 0.06, -0.95, 0.14, 0.045, "dark")
    b.line("leg", 0.3, -0.6, 0.3, -0.94, 0.035, "dark", show=b.has(1))
    b.ellipse("leg", 0.38, -0.95, 0.14, 0.045, "dark", show=b.has(1))
    b.lens("tail", -0.76, -0.2, 0.24, 0.1, "second", angle=-0.7)
    b.line("neck", 0.4, -0.3, 0.5, y, 0.16)
    b.ellipse("body", -0.06, -0.36, 0.74, b.u(0.36, 0.42), angle=0.1)
    b.lens("beak", 0.84, y - 0.02, 0.25, 0.085, "dark", angle=b.u(-0.15, 0.05))
    b.ellipse("head", 0.54, y + 0.04, 0.26, 0.25)
    b.lens("wing", -0.18, -0.3, b.u(0.4, 0.5), 0.19, "second", angle=0.25)
    _eye(b, 0.62, y + 0.1)


def flamingo(b: Builder) -> None:
    """Small body high on one or two thin legs, long bent neck, hooked beak."""
    y = b.u(-0.05, 0.08)
    b.line("leg", 0.02, y - 0.1, 0.06, -0.96, 0.035, "dark")
    b.line("leg", -0.12, y - 0.1, -0.34, -0.36, 0.035, "dark", show=b.has(1))
    b.line("leg", -0.34, -0.36, -0.16, -0.96, 0.035, "dark", show=b.has(1))
    b.lens("tail", -0.5, y + 0.02, 0.24, 0.09, "second", angle=0.3)
    b.arc("neck", 0.3, y + 0.2, 0.2, 0.075, 1.6, angle=-2.6)
    b.arc("neck", 0.52, y + 0.54, 0.2, 0.07, 1.7, angle=0.6)
    b.line("neck", 0.44, y + 0.12, 0.36, y + 0.52, 0.07)
    b.ellipse("body", -0.08, y + 0.06, b.u(0.4, 0.48), 0.24, angle=0.15)
    b.ellipse("head", 0.66, y + 0.5, 0.14, 0.13)
    b.lens("beak", 0.78, y + 0.36, 0.2, 0.06, "dark", angle=-1.0)
    b.lens("wing", -0.16, y + 0.08, 0.36, 0.13, "second", angle=0.2)
    _eye(b, 0.68, y + 0.54, 0.045)


def owl(b: Builder) -> None:
    """Upright egg with two big round eyes, ear tufts, folded wings, one to four spots on the belly."""
    w, h = b.u(0.48, 0.56), b.u(0.72, 0.78)
    for side in (-1, 1):
        b.box("ear", 0.3 * side, 0.68, 0.14, 0.2, "second", taper=1, angle=-0.35 * side, round=0.1)
        b.ellipse("leg", 0.17 * side, -0.94, 0.13, 0.07, "dark")
    b.ellipse("body", 0, -0.12, w, h)
    b.ellipse("body", 0, -0.4, w * 0.62, h * 0.5, "pale", shade=0.5)
    for side in (-1, 1):
        b.lens("wing", w * side * 0.9, -0.24, 0.48, 0.16, "second", angle=1.57 - 0.16 * side)
        b.ellipse("eye", 0.21 * side, 0.28, 0.21, 0.21, "white", shade=0.3)
        b.ellipse("eye", 0.18 * side, 0.28, 0.11, 0.11, "black", shade=0)
    b.box("beak", 0, 0.1, 0.09, 0.13, "dark", taper=-1, round=0.1)
    for i in range(4):
        b.lens("spot", b.place(i) * 0.26, -0.4, 0.045, 0.09, "dark", angle=0, show=b.has(i))


def fish(b: Builder) -> None:
    """Lens with a forked tail and one to three fins."""
    h = b.u(0.36, 0.46)
    b.box("tail", -0.76, -0.3, 0.36, 0.22, "second", taper=1, angle=-np.pi / 2, round=0.1)
    b.box("fin", 0.0, -0.3 + h, 0.26, 0.15, "second", taper=0.5, skew=-0.5, round=0.2)
    b.box("fin", -0.04, -0.32 - h, 0.18, 0.13, "second", taper=-0.5, skew=0.5, round=0.2, show=b.has(1))
    b.lens("body", 0.14, -0.3, 0.82, h)
    b.arc("body", 0.2, -0.3, 0.3, 0.02, 0.8, "dark", angle=-np.pi / 2, shade=0)
    b.lens("fin", -0.02, -0.38, 0.2, 0.09, "second", angle=0.4, show=b.has(2))
    _eye(b, 0.62, -0.22, 0.08)


def crab(b: Builder) -> None:
    """Flat body, two claws, eyes on stalks, four, six or eight legs."""
    h = b.u(0.26, 0.34)
    for side in (-1, 1):
        for i in range(4):
            knee, y = 0.62 + 0.1 * i, -0.3 - 0.1 * i
            show = b.has(2 * i)
            b.line("leg", 0.3 * side, -0.5, knee * side, y, 0.045, "second", show=show)
            b.line("leg", knee * side, y, (knee + 0.12) * side, y - 0.42 + 0.08 * i, 0.04, "second", show=show)
        b.line("arm", 0.4 * side, -0.35, 0.72 * side, 0.02, 0.07, "second")
        b.arc("claw", 0.7 * side, 0.24, 0.16, 0.08, 2.3, angle=b.u(0.1, 0.6) * side)
        b.line("eye", 0.16 * side, -0.3, 0.2 * side, 0.06, 0.035, "second")
    b.ellipse("body", 0, -0.46, b.u(0.5, 0.6), h)
    for side in (-1, 1):
        _eye(b, 0.2 * side, 0.1, 0.09)
    b.arc("body", 0, -0.44, 0.2, 0.02, 0.7, "dark", angle=np.pi, shade=0)


def octopus(b: Builder) -> None:
    """Round head over four to seven curling arms."""
    r, y = b.u(0.44, 0.52), b.u(0.3, 0.4)
    for i in range(7):
        x = b.place(i) * 0.72
        b.line("arm", x * 0.4, -0.1, x, -0.6, 0.1, show=b.has(i))
        b.arc(
            "arm", x + 0.13 * np.sign(x + 1e-3), -0.66, 0.15, 0.08, 1.3, angle=np.pi - 0.3 * np.sign(x), show=b.has(i)
        )
    b.ellipse("head", 0, y, r, r * b.u(1.05, 1.25))
    b.box("head", 0, -0.06, r * 0.8, 0.24, round=0.6)
    for side in (-1, 1):
        _eye(b, 0.17 * side, y - 0.14, 0.12)
    b.ellipse("spot", -0.2, y + 0.3, 0.09, 0.07, "second")
    b.ellipse("spot", 0.14, y + 0.34, 0.06, 0.05, "second")
