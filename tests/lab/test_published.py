"""The paper's exponents: the numbers, the settings they speak of, and what tables, lines and figures say about them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyptree.cli import main
from hyptree.lab.figures.drawing import _draw_lines
from hyptree.lab.figures.panels import Panel, Series
from hyptree.lab.figures.sweep_figures import FIGURES
from hyptree.lab.fits import fit_runs
from hyptree.lab.published import MAP, POINTS, agrees, compare, published_exponent, scatter
from hyptree.lab.sweeps.grid import PAPER_ALPHAS, PAPER_GAMMAS, PAPER_WIDTHS, preset
from hyptree.lab.sweeps.run_table import COLUMNS, read_runs
from hyptree.tables import to_csv


def models(
    alpha: float = 2.0, gamma: float = -7 / 9, exponents: Sequence[float] = (1.9,), **changes: Any
) -> list[dict[str, Any]]:
    """Rows of the paper's grid, one exponent per seed, with a little scatter so that fits have errors."""
    (grid,) = preset("paper-grid")
    row: dict[str, Any] = dict.fromkeys(COLUMNS, 0.5)
    row |= {name: getattr(grid, name) for name in ("n", "dist", "batch", "steps", "lr", "warmup", "bias_init")}
    row |= {"part": "grid", "alpha": alpha, "gamma": gamma, "density": 1.0, "curvature": 0.0, "diverged": False}
    row |= {"regime": "strong" if gamma < 0 else "weak", "phi_half": 1.0 if gamma < 0 else 0.01}
    return [
        {**row, "m": m, "seed": seed, "loss_eval": m**-exponent * (1.1 if k % 2 else 0.9), **changes}
        for k, m in enumerate(PAPER_WIDTHS)
        for seed, exponent in enumerate(exponents)
    ]


def test_the_numbers_of_the_paper() -> None:
    assert len(MAP) == 17 * 10 and len(POINTS) == 17 * 3 + 9 and set(POINTS) < set(MAP)
    assert {alpha for alpha, _ in MAP} == set(PAPER_ALPHAS)
    assert sorted({gamma for _, gamma in MAP}) == pytest.approx(np.linspace(-1, 1, 10), abs=5e-4)
    assert POINTS[2.0, -0.778] == (2.05, 0.07) and POINTS[0.0, -0.333] == (0.793, 0.095)
    assert POINTS[1.625, 0.556] == (0.563, 0.127)
    assert (MAP[0.0, -1.0], MAP[1.875, -1.0], MAP[2.0, -0.111], MAP[2.0, 1.0]) == (0.83, 1.29, 2.42, 0.23)
    assert sorted({gamma for _, gamma in POINTS}) == [-0.778, -0.556, -0.333, 0.111, 0.333, 0.556]
    # Two figures of the paper show the same fits: what was read from colours is what was read from coordinates.
    away = [MAP[key] - exponent for key, (exponent, _) in POINTS.items()]
    assert max(map(abs, away)) <= 0.015 and np.std(away) <= 0.007


@pytest.mark.parametrize("gamma", [-7 / 9, round(-7 / 9, 12), -0.778])
def test_a_point_comes_with_its_error_and_a_cell_of_the_map_without(gamma: float) -> None:
    assert published_exponent(models(2.0, gamma)) == (2.05, 0.07)
    assert published_exponent(models(1.875, -1.0)) == (1.29, None)
    assert published_exponent(models(2.0, gamma, (1.8, 1.9), data_seed=7)) == (2.05, 0.07)


def test_every_setting_of_the_preset_has_one() -> None:
    (grid,) = preset("paper-grid")
    actual = [published_exponent(models(alpha, gamma)) for alpha in grid.alpha for gamma in grid.gamma]
    assert len(actual) == 170 and None not in actual
    assert grid.lr_rule == "flat" and grid.m == PAPER_WIDTHS and grid.gamma == PAPER_GAMMAS and grid.density == (1.0,)


