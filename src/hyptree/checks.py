"""One check of numbers in settings, by the names of their fields."""

from __future__ import annotations

import math
import sys
from typing import Any

_RANGES = {
    "a positive number": (sys.float_info.min, sys.float_info.max),
    "at least 0": (0, math.inf),
    "at least 1": (1, math.inf),
    "from 0 to 2^31 - 1": (0, 2**31 - 1),  # what every generator takes for a seed
}


def require_numbers(settings: Any, wanted: str, *names: str, flag: str = "") -> None:
    """Raise unless each field is a number as ``wanted``; None was not given and passes.

    Args:
        wanted: in words, one of those above.
        flag: ``--`` where people know the fields as flags.
    """
    least, most = _RANGES[wanted]
    for name in names:
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            shown = flag + (name.replace("_", "-") if flag else name)
            raise ValueError(f"{shown} must be {wanted}, got {value}")
