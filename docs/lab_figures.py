"""Makes the pictures of docs/lab.md: ``python docs/lab_figures.py FOLDER...`` of ``--preset paper-grid``."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from hyptree.lab.figures.drawing import write_figure
from hyptree.lab.figures.sweep_figures import FIGURES
from hyptree.lab.fits import fit_runs
from hyptree.lab.sweeps.run_table import read_runs

FOLDER = Path(__file__).parent / "img"
PICTURES = {
    "lab_maps": ("represented features", "exponent"),
    "lab_exponents": ("exponent of weak models", "exponent of strong models"),
    "lab_published": ("exponent, ours against published",),
}
"""Name of a picture, and the titles of its panels."""


def main(*folders: str) -> None:
    rows = [row for folder in folders for row in read_runs(folder)]
    fits = fit_runs(rows)
    found = {
        panel.title: panel
        for name in ("represented", "exponents", "weak", "strong", "published")
        for panel in FIGURES[name](rows, fits, np.empty((0, 0)))
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, titles in PICTURES.items():
            png, *_ = write_figure(Path(folder) / name, [found[title] for title in titles])
            shutil.copyfile(png, FOLDER / png.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
