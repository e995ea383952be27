"""Superposition lab: why loss falls as one over width. Toy-model sweeps, metrics, theory and fits.

``sweep("smoke", "runs/lab")`` trains a grid and writes its tables, ``fit`` gives the exponents, ``plot`` the figures,
``overlap`` the statistics of a real head, :mod:`hyptree.lab.theory` what to expect. Nothing heavy is imported before
it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyptree.lazy import lazy

if TYPE_CHECKING:
    from hyptree.lab.engine import Engine
    from hyptree.lab.figures.drawing import plot
    from hyptree.lab.fits import fit, fit_power
    from hyptree.lab.lm_heads.overlap import overlap
    from hyptree.lab.metrics import measure
    from hyptree.lab.shared_exponent import fit_shared
    from hyptree.lab.sweeps.grid import PRESETS, Grid, Model, preset
    from hyptree.lab.sweeps.run_table import read_runs
    from hyptree.lab.sweeps.runner import sweep
    from hyptree.lab.theory import frequencies

__all__ = [
    "PRESETS",
    "Engine",
    "Grid",
    "Model",
    "fit",
    "fit_power",
    "fit_shared",
    "frequencies",
    "measure",
    "overlap",
    "plot",
    "preset",
    "read_runs",
    "sweep",
]

__getattr__, __dir__ = lazy(__name__, __file__)
