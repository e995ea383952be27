"""Figures: what is in them is in their CSV and says what runs and theory say; no data, no figure."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.lab.figures.drawing import _draw_lines, plot
from hyptree.lab.figures.lm_head_figures import model_losses
from hyptree.lab.figures.panels import Panel, Series, means, to_rows
from hyptree.lab.figures.sweep_figures import FIGURES
from hyptree.lab.fits import fit_runs
from hyptree.lab.shared_exponent import SharedFit
from hyptree.lab.sweeps.grid import Grid
from hyptree.lab.sweeps.run_table import COLUMNS
from hyptree.lab.sweeps.runner import sweep
from hyptree.lab.theory import (
    curved_floor,
    finite_exponent,
    frequencies,
    matched_curvature,
    strong_exponent,
    welch_bound,
)
from hyptree.tables import to_csv

WIDTHS = (4, 8, 16)


def run(m: int, alpha: float, gamma: float, density: float = 1.0, **changes: Any) -> dict[str, Any]:
    is_strong = gamma < 0
    row: dict[str, Any] = dict.fromkeys(COLUMNS, 0.5)
    row |= {"part": "a", "n": 100, "m": m, "dist": "power", "alpha": alpha, "gamma": gamma, "density": density}
    row |= {"seed": 0, "steps": 9, "batch": 7, "diverged": False, "regime": "strong" if is_strong else "weak"}
    row |= {
        "curvature": 0.0,
        "loss_eval": density / m,
        "phi_half": 1.0 if is_strong else m / 100,
        "loss_unlearned": 0.9 / m,
    }
    return row | changes


RUNS = [run(m, alpha, gamma) for gamma in (-1.0, 0.2) for alpha in (1.0, 2.0) for m in WIDTHS]


def points(figure: str, rows: list[dict[str, Any]], panel: str, series: str) -> dict[float, float]:
    panels = FIGURES[figure](rows, fit_runs(rows), np.ones((len(rows), 100)))
    actual = [row for row in to_rows(panels) if row["panel"] == panel and row["series"] == series]
    assert actual, sorted({(row["panel"], row["series"]) for row in to_rows(panels)})
    return {row["x"]: row["y"] for row in actual}


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
    actual = points("strong", RUNS, "exponent of strong models", "γ = -1")
    assert actual == pytest.approx({1.0: 1.0, 2.0: 1.0})
    theory = points("strong", RUNS, "exponent of strong models", "max(1, 2α - 2)")
    assert theory == {alpha: strong_exponent(alpha) for alpha in theory} and {1.0, 1.5, 2.0} <= set(theory)
    weak = points("weak", RUNS, "exponent of weak models", "α - 1")
    assert (weak[1.0], weak[2.0]) == (0.0, 1.0)
    finite = points("weak", RUNS, "exponent of weak models", "theory, n = 100")
    assert finite == {alpha: finite_exponent(frequencies(100, alpha), WIDTHS) for alpha in (1.0, 2.0)}
    assert points("exponents", RUNS, "exponent", "-1") == pytest.approx({1.0: 1.0, 2.0: 1.0})


def test_weak_losses_against_theory() -> None:
    actual = points("weak", RUNS, "loss of weak models and of what they drop", "α = 1")
    assert actual == pytest.approx({0.9 / m: 1 / m for m in WIDTHS})


def test_strong_panels() -> None:
    bound = points(
        "strong", RUNS, "overlap of features with a norm above one", "least possible for min(n, m²/2) rows, n = 100"
    )
    assert bound == pytest.approx(
        {4: welch_bound(8, 4) ** 2, 8: welch_bound(32, 8) ** 2, 16: welch_bound(100, 16) ** 2}
    )
    share = points("strong", RUNS, "features with a norm above one", "m² / 2n, n = 100")
    assert share == pytest.approx({4: 0.08, 8: 0.32, 16: 1.0})
    norms = points("strong", RUNS, "norms of features, strongest growth", "α = 1")
    assert sum(norms.values()) == pytest.approx(1) and max(norms, key=norms.__getitem__) == pytest.approx(1, abs=0.02)


def test_points_without_features_above_one_are_counted() -> None:
    """At m = 4 no seed has such a feature, at m = 8 one of two has; a mean counts the zero of the other."""
    rows = [
        run(m, 1.0, gamma, seed=seed, phi_one=phi, mso_strong=1 / m if phi else math.nan)
        for gamma in (-1.0, -0.5)
        for m, shares in zip(WIDTHS, ((0.0, 0.0), (0.0, 0.2), (0.4, 0.6)), strict=True)
        for seed, phi in enumerate(shares)
    ]
    panels = {panel.title: panel for panel in FIGURES["strong"](rows, fit_runs(rows), np.empty((0, 0)))}
    share, overlap = panels["features with a norm above one"], panels["overlap of features with a norm above one"]
    assert (share.series[0].x, share.series[0].y) == ([8, 16], [0.1, 0.5])
    assert (overlap.series[0].x, overlap.series[0].y) == ([8, 16], [1 / 8, 1 / 16])
    assert share.note == "means over γ; 1 point with no norm above one not drawn"
    assert overlap.note == "means over γ; 1 point with fewer than two norms above one not drawn"
    whole = FIGURES["strong"](RUNS, fit_runs(RUNS), np.empty((0, 0)))
    assert {panel.note for panel in whole} == {""}


def test_density_figure_needs_two_densities() -> None:
    assert FIGURES["density"](RUNS, fit_runs(RUNS), np.empty((0, 0))) == []
    rows = [run(m, 1.0, -1.0, density) for m in WIDTHS for density in (1.0, 3.0)]
    assert points("density", rows, "loss by density, growth, γ = -1", "m = 8") == {1.0: 1 / 8, 3.0: 3 / 8}
    assert points("density", rows, "loss against width, growth, γ = -1", "E = 3")[16] == 3 / 16
    actual = points("density", rows, "exponent by density", "α = 1 (γ = -1, strong)")
    assert actual == pytest.approx({1.0: 1.0, 3.0: 1.0})


def test_curved_models_beside_flat_ones(tmp_path: Path) -> None:
    """Losses fall as m^-1.5 at c = 1 and as m^-1 at c = 0, and the fits say so; flat figures show flat models only."""
    rows = [
        run(
            m,
            1.0,
            -1.0,
            curvature=c,
            loss_eval=(2 if c else 4) * m ** -(1.5 if c else 1.0),
            mso_positive=(1 - c / 2) / m,
        )
        for m in WIDTHS
        for c in (0.0, 1.0)
    ]
    assert FIGURES["curvature"](RUNS, fit_runs(RUNS), np.empty((0, 0))) == []
    name = "α = 1 (a)"
    assert points("curvature", rows, "exponent less that of the same models flat", name) == pytest.approx({1.0: 0.5})
    ratio = math.exp(np.mean([math.log(0.5 * m**-0.5) for m in WIDTHS]))
    assert points("curvature", rows, "loss as a multiple of the same models flat", name) == pytest.approx({1.0: ratio})
    assert points("curvature", rows, "a: α = 1 (γ = -1)", "c = 1") == {m: 2 * m**-1.5 for m in WIDTHS}
    assert points("curvature", rows, "best curvature of those tried", name) == dict.fromkeys(WIDTHS, 1.0)
    matched = points("curvature", rows, "best curvature of those tried", "threshold = 1/√m")
    assert matched == {m: matched_curvature(m) for m in WIDTHS}
    assert points("curvature", rows, f"overlaps that pass: {name}", "c = 1") == pytest.approx(
        dict.fromkeys(WIDTHS, 0.5)
    )
    pytest.importorskip("matplotlib")
    (tmp_path / "runs.csv").write_text(to_csv(rows))
    assert len(plot(tmp_path, ["loss", "curvature"])["curvature"]) == 3
    with (tmp_path / "figures" / "loss.csv").open(encoding="utf-8") as file:
        assert {float(row["x"]): float(row["y"]) for row in csv.DictReader(file)} == {m: 4 / m for m in WIDTHS}


def test_settings_of_curved_models_are_told_apart() -> None:
    """Names carry what a part has several of, and panels say how many settings they leave out."""
    rows = [
        run(m, 1.0, gamma, density, part=part, curvature=c, loss_eval=(1 + c) * density / m ** (1 + c / 8))
        for part, gammas, densities in (("a", (-1.0, -0.5), (1.0, 3.0)), ("b", (-1.0,), (1.0,)))
        for gamma in gammas
        for density in densities
        for c in (0.0, 1.0)
        for m in WIDTHS
    ]
    panels = {panel.title: panel for panel in FIGURES["curvature"](rows, fit_runs(rows), np.empty((0, 0)))}
    message = [f"α = 1 (a, γ = {gamma}, E = {density})" for density in (1, 3) for gamma in (-1, -0.5)]
    for title in ("exponent less that of the same models flat", "loss as a multiple of the same models flat"):
        assert [series.name for series in panels[title].series][:5] == [*message, "α = 1 (b)"]
    best = [series.name for series in panels["best curvature of those tried"].series]
    assert sorted(best) == sorted([*message, "α = 1 (b)", "threshold = 1/√m"])
    losses = {title: panel.note for title, panel in panels.items() if title.startswith(("a: ", "b: "))}
    left_out = "3 of the 4 settings of a are drawn"
    assert losses == {
        "a: α = 1 (γ = -1)": left_out,
        "a: α = 1 (γ = -1, E = 3)": left_out,
        "a: α = 1 (γ = -0.5, E = 3)": left_out,
        "b: α = 1 (γ = -1)": "",
    }
    passing = panels["overlaps that pass: α = 1 (a, γ = -1, E = 1)"]
    assert passing.note == "1 of the 3 settings with γ = -1 is drawn"
    assert {row["note"] for row in to_rows([passing])} == {passing.note}


def test_a_floor_is_drawn_where_it_lies_among_the_losses() -> None:
    floor = curved_floor(frequencies(100, 2.0), 1.0)[0]
    rows = [run(m, 2.0, -1.0, curvature=c, loss_eval=floor * (m / 5)) for m in WIDTHS for c in (0.0, 1.0)]
    actual = points("curvature", rows, "a: α = 2 (γ = -1)", "floor, c = 1")
    assert actual == {4: floor, 16: floor}
    above = [{**row, "loss_eval": 100 * row["loss_eval"]} for row in rows]
    panels = FIGURES["curvature"](above, fit_runs(above), np.empty((0, 0)))
    assert not any("floor" in row["series"] for row in to_rows(panels))


def test_names_of_widths_have_room() -> None:
    from hyptree.lab.figures.drawing import _apart

    assert _apart([5, 8, 12, 18, 19, 28, 31, 44, 50], "{:g}".format) == [5, 8, 12, 18, 28, 44]
    assert _apart([7], "{:g}".format) == [7]


@pytest.mark.parametrize(("num", "output"), [(40, []), (41, ["41 series; their names are in the CSV"])])
def test_series_without_a_legend_are_counted(num: int, output: list[str]) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    ax = figures.Figure().subplots()
    _draw_lines(ax.figure, ax, Panel("", "c", "loss", [Series(f"{k}", [1, 2], [k, k]) for k in range(num)]))
    assert [text.get_text() for text in ax.texts] == output
    assert (ax.get_legend() is None) == bool(output)


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
        actual = {float(row["x"]): float(row["y"]) for row in csv.DictReader(file) if row["series"].startswith("α = 2")}
    assert actual == {row["m"]: row["loss_eval"] for row in rows if row["alpha"] == 2}


def test_losses_of_language_models_with_their_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    offsets = {("A", "x"): 2.0, ("B", "x"): 1.5, ("B", "y"): 1.0}
    lines = ["model,family,dataset,m,loss"]
    lines += [f"{f}{m},{f},{d},{m},{300 * m**-0.9 + b!r}" for (f, d), b in offsets.items() for m in (64, 128, 256, 512)]
    (tmp_path / "losses.csv").write_text("\n".join(lines))
    table, out = str(tmp_path / "losses.csv"), tmp_path / "fig" / "llm.svg"
    assert main(["lab", "llm-fit", table, "--draws", "3", "--plot", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [str(out.with_suffix(end)) for end in (".png", ".svg", ".csv")]
    with out.with_suffix(".csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for (family, dataset), offset in offsets.items():
        of = {row["panel"]: row for row in rows if row["series"] == f"{family}, {dataset}" and row["x"] == "128.0"}
        assert float(of["loss against width"]["y"]) == pytest.approx(300 * 128**-0.9 + offset)
        assert float(of["loss above the offset of its family and dataset"]["y"]) == pytest.approx(
            300 * 128**-0.9, rel=1e-4
        )
    curve = {float(row["x"]): float(row["y"]) for row in rows if row["series"] == "300 m^-0.900"}
    assert len(curve) == 30 and all(y == pytest.approx(300 * m**-0.9, rel=1e-4) for m, y in curve.items())


def test_what_points_are_means_over_and_what_is_not_drawn_is_noted() -> None:
    rows = RUNS + [{**row, "density": 2.0, "seed": 1} for row in RUNS if row["alpha"] == 1.0]
    titles = {
        "represented": {
            "represented features by decay": "means over α and E",
            "represented features": "means over m and E",
        },
        "density": {
            "loss by density, growth, γ = -1": "means over α",
            "loss against width, decay, γ = 0.2": "means over α",
        },
    }
    for figure, notes in titles.items():
        panels = {panel.title: panel.note for panel in FIGURES[figure](rows, fit_runs(rows), np.empty((0, 0)))}
        assert {title: panels[title] for title in notes} == notes
    alike = [{**row, "seed": seed} for row in RUNS if row["alpha"] == 1.0 for seed in range(2)]
    assert FIGURES["represented"](alike, fit_runs(alike), np.empty((0, 0)))[0].note == ""  # starts are no setting
    losses = [
        {"model": str(m), "family": "A", "dataset": "x", "m": m, "loss": loss} for m, loss in ((8, 3.0), (16, 1.0))
    ]
    fit = SharedFit(1.0, 0.1, 1.0, {("A", "x"): 2.0}, 0.1, 0.9, 1.1, 2)
    assert [panel.note for panel in model_losses(losses, fit)] == ["", "1 point below the offset not drawn"]


def test_an_error_that_is_missing_is_not_drawn() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    ax = figure.add_subplot()
    _draw_lines(figure, ax, Panel("t", "x", "y", [Series("s", [1, 2], [1.0, 2.0], error=[math.nan, 0.1])]))
    ((_, caps, bars),) = ax.containers
    assert [np.isfinite(np.asarray(cap.get_ydata(), float)).tolist() for cap in caps] == [[False, True]] * 2
    assert [len(segment) for segment in bars[0].get_segments()] == [0, 2]


def test_norms_that_are_not_there_are_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "runs.csv").write_text(to_csv(RUNS))
    lines: list[str] = []
    plot(tmp_path, ["strong"], say=lines.append)
    assert lines == [f"norms of features are not drawn: the parts of the sweep are not all beside {tmp_path}"]


def test_unknown_figures_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown figure 'weke'; did you mean 'weak'\?"):
        plot(tmp_path, ["weke"])
