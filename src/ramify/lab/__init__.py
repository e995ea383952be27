"""Superposition lab: why loss falls as one over width. Toy-model sweeps, metrics, theory and fits.

``sweep("smoke", "runs/lab")`` trains a grid and writes its tables, ``fit`` gives the exponents, ``plot`` the figures,
``overlap`` the statistics of a real head, :mod:`ramify.lab.theory` what to expect. Nothing heavy is imported before
it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.lazy import lazy

if TYPE_CHECKING:
    from ramify.lab.drawing import plot
    from ramify.lab.engine import Engine
    from ramify.lab.fits import fit, fit_power
    from ramify.lab.frequencies import frequencies
    from ramify.lab.grid import Grid, Model
    from ramify.lab.head_overlap import overlap
    from ramify.lab.metrics import measure
    from ramify.lab.presets import PRESETS, preset
    from ramify.lab.runner import sweep
    from ramify.lab.shared_exponent import fit_shared
    from ramify.lab.table import read_runs

_HOMES = {
    "Engine": "engine",
    "Grid": "grid",
    "Model": "grid",
    "PRESETS": "presets",
    "fit": "fits",
    "fit_power": "fits",
    "fit_shared": "shared_exponent",
    "frequencies": "frequencies",
    "measure": "metrics",
    "overlap": "head_overlap",
    "plot": "drawing",
    "preset": "presets",
    "read_runs": "table",
    "sweep": "runner",
}

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

__getattr__, __dir__ = lazy(__name__, _HOMES)
