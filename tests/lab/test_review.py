"""What a wrong lab could do unseen by the other tests: each of these fails on a fault that was put in on purpose."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hyptree.errors import UserError
from hyptree.lab.fits import fit_runs
from hyptree.lab.lm_heads.checkpoint import find_lm_head
from hyptree.lab.lm_heads.overlap import overlap
from hyptree.lab.sampler import Sampler
from hyptree.lab.shared_exponent import fit_shared
from hyptree.lab.theory import finite_exponent, frequencies
from tests.lab.lm_heads.test_gguf import write
from tests.lab.test_fits import WIDTHS, llm_points, rows


def test_values_depend_on_step_stream_and_data_seed(seed: int) -> None:
    """With features that are always active, so that only values can differ."""
    p = torch.ones(1, 12)

    def values(data_seed: int, step: int, stream: int) -> torch.Tensor:
        return Sampler(p, 5, data_seed, torch.float64).draw(step, stream).dense(0, 12)

    first = values(seed, 3, 0)
    assert torch.equal(first, values(seed, 3, 0))
    for other in (values(seed + 1, 3, 0), values(seed, 4, 0), values(seed, 3, 1)):
        assert other.shape == (5, 12) and (other != first).all()


def test_data_seeds_choose_other_cells(seed: int) -> None:
    p = torch.full((1, 300), 0.1)
    cells = [Sampler(p, 40, seed + k).draw(0).dense(0, 300) for k in range(2)]
    assert cells[0].shape != cells[1].shape or not torch.equal(cells[0] > 0, cells[1] > 0)


def test_weak_and_strong_models_in_one_fit_are_mixed() -> None:
    table = rows()
    for row in table[:3]:
        row["regime"] = "weak"
    assert fit_runs(table)[0]["regime"] == "mixed"


def test_theory_is_that_of_the_widths_that_were_fitted() -> None:
    p = frequencies(1000, 1.75)
    for drop in (0, 2):
        (line,) = fit_runs(rows(), drop_small=drop)
        assert line["theory_finite"] == pytest.approx(finite_exponent(p, WIDTHS[drop:].tolist()))
    assert finite_exponent(p, WIDTHS[2:].tolist()) != pytest.approx(finite_exponent(p, WIDTHS.tolist()), abs=0.01)


def test_error_of_the_shared_exponent_counts_every_offset(seed: int) -> None:
    """Against a least-squares fit of all parameters at once: N - 18 degrees of freedom, not N - 3."""
    optimize = pytest.importorskip("scipy.optimize")
    m, loss, group, _ = llm_points(0.07, seed)
    fit = fit_shared(m, loss, group)
    names = list(fit.offsets)
    place = np.array([names.index(name) for name in group])
    x = np.log(np.array(m) / 1000)

    def residual(theta: np.ndarray) -> np.ndarray:
        return theta[0] * np.exp(-theta[1] * x) + theta[2:][place] - loss

    start = np.array([fit.scale * 1000**-fit.exponent, fit.exponent, *fit.offsets.values()])
    actual = optimize.least_squares(residual, start, xtol=1e-12, ftol=1e-12, gtol=1e-12)
    variance = 2 * actual.cost / (len(loss) - 18) * np.linalg.inv(actual.jac.T @ actual.jac)[1, 1]
    assert fit.exponent == pytest.approx(actual.x[1], abs=1e-5)
    assert fit.error == pytest.approx(variance**0.5, rel=1e-3)


def test_bootstrap_draws_models_and_not_points(seed: int) -> None:
    """Noise that the losses of a model share is seen only by drawing whole models."""
    m, loss, group, checkpoint = llm_points(0.0, seed)
    rng = np.random.default_rng(seed)
    noise = {name: rng.normal(0, 0.07) for name in dict.fromkeys(checkpoint)}
    noisy = [value + noise[name] for value, name in zip(loss, checkpoint, strict=True)]
    wide = fit_shared(m, noisy, group, checkpoint, draws=150)
    narrow = fit_shared(m, noisy, group, None, draws=150)
    assert wide.high - wide.low > 1.3 * (narrow.high - narrow.low)


class _Trap:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_an_allowed_pickle_runs_no_code(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    torch.save({"lm_head.weight": torch.ones(4, 2), "trap": _Trap(trap)}, tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"cannot read .*model\.bin"):
        find_lm_head(tmp_path / "model.bin", allow_pickle=True)
    assert not trap.exists()
    pickle.loads(pickle.dumps(_Trap(trap)))
    assert trap.exists()  # the trap works


def test_an_embedding_beside_a_head_is_not_tied(seed: int, tmp_path: Path) -> None:
    W = np.random.default_rng(seed).normal(size=(6, 8)).astype(np.float32).tobytes()
    path = write(tmp_path / "m.gguf", dict.fromkeys(("token_embd.weight", "output.weight"), ((6, 8), 0, W)))
    assert find_lm_head(path, "token_embd.weight").tied == "input embedding"


def test_represented_rows_are_those_above_half_the_mean_norm(seed: int, tmp_path: Path) -> None:
    """Heads have norms of any size, so the bound goes with their mean."""
    W = torch.nn.functional.normalize(torch.randn(40, 6), dim=1) * 0.05
    W[:10] /= 5
    save_file({"lm_head.weight": W}, tmp_path / "model.safetensors")
    assert overlap(tmp_path).phi_half == pytest.approx(0.75)
