"""Language models as a task of the loop: what they learn, what they score, that they resume bit for bit."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyptree.cli import main
from hyptree.config import load
from hyptree.errors import UserError
from hyptree.runs import RunFolder
from hyptree.train.evaluate import evaluate_run, load_model
from hyptree.train.loop import Trainer, fit
from hyptree.train.optimizer.build import param_groups, parameter_marks
from hyptree.train.run.recipe import OptimSettings, Recipe
from tests.train import tiny
from tests.train.test_resume import assert_same_run, dying_before_step, tensors

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "task=language",
    "text.num_documents=30",
    "text.vocab_size=320",
    "text.block_length=32",
    "model.args={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 56}",
    "data.batch_size=8",
    "optim.lr=0.01",
    "optim.weight_decay=0.01",
    "schedule.steps=12",
    "schedule.warmup=1",
    "run.device=cpu",
    "run.log_steps=4",
    "run.eval_every=0",
    "run.tensorboard=false",
    "run.max_skipped_steps=3",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Tokenizer and tokens of the little text, made once."""
    return tmp_path_factory.mktemp("text")


def recipe(cache: Path, name: str, *overrides: str) -> Recipe:
    """Twelve steps of a model of two layers on part of the built-in text."""
    return load(Recipe, None, [*SMALL, f"text.cache={cache}", f"model.name={name}", *overrides])


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("name", ["helm-d-pico", "helm-mice-pico", "twin:helm-d-pico", "twin:helm-mice-pico"])
def test_every_kind_of_model_learns(tmp_path, cache, name):
    fit(recipe(cache, name), tmp_path, quiet=True)
    lines = RunFolder(tmp_path).read_metrics()
    train, (val,) = [line for line in lines if line["split"] == "train"], [x for x in lines if x["split"] == "val"]
    assert train[0]["loss"] == pytest.approx(math.log(320), abs=1.0)
    assert train[-1]["loss"] < train[0]["loss"] - 0.3
    assert val["perplexity"] == pytest.approx(math.exp(val["loss"])) and val["loss"] < math.log(320) - 0.3
    assert val["log_likelihood"] == -val["loss"]


def test_resumed_run_equals_the_uninterrupted_one(tmp_path, cache):
    inputs = recipe(cache, "helm-d-pico", "run.save_steps=2", "run.accumulate=2", "run.precision=bf16")
    fit(inputs, tmp_path / "whole", quiet=True)
    for step in (3, 9):
        with dying_before_step(step):
            fit(inputs, tmp_path / "parts", resume=True, quiet=True)
    fit(inputs, tmp_path / "parts", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("name", ["helm-d-pico", "helm-mice-pico", "twin:helm-d-pico"])
def test_numbers_while_training_are_those_of_the_weights(tmp_path, cache, name):
    """The third evaluation of a run says of its weights what a fresh process would say."""
    inputs = recipe(cache, name, "run.eval_every=0.01", "schedule.steps=9")
    fit(inputs, tmp_path, quiet=True)
    lines = [line for line in RunFolder(tmp_path).read_metrics() if line["split"] == "val"]
    assert len(lines) > 2
    best = min(lines, key=lambda line: line["loss"])
    assert evaluate_run(tmp_path)["loss"] == pytest.approx(best["loss"], rel=1e-6)


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("name", ["helm-d-pico", "twin:helm-d-pico"])
def test_accumulation_trains_the_same_model(tmp_path, cache, name, packing):
    """Also where the first token of a document has no label, so that the halves of a batch have unequally many."""
    lines = ["tell me a long story " * 60] * 12 + ["a word"] * 300
    (tmp_path / "text.txt").write_text("\n".join(lines))
    text = (f"text.path=[{tmp_path / 'text.txt'}]", "text.documents=lines", "text.num_documents=null")
    for parts in (1, 2):
        changes = (*text, f"text.packing={packing}", f"run.accumulate={parts}", "run.log_steps=1")
        inputs = recipe(cache, name, *changes, "text.vocab_size=270", "schedule.steps=4")
        fit(inputs, tmp_path / str(parts), quiet=True)
    a, b = (RunFolder(tmp_path / name).read_metrics() for name in ("1", "2"))
    assert [line["loss"] for line in b] == pytest.approx([line["loss"] for line in a], rel=2e-6)


def test_what_a_run_knows_is_enough_without_text_and_cache(tmp_path, cache):
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    fit(recipe(own, "twin:helm-d-pico", "schedule.steps=1"), tmp_path / "run", quiet=True)
    shutil.rmtree(own)
    from hyptree.train.language import load_language_model

    model, tokenizer = load_language_model(tmp_path / "run")
    text = "The quick brown fox, naïvely 🙂."
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert model.config.vocab_size == len(tokenizer) == 320
    assert model.config.eos_token_id == tokenizer.eos_token_id is not None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.name=helm-d-piko",), r"unknown preset 'helm-d-piko'; did you mean 'helm-d-pico'\?"),
        (("model.args.hiden_size=3",), r"'hiden_size'.*did you mean 'hidden_size'\?"),
        (("model.args.vocab_size=300",), "vocab_size is 300, the tokenizer has 320 tokens; leave it out"),
        (("text.block_length=512",), "block_length 512 is longer than the context of helm-d-pico, 256"),
        (("text.path=[nowhere.txt]",), "cannot read nowhere.txt"),
        (("model.pretrained=true",), "there are no weights to download"),
    ],
)
def test_a_wrong_recipe_is_one_clear_line(tmp_path, cache, overrides, message):
    with pytest.raises(UserError, match=message):
        fit(recipe(cache, "helm-d-pico", *overrides), tmp_path, quiet=True)


