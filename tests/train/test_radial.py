"""The task radial: the losses of the old trainer bit for bit, resumes, shared by processes, an encoder afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="install hyptree[vlm]")

from safetensors.torch import load_file

from hyptree.cli import main
from hyptree.config import load
from hyptree.data.hierarchies.hierarcaps import Chain, read_hierarcaps, without_images_of
from hyptree.errors import UserError
from hyptree.runs import RunFolder
from hyptree.train.evaluate import evaluate_run
from hyptree.train.export import export
from hyptree.train.loop import Trainer, fit
from hyptree.train.run.recipe import Recipe
from hyptree.train.tasks.radial import Radial
from hyptree.vlm import AdapterHandle, load_encoder
from hyptree.vlm.radial.hierarchy_report import world_chains
from hyptree.vlm.radial.loss import RadialLoss
from tests.train.test_distributed import _be_rank, in_two
from tests.vlm.radial.golden_model import PROBES, save_golden_clip
from tests.vlm.small_models import register_open_clip, save_bert, save_dual

GOLDEN = json.loads((Path(__file__).parent / "golden_radial.json").read_text())
BASE = (
    "task=radial", "optim.lr=1e-3", "data.batch_size=4", "data.num_train=10", "data.num_val=6", "schedule.epochs=2",
    "run.device=cpu", "run.threads=1", "run.tensorboard=false", "run.log_steps=1",
)  # fmt: skip
"""Ten chains of the world twice, in batches of 4, 4 and 2."""
HEADER = "positive,negative,image_url\n"
ROWS = [
    f"vehicle => {kind} => a {kind} at night => a red {kind} on the road {i},"
    f"road => night => a road => three wheels,u/{i}.jpg\n"
    for i, kind in enumerate(["car", "truck"] * 6)
]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_golden_clip(tmp_path_factory.mktemp("models") / "clip")


def recipe(clip: str, *overrides: str) -> Recipe:
    return load(Recipe, None, [*BASE, f"model.name={clip}", *overrides])


def lines(run: Path, split: str) -> list[dict[str, Any]]:
    return [line for line in RunFolder(run).read_metrics() if line["split"] == split]


def assert_same(one: Path, other: Path) -> None:
    """Weights and moments are equal to the bit, and so are the losses of every step."""
    for name in ("model", "training"):
        a, b = (load_file(run / f"checkpoints/last/{name}.safetensors") for run in (one, other))
        assert a.keys() == b.keys() and a
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert [line["loss"] for line in lines(one, "train")] == [line["loss"] for line in lines(other, "train")]


# ------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("name", GOLDEN)
def test_the_losses_and_embeddings_are_those_of_the_old_trainer(clip, tmp_path, monkeypatch, name):
    """To the bit on the machine that made them. The loop's own AdamW is the fused one, whose rounding is another."""
    # So is the rounding of quick rows, which Adam's first step, of gradients that are rounding alone, makes large.
    monkeypatch.setattr("hyptree.geometry.core.rows.fits", lambda *_: False)
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, fused, **options: adamw(groups, **options))
    case, seed = GOLDEN[name], name[-1]
    words = [f"radial.{key}={json.dumps(value)}" for key, value in case["settings"].items()]
    fit(recipe(clip, f"run.seed={seed}", f"data.seed={seed}", *words), tmp_path, quiet=True)
    actual = [[line[key] for key in ("loss", "entail", "hard", "keep")] for line in lines(tmp_path, "train")]
    with torch.no_grad():
        embeddings = load_encoder(f"hf:{tmp_path}").encode_text(PROBES)[:, :3]
    for values, expected in ((actual, case["losses"]), (embeddings, case["embeddings"])):
        expected = torch.tensor(expected, dtype=torch.float64)
        difference = (torch.as_tensor(values, dtype=torch.float64) - expected).abs().max()
        assert difference <= 1e-6 * expected.abs().max()


def test_defaults_are_the_published_setting_and_an_adapter_has_a_rate_of_its_own():
    published = load(Recipe, None, ["task=radial"])
    assert (published.optim.lr, published.optim.weight_decay, published.optim.clip) == (1e-7, 0.01, None)
    assert (published.schedule.name, published.schedule.epochs, published.data.batch_size) == ("constant", 1, 8)
    assert load(Recipe, None, ["task=radial", "radial.method=lora"]).optim.lr == 1e-4
    assert load(Recipe, None, ["task=radial", "radial.method=lora", "optim.lr=1e-3"]).optim.lr == 1e-3


