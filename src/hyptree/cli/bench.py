"""``hyptree bench``: how fast and how right the library is, beside its rivals.

The benchmarks lie beside the package in a checkout and not in the wheel, since they compare with other libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyptree.errors import UserError


def _checkout() -> Path:
    """The checkout that this package is imported from, else the one around the current folder."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "benchmarks" / "command.py").is_file():
            return root
    raise UserError("the benchmarks are not installed with the package: clone the repository, run hyptree bench there")


def _subverbs() -> dict[str, Callable[[Any], int]]:
    root = str(_checkout())
    if root not in sys.path:
        sys.path.insert(0, root)
    from benchmarks.command import SUBVERBS

    return SUBVERBS


SUBVERBS = _subverbs()
