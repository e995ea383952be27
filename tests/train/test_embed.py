"""Embedding a hierarchy: objectives against their definitions, the loop before, learning, resuming, the verbs."""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hyptree.cli import main
from hyptree.config import load
from hyptree.data.hierarchies.edges import make_hierarchy
from hyptree.data.plan import Plan
from hyptree.errors import UserError
from hyptree.evaluate.hierarchy.embedding import disk_points, measure
from hyptree.geometry import Euclidean, Lorentz, Poincare
from hyptree.runs import RunFolder
from hyptree.train.embedding.batches import Batches
from hyptree.train.embedding.objectives import cone_loss, distance_loss, log_proximity, log_proximity_reference
from hyptree.train.loop import fit
from hyptree.train.optimizer.build import build_optimizer, clip_gradients
from hyptree.train.run.recipe import Recipe, require_read
from hyptree.train.run.settings import EmbedSettings
from hyptree.train.tasks.embed import Embed, load_embedding
from tests.train.test_distributed import _be_rank, in_two
from tests.train.test_resume import _newest, dying_before_step

ROOT = Path(__file__).parents[2]
WORDNET = Path(os.environ.get("HYPTREE_DATA", ROOT.parent / "shared" / "data")) / "wordnet"
GOLDEN = json.loads((Path(__file__).parent / "golden_embed.json").read_text())


