"""Training: recipes, the loop, checkpoints. Nothing heavy is imported before it is used.

``fit(recipe, out)`` trains, ``load_model(run)`` gives the best model of a run, ``Recipe`` says what a run is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyptree.lazy import lazy

if TYPE_CHECKING:
    from hyptree.train.evaluate import evaluate_run, load_model
    from hyptree.train.loop import fit
    from hyptree.train.run.recipe import Recipe

__all__ = ["Recipe", "evaluate_run", "fit", "load_model"]

__getattr__, __dir__ = lazy(__name__, __file__)
