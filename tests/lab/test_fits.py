"""Fits give back what was put in, and their intervals cover the truth as often as they say."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.lab.fits import bootstrap_exponent, fit_power, fit_runs, student_quantile
from hyptree.lab.shared_exponent import fit_shared, read_losses, width_exponent
from hyptree.lab.sweeps.run_table import COLUMNS, read_runs
from hyptree.tables import to_csv

WIDTHS = np.array([10, 15, 25, 39, 63, 100])


def test_a_pure_power_law_comes_back() -> None:
    fit = fit_power(WIDTHS, 3 * WIDTHS**-1.3)
    assert (fit.exponent, fit.scale, fit.r2, fit.num_points) == pytest.approx((1.3, 3, 1, 6))
    assert fit.error == pytest.approx(0, abs=1e-7)
    two = fit_power([2, 4], [1, 0.5])
    assert two.exponent == pytest.approx(1) and math.isnan(two.error) and math.isnan(two.low)


def test_errors_are_those_of_linear_regression(seed: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    loss = WIDTHS**-0.8 * np.exp(np.random.default_rng(seed).normal(0, 0.2, 6))
    expected = stats.linregress(np.log(WIDTHS), np.log(loss))
    fit = fit_power(WIDTHS, loss)
    assert fit.exponent == pytest.approx(-expected.slope) and fit.error == pytest.approx(expected.stderr)
    assert fit.r2 == pytest.approx(expected.rvalue**2)
    assert fit.high - fit.exponent == pytest.approx(stats.t.ppf(0.975, 4) * expected.stderr)


def test_student_quantiles_equal_the_tables() -> None:
    """From any statistics book."""
    for freedom, expected in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (101, 1.984)):
        assert student_quantile(0.975, freedom) == pytest.approx(expected, abs=6e-4)


def test_intervals_cover_the_truth(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fits = [fit_power(WIDTHS, WIDTHS**-1.3 * np.exp(rng.normal(0, 0.1, 6))) for _ in range(500)]
    assert 0.90 <= np.mean([fit.low <= 1.3 <= fit.high for fit in fits]) <= 0.99
    assert np.mean([fit.exponent for fit in fits]) == pytest.approx(1.3, abs=0.02)


def test_losses_without_a_logarithm_are_refused() -> None:
    with pytest.raises(ValueError, match="two different widths, got 1"):
        fit_power([5, 5], [1, 2])
    with pytest.raises(ValueError, match="positive and finite"):
        fit_power([5, 6], [1, float("nan")])


def test_bootstrap_over_seeds_shows_their_spread() -> None:
    m = np.tile(WIDTHS, 4)
    seeds = np.repeat(np.arange(4), 6)
    exponents = np.array([0.8, 1.0, 1.0, 1.2])[seeds]
    low, high = bootstrap_exponent(m, m**-exponents, seeds)
    assert 0.8 <= low < 0.93 and 1.07 < high <= 1.2
    same = bootstrap_exponent(m, 2.0 / m, seeds)
    assert same == pytest.approx((1, 1))


def rows(exponent: float = 1.1, seeds: int = 1, **changes: Any) -> list[dict[str, Any]]:
    common = {"part": "a", "n": 1000, "dist": "power", "alpha": 1.75, "density": 1.0, "gamma": -1.0, "steps": 10}
    common |= {"batch": 8, "diverged": False, "regime": "strong", "phi_half": 1.0, **changes}
    return [
        {**common, "m": int(m), "seed": seed, "loss_eval": m**-exponent, "loss_train": m**-2.0}
        for m in WIDTHS
        for seed in range(seeds)
    ]


def test_settings_are_fitted_apart_with_theory_beside() -> None:
    first, second = fit_runs(rows() + rows(0.7, gamma=0.3, regime="weak", phi_half=0.02))
    assert first["exponent"] == pytest.approx(1.1) and second["exponent"] == pytest.approx(0.7)
    assert (first["regime"], second["regime"]) == ("strong", "weak")
    assert first["theory_finite"] == pytest.approx(0.80, abs=0.005)
    assert (first["theory_weak"], first["theory_strong"]) == (0.75, 1.5)
    assert (second["kept_low"], second["kept_high"]) == pytest.approx((0.2, 2.0))
    assert fit_runs(rows(), loss="loss_train")[0]["exponent"] == pytest.approx(2)


def test_diverged_models_are_counted_and_left_out() -> None:
    table = rows(seeds=3)
    table[4] |= {"diverged": True, "loss_eval": math.nan, "regime": "diverged", "phi_half": math.nan}
    (line,) = fit_runs(table)
    assert (line["num_models"], line["num_diverged"], line["num_seeds"]) == (17, 1, 3)
    assert line["exponent"] == pytest.approx(1.1) and line["regime"] == "strong"
    assert line["boot_low"] == pytest.approx(1.1)
    (nothing,) = fit_runs([{**row, "diverged": True} for row in table])
    assert math.isnan(nothing["exponent"]) and nothing["num_diverged"] == 18 and nothing["regime"] == "none"


def test_a_label_needs_every_model() -> None:
    table = rows()
    table[0]["regime"] = "mixed"
    assert fit_runs(table)[0]["regime"] == "mixed"
    assert fit_runs(table, drop_small=1)[0]["regime"] == "strong"
    assert fit_runs(table, drop_small=1)[0]["num_models"] == 5


def test_other_shapes_have_no_alpha() -> None:
    (line,) = fit_runs(rows(alpha=math.nan, dist="linear"))
    assert math.isnan(line["theory_weak"]) and line["theory_strong"] == 1
    assert 0 < line["theory_finite"] < 0.2


def test_wrong_questions_are_one_line() -> None:
    with pytest.raises(UserError, match="loss must be loss_eval or loss_train, got 'loss'"):
        fit_runs([], loss="loss")
    with pytest.raises(UserError, match="drop-small must be 0 or more, got -1"):
        fit_runs([], drop_small=-1)


LLM_WIDTHS = {
    "opt": (768, 1024, 2048, 2560, 4096, 5120, 7168, 9216),
    "qwen": (896, 1536, 2048, 3584, 5120, 5120, 8192),
    "gpt2": (768, 1024, 1280, 1600),
    "pythia": (512, 768, 1024, 2048, 2048, 2560, 4096, 5120),
}
LLM_OFFSETS = {
    "opt": (2.207, 2.275, 1.719, 2.185),
    "qwen": (1.608, 2.101, 1.489, 1.935),
    "gpt2": (2.302, 2.355, 1.941, 2.296),
    "pythia": (2.141, 2.300, 1.520, 2.242),
}


def llm_points(noise: float, seed: int) -> tuple[list[float], list[float], list[Any], list[Any]]:
    rng = np.random.default_rng(seed)
    points = [
        (width, 476.1 * width**-0.9098 + offset + rng.normal(0, noise), (family, k), (family, i))
        for family, widths in LLM_WIDTHS.items()
        for i, width in enumerate(widths)
        for k, offset in enumerate(LLM_OFFSETS[family])
    ]
    m, loss, group, checkpoint = map(list, zip(*points, strict=True))
    return m, loss, group, checkpoint


def test_shared_exponent_of_the_published_constants(seed: int) -> None:
    m, loss, group, _ = llm_points(0.0, seed)
    fit = fit_shared(m, loss, group)
    assert fit.num_points == 108 and len(fit.offsets) == 16
    assert fit.exponent == pytest.approx(0.91, abs=0.005)
    assert fit.scale == pytest.approx(476.1, rel=1e-3)
    assert fit.offsets["gpt2", 1] == pytest.approx(2.355, abs=1e-3)


def test_shared_exponent_knows_its_error(seed: int) -> None:
    """Over fresh noise, the exponent scatters as much as the error says; a bootstrap agrees."""
    fits = [fit_shared(*llm_points(0.07, seed + k)[:3]) for k in range(100)]
    spread = np.std([fit.exponent for fit in fits])
    assert spread == pytest.approx(np.mean([fit.error for fit in fits]), rel=0.3)
    m, loss, group, checkpoint = llm_points(0.07, seed)
    fit = fit_shared(m, loss, group, checkpoint, draws=150)
    assert fit.low < fit.exponent < fit.high
    assert (fit.high - fit.low) / 4 == pytest.approx(fit.error, rel=0.6)


def test_shared_exponent_refuses_too_few_points() -> None:
    with pytest.raises(ValueError, match="2 offsets and an exponent need more than 4 points, got 4"):
        fit_shared([1, 2, 1, 2], [1, 2, 3, 4], "aabb")
    with pytest.raises(ValueError, match="no group has two widths"):
        fit_shared([1, 1, 1, 2, 2, 2], [1, 2, 3, 4, 5, 6], "aaabbb")


@pytest.mark.parametrize("exponent", [-0.5, 0.0, 6.0])
def test_losses_that_fall_as_no_power_of_the_width_have_no_exponent(exponent: float, seed: int) -> None:
    m = [8, 16, 32, 64, 128]
    noise = np.random.default_rng(seed).normal(0, 1e-9, 5)
    loss = [2 + width**-exponent + e for width, e in zip(m, noise, strict=True)]
    if exponent == 0:
        loss = [5 - 0.1 * math.log(width) for width in m]  # slower than any
    with pytest.raises(ValueError, match="no power of the width describes these losses"):
        fit_shared(m, loss, ["a"] * 5)


def test_chinchilla_in_width() -> None:
    exponent, error = width_exponent()
    assert exponent == pytest.approx(0.88, abs=0.005) and error == pytest.approx(0.05, abs=0.005)


def test_llm_fit_from_a_table(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    m, loss, group, checkpoint = llm_points(0.05, seed)
    lines = ["model,family,dataset,m,loss"]
    for width, value, (family, k), (_, i) in zip(m, loss, group, checkpoint, strict=True):
        lines.append(f"{family}-{i},{family},{k},{width},{value!r}")
    table = tmp_path / "losses.csv"
    table.write_text("\n".join(lines))
    assert main(["lab", "llm-fit", str(table), "--draws", "20", "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["exponent"] == pytest.approx(fit_shared(m, loss, group).exponent)
    assert actual["low"] < actual["high"] and len(actual["offsets"]) == 16
    assert main(["lab", "llm-fit", str(table), "--draws", "5"]) == 0
    assert "Chinchilla's exponent in parameters, in width: 0.88 ± 0.05" in capsys.readouterr().out
    for text, message in (
        ("model,family\n", "has no column 'dataset'"),
        ("model,family,dataset,m,loss\na,b,c,x,1\n", "line 2: m and loss must be positive numbers, got 'x', '1'"),
        ("model,family,dataset,m,loss\na,b,c,5,1\n", "need more than 3 points, got 1"),
    ):
        table.write_text(text)
        assert main(["lab", "llm-fit", str(table)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_table_that_is_not_utf8_is_one_line(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "losses.csv"
    table.write_bytes("model,family,dataset,m,loss\na,Ä,x,64,3.5\n".encode(encoding))
    for command, what in (("llm-fit", "a table of losses"), ("fit", "a table of runs"), ("plot", "a table of runs")):
        assert main(["lab", command, str(table)]) == 2
        error = capsys.readouterr().err
        assert f"{table}: not a text file in UTF-8; expected {what}" in error and error.count("\n") == 1


def test_the_mark_of_spreadsheets_is_no_part_of_a_name(tmp_path: Path) -> None:
    table = tmp_path / "losses.csv"
    table.write_bytes("\ufeffmodel,family,dataset,m,loss\na,b,x,64,3.5\n".encode())
    assert read_losses(table) == [{"model": "a", "family": "b", "dataset": "x", "m": 64.0, "loss": 3.5}]


def test_a_line_of_a_table_that_was_cut_is_told(tmp_path: Path) -> None:
    same = {**dict.fromkeys(COLUMNS, 0.5), "diverged": False, "part": "a", "regime": "strong"}
    table = [same | row for row in rows()]
    last_a_text = [{name: row[name] for name in (*(n for n in COLUMNS if n != "regime"), "regime")} for row in table]
    text = to_csv(last_a_text)
    (tmp_path / "runs.csv").write_text(text[: text.rindex(",strong")])
    with pytest.raises(UserError, match=f"line {len(table) + 1}: regime must be a str, got None"):
        read_runs(tmp_path)


def test_a_fit_records_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = [{**dict.fromkeys(COLUMNS, 0.5), **row, "regime": "strong"} for row in rows()]
    table = [{**row, "loss_train": row["loss_eval"]} for row in table]
    (tmp_path / "runs.csv").write_text(to_csv(table))
    for drop, text in ((0, ""), (1, "the smallest width is left out"), (2, "the 2 smallest widths are left out")):
        assert main(["lab", "fit", str(tmp_path), "--drop-small", str(drop), "--loss", "train"]) == 0
        out = capsys.readouterr().out
        assert text in out and ("left out of every fit" in out) == bool(drop)
        with (tmp_path / "fits.csv").open(encoding="utf-8") as file:
            (line,) = csv.DictReader(file)
        assert (line["drop_small"], line["loss"]) == (str(drop), "loss_train")
        assert line["widths"] == " ".join(str(m) for m in WIDTHS[drop:])