def test_the_root_is_the_empty_text_of_this_step_and_learns(clip):
    task, model, batch = started(clip, "data.num_train=4")
    loss, numbers = task.training_loss(model, batch)
    rows = task.encoder.encode_text(["", *(text for chain in batch["chains"] for text in chain.texts)]).detach()
    positive, negative = rows[1:].view(4, 8, -1).chunk(2, 1)
    expected = RadialLoss()(positive, negative, rows[0], positive, negative)
    assert loss.item() == pytest.approx(expected.total.item(), abs=1e-5) and numbers["keep"] < 1e-12
    root = model(task.encoder.tokenize([""]))
    root.retain_grad()
    task._embed = lambda model, batch: (root[0], Radial._embed(task, model, batch)[1])
    task.training_loss(model, batch)[0].backward()
    assert root.grad.abs().max() > 1e-5


def started(clip: str, *overrides: str) -> tuple[Radial, Any, Any]:
    """Task, model and first batch as the loop has them before the first step."""
    task = Radial(recipe(clip, *overrides))
    train = task.build_dataset("train")
    loader = task.build_loader(train, True)
    model = task.build_model(task.describe(train)).train()
    with torch.no_grad():
        task.before_training(model)
    return task, model, next(iter(loader))


def test_keep_holds_embeddings_back(clip, tmp_path):
    for weight in (0.0, 100.0):
        fit(recipe(clip, f"radial.keep_weight={weight}"), tmp_path / str(weight), quiet=True)
    free, held = (lines(tmp_path / name, "train")[-1]["keep"] for name in ("0.0", "100.0"))
    assert held < free / 3


