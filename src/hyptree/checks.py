"""Checks of numbers in settings, by the names of their fields; what is None was not given and passes."""

from __future__ import annotations

import math
from typing import Any


def require_positive(settings: Any, *names: str, flag: str = "") -> None:
    """Raise unless each is a positive number. ``flag`` is ``--`` where people know the fields as flags."""
    _require(settings, names, flag, lambda value: value > 0 and math.isfinite(value), "a positive number")


def require_at_least(least: int, settings: Any, *names: str, flag: str = "") -> None:
    """Raise unless each is as large as that."""
    _require(settings, names, flag, lambda value: value >= least, f"at least {least}")


def require_seed(settings: Any, flag: str = "") -> None:
    """Raise unless ``seed`` is one that every generator takes."""
    _require(settings, ("seed",), flag, lambda value: 0 <= value < 2**31, "from 0 to 2^31 - 1")


def _require(settings: Any, names: tuple[str, ...], flag: str, is_fine: Any, wanted: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not is_fine(value):
            shown = flag + (name.replace("_", "-") if flag else name)
            raise ValueError(f"{shown} must be {wanted}, got {value}")