@pytest.mark.parametrize(
    "change",
    [
        {"n": 1024},
        {"dist": "exponential", "alpha": math.nan},
        {"density": 1.811},
        {"curvature": 0.1},
        {"batch": 1024},
        {"steps": 10000},
        {"lr": 0.02},
        {"warmup": 0.05},
        {"warmup": math.nan},
        {"bias_init": "zero"},
        {"alpha": 1.9},
        {"alpha": 2.125},
        {"gamma": -0.8},
        {"gamma": 0.0},
    ],
    ids=str,
)
def test_other_settings_have_none(change: dict[str, Any]) -> None:
    assert published_exponent([{**row, **change} for row in models()]) is None


def test_other_widths_and_rates_by_width_have_none() -> None:
    assert published_exponent(models()[1:]) is None
    assert published_exponent([*models(), {**models()[0], "m": 160}]) is None
    assert published_exponent([{**row, "lr": 0.01 * (10 / row["m"]) ** 0.25} for row in models()]) is None
    (dropped,) = fit_runs(models(), drop_small=1)
    assert math.isnan(dropped["published"]) and math.isnan(dropped["published_error"])


def test_fits_have_the_published_exponent_and_the_scatter_of_starts() -> None:
    exponents = (1.7, 1.9, 2.3)
    point, cell, alone, other = fit_runs(
        models(exponents=exponents)
        + models(1.875, -1.0, exponents[:2])
        + models(1.5, 3 / 9)
        + models(batch=64, exponents=exponents)
    )
    assert (point["published"], point["published_error"]) == (2.05, 0.07)
    assert cell["published"] == 1.29 and math.isnan(cell["published_error"])
    assert (alone["published"], alone["published_error"]) == (0.701, 0.045) and math.isnan(alone["seed_sd"])
    assert math.isnan(other["published"]) and other["seed_sd"] == point["seed_sd"]
    assert point["seed_sd"] == pytest.approx(np.std(exponents, ddof=1))  # the same scatter about each line
    assert cell["seed_sd"] == pytest.approx(np.std(exponents[:2], ddof=1))


def test_a_start_that_lost_a_width_is_not_one_of_the_single_fits() -> None:
    rows = models(exponents=(1.7, 1.9, 2.3))
    rows[2] |= {"diverged": True, "loss_eval": math.nan}  # the third start at the first width
    (line,) = fit_runs(rows)
    assert line["seed_sd"] == pytest.approx(np.std((1.7, 1.9), ddof=1)) and line["published"] == 2.05
    gone = [{**row, "diverged": row["m"] == 10} for row in models()]
    assert math.isnan(fit_runs(gone)[0]["published"])  # of five widths


def line(published: float, error: float = math.nan, **ours: Any) -> dict[str, Any]:
    fit = {"exponent": 1.0, "error": 0.03, "num_seeds": 1, "seed_sd": math.nan, **ours}
    return {**fit, "published": published, "published_error": error}


def test_one_seed_is_judged_by_the_errors_of_both_fits() -> None:
    assert scatter(line(1.0, 0.04)) == pytest.approx(0.05)
    assert agrees(line(1.099, 0.04)) and agrees(line(0.901, 0.04)) and not agrees(line(1.101, 0.04))
    assert scatter(line(1.0)) == pytest.approx(0.03 * math.sqrt(2))  # a cell of the map: ours for both
    two = {"num_seeds": 2, "seed_sd": 9.0}
    assert not agrees(line(1.101, 0.04, **two))


def test_three_seeds_are_judged_by_how_single_starts_scatter() -> None:
    three = {"num_seeds": 3, "seed_sd": 0.2}
    edge = 2 * 0.2 * math.sqrt(4 / 3)
    assert agrees(line(1 + edge - 1e-3, 0.001, **three)) and not agrees(line(1 + edge + 1e-3, 9.0, **three))