def test_every_chain_once_per_epoch_in_an_order_of_its_own_and_only_their_texts_are_embedded(clip):
    task, _, batch = started(clip)
    batches = task._batches
    epochs = [[chain.image for step in range(3) for chain in batches.chains(epoch, step)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(chain.image for chain in batches.dataset)
    assert epochs[0] != epochs[1] and len(batches) == 3 and len(batches.chains(0, 2)) == 2
    assert batch["chains"] == batches.chains(0, 0)
    task, _, batch = started(clip, "schedule.steps=1")
    assert set(task._first._row) == {"", *(text for chain in batch["chains"] for text in chain.texts)}


def test_equal_texts_go_through_the_encoder_once(clip):
    task = Radial(recipe(clip))
    task.encoder = load_encoder(clip)
    (batch,) = task.build_loader([Chain(("a", "b", "c", "d"), ("e", "a", "c", "f"))] * 3, True)
    assert len(batch["tokens"]["input_ids"]) == 7  # a to f, and the root
    assert torch.equal(batch["rows"][0], batch["rows"][2]) and batch["rows"][0, 0] == batch["rows"][0, 5]


def test_the_loss_falls_on_real_chains(clip, tmp_path, shared_data):
    folder = shared_data / "hierarcaps"
    if not folder.is_dir():
        pytest.skip("no hierarcaps here")
    bert = f"hf:{save_bert(tmp_path / 'bert', None)}"
    words = (
        f"radial.chains={folder}",
        "data.num_train=200",
        "data.num_val=50",
        "data.batch_size=8",
        "schedule.epochs=1",
    )
    result = fit(recipe(bert, *words, "run.eval_first=true"), tmp_path / "run", quiet=True)
    first, last = lines(tmp_path / "run", "val")
    assert result.step == 25 and last["angle_next"] - last["angle_wrong"] < first["angle_next"] - first["angle_wrong"]
    task = Radial(recipe(bert, *words))
    test = read_hierarcaps(folder, "test")
    train, val = task._parts
    assert len(train) == 18_770 and without_images_of(train, test) == train and without_images_of(val, test) == []


# ------------------------------------------------------------------------------------------------- stopped and shared


def test_a_run_that_was_stopped_goes_on_bit_for_bit(clip, tmp_path):
    words = ("run.save_steps=2", "run.ema=0.9", "run.eval_first=true", "data.batch_size=4")
    fit(recipe(clip, *words), tmp_path / "whole", quiet=True)
    real = Trainer.train_step

    def train_step(self: Trainer, batches: Any) -> None:
        if self.progress.step == 5:
            raise RuntimeError("the power went off")
        real(self, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        with pytest.raises(RuntimeError, match="power"):
            fit(recipe(clip, *words), tmp_path / "run", quiet=True)
    fit(recipe(clip, *words), tmp_path / "run", resume=True, quiet=True)
    assert_same(tmp_path / "whole", tmp_path / "run")
    assert [line["step"] for line in lines(tmp_path / "run", "val")] == [0, 6]


LONG = ("schedule.steps=60", "run.save_steps=3")


def _train(clip: str, out: str) -> None:
    torch.set_num_threads(1)
    fit(recipe(clip, *LONG), out, quiet=True)


def test_kill_9_in_the_middle_resume_eval_and_page(clip, tmp_path, capsys):
    fit(recipe(clip, *LONG), tmp_path / "whole", quiet=True)
    run = tmp_path / "run"
    process = multiprocessing.get_context("forkserver").Process(target=_train, args=(clip, str(run)))
    process.start()
    deadline = time.monotonic() + 90
    while not (run / "checkpoints/previous").is_dir() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(lines(run, "train")) < 60
    fit(recipe(clip, *LONG), run, resume=True, quiet=True)
    assert_same(tmp_path / "whole", run)

    last = lines(run, "val")[-1]
    assert main(["eval", str(run), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert all(numbers[name] == last[name] for name in ("told_apart", "angle_next", "angle_wrong", "tau_d"))
    assert main(["explain", str(run), "--pictures", "2"]) == 0
    assert f"hf:{run}" in (run / "index.html").read_text()


def _rank(rank: int, port: int, log: str, out: str, clip: str, overrides: tuple[str, ...]) -> None:
    _be_rank(rank, port)
    ended = "fine"
    try:
        fit(recipe(clip, *overrides), out, quiet=True)
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    Path(f"{log}.{rank}").write_text(json.dumps(ended))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_equal_one(clip, tmp_path, parallel):
    """The worst pairs are those of the whole batch, and an epoch of nine ends with a batch that only one shares in."""
    words = ("data.num_train=9", "run.threads=null", f"run.parallel={parallel}")
    fit(recipe(clip, *words), tmp_path / "one", quiet=True)
    assert in_two(tmp_path, _rank, str(tmp_path / "two"), clip, words) == ["fine", "fine"]
    one, two = (load_file(tmp_path / name / "checkpoints/last/model.safetensors") for name in ("one", "two"))
    for key in one:
        if not key.endswith("k_proj.bias"):  # no gradient but rounding, of which Adam makes steps
            torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}")
    for split in ("train", "val"):
        for a, b in zip(lines(tmp_path / "one", split), lines(tmp_path / "two", split), strict=True):
            for name in {"loss", "hard", "keep", "angle_next", "told_apart", "tau_d"} & a.keys():
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5)


# ------------------------------------------------------------------------------------------------ what comes of a run


def test_a_run_is_an_encoder_for_every_verb_and_as_a_folder(clip, tmp_path, capsys):
    out = tmp_path / "run"
    fit(recipe(clip), out, quiet=True)
    base, trained = load_encoder(clip), load_encoder(str(out))
    assert trained.name == f"hf:{out}" and all(p.requires_grad for p in trained.model.parameters())
    assert not torch.allclose(base.encode_text(PROBES), trained.encode_text(PROBES), atol=1e-3)
    frozen = dict(base.model.named_parameters())
    for name, value in trained.model.named_parameters():
        assert torch.equal(value, frozen[name]) or name.startswith("text"), name  # pictures and logits are as before
    saved = load_file(out / "checkpoints/last/model.safetensors")
    assert {name for name in saved if name != "base"} == {f"clip.{name}" for name in frozen if name.startswith("text")}

    evaluate = ["vlm", "eval-hierarchy", "--suite", "world-text", "--limit", "10", "--quiet", "--json", "--model"]
    reports = []
    folder, _ = export(out, "hf", tmp_path / "hf")
    for model in (str(out), f"hf:{out}", f"hf:{folder}", clip):
        assert main([*evaluate, model]) == 0
        reports.append(json.loads(capsys.readouterr().out)["suites"])
    assert reports[0] == reports[1] == reports[2] != reports[3]
    with pytest.raises(UserError, match="trained no adapter"):
        export(out, "adapter")
    with pytest.raises(UserError, match="a text encoder is exported as hf"):
        export(out, "torch-export")


@pytest.mark.parametrize("method", ["lora", "scale", "diagonal"])
def test_an_adapter_is_trained_and_merged_or_taken_alone(clip, tmp_path, method):
    options = {"lora": "{rank: 2}", "scale": "{block_size: 16}"}.get(method, "{}")
    words = (f"radial.method={method}", f"radial.adapter={options}", "optim.lr=0.01")
    fit(recipe(clip, *words), tmp_path / "run", quiet=True)
    merged, base = load_encoder(f"hf:{tmp_path / 'run'}"), load_encoder(clip)
    assert list(dict(merged.model.named_parameters())) == list(dict(base.model.named_parameters()))
    assert not torch.allclose(base.encode_text(PROBES), merged.encode_text(PROBES), atol=1e-3)
    saved = load_file(tmp_path / "run/checkpoints/last/model.safetensors")
    assert 0 < sum(value.numel() for value in saved.values()) < sum(p.numel() for p in base.text_parameters()) / 2
    export(tmp_path / "run", "adapter")
    AdapterHandle.load(base, tmp_path / "run/adapter")
    torch.testing.assert_close(base.encode_text(PROBES), merged.encode_text(PROBES), atol=1e-5, rtol=1e-5)


def test_sentence_encoders_and_open_clip_train_too(tmp_path):
    pytest.importorskip("open_clip")
    bert, name = f"hf:{save_bert(tmp_path / 'bert', None)}", register_open_clip(tmp_path)
    for i, words in enumerate(([bert, "radial.geometry=geodesic"], [f"open_clip:{name}", "radial.random_init=true"])):
        run = tmp_path / str(i)
        fit(recipe(*words, "schedule.steps=3"), run, quiet=True)
        assert lines(run, "train")[-1]["keep"] > 0
        assert load_encoder(f"hf:{run}").encode_text(PROBES).isfinite().all()
        assert evaluate_run(run)["told_apart"] == lines(run, "val")[-1]["told_apart"]


def test_a_hyperbolic_encoder_is_trained_on_its_own_hyperboloid(tmp_path):
    folder = save_dual(tmp_path / "curved", "clip")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hyperbolic_curvature": 0.5}))
    task = Radial(recipe(f"hf:{folder}", "radial.geometry=lorentz"))
    task.build_model({})
    assert task.loss.c == task.c == 0.5
    with pytest.raises(UserError, match=r"radial.curvature 2 is not the encoder's own, 0.5; leave it out"):
        Radial(recipe(f"hf:{folder}", "radial.geometry=lorentz", "radial.curvature=2")).build_model({})


# ------------------------------------------------------------------------------------------------------------ chains


@pytest.fixture
def chains(tmp_path: Path) -> Path:
    path = tmp_path / "chains.csv"
    path.write_text(HEADER + "".join(ROWS))
    return path


def test_validation_chains_are_of_other_pictures(clip, chains, tmp_path):
    def split(*words: str) -> tuple[list[Chain], list[Chain]]:
        task = Radial(recipe(clip, "data.num_train=null", f"radial.chains={chains}", *words))
        return task.build_dataset("train"), task.build_dataset("val")

    train, val = split("radial.val_share=0.25")
    assert [chain.image for chain in val] == ["2.jpg", "6.jpg", "10.jpg"] and len(train) == 9
    assert without_images_of(train, val) == train
    other = tmp_path / "test.csv"
    other.write_text("id,captions,image_url\n0,a => b => c => d,v/3.jpg\n1,a => b => c => d,v/5.jpg\n")
    train, val = split(f"radial.held_out={other}")
    assert [chain.image for chain in val] == ["3.jpg", "5.jpg"] and len(train) == 10
    # In a folder of HierarCaps the pictures of its test set are held out without asking.
    folder = tmp_path / "hierarcaps"
    folder.mkdir()
    (folder / "hierarcaps_test.csv").write_text(other.read_text())
    chains.rename(folder / "hierarcaps_test_expanded.csv")
    chains = folder
    assert [len(part) for part in split()] == [10, 2]


def test_chains_of_the_world_are_those_of_its_splits(clip):
    task = Radial(recipe(clip, "data.seed=3"))
    for name, count in (("train", 10), ("val", 6), ("test", 6)):
        assert task.build_dataset(name) == world_chains(name, count, 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a => b => c => d,a => b =>  => d,u\n", "the caption of level 3 is empty"),
        ("a => b => c => d => e,a => b => c => d,u\n", "a chain has 4 captions"),
        (ROWS[0], "leaves no chains for train"),
    ],
)
def test_bad_chains_are_one_line(clip, tmp_path, rows, message):
    path = tmp_path / "bad.csv"
    path.write_text(HEADER + rows)
    with pytest.raises(UserError, match=message):
        fit(recipe(clip, f"radial.chains={path}"), tmp_path / "run", quiet=True)


def test_chains_without_contradictions_are_no_training_set(clip, tmp_path):
    path = tmp_path / "plain.csv"
    path.write_text("captions\na => b => c => d\na => b => c => e\n")
    with pytest.raises(UserError, match=r"chain 0 of .* has no negatives, expected 4"):
        fit(recipe(clip, f"radial.chains={path}"), tmp_path / "run", quiet=True)


# ---------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["radial.chains=none.csv"], "cannot read none.csv: no such file"),
        (["radial.objective=cone"], "objective must be one of radial, cones, got 'cone'; did you mean 'cones'"),
        (["radial.geometry=flat"], "geometry must be one of"),
        (["radial.curvature=-1"], "curvature must be a positive number"),
        (["radial.val_share=1"], "val_share is a share"),
        (["radial.method=scale", "radial.adapter={block_size: 7}"], "block_size 7"),
        (["radial.method=lora", "radial.adapter={block_size: 7}"], "radial.adapter of method lora has no setting"),
        (["radial.adapter={rank: 7}"], "method tower takes no adapter options"),
        (["run.accumulate=2"], "run.accumulate 2 means nothing to the task radial"),
        (["data.root=somewhere"], "data.root somewhere means nothing to the task radial"),
        (["model.name=hcformer_pico"], "unknown encoder 'hcformer_pico'"),
        (["task=classify", "radial.part=train"], "radial.part train means nothing to the task classify"),
    ],
)
def test_mistakes_are_one_line(clip, tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        fit(recipe(clip, *words), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_other_chains_and_other_weights_do_not_go_on_with_a_run(clip, chains, tmp_path, capsys):
    model = f"hf:{save_dual(tmp_path / 'model', 'clip')}"
    words = (f"radial.chains={chains}", "data.num_train=null", "schedule.epochs=1")
    run = tmp_path / "run"
    fit(recipe(model, *words), run, quiet=True)
    chains.write_text(HEADER + "".join(ROWS[:-1]))
    with pytest.raises(UserError, match=r"its data had other num_chains \(dataset.json\); give the same data"):
        fit(recipe(model, *words), run, resume=True, quiet=True)
    save_dual(tmp_path / "model", "clip", seed=1)
    assert main(["vlm", "eval-hierarchy", "--model", str(run), "--suite", "world-text", "--limit", "4"]) == 2
    assert "trained on another encoder than hf:" in capsys.readouterr().err
    with pytest.raises(UserError, match="trained on another encoder than hf:"):
        evaluate_run(run)


def test_a_loss_that_is_not_finite_is_one_line(clip, tmp_path):
    with pytest.raises(UserError, match=r"(loss|gradient) is (nan|inf).* lower optim.lr"):
        fit(recipe(clip, "optim.lr=1e30", "schedule.steps=6"), tmp_path, quiet=True)


def test_verbs_that_are_gone_name_recipes_that_are_there(capsys):
    folder = Path(__file__).resolve().parents[2] / "recipes"
    for verb in ("train-radial", "train-scale", "train-fewshot"):
        assert main(["vlm", verb, "--model", "hf:x"]) == 2
        words = capsys.readouterr().err.split()
        assert (folder / Path(words[words.index("train") + 1]).name).is_file()


def test_the_recipes_are_whole():
    folder = Path(__file__).resolve().parents[2] / "recipes"
    for name in ("radial_world", "radial_hierarcaps"):
        assert load(Recipe, folder / f"{name}.yaml").task == "radial"
