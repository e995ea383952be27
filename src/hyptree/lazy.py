"""Rooms that import nothing until a name is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hyptree.errors import suggest


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose public names are imported on first use.

    Args:
        package: its ``__name__``.
        homes: public names by the module of the package that each lives in.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        hint = "" if name.startswith("_") else suggest(name, homes)
        raise AttributeError(f"module {package!r} has no attribute {name!r}" + (f"; {hint}" if hint else ""))

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
