"""The preset smoke shows the physics: bounds that were measured over several seeds before they were fixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ramify.lab.fits import fit_runs
from ramify.lab.presets import preset
from ramify.lab.runner import sweep

pytestmark = pytest.mark.slow

FLAT, SKEWED, WEAK = range(3)


def run(part: int, seed: int, out: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    grid = replace(preset("smoke")[part], seed=seed % 10**6, data_seed=seed // 11 % 10**6, **changes)
    rows = sweep(grid, out)
    assert not any(row["diverged"] for row in rows)
    return rows, fit_runs(rows)


def test_flat_data_in_strong_superposition_falls_as_one_over_width(seed: int, tmp_path: Path) -> None:
    rows, fits = run(FLAT, seed, tmp_path)
    assert [fit["regime"] for fit in fits] == ["strong", "strong"]
    for fit in fits:
        assert 0.8 <= fit["exponent"] <= 1.3
    for row in rows:
        assert row["phi_half"] == 1
        assert 0.9 <= row["mso_all"] * row["m"] <= 1.1


def test_skewed_data_in_strong_superposition_falls_faster(seed: int, tmp_path: Path) -> None:
    _, (fit,) = run(SKEWED, seed, tmp_path)
    assert fit["regime"] == "strong"
    assert 1.75 <= fit["exponent"] <= 2.5


def test_weak_superposition_loses_what_it_drops(seed: int, tmp_path: Path) -> None:
    """Three seeds: a start may lose a frequent feature for good, which moves one model far off the curve.

    Of 84 models on fresh seeds, 3 lay above 1.6 times the curve (up to 1.74), and the exponents of single seeds up to
    0.29 from it.
    """
    rows, fits = run(WEAK, seed, tmp_path, seeds=3)
    for fit in fits:
        assert fit["regime"] == "weak"
        assert abs(fit["exponent"] - fit["theory_finite"]) < 0.3
        ratios = [row["loss_eval"] / row["loss_unlearned"] for row in rows if row["alpha"] == fit["alpha"]]
        assert 1 <= median(ratios) <= 1.6
        assert min(ratios) >= 0.95 and max(ratios) <= 2
