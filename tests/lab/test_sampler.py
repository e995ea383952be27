"""Frequencies and the sampler: chances, values, shared random numbers, empty samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyptree.errors import UserError
from hyptree.lab.sampler import Sampler
from hyptree.lab.theory import frequencies


def test_shapes_and_their_scale() -> None:
    p = frequencies(1000, 2.0, 1.3)
    assert p.sum() == pytest.approx(1.3) and p[0] / p[9] == pytest.approx(100)
    flat = frequencies(50, 0.0)
    assert np.allclose(flat, 1 / 50)
    exponential = frequencies(10240, dist="exponential")
    assert exponential[400] / exponential[0] == pytest.approx(np.exp(-1)) and exponential.sum() == pytest.approx(1)
    line = frequencies(10240, dist="linear")
    assert line[1024] / line[0] == pytest.approx(0.9)


def test_the_density_levels_of_the_paper_end_where_the_first_feature_is_always_active() -> None:
    top = 1 / frequencies(1000, 1.0)[0]
    assert top == pytest.approx(7.485, abs=5e-4)
    assert frequencies(1000, 1.0, top)[0] == pytest.approx(1)
    with pytest.raises(UserError, match=r"density 7\.6 with alpha 1 and n 1000 .* 1\.02 > 1; .* at most 7\.485"):
        frequencies(1000, 1.0, 7.6)
    with pytest.raises(UserError, match="unknown distribution 'zipf'; expected one of power, exponential, linear"):
        frequencies(10, dist="zipf")


def test_chances_values_and_empty_samples(seed: int) -> None:
    p = torch.from_numpy(np.stack([frequencies(60, 0.0, 1.5), frequencies(60, 1.2, 1.0)]))
    size, rounds = 1000, 200
    sampler = Sampler(p, size, seed, torch.float64)
    counts, values, rows = torch.zeros(2, 60), [[], []], torch.zeros(2)
    for step in range(rounds):
        batch = sampler.draw(step)
        for a in range(2):
            part = slice(batch.starts[a], batch.starts[a + 1])
            counts[a] += torch.bincount(batch.features[part], minlength=60)
            values[a].append(batch.values[part])
            rows[a] += batch.num_rows[a]
    total = size * rounds
    spread = (p * (1 - p) / total).sqrt()
    assert ((counts / total - p).abs() < 5 * spread).all()
    for a in range(2):
        v = torch.cat(values[a])
        assert v.min() > 0 and v.max() < 2
        assert abs(v.mean() - 1) < 5 * (1 / 3 / len(v)) ** 0.5
        assert abs(v.square().mean() - 4 / 3) < 5 * (64 / 45 / len(v)) ** 0.5  # var(v^2) = 16/5 - 16/9
        assert abs(len(v) / total - p[a].sum()) < 5 * ((p[a] * (1 - p[a])).sum() / total) ** 0.5
        empty = (1 - p[a]).prod().item()
        assert abs(1 - rows[a].item() / total - empty) < 5 * (empty * (1 - empty) / total) ** 0.5


def test_rare_features_keep_their_chance(seed: int) -> None:
    """A chance of 1.5 of the coarse steps: the fine bits decide, else it would be a third more or less."""
    p = torch.full((1, 4000), 1.5 * 2.0**-16, dtype=torch.float64)
    sampler = Sampler(p, 4000, seed)
    actual = sum(sampler.draw(step).starts[-1] for step in range(8))
    expected = 8 * 4000 * 4000 * p[0, 0].item()
    assert abs(actual - expected) < 5 * expected**0.5 < expected / 3


def test_tables_share_their_random_numbers(seed: int) -> None:
    """The cells of a rarer table are among those of a more frequent one, with the same values."""
    small, large = torch.full((20,), 0.05), torch.full((20,), 0.3)
    many = Sampler(torch.stack([large, small]), 50, seed)
    alone = Sampler(small[None], 50, seed)
    for step in range(3):
        batch = many.draw(step)
        # Rows are compact within each table: values identify cells, since no two are equal.
        values = [set(batch.values[batch.starts[a] : batch.starts[a + 1]].tolist()) for a in range(2)]
        assert values[1] and values[1] < values[0]
        assert torch.equal(alone.draw(step).dense(0, 20), batch.dense(1, 20))


def test_pieces_hold_the_same_samples(seed: int) -> None:
    p = torch.stack([torch.full((20,), 0.05), torch.full((20,), 0.3)])
    whole, pieces = Sampler(p, 50, seed).draw(4), Sampler(p, 50, seed, piece=20).draw(4)
    assert whole.sizes == [50] and pieces.sizes == [17, 17, 16]
    assert len(pieces.num_rows) == 6 and sum(pieces.num_rows[:3]) == whole.num_rows[0]
    for table in range(2):
        assert torch.equal(whole.dense(table, 20), pieces.dense(table, 20))


def test_steps_can_be_drawn_in_any_order(seed: int) -> None:
    sampler = Sampler(torch.full((1, 33), 0.1), 7, seed)
    forward = [sampler.draw(step).dense(0, 33) for step in range(4)]
    for step in (3, 0, 2, 1):
        assert torch.equal(sampler.draw(step).dense(0, 33), forward[step])
    assert forward[0].shape != forward[1].shape or not torch.equal(forward[0], forward[1])


def test_a_certain_feature_is_always_there_and_an_empty_batch_is_possible(seed: int) -> None:
    p = torch.tensor([[1.0, 1e-9], [1e-9, 1e-9]])
    batch = Sampler(p, 9, seed).draw(0)
    assert batch.num_rows == [9, 0]
    assert batch.features.tolist() == [0] * 9
