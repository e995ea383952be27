"""What drawings share: colours, the font, names that can be read, the two axes on which directions are seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from hyptree.data.pictures.single import data_url

# Distinct hues of similar weight on white, also for most readers who see red and green alike.
PALETTE = ("#3b6fb6", "#d9772b", "#2f9171", "#b0467f", "#7a5fc0", "#a8872a", "#2c97b3", "#c24b42")
NEUTRAL = "#4a5160"
INK, SOFT, RIM, INSIDE, FLOOR = "#1c2030", "#5a6172", "#c3c8d4", "#f7f8fb", "#e7eaf1"

_ENDS = ((49, 87, 201), (24, 121, 78), (194, 130, 12), (160, 50, 120))
"""Colours of four levels, general first; other numbers of levels are mixed from them."""

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
HALO = 'stroke="white" stroke-width="3.5" stroke-linejoin="round" paint-order="stroke"'
"""White around letters, so that lines below do not cross them."""


def read_beside(module: str, name: str) -> str:
    """The text of a style sheet or a script that lies beside a module, of which ``module`` is the file."""
    return Path(module).with_name(name).read_text(encoding="utf-8")


def tag(kind: str, *inside: str, **attributes: object) -> str:
    """An SVG element; what stands inside is trusted as it is, attributes are escaped.

    Args:
        attributes: ``stroke_width=2.0`` is written as ``stroke-width="2"``, ``class_`` as ``class``; None is left out.
    """
    shown = "".join(f' {k.rstrip("_").replace("_", "-")}="{_value(v)}"' for k, v in attributes.items() if v is not None)
    return f"<{kind}{shown}>{''.join(inside)}</{kind}>" if inside else f"<{kind}{shown}/>"


def _value(value: object) -> str:
    """A text as it is, a number with two digits at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value), quote=True)


def hint(text: str) -> str:
    """What an SVG element says when one points at it."""
    return f"<title>{escape(text)}</title>"


def img(picture: np.ndarray, alt: str, quality: int = 90, **attributes: str) -> str:
    """An ``<img>`` with the picture inside it."""
    return tag("img", **attributes, alt=alt, src=data_url(picture, quality))


def hex_colour(rgb: Iterable[float]) -> str:
    """Red, green and blue up to 255, as CSS writes them."""
    return "#" + "".join(f"{round(float(value)):02x}" for value in rgb)


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two boxes (left, low, right, high) have points in common."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def level_colours(num_levels: int) -> list[str]:
    """A colour for each level, general first."""
    at = np.linspace(0, len(_ENDS) - 1, num_levels) if num_levels > 1 else np.zeros(1)
    mixed = [[np.interp(x, range(len(_ENDS)), [end[k] for end in _ENDS]) for k in range(3)] for x in at]
    return [hex_colour(colour) for colour in mixed]
