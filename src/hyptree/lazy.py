"""Rooms that import nothing until a name is asked for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from hyptree.errors import suggest


def lazy(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose public names are imported on first use.

    Which name lives where is said once, by the imports below ``if TYPE_CHECKING:`` in the package's own file: a type
    checker follows them, and they are read here.

    Args:
        package: its ``__name__``.
        file: its ``__file__``.
    """
    blocks = [node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        hint = "" if name.startswith("_") else suggest(name, homes)
        raise AttributeError(f"module {package!r} has no attribute {name!r}" + (f"; {hint}" if hint else ""))

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
