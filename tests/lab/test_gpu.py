"""The engine on a GPU: equal to autograd, the same bits every time, TF32 kept out whatever the program set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hyptree.lab import definition
from hyptree.lab.engine import Engine
from hyptree.lab.sampler import Sampler
from hyptree.lab.sweeps.grid import Grid
from hyptree.lab.sweeps.run_table import read_runs
from hyptree.lab.sweeps.runner import sweep
from hyptree.tables import to_csv

pytestmark = pytest.mark.gpu

GRID = Grid(n=40, m=(3, 7), alpha=(0.0, 1.0, 1.5), gamma=(-0.8, 0.3), seeds=2, batch=64, steps=50, eval_samples=256)


def run(grid: Grid, **options: object) -> tuple[Engine, Tensor]:
    engine = Engine(grid, "cuda", **options)  # type: ignore[arg-type]
    actual = [engine.advance(with_loss=True) for _ in range(grid.steps)]
    return engine, torch.stack([loss for loss in actual if loss is not None])


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("chunk", [0, 5])
def test_whole_trainings_equal_autograd(seed: int, pad: bool, chunk: int) -> None:
    """In float64, on the samples that the GPU drew; chunks hold several groups of samples, so rows are padded."""
    grid = Grid(**{**GRID.__dict__, "data_seed": seed % 10**6})
    engine, losses = run(grid, dtype=torch.float64, pad=pad, chunk=chunk)
    place = 0
    for bucket in engine.buckets:
        for i, model in enumerate(bucket.models):
            toy = definition.ToyModel(*definition.initial(model, dtype=torch.float64))
            batches = []
            for step in range(grid.steps):
                x = engine.sampler.draw(step).dense(bucket.groups[i], grid.n).cpu()
                batches.append(torch.cat([x, x.new_zeros(grid.batch - len(x), grid.n)]))
            expected = definition.train(toy, batches, grid, model.gamma)
            W, b = bucket.weights(i)
            torch.testing.assert_close(W.cpu(), toy.W.detach(), rtol=0, atol=1e-10)
            torch.testing.assert_close(b.cpu(), toy.b.detach(), rtol=0, atol=1e-10)
            torch.testing.assert_close(losses[:, place].cpu(), torch.stack(expected), rtol=1e-10, atol=0)
            place += 1


def test_the_same_run_gives_the_same_bits(seed: int) -> None:
    grid = Grid(**{**GRID.__dict__, "n": 300, "batch": 512, "data_seed": seed % 10**6})
    (one, losses_one), (other, losses_other) = run(grid), run(grid)
    assert torch.equal(losses_one, losses_other)
    for a, b in zip(one.state().values(), other.state().values(), strict=True):
        assert torch.equal(a, b)


def test_tf32_is_kept_out(seed: int) -> None:
    grid = Grid(**{**GRID.__dict__, "n": 300, "batch": 512, "m": (64,), "steps": 10, "data_seed": seed % 10**6})
    exact, _ = run(grid)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        actual, _ = run(grid)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(exact.buckets[0].P, actual.buckets[0].P)


def test_chances_on_the_gpu(seed: int) -> None:
    p = torch.full((1, 500), 1.5 * 2.0**-12, dtype=torch.float64, device="cuda")
    sampler = Sampler(p, 4000, seed)
    actual = sum(sampler.draw(step).starts[-1] for step in range(20))
    expected = 20 * 4000 * 500 * p[0, 0].item()
    assert abs(actual - expected) < 5 * expected**0.5


def test_a_sweep_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    sweep(GRID, tmp_path / "whole", device="cuda")
    advance = Engine.advance

    def dying(self: Engine, with_loss: bool = False) -> Tensor | None:
        if self.step == 21:
            raise Killed
        return advance(self, with_loss)

    monkeypatch.setattr(Engine, "advance", dying)
    with pytest.raises(Killed):
        sweep(GRID, tmp_path / "cut", device="cuda", checkpoint_seconds=0)
    monkeypatch.undo()
    sweep(GRID, tmp_path / "cut", device="cuda", resume=True)
    # Read back, as it is parquet where pyarrow is installed; as text, in which not-a-number equals itself.
    whole, cut = (to_csv(read_runs(tmp_path / name)) for name in ("whole", "cut"))
    assert whole == cut
