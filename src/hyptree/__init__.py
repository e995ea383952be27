"""Hierarchy in deep learning: find it, learn it in hyperbolic space, use it, show it.

``import hyptree`` costs a few milliseconds and loads no torch: each part (``hyptree.geometry``, ``hyptree.tree``, ...)
is imported the first time it is touched.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

# Functions and classes offered at the top, by the module they live in.
_SHORTCUTS: dict[str, str] = {"explain": "hyptree.explore.explanation"}


def _parts() -> list[str]:
    """Names of the public submodules that exist, read from the package's folder so that no list can go stale."""
    import pkgutil

    return [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]


def __getattr__(name: str) -> Any:
    # Dunder and private names are asked for by inspect, pickle and doctest all the time: answer without a file search.
    if not name.startswith("_"):
        from importlib import import_module

        if name in _SHORTCUTS:
            return getattr(import_module(_SHORTCUTS[name]), name)
        if name in _parts():
            return import_module(f"{__name__}.{name}")

    from hyptree.errors import suggest

    hint = suggest(name, __dir__())
    raise AttributeError(f"module 'hyptree' has no attribute {name!r}" + (f"; {hint}" if hint else ""))


def __dir__() -> list[str]:
    return sorted({"__version__", *_SHORTCUTS, *_parts()})
