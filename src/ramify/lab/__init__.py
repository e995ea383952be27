"""Superposition lab: why loss falls as one over width. Toy-model sweeps, metrics, theory and fits.

``sweep("smoke", "runs/lab")`` trains a grid and writes its tables, ``fit`` gives the exponents, ``plot`` the figures,
``overlap`` the statistics of a real head, :mod:`ramify.lab.theory` what to expect. Nothing heavy is imported before
it is used.
"""

from __future__ import annotations

from typing import Any

_WHERE = {
    "Grid": "ramify.lab.grid",
    "Model": "ramify.lab.grid",
    "PRESETS": "ramify.lab.presets",
    "preset": "ramify.lab.presets",
    "frequencies": "ramify.lab.frequencies",
    "Engine": "ramify.lab.engine",
    "sweep": "ramify.lab.runner",
    "fit": "ramify.lab.fits",
    "fit_power": "ramify.lab.fits",
    "fit_shared": "ramify.lab.shared_exponent",
    "measure": "ramify.lab.metrics",
    "overlap": "ramify.lab.head_overlap",
    "plot": "ramify.lab.drawing",
    "read_runs": "ramify.lab.table",
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


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
