"""The batched engine against the definition: values, gradients, whole trainings, and independence of the grid."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hyptree.errors import UserError
from hyptree.lab import definition
from hyptree.lab.engine import Engine, build_index, gradients
from hyptree.lab.sampler import Sampler
from hyptree.lab.sweeps.grid import Grid, Model, schedule

GRID = Grid(
    n=40, m=(3, 7), alpha=(0.0, 1.0, 1.5), gamma=(-0.8, 0.3), seeds=2, batch=64, steps=50, eval_samples=256
)  # fmt: skip


def fresh(seed: int, **changes: object) -> Grid:
    return Grid(**{**GRID.__dict__, "seed": seed % 10**6, "data_seed": seed // 7 % 10**6, **changes})


def dense_batches(engine: Engine, group: int, steps: int) -> Iterator[Tensor]:
    """What a model saw, empty samples included."""
    for step in range(steps):
        x = engine.sampler.draw(step).dense(group, engine.grid.n)
        yield torch.cat([x, x.new_zeros(engine.grid.batch - len(x), engine.grid.n)])


def run(grid: Grid, **options: object) -> tuple[Engine, Tensor]:
    engine = Engine(grid, **options)  # type: ignore[arg-type]
    actual = [engine.advance(with_loss=True) for _ in range(grid.steps)]
    return engine, torch.stack([loss for loss in actual if loss is not None])


def trained(engine: Engine) -> dict[Model, tuple[Tensor, Tensor]]:
    return {model: bucket.weights(i) for bucket in engine.buckets for i, model in enumerate(bucket.models)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_trainings_equal_autograd_one_model_at_a_time(seed: int, dtype: torch.dtype) -> None:
    grid = fresh(seed)
    engine, losses = run(grid, dtype=dtype)
    names = engine.models
    assert len(names) == 24
    # Adam divides a gradient by its own size, so in float32 the rounding of a gradient near its eps can reach a bias.
    limit_weight, limit_bias, limit_loss = (1e-5, 1e-4, 1e-4) if dtype == torch.float32 else (1e-10, 1e-10, 1e-10)
    for bucket in engine.buckets:
        for i, model in enumerate(bucket.models):
            toy = definition.ToyModel(*definition.initial(model, dtype=dtype))
            expected = definition.train(toy, dense_batches(engine, bucket.groups[i], grid.steps), grid, model.gamma)
            W, b = bucket.weights(i)
            assert (W - toy.W).abs().max() < limit_weight
            assert (b - toy.b).abs().max() < limit_bias
            mine = losses[:, names.index(model)].to(dtype)
            torch.testing.assert_close(mine, torch.stack(expected), rtol=limit_loss, atol=0)


@pytest.mark.parametrize("piece", [0, 64, 25])
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_and_losses_equal_autograd(seed: int, mixed: bool, piece: int) -> None:
    """In float64, also where models of a chunk see different tables (padded rows), and batches in pieces."""
    engine = Engine(fresh(seed, density=(1.0, 2.2)), dtype=torch.float64)
    sampler = Sampler(engine.p, 64, seed, torch.float64, piece)
    bucket, batch = engine.buckets[1], sampler.draw(3)
    assert batch.sizes == ([22, 22, 20] if piece == 25 else [64])
    groups = bucket.groups if mixed else [2] * len(bucket.groups)
    assert len(set(batch.num_rows)) > 1
    pieces = [build_index(batch, groups, 40, k) for k in range(len(batch.sizes))]
    actual, loss = gradients(bucket.P, pieces, batch.size, with_loss=True)
    assert loss is not None
    for i, group in enumerate(groups):
        x = batch.dense(group, 40)
        x = torch.cat([x, x.new_zeros(batch.size - len(x), 40)])
        toy = definition.ToyModel(*bucket.weights(i))
        expected = definition.reconstruction_loss(toy(x), x)
        (expected / 40).backward()
        assert toy.W.grad is not None and toy.b.grad is not None
        torch.testing.assert_close(loss[i], expected.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(actual[i, :, :-1], toy.W.grad, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(actual[i, :, -1], toy.b.grad, rtol=1e-10, atol=1e-14)


def test_evaluation_is_the_mean_over_fresh_samples(seed: int) -> None:
    engine = Engine(fresh(seed), dtype=torch.float64)
    mean, error = engine.evaluate(256)
    k = 5
    bucket = engine.buckets[0]
    toy = definition.ToyModel(*bucket.weights(k))
    each = []
    for i in range(4):
        x = engine.sampler.draw(i, stream=1).dense(bucket.groups[k], 40)
        x = torch.cat([x, x.new_zeros(64 - len(x), 40)])
        each.append(definition.reconstruction_loss(toy(x), x).detach())
    torch.testing.assert_close(mean[k], torch.stack(each).mean(), rtol=1e-10, atol=0)
    torch.testing.assert_close(error[k], torch.stack(each).std() / 2, rtol=1e-8, atol=0)


def test_a_model_does_not_depend_on_the_rest_of_the_grid(seed: int) -> None:
    """Bit for bit, whichever other widths, exponents, decays and seeds are trained beside it."""
    many, _ = run(fresh(seed, steps=20), chunk=3)
    few, _ = run(fresh(seed, steps=20, m=(7,), alpha=(1.5, 0.0), gamma=(0.3,), seeds=1))
    actual = trained(many)
    assert len(few.models) == 2
    for model, (W, b) in trained(few).items():
        assert torch.equal(W, actual[model][0]) and torch.equal(b, actual[model][1])


def test_padding_is_exact(seed: int) -> None:
    plain, losses = run(fresh(seed))
    padded, losses_padded = run(fresh(seed), pad=True)
    assert len(padded.buckets) == 1
    bucket = padded.buckets[0]
    for i, model in enumerate(bucket.models):
        assert bucket.P[i, :, model.m : -1].count_nonzero() == 0
        for mine, theirs in zip(bucket.weights(i), trained(plain)[model], strict=True):
            assert (mine - theirs).abs().max() < 1e-5
    order = [plain.models.index(model) for model in padded.models]
    torch.testing.assert_close(losses_padded, losses[:, order], rtol=1e-4, atol=0)


@pytest.mark.parametrize("chunk", [1, 4, 24])
def test_chunks_change_nothing(seed: int, chunk: int) -> None:
    one, _ = run(GRID, chunk=chunk)
    other, _ = run(GRID)
    for model, (W, b) in trained(one).items():
        assert (W - trained(other)[model][0]).abs().max() < 1e-5
        assert (b - trained(other)[model][1]).abs().max() < 1e-5


def test_growth_pulls_norms_to_one_and_decay_shrinks(seed: int) -> None:
    grid = fresh(seed, m=(4,), alpha=(1.0,), gamma=(-1.0, 1.0), seeds=1, steps=400, lr=0.05)
    engine = Engine(grid)
    bucket = engine.buckets[0]
    W = bucket.P[..., :-1]
    W /= W.norm(dim=-1, keepdim=True)
    W[:, :10] *= 0.2
    W[:, 10:20] *= 3
    W[:, 20] = 0
    start, bias = W.clone(), bucket.P[..., -1].clone()
    shrunk = 1.0
    before = W[0].norm(dim=-1)
    for step in range(grid.steps):
        factor = schedule(step, grid.steps, grid.warmup)
        bucket.update(slice(0, 2), torch.zeros_like(bucket.P), step, factor)
        shrunk *= 1 - 0.05 * factor
        now = W[0].norm(dim=-1)
        assert (now[:10] >= before[:10] - 1e-6).all() and (now[10:20] <= before[10:20] + 1e-6).all()
        before = now
    assert (before[:20] - 1).abs().max() < 1e-3
    assert W[0, 20].count_nonzero() == 0 and torch.isfinite(W).all()
    torch.testing.assert_close(W[1], start[1] * shrunk, rtol=1e-4, atol=0)
    assert torch.equal(bucket.P[..., -1], bias)


def test_a_diverged_model_leaves_its_neighbours_alone(seed: int) -> None:
    grid = fresh(seed, steps=5)
    sound, _ = run(grid)
    engine = Engine(grid)
    engine.buckets[0].P[1, 3, 0] = float("nan")
    lost = engine.buckets[0].models[1]
    for _ in range(5):
        engine.advance()
    for model, (W, _) in trained(engine).items():
        assert torch.equal(W, trained(sound)[model][0]) == (model != lost)


def test_state_goes_on_bit_for_bit(seed: int) -> None:
    grid = fresh(seed)
    whole, _ = run(grid)
    first = Engine(grid)
    for _ in range(20):
        first.advance()
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    second = Engine(grid)
    second.load_state(state, first.step)
    for _ in range(30):
        second.advance()
    assert all(torch.equal(a, b) for a, b in zip(whole.state().values(), second.state().values(), strict=True))
    with pytest.raises(ValueError, match=r"no 0\.P of shape \(12, 40, 4\)"):
        second.load_state({}, 1)


def test_schedule() -> None:
    assert schedule(0, 20000, 0.1) == pytest.approx(1 / 2000)
    assert schedule(1999, 20000, 0.1) == pytest.approx(1)
    assert schedule(10999, 20000, 0.1) == pytest.approx(0.525)
    assert schedule(19999, 20000, 0.1) == pytest.approx(0.05)
    assert schedule(0, 1, 0.0) == pytest.approx(0.05)


def test_learning_rates_of_wide_runs() -> None:
    grid = Grid(n=256, m=(8, 128), lr_rule="width", lr=0.02)
    assert grid.learning_rates(8) == pytest.approx((0.02, 0.25))
    assert grid.learning_rates(128) == pytest.approx((0.01, 2 / 128))
    engine = Engine(grid, pad=True)
    bucket = engine.buckets[0]
    for i, model in enumerate(bucket.models):
        weight, bias = grid.learning_rates(model.m)
        assert bucket.lr[i, 0, 0].item() == pytest.approx(weight) and bucket.lr[i, 0, -1].item() == pytest.approx(bias)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": (0, 3)}, "m must be between 1 and n = 40, got 0 3"),
        ({"m": ()}, "m is empty"),
        ({"alpha": (1.0, 1.0)}, "alpha names a value twice: 1.0 1.0"),
        ({"alpha": (float("nan"),)}, "alpha must be finite"),
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"lr": -1.0}, "lr must be positive, got -1.0"),
        ({"warmup": 1.0}, "warmup is a share"),
        ({"density": (0.0,)}, "density must be positive"),
        ({"density": (5.0,)}, "the density can be at most 4.279"),
        ({"bias_init": "ones"}, "bias_init must be one of normal, zero, got 'ones'"),
        ({"dist": "exponental"}, "unknown distribution 'exponental'; did you mean 'exponential'?"),
    ],
)
def test_wrong_grids_are_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")) as actual:
        fresh(0, **changes)
    assert "\n" not in str(actual.value)


def test_large_batches_are_worked_on_in_pieces(seed: int) -> None:
    """Of at least 128 rows on a CPU; the training is the same."""
    grid = fresh(seed, n=3000, m=(2,), alpha=(1.0,), gamma=(-1.0,), seeds=1, batch=300, steps=2)
    engine, actual = run(grid, dtype=torch.float64)
    assert engine.sampler.sizes == [100, 100, 100]
    toy = definition.ToyModel(*definition.initial(engine.models[0], dtype=torch.float64))
    expected = definition.train(toy, dense_batches(engine, 0, 2), grid, -1.0)
    torch.testing.assert_close(actual[:, 0], torch.stack(expected), rtol=1e-10, atol=0)
    torch.testing.assert_close(engine.buckets[0].weights(0)[0], toy.W.detach(), rtol=0, atol=1e-10)
    mean, _ = engine.evaluate(600)
    assert mean[0].item() == pytest.approx(actual[-1, 0].item(), rel=0.1)


def test_precision_that_the_program_chose_plays_no_part(seed: int) -> None:
    grid = fresh(seed, m=(7,), steps=5)
    exact, losses = run(grid)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            actual, losses_found = run(grid)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(losses, losses_found)
    assert torch.equal(exact.buckets[0].P, actual.buckets[0].P)


def test_batches_without_any_active_feature(seed: int) -> None:
    """Such a batch only pulls biases down."""
    grid = fresh(seed, m=(3,), alpha=(1.0,), gamma=(0.0,), seeds=1, density=(1e-9,), batch=4, steps=3)
    engine, losses = run(grid)
    W, b = definition.initial(engine.models[0])
    assert torch.equal(engine.buckets[0].weights(0)[0], W)
    assert losses[0, 0].item() == pytest.approx(b.relu().square().sum().item(), rel=1e-5)
    moved = engine.buckets[0].weights(0)[1] - b
    assert (moved[b > 0.01] < 0).all() and (moved[b < 0] == 0).all()


def test_streams_of_training_and_evaluation_differ(seed: int) -> None:
    sampler = Sampler(torch.full((1, 30), 0.1), 100, seed)
    a, b = sampler.draw(0, 0).dense(0, 30), sampler.draw(0, 1).dense(0, 30)
    assert a.shape != b.shape or not torch.equal(a, b)
