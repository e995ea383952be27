"""Classification: loss, mixing, numbers with a hierarchy; and the verbs train, eval, models, export on top of it."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hyptree.cli import main
from hyptree.cli.config import parse
from hyptree.cli.train import run as train
from hyptree.config import load
from hyptree.data.sample import Sample
from hyptree.errors import UserError
from hyptree.runs import RunFolder
from hyptree.train import load_model
from hyptree.train.loop import fit
from hyptree.train.model import create_model
from hyptree.train.run.recipe import ModelSettings, Recipe
from hyptree.train.tasks.classify import Classify
from hyptree.tree import Tree
from tests.stderr import own

pytest.importorskip("timm")

ROOT = Path(__file__).resolve().parents[2]

# Two kinds of three classes under one root: 0 1 2 -> 6, 3 4 5 -> 7, 6 7 -> 8.
TREE = Tree([6, 6, 6, 7, 7, 7, 8, 8, -1])


class Constant(nn.Module):
    """Answers with fixed logits, row by row of what is asked: the picture's first pixel is the row."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits[x[:, 0, 0, 0].long()]


def task(*overrides: str) -> Classify:
    built = Classify(load(Recipe, None, ["model.name=test_vit", "model.args.img_size=32", "data.size=32", *overrides]))
    built.build_model({"classes": list("abcdef"), "tree": {"parent": TREE.parent.tolist(), "label": None}})
    return built


def batch(num: int) -> dict[str, torch.Tensor]:
    images = torch.arange(num, dtype=torch.float32)[:, None, None, None].expand(num, 3, 4, 4).clone()
    return {"image": images, "label": torch.randint(6, (num,))}