def test_the_line_says_how_many_agree_by_which_rule() -> None:
    three = {"num_seeds": 3, "seed_sd": 0.1}
    assert compare([line(math.nan), line(math.nan)]) == ""
    assert compare([line(1.05, 0.04), line(math.nan)]) == (
        "published (the paper's, one start each): 1 setting, median difference 0.05; "
        "1 of 1 within two standard errors of both fits"
    )
    assert compare([line(1.02), line(0.80, 0.04), line(1.1, **three), line(1.5, **three)]) == (
        "published (the paper's, one start each): 4 settings, median difference 0.15; "
        "1 of 2 within two standard errors of both fits; "
        "1 of 2 no further from ours than one start scatters (2 seed sd sqrt(1 + 1/seeds), for 3 seeds or more)"
    )


def shown(folder: Path, rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    (folder / "runs.csv").write_text(to_csv(rows))
    assert main(["lab", "fit", str(folder)]) == 0
    table, _, below = capsys.readouterr().out.partition("published (")
    return table.splitlines(), below


def test_the_printed_table_shows_it_only_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (head, *lines), below = shown(tmp_path, models() + models(1.875, -1.0) + models(part="b", steps=10), capsys)
    place = head.index("published")
    assert [text[place:].split("  ")[0] for text in lines] == ["2.05 ± 0.07", "1.29", "-"]
    assert "seed sd" not in head and "2 settings" in below
    with (tmp_path / "fits.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["published"] for row in table] == ["2.05", "1.29", "nan"]
    assert [row["published_error"] for row in table] == ["0.07", "nan", "nan"]
    assert [row["seed_sd"] for row in table] == ["nan"] * 3
    assert main(["lab", "fit", str(tmp_path), "--json"]) == 0
    assert [row["published"] for row in json.loads(capsys.readouterr().out)] == [2.05, 1.29, None]
    (head, first), below = shown(tmp_path, models(exponents=(1.7, 1.9)), capsys)
    assert first[head.index("seed sd") :].split()[0] == f"{np.std((1.7, 1.9), ddof=1):.3f}"
    (head, *_), below = shown(tmp_path, models(steps=10, exponents=(1.7, 1.9)), capsys)
    assert "published" not in head and "seed sd" not in head and not below


@pytest.mark.parametrize("text", ["", "{", "[]", '{"parts": 3}', '{"parts": {"grid": {}}}'])
def test_a_table_needs_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(to_csv(models()))
    (tmp_path / "config.json").write_text(text)
    assert fit_runs(read_runs(tmp_path))[0]["published"] == 2.05


def panels(figure: str, rows: list[dict[str, Any]]) -> dict[str, Panel]:
    return {panel.title: panel for panel in FIGURES[figure](rows, fit_runs(rows), np.empty((0, 0)))}


@pytest.mark.parametrize(("regime", "gamma", "alpha", "point"), [
    ("strong", -7 / 9, 2.0, (2.05, 0.07)),
    ("weak", 3 / 9, 1.5, (0.701, 0.045)),
])  # fmt: skip
def test_exponents_against_alpha_have_hollow_points(
    regime: str, gamma: float, alpha: float, point: tuple[float, float]
) -> None:
    rows = models(0.25, gamma) + models(alpha, gamma) + models(alpha, gamma, part="b")
    title = f"exponent of {regime} models"
    (series,) = (one for one in panels(regime, rows)[title].series if one.style == "hollow")
    assert series.name == "published" and series.error is not None
    assert list(series.x) == [0.25, alpha] and (series.y[1], series.error[1]) == point  # once, though two parts have it
    others = panels(regime, [{**row, "steps": 10} for row in rows])[title].series
    assert others and all(one.style != "hollow" for one in others)


def test_ours_against_published_are_told_apart_by_gamma() -> None:
    exponents = (1.7, 1.9, 2.3)
    rows = models(exponents=exponents) + models(1.875) + models(1.875, -1.0) + models(part="b", batch=64)
    fits = fit_runs(rows)
    (panel,) = panels("published", rows).values()
    cell, points, equal = panel.series
    assert (cell.name, list(cell.x), list(cell.y)) == ("γ = -1", [1.29], [fits[2]["exponent"]])
    assert (points.name, list(points.x), points.labels) == ("γ = -0.778", [2.05, 1.932], ["α = 2", "α = 1.875"])
    assert list(points.y) == [fits[0]["exponent"], fits[1]["exponent"]]
    assert points.x_error == [0.07, 0.084] and cell.x_error == pytest.approx([math.nan], nan_ok=True)
    assert points.error == pytest.approx([np.std(exponents, ddof=1), fits[1]["error"]])
    assert list(equal.x) == list(equal.y) == [1.29, 2.05]
    assert panel.note.endswith("bars upwards: standard error or deviation of one start")
    assert FIGURES["published"](rows, fit_runs(models(steps=10)), np.empty((0, 0))) == []


def test_the_figure_is_drawn_with_its_table_and_stands_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "runs.csv").write_text(to_csv(models() + models(1.875) + models(1.875, -1.0)))
    assert main(["lab", "plot", str(tmp_path), "--which", "published", "strong"]) == 0
    assert (tmp_path / "figures" / "published.png").read_bytes().startswith(b"\x89PNG")
    assert "γ = -0.778" in (tmp_path / "figures" / "published.svg").read_text(encoding="utf-8")
    with (tmp_path / "figures" / "published.csv").open(encoding="utf-8") as file:
        table = {(row["series"], row["label"]): row for row in csv.DictReader(file) if row["label"]}
    assert len(table) == 3
    row = table["γ = -0.778", "α = 2"]
    assert (row["x"], row["x_error"]) == ("2.05", "0.07")
    assert float(row["y"]) == fit_runs(models())[0]["exponent"]
    with (tmp_path / "figures" / "strong.csv").open(encoding="utf-8") as file:
        assert sorted(float(row["y"]) for row in csv.DictReader(file) if row["series"] == "published") == [
            1.29,
            1.932,
            2.05,
        ]
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "<th>published</th>" in page and "2.05 ± 0.07" in page and "Beside the published exponents" in page
    assert "Published (the paper&#x27;s, one start each): 3 settings" in page
    (tmp_path / "runs.csv").write_text(to_csv(models(steps=10)))
    assert main(["lab", "plot", str(tmp_path), "--which", "published"]) == 0
    assert "no figure published: the sweep has no data for it" in capsys.readouterr().err
    assert "published</th>" not in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_hollow_points_are_grey_and_beside_ours() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    ax = figures.Figure().subplots()
    ours, theirs = Series("γ", [0, 1], [1, 2], error=[0.1, 0.1]), Series("p", [0, 1], [1, 2], "hollow", [math.nan, 0.2])
    _draw_lines(ax.figure, ax, Panel("", "α", "exponent", [ours, theirs]))
    first, second = (one.lines[0] for one in ax.containers)
    assert second.get_markerfacecolor() == "white" and second.get_color() == "0.5" and first.get_color() != "0.5"
    assert list(second.get_xdata() - first.get_xdata()) == pytest.approx([0.012] * 2)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["γ", "p"]


@pytest.mark.parametrize(("num", "drawn"), [(40, 40), (41, 0)])
def test_too_many_texts_are_left_to_the_table(num: int, drawn: int) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    ax = figures.Figure().subplots()
    series = Series("a", [10 + k for k in range(num)], list(range(num)), labels=[str(k) for k in range(num)])
    _draw_lines(ax.figure, ax, Panel("", "x", "y", [series]))
    assert len(ax.texts) == drawn
    # Towards the middle: to the right of the first points, to the left of the last.
    assert [text.get_ha() for text in (ax.texts or ())][:: num - 1] == (["left", "right"] if drawn else [])
