"""Hi-Mapper on the model of a run: what is learned, logged, resumed and refused; below a dense head too."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("timm")

from hyptree.cli import main
from hyptree.config import load
from hyptree.errors import UserError
from hyptree.models import HiMapper
from hyptree.models.decoders import Segmenter, pyramid_backbone
from hyptree.models.himapper.dense import HiMapperFeatures
from hyptree.runs import RunFolder
from hyptree.train import load_model
from hyptree.train.export import export
from hyptree.train.loop import fit
from hyptree.train.model import create_model, load_weights
from hyptree.train.optimizer.build import param_groups
from hyptree.train.plugin import NUMBERS, LogitsOnly, plug_in_features, with_plugin_loss
from hyptree.train.run.recipe import PluginSettings, Recipe
from hyptree.train.tasks import build_task
from tests.train.test_resume import assert_same_run, dying_before_step

ROOT = Path(__file__).resolve().parents[2]

TINY = (
    *("data.size=32", "data.num_train=48", "data.num_val=20", "data.batch_size=16", "model.name=test_vit"),
    *("model.args.img_size=32", "model.args.patch_size=8", "schedule.epochs=2", "optim.lr=1e-3", "run.device=cpu"),
    *("run.tensorboard=false", "run.log_steps=2", "model.plugin.name=himapper", "model.plugin.num_leaves=8"),
    *("model.plugin.depth=3", "model.plugin.width=32", "model.plugin.heads=2"),
)
LOGGED = {"contrastive", "kl", *NUMBERS}


def recipe(*overrides: str) -> Recipe:
    return load(Recipe, None, [*TINY, *overrides])


def build(settings: Recipe, num_classes: int = 6) -> tuple[Any, nn.Module]:
    task = build_task(settings)
    torch.manual_seed(3)
    return task, task.build_model({"classes": [str(i) for i in range(num_classes)]})


def tiny_batch(num: int = 4, num_classes: int = 6) -> dict[str, Tensor]:
    return {"image": torch.randn(num, 3, 32, 32), "label": torch.randint(num_classes, (num,))}


# ------------------------------------------------------------------------------------------------------------- settings


def test_defaults_are_those_of_the_model():
    arguments = inspect.signature(HiMapper).parameters
    settings = PluginSettings()
    shared = [name for name in vars(settings) if name in arguments]
    assert len(shared) >= 13 and set(vars(settings)) - set(shared) == {"name", "args", "lr"}
    assert {name: getattr(settings, name) for name in shared} == {name: arguments[name].default for name in shared}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.plugin.num_leaves=20", "model.plugin.depth=4"], r"multiple of 2\^\(depth - 1\) = 8, got 20"),
        (["model.plugin.leaves=3"], "unknown key 'model.plugin.leaves'; did you mean 'model.plugin.num_leaves'"),
        (["model.plugin.name=himaper"], "did you mean 'himapper'"),
        (["model.plugin.alpha=-1"], "alpha must be 0 or a positive number, got -1.0"),
        (["tokens.keep=0.5"], "model.plugin reads a whole feature map"),
    ],
)
def test_mistakes_in_a_recipe_are_one_line(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        recipe(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.plugin.args.sibling_str=1"], "model.plugin.args: got an unexpected keyword argument 'sibling_str'"),
        (["model.plugin.args.attention=cosin"], "attention must be one of cosine, scaled, got 'cosin'"),
        (["model.plugin.heads=3"], "width must be a multiple of heads"),
        (["task=language"], "the task language takes no model.plugin, got himapper; leave it out"),
        (["model.name=coat_tiny", "model.args={img_size: 32}"], "forward_features gives a .*expected one map"),
        (
            ["model.name=deit_tiny_patch16_224", "model.args={depth: 1}"],
            r"for .* 224 px, data.size is 32; set .*img_size",
        ),
    ],
)
def test_what_the_plugin_cannot_do_is_one_line_before_training(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        build(recipe(*overrides))
    assert "\n" not in str(caught.value)


def test_backbone_is_another_word_for_name(tmp_path):
    settings = recipe("model.backbone=resnet18", "model.args={}")
    assert settings.model.name == "resnet18" and settings.model.backbone is None
    assert recipe("model.backbone=resnet18", "model.args={}") == recipe("model.name=resnet18", "model.args={}")
    _, model = build(settings)
    assert isinstance(model, HiMapper) and type(model.backbone).__name__ == "ResNet"


# ------------------------------------------------------------------------------------------------------- classification


def test_switched_off_it_is_exactly_the_model():
    _, plain = build(load(Recipe, None, [word for word in TINY if "plugin" not in word]))
    _, off = build(recipe("model.plugin.enabled=false"))
    _, on = build(recipe())
    assert type(off) is type(plain) and isinstance(on, HiMapper)
    weights = plain.state_dict()
    assert off.state_dict().keys() == weights.keys()
    for name, value in weights.items():  # the same fresh model below the plug-in
        assert torch.equal(off.state_dict()[name], value) and torch.equal(on.state_dict()[f"backbone.{name}"], value)
    x = torch.randn(3, 3, 32, 32)
    assert torch.equal(plain.eval()(x), off.eval()(x))
    torch.testing.assert_close(on.eval()(x).logits, plain(x), rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_tasks_and_the_plugins():
    task, model = build(recipe("model.plugin.alpha=0.3", "model.plugin.beta=0.07", "loss.label_smoothing=0.1"))
    batch = tiny_batch()
    model.train()
    torch.manual_seed(5)
    loss, numbers = task.training_loss(model, batch)
    torch.manual_seed(5)  # the same samples of the tree
    output = model(batch["image"])
    expected = F.cross_entropy(output.logits, batch["label"], label_smoothing=0.1)
    expected = expected + 0.3 * output.losses["contrastive"] + 0.07 * output.losses["kl"]
    torch.testing.assert_close(loss, expected)
    assert numbers.keys() == {"top1", *LOGGED}
    assert not any(value.requires_grad for value in numbers.values())
    assert numbers["contrastive"] == output.losses["contrastive"] and numbers["curvature"] == output.curvature
    mixed = task.training_loss(model, batch | {"target": F.one_hot(batch["label"], 6).float()})[1]
    assert mixed.keys() == LOGGED


def test_evaluation_means_are_over_pictures():
    task, model = build(recipe())
    model.eval()
    data = tiny_batch(10)
    parts = [{key: value[a:b] for key, value in data.items()} for a, b in ((0, 7), (7, 10))]
    with torch.no_grad():
        actual = task.evaluate(model, parts, lambda tensor: tensor)
        outputs = [model(part["image"], compute_losses=True) for part in parts]
    assert {"contrastive", *NUMBERS} <= actual.keys()
    for name in NUMBERS:
        expected = (7 * outputs[0].stats[name].double() + 3 * outputs[1].stats[name].double()) / 10
        assert actual[name] == pytest.approx(expected.item())
    logits = torch.cat([output.logits for output in outputs])
    assert actual["top1"] == pytest.approx((logits.argmax(1) == data["label"]).double().mean().item())
    plain_task, plain = build(recipe("model.plugin.enabled=false"))
    assert not LOGGED & plain_task.evaluate(plain.eval(), parts, lambda tensor: tensor).keys()


def test_a_run_logs_the_tree_and_resumes_bit_for_bit(tmp_path):
    settings = recipe("run.save_steps=2", "run.ema=0.9", "model.plugin.lr=3e-3")
    whole = fit(settings, tmp_path / "whole", quiet=True)
    with dying_before_step(3):
        fit(settings, tmp_path / "parts", quiet=True)
    parts = fit(settings, tmp_path / "parts", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert parts.numbers == whole.numbers
    lines = RunFolder(tmp_path / "whole").read_metrics()
    assert [line["step"] for line in lines if line["split"] == "train"] == [2, 4, 6]
    assert all(line.keys() >= LOGGED for line in lines if line["split"] == "train")
    assert all(line.keys() >= {"image_dependence", "mistake_distance"} for line in lines if line["split"] == "val")
    assert len({line["contrastive"] for line in lines if line["split"] == "train"}) == 3
    model, _ = load_model(tmp_path / "whole")
    assert isinstance(model, HiMapper) and not model.training
    assert model.encode.out_proj.weight.abs().sum() > 0  # it was zero before


def test_logits_alone():
    _, model = build(recipe())
    x = torch.randn(3, 3, 32, 32)
    assert torch.equal(LogitsOnly(model).eval()(x), model(x).logits)


@pytest.mark.slow
def test_a_run_is_exported_as_logits(tmp_path):
    fit(recipe("schedule.steps=1"), tmp_path / "run", quiet=True)
    model, _ = load_model(tmp_path / "run")
    path, difference = export(tmp_path / "run", "torch-export")  # for two pictures, and any other number
    x = torch.randn(3, 3, 32, 32)
    program = torch.export.load(path).module()
    torch.testing.assert_close(program(x), model(x).logits, rtol=1e-4, atol=1e-5)
    assert difference is not None


def test_checkpointed_activations_change_nothing():
    losses = []
    for saves in ("false", "true"):
        task, model = build(recipe())
        if saves == "true":
            model.to_plain().set_grad_checkpointing(True)
        torch.manual_seed(9)
        batch = tiny_batch()
        loss, _ = task.training_loss(model.train(), batch)
        loss.backward()
        losses.append((loss.item(), model.tree.mu.grad.clone(), model.backbone.patch_embed.proj.weight.grad.clone()))
    assert losses[0][0] == losses[1][0]
    for plain, saved in zip(losses[0][1:], losses[1][1:], strict=True):
        torch.testing.assert_close(saved, plain)
    assert losses[0][1].abs().sum() > 0


def test_checkpointing_reaches_the_backbone_in_a_run(tmp_path):
    plain = fit(recipe("schedule.steps=2"), tmp_path / "plain", quiet=True)
    saving = fit(recipe("schedule.steps=2", "run.grad_checkpointing=true"), tmp_path / "saving", quiet=True)
    assert saving.numbers["loss"] == pytest.approx(plain.numbers["loss"], rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- weights


def test_weights_of_the_plain_model_start_the_backbone_and_come_back(tmp_path):
    _, plain = build(recipe("model.plugin.enabled=false"), num_classes=6)
    save_file({name: value.half() for name, value in plain.state_dict().items()}, tmp_path / "plain.safetensors")
    torch.manual_seed(99)
    task = build_task(recipe())
    wrapped = task.build_model({"classes": list("abcd")})  # another classifier, which stays fresh
    fresh = load_weights(wrapped, tmp_path / "plain.safetensors")
    assert [name for name in fresh if name.startswith("backbone.")] == ["backbone.head.weight", "backbone.head.bias"]
    assert [name for name in fresh if not name.startswith("backbone.")] == [
        name for name in wrapped.state_dict() if not name.startswith("backbone.")
    ]
    value = plain.state_dict()["blocks.0.attn.qkv.weight"].half().float()
    assert torch.equal(wrapped.state_dict()["backbone.blocks.0.attn.qkv.weight"], value)

    save_file(wrapped.state_dict(), tmp_path / "wrapped.safetensors")
    torch.manual_seed(100)
    other = build_task(recipe("model.plugin.enabled=false")).build_model({"classes": list("abcd")})
    assert load_weights(other, tmp_path / "wrapped.safetensors") == []
    assert all(
        torch.equal(value, wrapped.state_dict()[f"backbone.{name}"]) for name, value in other.state_dict().items()
    )


def test_a_dense_model_takes_backbone_and_plugin_of_a_classifier(tmp_path):
    options = ["model.name=resnet18", "model.args={channels: [8, 8, 16, 16]}", "model.plugin.width=16"]
    _, classifier = build(recipe(*options))
    save_file(classifier.state_dict(), tmp_path / "w.safetensors")
    head = ["task=segment", "model.head.pyramid_channels=32", "model.head.channels=32"]
    torch.manual_seed(77)
    dense = build_task(recipe(*options, *head)).build_model({"semantic_classes": ["a", "b"]})
    fresh = load_weights(dense, tmp_path / "w.safetensors")
    assert not [name for name in fresh if name.startswith("pyramid.backbone.")]
    state = dense.state_dict()
    assert torch.equal(state["pyramid.backbone.tree.mu"], classifier.tree.mu)
    assert torch.equal(
        state["pyramid.backbone.backbone.layer4.1.conv2.weight"], classifier.backbone.layer4[1].conv2.weight
    )


# ----------------------------------------------------------------------------------------------------------- optimiser


def by_name(model: nn.Module, settings: Recipe) -> dict[str, dict[str, Any]]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups(model, settings.optim)
    actual = {names[id(p)]: group for group in groups for p in group["params"]}
    assert actual.keys() == set(names.values()) and sum(len(g["params"]) for g in groups) == len(names)
    return actual


def test_learning_rate_and_decay_of_the_plugin():
    settings = recipe("model.plugin.lr=1e-2", "optim.lr=1e-3", "optim.weight_decay=0.1")
    actual = by_name(build(settings)[1], settings)
    for name, group in actual.items():
        assert group["lr_scale"] == pytest.approx(1.0 if name.startswith("backbone.") else 10.0), name
    assert actual["tree.mu"]["weight_decay"] == actual["space.log_c"]["weight_decay"] == 0
    assert actual["backbone.pos_embed"]["weight_decay"] == 0  # the backbone's own exception
    assert actual["decompose.token_proj.weight"]["weight_decay"] == 0.1


def test_layer_decay_is_that_of_the_backbone():
    settings = recipe("optim.layer_decay=0.5", "model.plugin.lr=2e-3", "optim.lr=1e-3")
    _, model = build(settings)
    actual, plain = by_name(model, settings), by_name(build(recipe("model.plugin.enabled=false"))[1], settings)
    for name, group in plain.items():
        assert actual[f"backbone.{name}"]["lr_scale"] == group["lr_scale"]
    assert plain["patch_embed.proj.weight"]["lr_scale"] < 0.1 < plain["head.weight"]["lr_scale"] == 1
    assert actual["encode.out_proj.weight"]["lr_scale"] == actual["tree.mu"]["lr_scale"] == 2


# --------------------------------------------------------------------------------------------------------------- dense

SMALL = PluginSettings("himapper", num_leaves=8, depth=3, width=32, heads=2)


@pytest.mark.parametrize("name", ["resnet18", "hcformer_pico", "swin_tiny_patch4_window7_224"])
def test_fresh_maps_are_the_backbones_own(name):
    options = {"img_size": 64, "embed_dim": 16, "window_size": 2} if name.startswith("swin") else {}
    options |= {"channels": (8, 8, 16, 16)} if name == "resnet18" else {}
    backbone = pyramid_backbone(name, **options).eval()
    features = plug_in_features(backbone, SMALL, lr=1e-3).eval()
    assert isinstance(features, HiMapperFeatures)
    x = torch.randn(2, 3, 64, 64)
    plain, mapped = backbone(x), features(x)
    assert len(plain) == len(mapped) and all(torch.equal(a, b) for a, b in zip(plain, mapped, strict=True))
    nn.init.normal_(features.encode.out_proj.weight)
    changed = features(x)
    assert all(torch.equal(a, b) for a, b in zip(plain[:-1], changed[:-1], strict=True))
    added = (changed[-1] - plain[-1]).movedim(-1, 1) if name.startswith("swin") else changed[-1] - plain[-1]
    assert added.abs().max() > 0.01  # one vector, the same at every place
    torch.testing.assert_close(added, added[:, :, :1, :1].expand_as(added), rtol=1e-4, atol=1e-4)
    assert features.take_losses() is None  # no losses outside training
    features.enabled = False
    assert all(torch.equal(a, b) for a, b in zip(plain, features(x), strict=True))


def without_plugin(model: nn.Module) -> dict[str, Tensor]:
    """Weights of a dense model under the names they have without a plug-in."""
    return {name.replace("backbone.backbone.", "backbone."): value for name, value in model.state_dict().items()}


def test_a_segmenter_starts_as_the_plain_one_and_its_loss_has_the_trees():
    torch.manual_seed(4)
    backbone = pyramid_backbone("resnet18", channels=(8, 8, 16, 16))
    features = plug_in_features(backbone, SMALL, lr=1e-3)
    model = Segmenter(features, 3, pyramid_channels=32, channels=32)
    plain = Segmenter(backbone, 3, pyramid_channels=32, channels=32)
    plain.load_state_dict(
        {k.replace("backbone.backbone.", "backbone."): v for k, v in model.state_dict().items()}, strict=False
    )
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model.eval()(x), plain.eval()(x))

    task = build_task(recipe("task=segment"))
    batch = {"image": x, "semantic": torch.randint(3, (2, 64, 64), dtype=torch.uint8)}
    loss, numbers = task.training_loss(model.train(), batch)
    assert numbers.keys() == {"pixel_accuracy", *LOGGED}
    loss.backward()
    assert features.tree.mu.grad.abs().sum() > 0 and features.space.proj.weight.grad.abs().sum() > 0
    without = F.cross_entropy(model(x), batch["semantic"].long())
    losses, _ = features.take_losses()
    assert (loss - without).item() == pytest.approx(losses["aux_total"].item(), abs=0.05)  # but for the noise
    assert losses["aux_total"] > 0 and features.take_losses() is None


class TwoMaps(nn.Module):
    """The smallest backbone that gives features, quick to compile."""

    class feature_info:
        channels = staticmethod(lambda: [4, 6])

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 6, 2, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = self.fine(x)
        return [fine, self.coarse(fine.relu())]


def test_losses_come_out_of_compiled_code():
    features = plug_in_features(TwoMaps(), PluginSettings("himapper", num_leaves=4, depth=2, width=8, heads=1), lr=1.0)
    features.compile(backend="eager", fullgraph=True)
    maps = features.train()(torch.randn(2, 3, 32, 32))
    assert [tuple(m.shape) for m in maps] == [(2, 4, 8, 8), (2, 6, 4, 4)]
    loss, numbers = with_plugin_loss(features, None, torch.zeros(()), {})
    assert loss.requires_grad and loss > 0 and numbers.keys() == LOGGED
    loss.backward()
    assert features.tree.mu.grad.abs().sum() > 0 and features.backbone.fine.weight.grad.abs().sum() > 0


DENSE = (
    *("model.name=resnet18", "model.args={channels: [8, 16, 24, 32]}", "data.size=64", "data.batch_size=4"),
    *("data.num_train=4", "data.num_val=2", "model.head.pyramid_channels=32", "run.log_steps=5", "optim.lr=3e-3"),
    *("schedule.warmup=0", "run.eval_every=0", "data.augment.flip=0", "run.save_every=0"),
)


def test_segmentation_of_a_few_pictures_is_learned(tmp_path):
    settings = recipe("task=segment", *DENSE, "model.head.channels=32", "schedule.steps=30", "schedule.name=constant")
    fit(settings, tmp_path / "run", quiet=True)
    lines = [line for line in RunFolder(tmp_path / "run").read_metrics() if line["split"] == "train"]
    assert all(line.keys() >= LOGGED for line in lines)
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"] and lines[-1]["contrastive"] < lines[0]["contrastive"]


def test_detection_starts_as_the_plain_one_and_trains(tmp_path):
    pytest.importorskip("pycocotools", reason="install hyptree[eval]")
    head = ["task=detect", *DENSE, "model.head.anchor_scale=4", "model.head.head_channels=32", "schedule.steps=4"]
    small = ["model.head.num_proposals=20", "model.head.num_learned=16", "run.log_steps=2"]
    data = {"box_classes": list("abc"), "has_masks": True}
    models = []
    for extra in ([], ["model.plugin.enabled=false"]):
        torch.manual_seed(6)
        models.append(build_task(recipe(*head, *small, *extra)).build_model(data).eval())
    mapped, plain = models
    plain.load_state_dict(without_plugin(mapped), strict=False)
    x = torch.randn(2, 3, 64, 64)
    for name, level in mapped.backbone(x).items():
        assert torch.equal(level, plain.backbone(x)[name])
    fit(recipe(*head, *small), tmp_path / "run", quiet=True)
    lines = [line for line in RunFolder(tmp_path / "run").read_metrics() if line["split"] == "train"]
    assert all(line.keys() >= {"loss_classifier", *LOGGED} for line in lines)


def test_features_need_a_backbone_that_gives_them():
    with pytest.raises(ValueError, match="backbone must give features, got ResNet"):
        HiMapperFeatures(create_model(recipe("model.name=resnet18", "model.args={}").model))


def test_a_tree_can_be_read_below_a_dense_head():
    features = plug_in_features(pyramid_backbone("resnet18", channels=(8, 8, 16, 16)), SMALL, lr=1e-3)
    tree = features.explain_tree(torch.randn(1, 3, 64, 96))
    assert tree.num_nodes == 8 + 4 + 2 and tree.support.shape == (14, 2, 3) and features.training


def test_plug_in_leaves_a_model_without_one_alone():
    model = nn.Conv2d(3, 4, 1)
    loss, numbers = torch.ones(()), {"top1": torch.ones(())}
    assert with_plugin_loss(model, torch.zeros(2), loss, numbers) == (loss, numbers)


# ------------------------------------------------------------------------------------------------------------- recipes


def test_the_command_of_the_issue(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("data: {name: world}\n")
    words = [f"--{word.partition('=')[0]}={word.partition('=')[2]}" for word in TINY if "model.name" not in word]
    assert main(["train", str(tmp_path / "r.yaml"), *words, "--model.backbone", "test_vit", "--print-config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load(Recipe, tmp_path / "printed.yaml") == recipe()


PLACES = ["data.root=nowhere", "model.weights=nowhere"]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("himapper_*.yaml")), ids=lambda path: path.stem)
def test_recipes_can_be_read(path):
    from hyptree.train.compare import read_table, row_recipe

    if not path.stem.startswith("himapper_arms"):
        assert load(Recipe, path, PLACES).model.plugin.name == "himapper"
        return
    settings = read_table(path, PLACES)
    arms = {row: row_recipe(settings, row, 4) for row in settings.rows}
    plugins = {row: actual.model.plugin for row, actual in arms.items()}
    assert len(settings.seeds) >= 5 and list(arms) == [
        *("plain backbone", "plain backbone, equal time", "modules without losses", "Euclidean", "hyperbolic"),
        *("deterministic tree", "official init", "the paper's sign"),
    ]
    assert [row for row, plugin in plugins.items() if plugin is None] == list(arms)[:2]
    assert arms["plain backbone"] == arms["plain backbone, equal time"]
    assert settings.rows["plain backbone, equal time"]["time_of"] == "hyperbolic"
    default = PluginSettings("himapper")
    changed = {
        row: {name: value for name, value in vars(plugin).items() if value != getattr(default, name)}
        for row, plugin in plugins.items()
        if plugin is not None
    }
    assert changed["hyperbolic"] == {} and changed["modules without losses"] == {"alpha": 0, "beta": 0}
    assert changed["Euclidean"] == {"geometry": "euclidean"}
    released = {"sibling_std": 0.01, "query_residual": True, "args": {"attention": "scaled"}}
    assert changed["official init"] == released  # all three choices of the released code
    assert changed["deterministic tree"] == {"probabilistic": False}
    assert changed["the paper's sign"] == {"args": {"sign": "paper"}}
    for row, actual in arms.items():  # but for the plug-in, all arms are trained alike
        actual.model.plugin = default
        assert actual == arms["hyperbolic"], row


def test_the_papers_preset_says_what_the_paper_says():
    settings = load(Recipe, ROOT / "recipes" / "himapper_finetune.yaml")
    assert (settings.schedule.epochs, settings.schedule.name, settings.data.batch_size) == (50, "cosine", 1024)
    assert (settings.optim.lr, settings.optim.weight_decay) == (1e-4, 1e-4)
    augment = settings.data.augment
    assert (augment.rand_augment, augment.mixup, augment.cutmix, augment.erasing) == (
        "rand-m9-mstd0.5-inc1",
        0.8,
        1.0,
        0.25,
    )
    assert settings.loss.label_smoothing == 0.1 and settings.model.pretrained


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("himapper_pets", "oxford-pets/oxford_pets_128.npz"),
        ("himapper_tiny_imagenet", "tiny-imagenet-wordnet/tiny_imagenet_64.npz"),
    ],
)
def test_recipes_of_real_pictures_train_from_real_weights(shared_data, tmp_path, name, root):
    weights = shared_data / "weights" / "tf_efficientnet_lite0_fp16.safetensors"
    if not (shared_data / root).exists() or not weights.exists():
        pytest.skip(f"no {root} or {weights.name} in {shared_data}")
    words = [f"data.root={shared_data / root}", f"model.weights={weights}", "data.num_train=8", "data.num_val=6"]
    words += ["data.batch_size=4", "data.eval_batch_size=6", "data.workers=0", "schedule.steps=2", "run.device=cpu"]
    words += ["schedule.warmup=0", "run.log_steps=1", "run.tensorboard=false", "data.size=64"]
    result = fit(load(Recipe, ROOT / "recipes" / f"{name}.yaml", words), tmp_path / "run", quiet=True)
    assert result.numbers.keys() >= {"mistake_distance", "hierarchical_precision5", "image_dependence"}
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "fresh: " in log and "backbone.classifier.weight" in log and "backbone.conv_stem" not in log
    from safetensors import safe_open

    with safe_open(weights, "pt") as file:
        start = file.get_tensor("conv_stem.weight").float()
    model, _ = load_model(tmp_path / "run")
    torch.testing.assert_close(model.backbone.conv_stem.weight, start, rtol=0, atol=5e-3)  # two steps away from it
    assert start.abs().max() > 0.1


def test_the_arms_are_trained_and_tabled(tmp_path):
    from hyptree.train.compare import make_table, read_table, to_markdown

    words = [word for word in TINY if word.startswith(("data.", "run.", "model.plugin.")) and "name" not in word]
    words += [
        "model.name=test_vit",
        "model.args={img_size: 32, patch_size: 8}",
        "schedule.steps=4",
        "schedule.warmup=0",
    ]
    settings = read_table(ROOT / "recipes" / "himapper_arms_world.yaml", [*words, "run.log_steps=1"])
    settings.seeds = [1]
    kept = ("plain backbone", "plain backbone, equal time", "hyperbolic", "the paper's sign")
    settings.rows = {row: settings.rows[row] for row in kept}
    outcomes = {outcome.row: outcome for outcome in make_table(settings, tmp_path)}
    plain, longer, ours, paper = (outcomes[row] for row in kept)
    assert plain.parameters == longer.parameters < ours.parameters == paper.parameters
    assert plain.steps == ours.steps == 4 < longer.steps  # a wrapped step takes longer than a plain one
    assert ours.numbers["loss"] != paper.numbers["loss"]
    text = to_markdown(settings, list(outcomes.values()))
    assert "| plain backbone | " in text and text.count("| – | – | ") == 2


@pytest.mark.slow
def test_the_demo_ends_with_nodes_that_depend_on_the_picture(tmp_path):
    settings = load(Recipe, ROOT / "recipes" / "himapper_demo.yaml")
    default = PluginSettings("himapper")
    assert settings.model.plugin == default
    numbers = fit(settings, tmp_path / "run", quiet=True).numbers
    assert numbers["image_dependence"] >= 0.15 and numbers["top1"] > 0.2