def test_evaluation_numbers_equal_their_definition():
    logits, data = torch.randn(50, 6), batch(50)
    parts = [{key: value[a:b] for key, value in data.items()} for a, b in ((0, 30), (30, 50))]
    actual = task().evaluate(Constant(logits), parts, lambda tensor: tensor)
    label = data["label"]
    order = logits.argsort(1, descending=True)
    expected = -logits.double().log_softmax(1)[torch.arange(50), label].mean()
    assert actual["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert actual["top1"] == pytest.approx((order[:, 0] == label).double().mean().item())
    assert actual["top5"] == pytest.approx((order[:, 5] != label).double().mean().item())
    assert actual["top1_up1"] == pytest.approx((order[:, 0] // 3 == label // 3).double().mean().item())
    wrong = order[:, 0] != label
    assert actual["mistake_distance"] == pytest.approx(
        (2 + 2 * (order[:, 0] // 3 != label // 3))[wrong].double().mean()
    )
    assert actual["hierarchical_precision5"] == 1.0  # five nearest of six classes in two kinds: all of them


def test_label_smoothing_is_in_the_training_loss():
    logits, data = torch.randn(9, 6), batch(9)
    loss, numbers = task("loss.label_smoothing=0.3").training_loss(Constant(logits), data)
    target = 0.7 * nn.functional.one_hot(data["label"], 6) + 0.3 / 6
    assert loss.item() == pytest.approx(-(target * logits.log_softmax(1)).sum(1).mean().item(), rel=1e-5)
    assert numbers["top1"].item() == pytest.approx((logits.argmax(1) == data["label"]).float().mean().item())


def test_mixing_depends_on_seed_and_step_alone():
    built = task("data.augment.mixup=0.8", "data.augment.cutmix=1.0", "loss.label_smoothing=0.1")
    original = {"image": torch.randn(8, 3, 16, 16), "label": torch.randint(6, (8,))}

    def mixed(step: int) -> dict[str, torch.Tensor]:
        torch.rand(3), np.random.rand(2)  # noqa: NPY002  (whatever happened before)
        return built.prepare_batch({key: value.clone() for key, value in original.items()}, step)

    first, again, other = mixed(3), mixed(3), mixed(4)
    assert torch.equal(first["image"], again["image"]) and torch.equal(first["target"], again["target"])
    assert not torch.equal(first["image"], other["image"])
    assert first["target"].shape == (8, 6)
    torch.testing.assert_close(first["target"].sum(1), torch.ones(8))
    logits = torch.randn(8, 6)

    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return logits

    loss, _ = built.training_loss(Fixed(), first)
    assert loss.item() == pytest.approx(-(first["target"] * logits.log_softmax(1)).sum(1).mean().item(), rel=1e-5)
    plain = task().prepare_batch(original, 3)
    assert torch.equal(plain["image"], original["image"]) and "target" not in plain


def test_mixing_an_odd_share_is_refused():
    built = task("data.augment.mixup=0.8", "data.batch_size=12", "run.accumulate=2")
    with pytest.raises(
        UserError, match=r"even number of pictures at once, got 3 \(data.batch_size 12 over 2 parts and 2"
    ):
        built.build_loader([], True, rank=0, world_size=2)


def test_collate_and_pack_give_the_same_batch():
    samples = [Sample(torch.randn(3, 4, 4), str(i), label=i) for i in range(3)]
    one = task().collate(samples, train=True)
    other = task().pack(torch.stack([s.image for s in samples]), torch.tensor([0, 1, 2]))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ModelSettings(name="swin_tinny_patch4_window7_224"), r"did you mean 'swin_tiny_patch4_window7_224'\?"),
        (ModelSettings(name="test_vit", args={"dept": 3}), r"model test_vit: .*unexpected keyword argument 'dept'"),
    ],
)
def test_a_model_that_does_not_exist_is_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        create_model(settings, num_classes=3)


# --------------------------------------------------------------------------------------------- from the command line

RECIPE = """\
data: {name: world, size: 32, num_train: 48, num_val: 20, batch_size: 16}
model: {name: test_vit, args: {img_size: 32}}
optim: {lr: 1.0e-3}
schedule: {epochs: 2, warmup: 1}
run: {device: cpu, ema: 0.9, tensorboard: false, log_steps: 2}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "recipe.yaml").write_text(RECIPE)
    assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "out"), "--optim.lr", "2e-3"]) == 0
    return folder / "out"


def test_train_writes_a_run(run):
    recipe = RunFolder(run).recipe(Recipe)
    assert recipe.optim.lr == 2e-3 and recipe.model.args == {"img_size": 32}
    lines = RunFolder(run).read_metrics()
    assert [(line["step"], line["split"]) for line in lines] == [
        (2, "train"), (3, "val"), (4, "train"), (6, "train"), (6, "val"),
    ]  # fmt: skip
    assert {"loss", "top1", "top5", "top1_up1", "mistake_height"} <= lines[-1].keys()
    data = RunFolder(run).dataset()
    assert len(data["classes"]) >= 24 and len(data["tree"]["parent"]) > len(data["classes"])


def test_eval_gives_the_numbers_of_training(run, capsys):
    best = max(
        (line for line in RunFolder(run).read_metrics() if line["split"] == "val"), key=lambda line: line["top1"]
    )
    assert main(["eval", str(run), "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["samples"] == 20 and actual["top1"] == best["top1"]
    assert actual["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert main(["eval", str(run), "--split", "test", "--data.num-val", "12", "--data.eval-batch-size=5"]) == 0
    out = capsys.readouterr().out.split()
    assert out[out.index("samples") + 1] == "12" and out[out.index("split") + 1] == "test"


def trained(out: Path, *overrides: str, resume: bool = False) -> dict[str, torch.Tensor]:
    (out.parent / "recipe.yaml").write_text(RECIPE)
    fit(load(Recipe, out.parent / "recipe.yaml", overrides), out, resume=resume, quiet=True)
    return load_file(out / "checkpoints/last/model.safetensors")


def test_checkpointed_activations_change_nothing(tmp_path):
    plain = trained(tmp_path / "plain", "model.args.drop_path_rate=0.3")
    saving = trained(tmp_path / "saving", "model.args.drop_path_rate=0.3", "run.grad_checkpointing=true")
    assert plain.keys() == saving.keys()
    for name, value in plain.items():
        torch.testing.assert_close(saving[name], value, rtol=1e-5, atol=1e-7)


def test_every_augmentation_is_repeated_by_a_resumed_run(tmp_path):
    """Mixup, CutMix, RandAugment, erasing, crops, drop path: what a picture and a step meet is theirs alone."""
    overrides = [
        f"data.augment.{setting}"
        for setting in (
            "mixup=0.8", "cutmix=1.0", "rand_augment=rand-m9-mstd0.5-inc1", "erasing=0.5", "crop_scale=[0.3, 1.0]",
            "colour_jitter=0.3",
        )
    ]  # fmt: skip
    overrides += ["model.args.drop_path_rate=0.3", "run.save_steps=1", "data.num_train=32"]
    whole = trained(tmp_path / "whole", *overrides)
    trained(tmp_path / "parts", *overrides)
    shutil.rmtree(tmp_path / "parts/checkpoints/last")  # back to the step before the last one
    parts = trained(tmp_path / "parts", *overrides, resume=True)
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    assert "going on from step 3 " in (tmp_path / "parts/log.txt").read_text()


def test_a_run_folder_is_a_recipe_too(run, capsys):
    assert main(["train", str(run), "--resume"]) == 0
    assert "this run is finished: 6 steps" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 100])
def test_help_shows_the_values_that_are_read(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"\[?\b(None|True|False)\b[\])]", out)
    switches = re.findall(r"--no-([\w.-]+)", out)
    assert {"run.deterministic", "tokens.prop-attn", "model.plugin.enabled"} <= {*switches}
    for flag in switches:
        for words, value in (([f"--{flag}"], True), ([f"--no-{flag}"], False), ([f"--{flag}", "false"], False)):
            words = ["world_classify", "--model.plugin.name", "himapper", *words]
            recipe = parse(train, "hyptree train", words).settings[0]
            if flag == "model.plugin.enabled":  # one that is off is none
                assert (recipe.model.plugin is not None) is value
                continue
            assert functools.reduce(getattr, flag.replace("-", "_").split("."), recipe) is value


def test_help_names_every_task(capsys):
    from hyptree.train.tasks import TASKS

    assert main(["train", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    sentence = shown[shown.index("What is learned:") :].split(".")[0]
    own = [task for task, place in TASKS.items() if place.startswith("hyptree.")]  # other tests add tasks of their own
    assert own and [task for task in own if task not in sentence.replace(",", " ").split()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "RUN"], "already holds a run; choose another --out, --overwrite it, or go on with: hyptree train "),
        (["train", "RUN", "--resume", "--optim.lr", "1"], "it was made with optim.lr = 0.002, now it is 1.0"),
        (
            ["train", "RUN", "--out", "x", "--optim.lrr", "1"],
            "unknown flag --optim.lrr for hyptree train; did you",
        ),
        (["train", "RUN", "--out"], "--out needs a path"),
        (
            ["train", "RUN", "--out", "FILE"],
            "metrics.jsonl is a file; the run needs a folder, choose another --out",
        ),
        (["train", "RUN", "--out", "FILE/x"], "metrics.jsonl is a file; the run needs a folder"),
        (["train"], "hyptree train needs RECIPE (see hyptree train --help)"),
        (["train", "nowhere.yaml"], "cannot read nowhere.yaml: No such file or directory"),
        (["train", "recipes/world_clasify.yaml"], "did you mean 'recipes/world_classify.yaml'?"),
        (["train", "runs/nowhere", "--resume"], "runs/nowhere: no such folder to go on in"),
        (["train", "RUN", "--out", "x", "--data.name", "folder", "--data.root", "/nowhere"], "/nowhere"),
        (["train", "RUN", "--out", "x", "--data.num_classes", "7"], "7"),
        (
            ["train", "RUN", "--out", "x", "--model.name", "resnet5o"],
            "unknown model 'resnet5o'; did you mean 'resnet50'?",
        ),
        (["eval", "RUN", "--split", "tset"], "got 'tset'; did you mean 'test'?"),
        (["eval", "nowhere"], "nowhere: no such folder; give a run of hyptree train"),
        (["export", "nowhere"], "nowhere: no such folder; give a run of hyptree train"),
        (["models", "resnet5oo"], "no model matches 'resnet5oo'; did you mean 'resnet50'?"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    arguments = [argument.replace("FILE", str(run / "metrics.jsonl")) for argument in arguments]
    assert main([str(run) if argument == "RUN" else argument for argument in arguments]) == 2
    err = own(capsys.readouterr().err)
    assert message in err and err.startswith("hyptree: error: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_print_config_is_a_recipe(run, tmp_path, capsys):
    assert main(["train", str(run), "--model.args.depth", "3", "--run.compile", "--print-config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    recipe = load(Recipe, tmp_path / "printed.yaml")
    assert recipe.model.args == {"img_size": 32, "depth": 3} and recipe.run.compile and recipe.optim.lr == 2e-3
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "RECIPE" in shown and "--optim.layer-decay" in shown and "--resume" in shown


def test_a_damaged_best_checkpoint_is_named(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "copy")
    path = tmp_path / "copy/checkpoints/best/model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    assert main(["eval", str(tmp_path / "copy")]) == 2
    assert "best/model.safetensors is damaged" in capsys.readouterr().err
    path.unlink()  # asked for: now the newest average takes its place
    model, _ = load_model(tmp_path / "copy")
    last = load_file(tmp_path / "copy/checkpoints/last/ema.safetensors")
    assert all(torch.equal(value, last[name]) for name, value in model.state_dict().items())


def test_export(run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(tmp_path / "weights/w.safetensors")]) == 0
    model, _ = load_model(run)
    weights = load_file(tmp_path / "weights/w.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())

    assert main(["export", str(run), "--format", "torch-export"]) == 0
    assert "largest difference to the model" in capsys.readouterr().out
    program = torch.export.load(run / "model.pt2").module()
    x = torch.randn(5, 3, 32, 32)  # another batch size than it was traced with
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)

    if importlib.util.find_spec("onnx") is None:
        assert main(["export", str(run), "--format", "onnx"]) == 2
        assert "this needs onnx: pip install hyptree[onnx]" in capsys.readouterr().err
    else:
        assert main(["export", str(run), "--format", "onnx"]) == 0


def test_a_picture_size_that_a_model_was_not_made_for_is_one_line(tmp_path, capsys):
    arguments = [
        "--model.name",
        "deit_tiny_patch16_224",
        "--data.size",
        "48",
        "--data.batch-size",
        "4",
        "--data.num-train",
        "8",
        "--data.num-val",
        "4",
    ]
    assert main(["train", str(ROOT / "recipes/world_classify.yaml"), *arguments, "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "made for pictures of 224 x 224 px, data.size is 48; set model.args.img_size 48" in err


def test_models_lists_names_and_parameters(capsys):
    assert main(["models", "test_vit", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    import timm

    assert rows["test_vit"]["params"] == sum(p.numel() for p in timm.create_model("test_vit").parameters())
    assert rows["test_vit"]["from"] == "timm"
    assert main(["models", "hcformer_pico"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["hcformer_pico", "hyptree"]
    from hyptree.lm import HelmForCausalLM, preset

    assert main(["models", "helm*pico", "--json"]) == 0
    rows = {row["name"]: row["params"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(rows) == {"helm-d-pico", "helm-mice-pico"}
    assert rows["helm-d-pico"] == HelmForCausalLM(preset("helm-d-pico")).num_parameters()


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("world_*.yaml")), ids=lambda path: path.stem)
def test_recipes_can_be_read(path):
    recipe = load(Recipe, path)
    assert recipe.data.name == "world"


def test_the_recipe_of_three_vits_trains_on_real_pictures(shared_data, tmp_path):
    from hyptree.train.compare import compare, read_table, row_recipe

    root = shared_data / "cifar10" / "cifar10_jpeg.npz"
    if not root.exists():
        pytest.skip(f"no {root}")
    path = ROOT / "recipes" / "vit_cifar10_seeds.yaml"
    settings = read_table(path, [f"data.root={root}"])
    recipe = row_recipe(settings, "ViT-Ti/2", 2)
    assert recipe.run.seed == 2 and settings.seeds == [0, 1, 2]
    model = create_model(recipe.model, num_classes=10)
    assert model.patch_embed.num_patches == 256 and len(model.blocks) == 12 and model.num_prefix_tokens == 1
    quick = ["data.num_train=16", "data.num_val=10", "data.batch_size=8", "data.eval_batch_size=10", "schedule.steps=2"]
    quick += ["schedule.warmup=1", "model.args.depth=1", "run.compile=false", "run.device=cpu", "run.log_steps=1"]
    text = compare(path, tmp_path, overrides=[f"data.root={root}", f"data.cache={tmp_path / 'kept'}", *quick])
    assert "| ViT-Ti/2 |" in text and str(root) not in text and "over seeds 0, 1, 2" in text
    lines = [line for seed in range(3) for line in RunFolder(tmp_path / "vit-ti-2" / f"seed{seed}").read_metrics()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == 6 and len(set(losses)) == 6 and all(1.5 < loss < 4 for loss in losses)
