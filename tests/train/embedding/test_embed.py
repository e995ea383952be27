"""Embedding a hierarchy: objectives against their definitions, learning, resuming bit for bit, the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hyptree.cli import main
from hyptree.data.hierarchies.edges import make_hierarchy, read_hierarchy
from hyptree.errors import UserError
from hyptree.evaluate.hierarchy.embedding import disk_points, load_embedding, measure
from hyptree.files import load_tensors, save_tensors, write_atomic, write_text
from hyptree.geometry import Euclidean, Lorentz, Poincare
from hyptree.train.embedding.job import CHECKPOINT, Batches, Embedder, embed
from hyptree.train.embedding.objectives import cone_loss, distance_loss, log_proximity, log_proximity_reference
from hyptree.train.run.settings import EmbedSettings

WORDNET = Path(__file__).parents[4] / "shared" / "data" / "wordnet"
TOY = EmbedSettings(dim=3, epochs=60, batch_size=16, negatives=40)


def toy(branching=3, depth=3):
    """A tree of 40 nodes: node i hangs under (i - 1) // 3."""
    n = sum(branching**level for level in range(depth + 1))
    child = np.arange(1, n)
    return make_hierarchy([f"n{i:03d}" for i in range(n)], np.stack([child, (child - 1) // branching], 1))


def changed(settings, **fields):
    return EmbedSettings(**{**vars(settings), **fields})


@pytest.fixture
def edges(tmp_path):
    path = tmp_path / "toy.tsv"
    path.write_text("child\tparent\n" + "".join(f"n{i}\tn{(i - 1) // 3}\n" for i in range(1, 40)))
    return path


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


def test_batches_hold_every_node_once_and_all_its_ancestors():
    hierarchy = toy()
    batches = Batches(hierarchy, batch_size=7, negatives=10, seed=3)
    order = batches.order(0)
    assert sorted(order.tolist()) == list(range(1, 40)) and not torch.equal(order, batches.order(1))
    row, ancestor = batches.ancestors_of(order)
    assert set(zip(order[row].tolist(), ancestor.tolist(), strict=True)) == set(map(tuple, hierarchy.pairs.tolist()))
    negatives = batches.draw_negatives(0, 4, frequent=False)
    assert len(set(negatives.tolist())) == 10
    assert torch.equal(negatives, batches.draw_negatives(0, 4, frequent=False))
    assert not torch.equal(negatives, batches.draw_negatives(0, 5, frequent=False))
    assert (batches.frequency[batches.draw_negatives(0, 4, frequent=True)] > 0).all()


def test_related_finds_ancestors_and_the_node_itself():
    hierarchy = toy()
    batches = Batches(hierarchy, batch_size=7, negatives=10, seed=0)
    nodes, columns = torch.randperm(40)[:15], torch.randperm(40)[:20]
    known = set(map(tuple, hierarchy.pairs.tolist())) | {(i, i) for i in range(40)}
    expected = {(i, j) for i, u in enumerate(nodes.tolist()) for j, v in enumerate(columns.tolist()) if (u, v) in known}
    for _ in range(2):  # the scratch memory is clean again
        assert set(zip(*(t.tolist() for t in batches.related(nodes, columns)), strict=True)) == expected


# ----------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(
    "fields",
    [{}, {"manifold": "poincare"}, {"dtype": "float32"}, {"optimizer": "sgd"}, {"curvature": 0.5}],
    ids=lambda fields: "-".join(map(str, fields.values())) or "default",
)
def test_a_toy_tree_is_learned(tmp_path, fields):
    embedder = embed(toy(), changed(TOY, lr=None, **fields), tmp_path)
    actual = measure(embedder.embedding())
    assert actual["map"] > 0.9 and actual["mean_rank"] < 1.5
    first, *_, last = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert last < 0.5 * first


def test_random_start_with_burn_in_learns_too(tmp_path):
    settings = changed(TOY, init="random", optimizer="sgd", lr=0.1, burn_in=10, epochs=150, schedule="constant")
    before = measure(Embedder(toy(), settings).embedding())["map"]
    assert measure(embed(toy(), settings, tmp_path).embedding())["map"] > max(0.9, before + 0.3)


@pytest.mark.parametrize("manifold", ["lorentz", "poincare"])
def test_cones_separate_ancestors_from_others(tmp_path, manifold):
    settings = EmbedSettings(dim=3, loss="cones", manifold=manifold, epochs=60, batch_size=16, negatives=40)
    before = measure(Embedder(toy(), settings).embedding())
    after = measure(embed(toy(), settings, tmp_path).embedding())
    assert after["cone_f1"] > 0.95 > before["cone_f1"]
    assert after["cone_map"] > 0.95


def test_both_models_of_hyperbolic_space_take_the_same_path():
    paths = []
    for manifold in (Lorentz(), Poincare()):
        embedder = Embedder(toy(), changed(TOY, manifold=type(manifold).__name__.lower()))
        for _ in range(30):
            embedder.advance()
        paths.append(manifold.pairwise_dist(embedder.points.detach(), embedder.points.detach()))
    torch.testing.assert_close(*paths, rtol=1e-6, atol=1e-6)


def test_a_step_leaves_untouched_rows_alone():
    settings = changed(TOY, batch_size=2, negatives=3)
    embedder = Embedder(toy(), settings)
    before = embedder.points.detach().clone()
    batch = embedder.batches.order(0)[:2]
    touched = {*batch.tolist(), *embedder.batches.draw_negatives(0, 0, False).tolist()}
    touched |= set(embedder.batches.ancestors_of(batch)[1].tolist())
    embedder.advance()
    moved = (embedder.points.detach() != before).any(1).nonzero().squeeze(1).tolist()
    assert set(moved) <= touched and len(moved) >= 3


@pytest.mark.skipif(not WORDNET.is_dir(), reason="needs the WordNet files in ../shared/data")
def test_wordnet_mammals_in_five_dimensions(tmp_path):
    hierarchy = read_hierarchy(WORDNET / "mammal_closure.tsv.gz")
    actual = measure(embed(hierarchy, EmbedSettings(seed=1), tmp_path).embedding())
    assert actual["map"] >= 0.93 and actual["mean_rank"] < 2


@pytest.mark.slow
@pytest.mark.skipif(not WORDNET.is_dir(), reason="needs the WordNet files in ../shared/data")
def test_wordnet_nouns_in_bounded_memory(tmp_path):
    code = (
        "import resource, sys; from hyptree.cli import main; "
        f"main(['tree', 'embed', {str(WORDNET / 'noun_closure.npz')!r}, '--config', 'recipes/embed_nouns.yaml', "
        "'--out', sys.argv[1], '--epochs', '8', '--max-seconds', '240', '--no-draw', '--json']); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    root = Path(__file__).parents[3]
    env = os.environ | {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, env=env, capture_output=True, text=True, check=True
    )
    metrics, memory = done.stdout.splitlines()
    assert int(memory) < 2_000_000  # kilobytes
    assert json.loads(metrics)["map"] > 0.3 and json.loads(metrics)["is_sampled"]


# ------------------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("fields", [{}, {"optimizer": "sgd", "lr": 0.1}, {"loss": "cones", "lr": 0.1}], ids=str)
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(tmp_path, fields):
    settings = changed(TOY, epochs=6, **fields)
    before = signal.getsignal(signal.SIGINT)
    whole = embed(toy(), settings, tmp_path / "whole")
    seen = 0

    def press_ctrl_c(done, note, total):
        nonlocal seen
        seen += 1
        if seen in (4, 9):  # in the middle of an epoch, twice
            os.kill(os.getpid(), signal.SIGINT)

    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            embed(toy(), settings, tmp_path / "parts", resume=resume, show=press_ctrl_c)
        assert not (tmp_path / "parts" / "embedding.safetensors").exists()
    parts = embed(toy(), settings, tmp_path / "parts", resume=True, show=press_ctrl_c)
    assert torch.equal(whole.points, parts.points)
    a, b = (load_tensors(tmp_path / name / CHECKPOINT)[0] for name in ("whole", "parts"))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    logs = [
        [(r["epoch"], r["loss"]) for r in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())]
        for name in ("whole", "parts")
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 6
    assert signal.getsignal(signal.SIGINT) is before  # put back: a shell in the background ignores it


def test_a_kill_without_warning_costs_the_time_since_the_last_checkpoint_and_nothing_else(tmp_path):
    settings = changed(TOY, epochs=5)
    whole = embed(toy(), settings, tmp_path / "whole")

    def die(done, note, total):
        if note.startswith("epoch 4/5"):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        embed(toy(), settings, tmp_path / "parts", show=die, checkpoint_seconds=0)
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as log:
        log.write('{"epoch": 4, "lo')  # half a line
    parts = embed(toy(), settings, tmp_path / "parts", resume=True)
    assert torch.equal(whole.points, parts.points)
    assert [json.loads(line)["epoch"] for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_a_time_limit_stops_and_resumes(tmp_path):
    settings = changed(TOY, epochs=3)
    first = embed(toy(), settings, tmp_path, max_seconds=1e-9)
    assert not first.is_done and (first.epoch, first.step) == (0, 1)
    again = embed(toy(), settings, tmp_path, resume=True)
    assert again.is_done and torch.equal(again.points, embed(toy(), settings, tmp_path / "whole").points)


def test_resume_refuses_other_settings_and_another_hierarchy(tmp_path):
    embed(toy(), changed(TOY, epochs=2), tmp_path)
    with pytest.raises(UserError, match=r"made with lr = 0\.3, now it is 0\.2"):
        embed(toy(), changed(TOY, epochs=2, lr=0.2), tmp_path, resume=True)
    with pytest.raises(UserError, match="other edges"):
        embed(toy(2, 4), changed(TOY, epochs=2), tmp_path, resume=True)


def test_seeds_differ_and_repeat(tmp_path):
    settings = changed(TOY, epochs=2)
    runs = [embed(toy(), changed(settings, seed=seed), tmp_path / str(i)).points for i, seed in enumerate((5, 5, 6))]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_files_are_open_to_those_the_umask_allows(tmp_path):
    """Some writers make files for their owner alone; others must be able to read a run."""
    (tmp_path / "plain").touch()
    write_atomic(tmp_path / "made", lambda path: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)) or path.chmod(0o600))
    save_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)})
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["made"] == modes["a.safetensors"] == modes["plain"]