def toy(branching=3, depth=3):
    """A tree of 40 nodes: node i hangs under (i - 1) // 3."""
    n = sum(branching**level for level in range(depth + 1))
    child = np.arange(1, n)
    return make_hierarchy([f"n{i:03d}" for i in range(n)], np.stack([child, (child - 1) // branching], 1))


TOY = ("embed.dim=3", "embed.negatives=40", "data.batch_size=16", "run.device=cpu", "run.tensorboard=false")


def recipe(edges, *overrides):
    """The task ``embed`` on a tree of 40 nodes, 3 steps an epoch."""
    base = ("task=embed", *TOY, f"embed.edges={edges}", "schedule.epochs=60", "run.log_steps=3")
    return load(Recipe, None, [*base, *overrides])


def start(edges, *overrides):
    """The task and its model before the first step."""
    task = Embed(recipe(edges, *overrides))
    return task, task.build_model(task.describe(task.build_dataset("train")))


def train(edges, out, *overrides, resume=False):
    return fit(recipe(edges, *overrides), out, resume=resume, quiet=True)


@pytest.fixture
def edges(tmp_path):
    path = tmp_path / "toy.tsv"
    path.write_text("child\tparent\n" + "".join(f"n{i:03d}\tn{(i - 1) // 3:03d}\n" for i in range(1, 40)))
    return path


def points(run):
    return RunFolder(run).load("last").model["weight"]


def lines(run):
    """The lines of metrics, without the clock."""
    return [{k: v for k, v in r.items() if k not in ("time", "per_second")} for r in RunFolder(run).read_metrics()]


def assert_same_run(one, other):
    a, b = ({f.name: load_file(f) for f in (run / "checkpoints/last").glob("*.safetensors")} for run in (one, other))
    assert a.keys() == b.keys() == {"model.safetensors", "training.safetensors"}
    for name in a:
        assert a[name].keys() == b[name].keys() and all(torch.equal(a[name][key], b[name][key]) for key in a[name])
    assert lines(one) == lines(other)


# --------------------------------------------------------------------------------------------------------- objectives


@pytest.mark.parametrize("manifold", [Lorentz(), Lorentz(0.3), Poincare(), Poincare(2.0), Euclidean()], ids=str)
@pytest.mark.parametrize("std", [0.01, 1.0, 4.0])
def test_log_proximity_and_its_gradient_are_the_definition(manifold, std):
    generator = torch.Generator().manual_seed(int(100 * std))
    x, y = (manifold.random(n, 4, std=std, generator=generator, dtype=torch.float64).requires_grad_() for n in (7, 11))
    masked = torch.tensor([0, 3, 3]), torch.tensor([5, 0, 10])
    weight = torch.randn(7, generator=generator, dtype=torch.float64)
    values, gradients = [], []
    for function in (log_proximity, log_proximity_reference):
        value = function(x, y, masked, manifold)
        values.append(value.detach())
        gradients.append(torch.autograd.grad((value * weight).sum(), (x, y)))
    torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=1e-9)
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-8 * float(expected.abs().max()))


def test_log_proximity_of_nothing_and_of_coincident_points():
    manifold = Lorentz()
    x = manifold.random(3, 2, dtype=torch.float64).requires_grad_()
    everything = torch.zeros(3, dtype=torch.long), torch.arange(3)
    value = log_proximity(x, x, everything, manifold)
    assert value[0] == -torch.inf and value[1:].isfinite().all()
    (gradient,) = torch.autograd.grad(
        distance_loss(x, x, value.new_ones(3), torch.arange(3), everything, manifold).sum(), x
    )
    assert gradient.isfinite().all() and gradient.abs().max() > 0
    same = x[:1].expand(4, 2)
    actual = log_proximity(same, same, (torch.empty(0).long(),) * 2, manifold)
    assert actual.tolist() == pytest.approx([np.log(4)] * 4)


def test_distance_loss_is_the_softmax_over_negatives():
    manifold = Lorentz()
    x, other = manifold.random(2, 3, dtype=torch.float64), manifold.random(5, 3, dtype=torch.float64)
    ancestor = manifold.random(3, 3, dtype=torch.float64)
    row, masked = torch.tensor([0, 0, 1]), (torch.tensor([0]), torch.tensor([2]))
    dist = manifold.dist(x[row], ancestor)
    actual = distance_loss(x, other, dist, row, masked, manifold)
    for k, (i, negatives) in enumerate([(0, [0, 1, 3, 4]), (0, [0, 1, 3, 4]), (1, [0, 1, 2, 3, 4])]):
        logits = -torch.cat([dist[k : k + 1], manifold.dist(x[i], other[negatives])])
        expected = torch.nn.functional.cross_entropy(logits[None], torch.tensor([0]))
        assert float(actual[k]) == pytest.approx(float(expected), rel=1e-10)


def test_cone_loss_is_the_hinge_of_the_energy():
    manifold = Poincare()
    general, specific = manifold.random(4, 3, dtype=torch.float64), manifold.random(6, 3, dtype=torch.float64)
    actual = cone_loss(general, specific, (torch.tensor([1]), torch.tensor([2])), 1.5, 0.1, manifold)
    for i in range(4):
        for j in range(6):
            energy = float(manifold.cone_energy(general[i], specific[j], K=0.1))
            assert float(actual[i, j]) == pytest.approx(0 if (i, j) == (1, 2) else max(0, 1.5 - energy), abs=1e-12)


# ------------------------------------------------------------------------------------------------------------ batches


def batches_of(hierarchy, size=7, seed=0, negatives=10):
    return Batches(hierarchy, Plan(len(hierarchy), size, seed, True, 0, 1), EmbedSettings(negatives=negatives))


def test_batches_hold_every_node_once_and_all_its_ancestors():
    hierarchy = toy()
    batches = batches_of(hierarchy, seed=3)
    order = batches.order(0)
    assert sorted(order.tolist()) == list(range(1, 40)) and not torch.equal(order, batches.order(1))
    row, ancestor = batches.ancestors_of(order)
    assert set(zip(order[row].tolist(), ancestor.tolist(), strict=True)) == set(map(tuple, hierarchy.pairs.tolist()))
    negatives = batches.draw_negatives(0, 4, frequent=False)
    assert len(set(negatives.tolist())) == 10
    assert torch.equal(negatives, batches.draw_negatives(0, 4, frequent=False))
    assert not torch.equal(negatives, batches.draw_negatives(0, 5, frequent=False))
    assert (batches.frequency[batches.draw_negatives(0, 4, frequent=True)] > 0).all()
    seen = [batch["touched"][batch["node"]] for batch in batches]
    assert [len(nodes) for nodes in seen] == [7, 7, 7, 7, 7, 4] and torch.equal(torch.cat(seen), order)


def test_negatives_of_a_large_table_are_different_nodes_and_all_are_drawn(monkeypatch):
    monkeypatch.setattr("hyptree.train.embedding.batches._LARGE", 39)
    batches = batches_of(toy())
    drawn = [batches.draw_negatives(0, step, frequent=False).tolist() for step in range(400)]
    assert drawn[0] == batches.draw_negatives(0, 0, frequent=False).tolist() != drawn[1]
    assert all(len(set(nodes)) == 10 for nodes in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=40)  # 100 each on average, of standard deviation 8.7
    assert counts.min() > 60 and counts.max() < 140


def test_related_finds_ancestors_and_the_node_itself():
    hierarchy = toy()
    batches = batches_of(hierarchy)
    nodes, columns = torch.randperm(40)[:15], torch.randperm(40)[:20]
    known = set(map(tuple, hierarchy.pairs.tolist())) | {(i, i) for i in range(40)}
    expected = {(i, j) for i, u in enumerate(nodes.tolist()) for j, v in enumerate(columns.tolist()) if (u, v) in known}
    for _ in range(2):  # the scratch memory is clean again
        assert set(zip(*(t.tolist() for t in batches.related(nodes, columns)), strict=True)) == expected


# -------------------------------------------------------------------------------------------- the loop before this one

GOLDEN_RUNS = {
    "lorentz": (),
    "curved": ("embed.curvature=0.5",),
    "poincare": ("model.name=poincare",),
    "euclidean": ("model.name=euclidean",),
    "float32": ("embed.dtype=float32",),
    "cones": ("embed.loss=cones",),
    "cones_poincare": ("embed.loss=cones", "model.name=poincare"),
    "sgd": ("optim.name=sgd", "optim.lr=0.1"),
    "burn_in": (
        *("optim.name=sgd", "optim.lr=0.06", "model.name=poincare", "embed.init=random"),
        *("schedule.warmup=2", "schedule.name=constant"),
    ),
    "burn_in_adam": ("embed.init=random", "schedule.warmup=1"),
}


def made_with():
    """What the last bits depend on: the processor's matrix products, and torch."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    version = torch.__version__.partition("+")[0]
    return f"{model and model[1].strip()} {version} {torch.backends.cpu.get_cpu_capability()}"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", GOLDEN_RUNS)
def test_runs_are_those_of_the_loop_before(edges, tmp_path, monkeypatch, name, seed):
    """Bit for bit where the golden runs were made; other processors and versions of torch add in another order."""
    golden, sums, real = GOLDEN[f"{name}/{seed}"], [], Embed.training_loss

    def training_loss(self, model, batch):
        total, numbers = real(self, model, batch)
        sums.append(float(total.detach()))
        return total, numbers

    monkeypatch.setattr(Embed, "training_loss", training_loss)
    # The old loop had the plain functions alone; quick rows of float32 round otherwise.
    monkeypatch.setattr("hyptree.geometry.core.rows.fits", lambda *_: False)
    train(edges, tmp_path / "run", "schedule.epochs=4", "embed.negatives=20", f"run.seed={seed}", *GOLDEN_RUNS[name])
    losses = [sum(sums[first : first + 3]) for first in range(0, 12, 3)]
    actual = points(tmp_path / "run")
    if made_with() == GOLDEN["made_with"]:
        assert losses == golden["losses"]
        assert hashlib.sha256(actual.numpy().tobytes()).hexdigest()[:16] == golden["sha256"]
    tolerance = 1e-6 if name != "float32" else 1e-3
    assert losses == pytest.approx(golden["losses"], rel=tolerance)
    assert actual[[0, 7, 39]].flatten().tolist() == pytest.approx(golden["points"], rel=tolerance, abs=tolerance)


# ----------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(
    "overrides",
    [(), ("model.name=poincare",), ("embed.dtype=float32",), ("optim.name=sgd", "optim.lr=0.1"), ("run.ema=0.9",)],
    ids=lambda overrides: "-".join(overrides) or "default",
)
def test_a_toy_tree_is_learned(edges, tmp_path, overrides):
    numbers = train(edges, tmp_path / "run", *overrides).numbers
    assert numbers["map"] > 0.9 and numbers["mean_rank"] < 1.5
    first, *_, last = [line["loss"] for line in lines(tmp_path / "run") if line["split"] == "train"]
    assert last < 0.5 * first


def test_random_start_with_burn_in_learns_too(edges, tmp_path):
    slow = ("embed.init=random", "optim.name=sgd", "optim.lr=0.1", "schedule.warmup=10", "schedule.name=constant")
    before = train(edges, tmp_path / "a", *slow, "schedule.epochs=11", "schedule.warmup=10.5").numbers["map"]
    assert train(edges, tmp_path / "b", *slow, "schedule.epochs=150").numbers["map"] > max(0.9, before + 0.3)
    rates = [line["lr"] for line in lines(tmp_path / "b") if line["split"] == "train"]
    assert rates == [0.001] * 10 + [0.1] * 140


@pytest.mark.parametrize("space", ["lorentz", "poincare"])
def test_cones_separate_ancestors_from_others(edges, tmp_path, space):
    options = ("embed.loss=cones", f"model.name={space}")
    task, model = start(edges, *options)
    before = measure(task.embedding(model))
    after = train(edges, tmp_path / "run", *options).numbers
    assert after["cone_f1"] > 0.95 > before["cone_f1"]
    assert after["cone_map"] > 0.95


def test_both_models_of_hyperbolic_space_take_the_same_path(edges, tmp_path):
    paths = []
    for manifold in (Lorentz(), Poincare()):
        name = type(manifold).__name__.lower()
        train(edges, tmp_path / name, f"model.name={name}", "schedule.steps=30", "schedule.name=constant")
        paths.append(manifold.pairwise_dist(points(tmp_path / name), points(tmp_path / name)))
    torch.testing.assert_close(*paths, rtol=1e-6, atol=1e-6)


def test_a_step_leaves_untouched_rows_alone(edges, tmp_path):
    task, model = start(edges, "data.batch_size=2", "embed.negatives=3")
    batch, before = next(iter(task.build_loader(task.hierarchy, True))), model.weight
    train(edges, tmp_path / "run", "data.batch_size=2", "embed.negatives=3", "schedule.steps=1")
    moved = (points(tmp_path / "run") != before).any(1).nonzero().squeeze(1).tolist()
    assert set(moved) <= set(batch["touched"].tolist()) and 3 <= len(moved) <= 12


def test_a_step_costs_no_more_in_a_large_table(tmp_path):
    """Nothing that a step makes is as large as the table: neither gradients nor what the optimiser works with."""
    n = 150_000
    child = np.arange(1, n)
    np.savez(tmp_path / "large.npz", pairs=np.stack([child, child // 8], 1))
    task, model = start(tmp_path / "large.npz")
    loader = iter(task.build_loader(task.hierarchy, True))
    optimizer = build_optimizer(model, task.recipe.optim)
    next(loader)  # which puts the nodes in order
    for is_first in (True, False):
        with torch.profiler.profile(profile_memory=True) as seen:
            task.training_loss(model, next(loader))[0].backward()
            clip_gradients(model, 1.0)
            assert model.weight.grad.is_sparse
            if not is_first:
                optimizer.step()
        if is_first:
            optimizer.step()  # which makes the moments, once
        optimizer.zero_grad()
        assert max(event.self_cpu_memory_usage for event in seen.events()) < 8 * n


@pytest.mark.skipif(not WORDNET.is_dir(), reason="needs the WordNet files; set HYPTREE_DATA")
def test_wordnet_mammals_in_five_dimensions(tmp_path):
    file = WORDNET / "mammal_closure.tsv.gz"
    given = load(Recipe, ROOT / "recipes/embed_mammals.yaml", [f"embed.edges={file}", "run.device=cpu", "run.seed=1"])
    actual = fit(given, tmp_path / "run", quiet=True).numbers
    assert actual["map"] >= 0.93 and actual["mean_rank"] < 2
    plain = load(Recipe, None, ["task=embed", f"embed.edges={file}", "run.device=cpu", "run.seed=1"])
    assert plain == given, "the defaults, written out"


@pytest.mark.slow
@pytest.mark.skipif(not WORDNET.is_dir(), reason="needs the WordNet files; set HYPTREE_DATA")
def test_wordnet_nouns_in_bounded_memory(tmp_path):
    code = (
        "import resource, sys; from hyptree.cli import main; "
        f"main(['train', 'embed_nouns', '--embed.edges', {str(WORDNET / 'noun_closure.npz')!r}, '--out', sys.argv[1], "
        "'--schedule.epochs', '8', '--run.device', 'cpu']); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert int(done.stdout.splitlines()[-1]) < 2_000_000  # kilobytes
    numbers = lines(tmp_path)[-1]
    assert numbers["map"] > 0.3 and numbers["is_sampled"] == 1


# ------------------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize(
    "overrides",
    [(), ("optim.name=sgd", "optim.lr=0.1"), ("embed.loss=cones", "run.accumulate=2", "schedule.warmup=1.5")],
    ids=str,
)
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(edges, tmp_path, overrides):
    overrides = (*overrides, "schedule.epochs=6", "run.save_steps=3")
    train(edges, tmp_path / "whole", *overrides)
    for step in (4, 11):  # in the middle of an epoch, twice
        with dying_before_step(step):
            train(edges, tmp_path / "parts", *overrides, resume=True)
    train(edges, tmp_path / "parts", *overrides, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def _train(edges, out, overrides):
    torch.set_num_threads(1)
    train(edges, out, *overrides, resume=True)


def test_kill_9_and_resume(edges, tmp_path):
    overrides = ("schedule.epochs=100", "run.save_steps=2", "embed.dim=2")
    train(edges, tmp_path / "whole", *overrides)
    run, context = tmp_path / "run", multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hyptree.train.loop", "hyptree.train.tasks.embed", "accelerate", __name__])
    for is_last in (False, False, True):
        process = context.Process(target=_train, args=(str(edges), run, overrides))
        process.start()
        before, deadline = _newest(run), time.monotonic() + 60
        while not is_last and _newest(run) == before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not is_last:
            time.sleep(0.1)
            assert process.is_alive(), "it ended before it could be killed"
            os.kill(process.pid, signal.SIGKILL)
        process.join(120)
    assert process.exitcode == 0
    assert_same_run(tmp_path / "whole", run)


def _rank(rank, port, log, edges, out, overrides):
    """One of several processes, as torchrun would start it; how it ends goes into a file."""
    _be_rank(rank, port)
    ended, printed = "fine", io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            train(edges, out, *overrides)
        except BaseException as error:
            ended = f"{type(error).__name__}: {error}"
    Path(f"{log}.{rank}").write_text(json.dumps(ended))


@pytest.mark.parametrize(
    "overrides",
    [("embed.loss=cones",), ("optim.name=sgd", "optim.lr=0.1", "optim.clip=5.0", "run.accumulate=2")],
    ids=str,
)
def test_two_processes_equal_one(edges, tmp_path, overrides):
    """The last batch of an epoch has 7 nodes, which two processes cannot share evenly."""
    overrides = (*overrides, "schedule.epochs=4")
    train(edges, tmp_path / "one", *overrides)
    two = tmp_path / "two"
    assert in_two(tmp_path, _rank, str(edges), str(two), overrides) == ["fine", "fine"]
    torch.testing.assert_close(points(two), points(tmp_path / "one"), rtol=1e-6, atol=1e-8)
    for a, b in zip(lines(tmp_path / "one"), lines(two), strict=True):
        assert a.keys() == b.keys() and a["split"] == b["split"]
        numbers = [key for key in a if key in ("step", "lr", "loss", "grad_norm", "map", "cone_map", "distortion")]
        assert [b[key] for key in numbers] == pytest.approx([a[key] for key in numbers], rel=1e-5)


def test_resume_refuses_other_settings_and_another_hierarchy(edges, tmp_path):
    train(edges, tmp_path / "run", "schedule.epochs=2")
    with pytest.raises(UserError, match=r"made with optim.lr = 0\.3, now it is 0\.2"):
        train(edges, tmp_path / "run", "schedule.epochs=2", "optim.lr=0.2", resume=True)
    moved = tmp_path / "moved.tsv"
    edges.rename(moved)
    assert train(moved, tmp_path / "run", "schedule.epochs=2", resume=True).step == 6
    moved.write_text(moved.read_text().replace("n039\tn012", "n039\tn011"))
    with pytest.raises(UserError, match=r"cannot resume .*: its data had other pairs"):
        train(moved, tmp_path / "run", "schedule.epochs=2", resume=True)


def test_seeds_differ_and_repeat(edges, tmp_path):
    for i, seed in enumerate((5, 5, 6)):
        train(edges, tmp_path / str(i), f"run.seed={seed}", "schedule.epochs=2")
    a, b, c = (points(tmp_path / str(i)) for i in range(3))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_loss_that_is_not_finite_stops_with_advice(edges, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hyptree.train.tasks.embed.initial_points", lambda *_: torch.full((40, 3), torch.nan, dtype=torch.float64)
    )
    with pytest.raises(UserError, match=r"the loss is nan at step 1; lower optim\.lr"):
        train(edges, tmp_path / "run")


# -------------------------------------------------------------------------------------------------------- command line


def run(*args):
    return main(list(map(str, args)))


def test_a_run_is_evaluated_measured_and_drawn(edges, tmp_path, capsys):
    out = tmp_path / "run"
    small = ("--embed.dim", 2, "--embed.edges", edges, "--data.batch_size", 16, "--run.device", "cpu")
    assert run("train", "embed_world", "--out", out, "--model.name", "poincare", *small) == 0
    numbers = RunFolder(out).read_metrics()[-1]
    assert numbers["split"] == "val" and numbers["map"] > 0.8 and numbers["num_nodes"] == 40
    capsys.readouterr()
    edges.unlink()  # the run keeps its hierarchy
    assert run("eval", out, "--json") == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert (
        evaluated["samples"] == 40
        and {key: numbers[key] for key in evaluated if key in numbers}
        | {
            "split": "val",
            "samples": 40,
            "skipped": 0,
        }
        == evaluated
    )
    assert "distortion" in evaluated
    assert run("eval", out) == 0
    assert f"{evaluated['map']:.4f}" in capsys.readouterr().out
    assert run("eval", out, "--embed.num-ranked", 5, "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_ranked_nodes"] == 5
    assert run("tree", "draw", out) == 0
    assert (out / "disk.png").read_bytes()[:4] == b"\x89PNG"
    assert run("tree", "draw", out, "--out", tmp_path / "a.svg") == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert run("explain", out) == 0
    page = (out / "index.html").read_text()
    assert 'class="disk"' in page and page.count('class="node"') == 40 and f"{evaluated['map']:.3f}" in page
    assert run("export", out, "--out", tmp_path / "points.safetensors") == 0
    assert torch.equal(load_file(tmp_path / "points.safetensors")["weight"], points(out))
    capsys.readouterr()
    assert run("export", out, "--format", "torch-export") == 2
    assert "exported as safetensors, not torch-export" in capsys.readouterr().err
    for args in (["draw", out, "--names", -1], ["show", edges, "--max-lines", -1]):
        assert run("tree", *args) == 2
        assert f"{args[-2]} must be at least 0, got -1" in capsys.readouterr().err


def test_the_classes_of_the_built_in_world_are_embedded(tmp_path, capsys):
    assert run("train", "embed_world", "--out", tmp_path, "--run.device", "cpu", "--run.log_steps", 10) == 0
    assert "lorentz: 90 parameters; 180 steps of 16 nodes, 3 per epoch, on cpu, 1 CPU thread" in capsys.readouterr().out
    embedding = load_embedding(tmp_path)
    assert len(embedding.names) == 45 and measure(embedding)["map"] > 0.85
    assert {"thing", "animal", "bird", "owl"} <= set(embedding.names)


def test_eval_of_another_hierarchy_is_refused(edges, tmp_path, capsys):
    train(edges, tmp_path / "run", "schedule.epochs=2")
    edges.write_text("a\tb\nc\tb\n")
    assert run("eval", tmp_path / "run") == 2
    assert "is not the hierarchy that" in capsys.readouterr().err
    save_file({"weight": torch.zeros(3, 2)}, tmp_path / "run/checkpoints/best/model.safetensors")
    assert run("tree", "draw", tmp_path / "run") == 2
    assert "has (3, 2) for weight, the model of this recipe (40, 3)" in capsys.readouterr().err


@pytest.mark.parametrize("pairs", ["nonsense", "eJwDAAAAAAE=", None, "eJxjYGBgYARiJiBmBgAAGgAH"])
def test_a_damaged_hierarchy_of_a_run_is_one_line(edges, tmp_path, pairs):
    train(edges, tmp_path / "run", "schedule.epochs=1")
    about = json.loads((tmp_path / "run/dataset.json").read_text())
    (tmp_path / "run/dataset.json").write_text(json.dumps({"names": about["names"][:2], "pairs": pairs}))
    with pytest.raises(UserError, match=r"dataset\.json is damaged|has \(40, 3\) for weight"):
        load_embedding(tmp_path / "run")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "embed_world", "--embed.edges", "missing.tsv"], "missing.tsv: no such file"),
        (["train", "embed_world", "--embed.edges", "one.tsv"], "line 1: expected a child and its parent"),
        (["train", "embed_world", "--embed.edges", "cycle.tsv"], "there is a cycle: a -> b -> a"),
        (["train", "embed_world", "--embed.dim", "0"], "dim must be at least 1, got 0"),
        (["train", "embed_world", "--optim.lr", "nan"], "optim.lr must be a number, got 'nan'"),
        (["train", "embed_world", "--schedule.warmup", "60"], "warmup 60 at a constant rate is all of the run"),
        (["train", "embed_world", "--embed.loss", "cones", "--model.name", "euclidean"], "needs a hyperbolic space"),
        (
            ["train", "embed_world", "--model.name", "lorenz"],
            "must be one of lorentz, poincare, euclidean, got 'lorenz'",
        ),
        (["train", "embed_world", "--run.parallel", "fsdp2"], "cannot cut the table of points"),
        (["train", "embed_world", "--run.precision", "bf16"], "run.precision bf16 means nothing to the task embed"),
        (["train", "embed_world", "--data.size", "32"], "data.size 32 means nothing to the task embed"),
        (["train", "embed_world", "--embed.margine", "1"], "did you mean '--embed.margin'?"),
        (["train", "world_classify", "--embed.dim", "3"], "embed.dim 3 means nothing to the task classify"),
        (["tree", "draw", "nowhere"], "no such folder"),
        (["tree", "draw", "."], "it has no recipe.yaml"),
        (["tree", "eval", "nowhere"], "hyptree tree eval is no more; type: hyptree eval RUN"),
        (["tree", "show", "cycle.tsv"], "there is a cycle"),
        (["tree", "embed", "one.tsv"], "hyptree tree embed is no more; type: hyptree train recipes/embed_mammals.yaml"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    Path("one.tsv").write_text("cat\ndog\n")
    Path("cycle.tsv").write_text("a\tb\nb\ta\n")
    assert run(*args) == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1] and "Traceback" not in captured.err
    assert captured.err.splitlines()[-1].startswith("hyptree: error: ") and captured.out == ""


def test_show_prints_the_tree(edges, capsys):
    assert run("tree", "show", edges, "--max-depth", 1) == 0
    text = capsys.readouterr().out
    assert "n000" in text and "n003" in text


def test_recipes_are_valid_and_show_what_is_used(capsys):
    recipes = sorted((ROOT / "recipes").glob("embed_*.yaml"))
    assert len(recipes) == 5
    for path in recipes:
        require_read(load(Recipe, path))
        assert run("train", path, "--print-config") == 0
        assert "max_step: 0.5" in capsys.readouterr().out


@pytest.mark.parametrize("manifold", [Lorentz(), Poincare(), Lorentz(0.25)], ids=str)
def test_the_picture_keeps_the_distance_from_the_origin(edges, manifold):
    task, model = start(edges, "embed.dim=4")
    embedding = task.embedding(model)
    embedding.manifold, embedding.points = manifold, manifold.random(40, 4, dtype=torch.float64)
    flat = torch.from_numpy(disk_points(embedding))
    scaled = manifold.dist0(embedding.points) * float(manifold.c) ** 0.5
    torch.testing.assert_close(Poincare().dist0(flat), scaled)


@pytest.mark.gpu
def test_cuda_learns_and_resumes_bit_for_bit(edges, tmp_path):
    overrides = ("run.device=cuda", "schedule.epochs=30", "run.save_steps=20")
    numbers = train(edges, tmp_path / "whole", *overrides).numbers
    with dying_before_step(50):
        train(edges, tmp_path / "parts", *overrides)
    train(edges, tmp_path / "parts", *overrides, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert numbers["map"] > 0.9
