"""Figures: what is in them is in their CSV and says what runs and theory say; no data, no figure."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.cli import main
from ramify.errors import UserError
from ramify.lab.figures import FIGURES, means, to_rows
from ramify.lab.fits import fit_runs
from ramify.lab.frequencies import frequencies
from ramify.lab.grid import Grid
from ramify.lab.runner import sweep
from ramify.lab.table import COLUMNS
from ramify.lab.theory import finite_exponent, strong_exponent, welch_bound

WIDTHS = (4, 8, 16)


def run(m: int, alpha: float, gamma: float, density: float = 1.0, **changes: Any) -> dict[str, Any]:
    is_strong = gamma < 0
    row: dict[str, Any] = dict.fromkeys(COLUMNS, 0.5)
    row |= {"part": "a", "n": 100, "m": m, "dist": "power", "alpha": alpha, "gamma": gamma, "density": density}
    row |= {"seed": 0, "steps": 9, "batch": 7, "diverged": False, "regime": "strong" if is_strong else "weak"}
    row |= {"loss_eval": density / m, "phi_half": 1.0 if is_strong else m / 100, "loss_unlearned": 0.9 / m}
    return row | changes


RUNS = [run(m, alpha, gamma) for gamma in (-1.0, 0.2) for alpha in (1.0, 2.0) for m in WIDTHS]


def points(figure: str, rows: list[dict[str, Any]], panel: str, series: str) -> dict[float, float]:
    panels = FIGURES[figure](rows, fit_runs(rows), np.ones((len(rows), 100)))
    found = [row for row in to_rows(panels) if row["panel"] == panel and row["series"] == series]
    assert found, sorted({(row["panel"], row["series"]) for row in to_rows(panels)})
    return {row["x"]: row["y"] for row in found}


def test_losses_by_side_and_data() -> None:
    expected = {4: 1 / 4, 8: 1 / 8, 16: 1 / 16}
    assert points("loss", RUNS, "loss against width, growth, γ = -1", "α = 2 (strong)") == expected
    assert points("loss", RUNS, "loss against width, decay, γ = 0.2", "α = 1 (weak)") == expected


def test_represented_features_by_decay() -> None:
    assert points("represented", RUNS, "represented features by decay", "n = 100, m = 8") == {-1.0: 1.0, 0.2: 0.08}
    assert points("represented", RUNS, "represented features", "0.2") == pytest.approx(
        dict.fromkeys((1.0, 2.0), 28 / 300)
    )


def test_exponents_with_theory_beside() -> None:
    found = points("strong", RUNS, "exponent of strong models", "γ = -1")
    assert found == pytest.approx({1.0: 1.0, 2.0: 1.0})
    theory = points("strong", RUNS, "exponent of strong models", "max(1, 2α - 2)")
    assert theory == {alpha: strong_exponent(alpha) for alpha in theory} and {1.0, 1.5, 2.0} <= set(theory)
    weak = points("weak", RUNS, "exponent of weak models", "α - 1")
    assert (weak[1.0], weak[2.0]) == (0.0, 1.0)
    finite = points("weak", RUNS, "exponent of weak models", "theory, n = 100")
    assert finite == {alpha: finite_exponent(frequencies(100, alpha), WIDTHS) for alpha in (1.0, 2.0)}
    assert points("exponents", RUNS, "exponent", "-1") == pytest.approx({1.0: 1.0, 2.0: 1.0})


def test_weak_losses_against_theory() -> None:
    found = points("weak", RUNS, "loss of weak models and of what they drop", "α = 1")
    assert found == pytest.approx({0.9 / m: 1 / m for m in WIDTHS})


def test_strong_panels() -> None:
    bound = points("strong", RUNS, "overlap of features with a norm above one", "least possible, n = 100")
    assert bound == pytest.approx(
        {4: welch_bound(8, 4) ** 2, 8: welch_bound(32, 8) ** 2, 16: welch_bound(100, 16) ** 2}
    )
    share = points("strong", RUNS, "features with a norm above one", "m² / 2n, n = 100")
    assert share == pytest.approx({4: 0.08, 8: 0.32, 16: 1.0})
    norms = points("strong", RUNS, "norms of features, strongest growth", "α = 1")
    assert sum(norms.values()) == pytest.approx(1) and max(norms, key=norms.__getitem__) == pytest.approx(1, abs=0.02)


def test_density_figure_needs_two_densities() -> None:
    assert FIGURES["density"](RUNS, fit_runs(RUNS), np.empty((0, 0))) == []
    rows = [run(m, 1.0, -1.0, density) for m in WIDTHS for density in (1.0, 3.0)]
    assert points("density", rows, "loss by density, growth, γ = -1", "m = 8") == {1.0: 1 / 8, 3.0: 3 / 8}
    assert points("density", rows, "loss against width, growth, γ = -1", "E = 3")[16] == 3 / 16
    found = points("density", rows, "exponent by density", "α = 1 (γ = -1, strong)")
    assert found == pytest.approx({1.0: 1.0, 3.0: 1.0})


def test_diverged_models_are_not_drawn() -> None:
    rows = [run(4, 1.0, -1.0), run(4, 1.0, -1.0, diverged=True, loss_eval=1e9), run(8, 1.0, -1.0, loss_eval=math.nan)]
    assert means(rows, "m", "loss_eval") == ([4], [0.25])


def test_files_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    grid = Grid(n=40, m=(3, 5, 8), alpha=(0.0, 2.0), gamma=(-1.0,), batch=32, steps=60, lr=0.05, bias_init="zero")
    other = Grid(name="line", n=20, m=(3, 5), dist="linear", gamma=(-1.0,), batch=32, steps=20, eval_samples=64)
    rows = sweep([grid, other], tmp_path)
    assert main(["lab", "plot", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "no figure density: the sweep has no data for it" in captured.err
    for name in ("loss", "strong", "exponents"):
        png, svg, table = (tmp_path / "figures" / f"{name}.{kind}" for kind in ("png", "svg", "csv"))
        assert str(png) in captured.out
        assert png.read_bytes().startswith(b"\x89PNG") and "<svg" in svg.read_text(encoding="utf-8")
        with table.open(encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) >= 3
    with (tmp_path / "figures" / "loss.csv").open(encoding="utf-8") as file:
        found = {float(row["x"]): float(row["y"]) for row in csv.DictReader(file) if row["series"].startswith("α = 2")}
    assert found == {row["m"]: row["loss_eval"] for row in rows if row["alpha"] == 2}


def test_unknown_figures_are_one_line(tmp_path: Path) -> None:
    from ramify.lab.drawing import plot

    with pytest.raises(UserError, match=r"unknown figure 'weke'; did you mean 'weak'\?"):
        plot(tmp_path, ["weke"])