def test_the_command_trains_goes_on_and_prepares(tmp_path, cache, capsys):
    (tmp_path / "small.yaml").write_text("task: language\n")
    settings = [*SMALL[1:], f"text.cache={cache}", "model.name=twin:helm-d-pico", "schedule.steps=2"]
    flags = [word for setting in settings for word in ("--" + setting.split("=")[0], setting.split("=", 1)[1])]
    assert main(["train", str(tmp_path / "small.yaml"), *flags, "--out", str(tmp_path / "run")]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["train", str(tmp_path / "run"), "--resume"]) == 0
    assert "this run is finished: 2 steps" in capsys.readouterr().out
    assert main(["train", str(tmp_path / "run"), "--prepare"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("train: 27 documents") and second.startswith("val: 3 documents")
    wrong = ["--optim.lrr", "1", "--out", str(tmp_path / "other")]
    assert main(["train", str(tmp_path / "small.yaml"), *wrong]) == 2
    assert "did you mean '--optim.lr'?" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- the numbers


def test_numbers_are_those_of_the_definition(tmp_path, cache):
    """Log-softmax of all logits, token by token, and the bytes of the text that was predicted."""
    inputs = recipe(cache, "twin:helm-d-pico", "schedule.steps=2", "data.eval_batch_size=7", "text.num_documents=10")
    fit(inputs, tmp_path, quiet=True)
    actual = evaluate_run(tmp_path)
    model, _ = load_model(tmp_path)
    from hyptree.data.text import build_text
    from hyptree.train.language import load_language_model

    tokenizer = load_language_model(tmp_path)[1]
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    sizes = [0 if i in tokenizer.all_special_ids else len(piece) for i, piece in enumerate(pieces)]
    nll, count, num_bytes = 0.0, 0, 0
    for block in build_text(inputs.text, "val"):
        with torch.no_grad():
            logs = model(block["input_ids"][None]).logits[0].double().log_softmax(-1)
        for i, label in enumerate(block["labels"].tolist()):
            if i > 0 and label != -100:
                nll, count, num_bytes = nll - logs[i - 1, label].item(), count + 1, num_bytes + sizes[label]
    assert actual["loss"] == pytest.approx(nll / count, rel=1e-6)
    assert actual["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert actual["bits_per_byte"] == pytest.approx(nll / math.log(2) / num_bytes, rel=1e-6)
    assert evaluate_run(tmp_path, "train")["loss"] != actual["loss"]


# ------------------------------------------------------------------------------------------- what the loop offers to it


class Marked(nn.Module):
    """A layer with parameters that say what they want."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 3))
        self.spared = nn.Parameter(torch.randn(3, 3))
        self.column = nn.Parameter(torch.randn(3))
        self.vector = nn.Parameter(torch.randn(3))
        self.slow = nn.Parameter(torch.randn(3))
        self.spared._no_weight_decay = True
        self.column._no_weight_decay = False
        self.slow._lr_scale = 0.1


def test_parameters_choose_their_decay_and_their_rate():
    model = Marked()
    groups = param_groups(model, OptimSettings(weight_decay=0.3))
    actual = {id(p): (group["weight_decay"], group["lr_scale"]) for group in groups for p in group["params"]}
    named = {name: actual[id(p)] for name, p in model.named_parameters()}
    assert named == {
        "matrix": (0.3, 1.0),
        "spared": (0.0, 1.0),
        "column": (0.3, 1.0),
        "vector": (0.0, 1.0),
        "slow": (0.0, 0.1),
    }
    assert parameter_marks(model) == {"spared": (True, 1.0), "column": (False, 1.0), "slow": (None, 0.1)}


@pytest.mark.parametrize("points", [False, True])  # fused AdamW decides on the device, the Riemannian one is asked
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(tmp_path, points):
    inputs = tiny.recipe("model.head.nan_at=5", "run.max_skipped_steps=1", f"model.args.points={str(points).lower()}")
    states = {}
    real = Trainer.train_step

    def train_step(self: Trainer, batches: object) -> None:
        real(self, batches)
        states[self.progress.step] = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        fit(inputs, tmp_path, quiet=True)
    assert all(torch.equal(states[5][name], states[4][name]) for name in states[4])
    assert not any(torch.equal(states[6][name], states[5][name]) for name in states[5] if name != "scale")
    lines = [line for line in RunFolder(tmp_path).read_metrics() if line["split"] == "train"]
    assert [line.get("skipped_steps") for line in lines] == [None, None, 1, 1, 1, 1]
    assert all(math.isfinite(line["loss"]) for line in lines)
    counts = {v.item() for k, v in tensors(tmp_path).items() if k.endswith("/step")}
    assert counts == {11}, "the optimiser counted the step that it left out"


def test_too_many_such_steps_end_the_run(tmp_path):
    inputs = tiny.recipe("optim.lr=1e30", "optim.clip=null", "run.max_skipped_steps=2")
    with pytest.raises(UserError, match="3 steps in a row had a gradient that is not finite"):
        fit(inputs, tmp_path, quiet=True)


# ---------------------------------------------------------------------------------------------------------- the recipes


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*_wiki.yaml")), ids=lambda path: path.stem)
def test_recipes_for_real_text_run(path, shared_data, tmp_path):
    text = shared_data / "text"
    inputs = load(
        Recipe,
        path,
        [
            f"text.path=[{text / 'wiki_valid.txt.xz'}]",
            f"text.val_path=[{text / 'wiki_valid.txt.xz'}]",
            f"text.cache={tmp_path / 'cache'}",
            "text.vocab_size=1024",
            "text.num_documents=20",
            "text.block_length=64",
            "data.batch_size=2",
            "data.eval_batch_size=8",
            "model.args={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 56}",
            "schedule.steps=2",
            "schedule.warmup=0",
            "run.device=cpu",
            "run.compile=false",
            "run.tensorboard=false",
        ],
    )
    result = fit(inputs, tmp_path / "run", quiet=True)
    assert result.step == 2 and result.numbers["loss"] < math.log(1024) + 1


def test_recipes_say_what_they_should():
    recipes = {
        path.stem: load(Recipe, path)
        for path in (ROOT / "recipes").glob("*.yaml")
        if "task: language" in path.read_text()
    }
    assert set(recipes) == {"helm_builtin", "helm_wiki", "llama_wiki", "helm_d_115m"}
    for inputs in recipes.values():
        schedule = inputs.schedule
        assert (schedule.name, schedule.min_lr, inputs.optim.clip, inputs.optim.weight_decay) == (
            "cosine",
            0.1,
            1.0,
            0.01,
        )
        length = schedule.steps or schedule.epochs
        assert schedule.warmup == pytest.approx(0.03 * length, rel=0.02)
    helm, llama = recipes["helm_wiki"], recipes["llama_wiki"]
    assert llama.model.name == f"twin:{helm.model.name}"
    assert json.dumps(llama.model.args) == json.dumps(helm.model.args)
    llama.model.name = helm.model.name
    assert llama == helm, "the comparison differs in nothing else"
    paper = recipes["helm_d_115m"]
    tokens = paper.data.batch_size * paper.text.block_length
    assert tokens == 4 * 4 * 2048 * 64 and paper.optim.lr == 4e-4 and paper.run.seed == 1234


# --------------------------------------------------------------------------------------------------- inside the model


@pytest.mark.parametrize("name", ["helm-d-pico", "helm-mice-pico", "twin:helm-d-pico"])
def test_inside_is_what_the_model_does(tmp_path, cache, name):
    from hyptree.evaluate.text.residual_stream import stream_statistics
    from hyptree.train.tasks import build_task

    task = build_task(recipe(cache, name))
    text = task.build_dataset("train")
    model: Any = task.build_model(task.describe(text)).eval()
    batch = text.batch([0, 1, 2])
    actual = stream_statistics(model, batch)
    with torch.no_grad():
        states = model.model(batch["input_ids"], output_hidden_states=True).hidden_states
    # Between the two layers; what transformers gives for the last one is normed in some models.
    assert actual["stream/00"] == pytest.approx(states[1].norm(dim=-1).mean().item(), rel=1e-6)
    assert [key for key in actual if key.startswith("stream/")] == ["stream/00", "stream/01"]
    loads = {key: value for key, value in actual.items() if key.startswith("load/")}
    assert ("clamped" in actual) == (not name.startswith("twin:"))
    if name != "helm-mice-pico":
        assert not loads and not [key for key in actual if key.startswith("curvature")]
        return
    assert sum(loads.values()) == pytest.approx(1) and len(loads) == 4  # the second of two layers has experts
    assert [actual[f"curvature/01.{i}"] for i in range(4)] == pytest.approx([0.1, 0.1 + 1.9 / 3, 0.1 + 3.8 / 3, 2.0])
    assert [actual[f"curvature_{which}"] for which in ("min", "mean", "max")] == pytest.approx([0.1, 1.05, 2.0])


def test_bounds_are_counted():
    from hyptree.evaluate.text.residual_stream import stream_statistics

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(min=0.0) + x.clamp(-9.0, 9.0)  # only the first is a lower bound

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer()])

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            return self.layers[0](input_ids)

    model = Model()
    object.__setattr__(model, "base_model", model)
    x = torch.tensor([[[-3.0, 4.0], [0.0, 5.0]]])
    actual = stream_statistics(model, {"input_ids": x, "labels": x})
    assert actual["clamped"] == 0.25
    assert actual["stream/00"] == pytest.approx((math.hypot(-3, 8) + 10) / 2)