def test_a_damaged_checkpoint_is_one_line(tmp_path):
    save_tensors(tmp_path / "a.safetensors", {"x": torch.arange(3)}, {"epoch": 2, "value": 0.1})
    tensors, state = load_tensors(tmp_path / "a.safetensors")
    assert tensors["x"].tolist() == [0, 1, 2] and state == {"epoch": 2, "value": 0.1}
    (tmp_path / "a.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(UserError, match="is damaged"):
        load_tensors(tmp_path / "a.safetensors")


def test_a_loss_that_is_not_finite_stops_with_advice(tmp_path):
    embedder = Embedder(toy(), TOY)
    with torch.no_grad():
        embedder.points[:] = torch.nan
    with pytest.raises(UserError, match=r"loss is nan in epoch 1, step 1; lower --lr"):
        embedder.advance()


# -------------------------------------------------------------------------------------------------------- command line


def run(*args):
    return main(["tree", *map(str, args)])


SMALL = ("--dim", "2", "--epochs", "40", "--batch-size", "16", "--negatives", "40", "--manifold", "poincare")


def test_embed_leaves_a_complete_run_and_eval_agrees(edges, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("embed", edges, "--out", out, *SMALL, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["map"] > 0.8 and printed["epochs"] == 40 and printed["num_nodes"] == 40
    assert json.loads((out / "metrics.json").read_text()) == printed
    assert {path.name for path in out.iterdir()} == {
        "config.yaml",
        "embedding.safetensors",
        "closure.safetensors",
        "names.txt",
        "metrics.jsonl",
        "metrics.json",
        "checkpoint.safetensors",
        "disk.png",
    }
    assert (out / "disk.png").read_bytes()[:4] == b"\x89PNG"
    assert run("eval", out, "--json") == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated == {key: printed[key] for key in evaluated} and "distortion" in evaluated
    assert run("eval", out) == 0
    assert f"{printed['map']:.4f}" in capsys.readouterr().out
    assert run("draw", out, "--out", tmp_path / "a.svg") == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    capsys.readouterr()
    for args in (
        ["draw", out, "--names", -1],
        ["eval", out, "--samples", -1],
        ["show", edges, "--max-lines", -1],
        ["embed", edges, "--out", tmp_path / "b", "--max-seconds", -1],
        ["embed", edges, "--out", tmp_path / "b", "--eval-samples", -1],
    ):
        assert run(*args) == 2
        assert f"{args[-2]} must be at least 0, got -1" in capsys.readouterr().err


def test_the_saved_config_repeats_the_run(edges, tmp_path, capsys):
    assert run("embed", edges, "--out", tmp_path / "a", *SMALL, "--no-draw") == 0
    assert run("embed", "--config", tmp_path / "a" / "config.yaml", "--out", tmp_path / "b") == 0
    a, b = (load_embedding(tmp_path / name).points for name in "ab")
    assert torch.equal(a, b)


def test_a_folder_with_a_run_is_not_overwritten_by_accident(edges, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("embed", edges, "--out", out, *SMALL, "--no-draw") == 0
    assert run("embed", edges, "--out", out, *SMALL, "--no-draw") == 2
    assert "already holds a run" in capsys.readouterr().err
    before = load_embedding(out).points
    assert run("embed", edges, "--out", out, *SMALL, "--no-draw", "--resume") == 0
    assert torch.equal(before, load_embedding(out).points)
    assert run("embed", edges, "--out", out, *SMALL, "--no-draw", "--overwrite", "--seed", 3) == 0
    assert not torch.equal(before, load_embedding(out).points)


def test_a_kill_while_a_run_is_replaced_leaves_no_points_of_the_old_one(edges, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert run("embed", edges, "--out", out, *SMALL) == 0
    before = {file.name for file in out.iterdir()}

    class Killed(BaseException):
        pass

    def kill(path, text):
        raise Killed

    monkeypatch.setattr("hyptree.train.embedding.job.write_text", kill)
    with pytest.raises(Killed):
        run("embed", edges, "--out", out, *SMALL, "--overwrite")
    assert before >= {"embedding.safetensors", "disk.png"}
    assert not {"embedding.safetensors", "disk.png", "checkpoint.safetensors"} & {file.name for file in out.iterdir()}


def test_ctrl_c_writes_a_checkpoint_and_exits_with_130(edges, tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "hyptree",
        "tree",
        "embed",
        str(edges),
        "--out",
        str(out),
        "--epochs",
        "1000000",
        "--no-draw",
    ]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        while not (log := out / "metrics.jsonl").exists() or not log.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    last = errors.strip().splitlines()[-1]
    assert last.startswith("hyptree: interrupted; go on with: ") and last.endswith("--no-draw --resume")
    state = load_tensors(out / CHECKPOINT)[1]
    assert state["epoch"] >= 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["embed", "missing.tsv"], "missing.tsv: no such file"),
        (["embed", "one.tsv"], "line 1: expected a child and its parent"),
        (["embed", "cycle.tsv"], "there is a cycle: a -> b -> a"),
        (["embed", "toy.tsv", "--epochs", "0"], "epochs must be at least 1, got 0"),
        (["embed", "toy.tsv", "--lr", "nan"], "lr must be a positive number, got nan"),
        (["embed", "toy.tsv", "--burn-in", "30"], "burn_in must be from 0 to epochs - 1 = 29, got 30"),
        (["embed", "toy.tsv", "--loss", "cones", "--manifold", "euclidean"], "needs a hyperbolic manifold"),
        (["embed", "toy.tsv", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (["embed", "toy.tsv", "--resume"], "nothing to resume"),
        (["embed", "toy.tsv", "--out", "toy.tsv"], "is a file, expected a folder"),
        (["embed", "toy.tsv", "--margine", "1"], "margine"),
        (["eval", "nowhere"], "no such folder"),
        (["eval", "."], "is it a run of tree embed?"),
        (["show", "cycle.tsv"], "there is a cycle"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_and_exit_code_2(edges, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    Path("one.tsv").write_text("cat\ndog\n")
    Path("cycle.tsv").write_text("a\tb\nb\ta\n")
    assert run(*args) == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1] and "Traceback" not in captured.err
    assert captured.err.splitlines()[-1].startswith("hyptree: error: ") and captured.out == ""


def test_eval_finds_a_point_that_is_not_finite(edges, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("embed", edges, "--out", out, *SMALL, "--no-draw") == 0
    tensors, state = load_tensors(out / "embedding.safetensors")
    tensors["points"][7, 0] = torch.nan
    save_tensors(out / "embedding.safetensors", tensors, state)
    assert run("eval", out) == 2
    assert "(row 7) is not finite" in capsys.readouterr().err


def test_show_prints_the_tree(edges, capsys):
    assert run("show", edges, "--max-depth", 1) == 0
    text = capsys.readouterr().out
    assert "n0" in text and "n3" in text


def test_recipes_are_valid(tmp_path, edges, capsys):
    recipes = sorted((Path(__file__).parents[3] / "recipes").glob("embed_*.yaml"))
    assert len(recipes) >= 2
    for recipe in recipes:
        assert run("embed", edges, "--config", recipe, "--print-config") == 0


@pytest.mark.parametrize("manifold", [Lorentz(), Poincare(), Lorentz(0.25)], ids=str)
def test_the_picture_keeps_the_distance_from_the_origin(manifold):
    embedder = Embedder(toy(), changed(TOY, dim=4))
    embedding = embedder.embedding()
    embedding.manifold, embedding.points = manifold, manifold.random(40, 4, dtype=torch.float64)
    flat = torch.from_numpy(disk_points(embedding))
    scaled = manifold.dist0(embedding.points) * float(manifold.c) ** 0.5
    torch.testing.assert_close(Poincare().dist0(flat), scaled)


@pytest.mark.gpu
def test_cuda_learns_and_resumes_bit_for_bit(tmp_path):
    settings = changed(TOY, device="cuda", epochs=30)
    whole = embed(toy(), settings, tmp_path / "whole")
    embed(toy(), settings, tmp_path / "parts", max_seconds=1e-9)
    parts = embed(toy(), settings, tmp_path / "parts", resume=True)
    assert torch.equal(whole.points, parts.points)
    assert measure(whole.embedding())["map"] > 0.9
