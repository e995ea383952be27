"""Training: recipes, the loop, checkpoints. Nothing heavy is imported before it is used.

``fit(recipe, out)`` trains, ``load_model(run)`` gives the best model of a run, ``Recipe`` says what a run is.
"""

from __future__ import annotations

from typing import Any

_WHERE = {
    "Recipe": "ramify.train.recipe",
    "fit": "ramify.train.loop",
    "load_model": "ramify.train.evaluate",
    "evaluate_run": "ramify.train.evaluate",
}

__all__ = ["Recipe", "evaluate_run", "fit", "load_model"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
