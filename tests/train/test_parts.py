"""The parts of training one by one: recipe, schedule, parameter groups, average, state, folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyptree.config import load, to_yaml
from hyptree.errors import UserError
from hyptree.geometry import Lorentz, PointModule
from hyptree.optim import RiemannianAdamW
from hyptree.optim import param_groups as library_groups
from hyptree.runs import Checkpoint, RunFolder, best_weights, damage
from hyptree.train.loop import fit
from hyptree.train.optimizer.build import Ema, Schedule, build_optimizer, clip_gradients, param_groups
from hyptree.train.run.log import Reporter
from hyptree.train.run.recipe import OptimSettings, Recipe, ScheduleSettings, check_resumable, flatten
from hyptree.train.run.state import fill_optimizer, fill_tensors, full_tensors, optimizer_tensors
from tests.train import tiny

ROOT = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------------------------------------------------- recipe


def test_recipe_survives_yaml(tmp_path):
    recipe = tiny.recipe("model.args.width=8", "model.weights=some/run", "optim.betas=[0.8, 0.9]", "optim.clip=null")
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    assert load(Recipe, tmp_path / "recipe.yaml") == recipe
    assert recipe.model.weights == Path("some/run") and recipe.model.args == {"width": 8}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", r"unknown key 'optim.lrr'; did you mean 'optim.lr'\?"),
        ("optim.lr=-1", "optim: lr must be a positive number, got -1"),
        ("optim.lr=fast", "optim.lr must be a number, got 'fast'"),
        ("optim.layer_decay=1.5", r"layer_decay must be in \(0, 1\], got 1.5"),
        ("schedule.name=cosinus", r"one of cosine, poly, constant, got 'cosinus'; did you mean 'cosine'\?"),
        ("schedule.warmup=31", r"warmup must be from 0 to the length of the run \(30\), got 31"),
        ("schedule.steps=0", "steps must be a positive number, got 0"),
        ("run.ema=1", "ema must be between 0 and 1, got 1"),
        ("run.accumulate=3", "data.batch_size 128 must be a multiple of run.accumulate 3"),
        ("run.precision=fp16", "run.precision must be one of fp32, bf16, got 'fp16'"),
        ("run.seed=-1", "seed must be from 0"),
        ("optim.momentum=0.5", "momentum means nothing to adamw; leave it out"),
    ],
)
def test_a_wrong_recipe_is_one_clear_line(override, message):
    with pytest.raises(UserError, match=message):
        load(Recipe, None, [override])


def test_flatten_and_check_resumable():
    recipe = tiny.recipe("model.args.width=8")
    flat = flatten(recipe)
    assert flat["model.args.width"] == 8 and flat["optim.lr"] == 0.01 and flat["optim.betas"] == [0.9, 0.999]
    check_resumable(recipe, tiny.recipe("model.args.width=8", "data.workers=4"), Path("x"))
    for change in ("model.args.width=9", "model.args.depth=1", "data.batch_size=32"):
        with pytest.raises(UserError, match=rf"cannot resume x: it was made with {change.split('=')[0]} = "):
            check_resumable(recipe, tiny.recipe("model.args.width=8", change), Path("x"))


def test_recipe_module_imports_no_torch(run_python):
    code = "import sys, hyptree.train.run.recipe, hyptree.cli.train, hyptree.cli.eval; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


# ------------------------------------------------------------------------------------------------------------- report


def test_numbers_of_single_classes_are_for_files(tmp_path, capsys):
    reporter = Reporter(RunFolder(tmp_path), 9, "img")
    line = {"step": 5, "epoch": 1.5, "split": "val", "time": 2.0, "miou": 0.25, "iou/cat": 0.5, "lr": 1e-3, "seen": 7}
    reporter.write(line)
    reporter.close()
    assert capsys.readouterr().out == "step 5/9  val: epoch 1.50  miou 0.2500  lr 0.001  seen 7\n"
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == line


# ----------------------------------------------------------------------------------------------------------- schedule


def test_cosine_with_warmup_in_epochs():
    schedule = Schedule(ScheduleSettings(epochs=10, warmup=2, min_lr=0.1), steps_per_epoch=5)
    assert (schedule.num_steps, schedule.num_warmup_steps) == (50, 10)
    assert [schedule.factor(s) for s in range(10)] == pytest.approx([(s + 1) / 11 for s in range(10)])
    assert schedule.factor(10) == 1
    assert schedule.factor(30) == pytest.approx(0.1 + 0.9 * 0.5)  # half-way between the top and the end
    assert schedule.factor(49) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 39 / 40)))
    assert schedule.factor(50) == pytest.approx(0.1)


def test_the_other_schedules_and_steps_as_unit():
    constant = Schedule(ScheduleSettings(name="constant", steps=8, warmup=3, epochs=99), steps_per_epoch=5)
    assert constant.num_steps == 8
    assert [constant.factor(s) for s in range(8)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    poly = Schedule(ScheduleSettings(name="poly", steps=10, power=2, min_lr=0), steps_per_epoch=5)
    assert [poly.factor(s) for s in range(10)] == pytest.approx([(1 - s / 10) ** 2 for s in range(10)])
    with pytest.raises(UserError, match=r"schedule.epochs 0.05 is less than one step \(an epoch has 5\)"):
        Schedule(ScheduleSettings(epochs=0.05), steps_per_epoch=5)


# --------------------------------------------------------------------------------------------------- parameter groups


class WithPoints(PointModule):
    """A point table on a hyperboloid of learned curvature, and an ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.space = Lorentz(c=1.0, learnable=True)
        self.register_point("points", self.space.expmap0(0.1 * torch.randn(4, 3)), self.space)
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.space.pairwise_dist(x, self.points)[:, :2]


def test_points_and_curvatures_get_groups_of_their_own():
    model = WithPoints()
    groups = param_groups(model, OptimSettings(lr=0.1, weight_decay=0.3, point_lr=0.2, curvature_lr=0.01))
    by_kind = {(g["kind"], g["weight_decay"]): g for g in groups}
    assert set(by_kind) == {("plain", 0.3), ("plain", 0.0), ("points", 0.0), ("curvature", 0.0)}
    assert by_kind["points", 0.0]["params"] == [model.points]
    assert by_kind["plain", 0.3]["params"] == [model.layer.weight]
    optimizer = build_optimizer(model, OptimSettings(lr=0.1, point_lr=0.2, curvature_lr=0.01))
    assert isinstance(optimizer, RiemannianAdamW)
    rates = {g["kind"]: 0.05 * g["lr_scale"] for g in optimizer.param_groups}  # at half of the top
    assert rates == pytest.approx({"plain": 0.05, "points": 0.1, "curvature": 0.005})
    assert type(build_optimizer(tiny.Net(), OptimSettings())) is torch.optim.AdamW


def test_sgd_decays_and_keeps_its_momentum():
    from hyptree.optim import RiemannianSGD

    model = torch.nn.Linear(3, 2, bias=False)
    settings = OptimSettings(name="sgd", lr=0.1, weight_decay=0.5, momentum=0.8)
    optimizer, weight, velocity = build_optimizer(model, settings), model.weight.detach().clone(), 0.0
    for _ in range(2):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        velocity = 0.8 * velocity + 1 + 0.5 * weight
        weight = weight - 0.1 * velocity
    torch.testing.assert_close(model.weight.detach(), weight)
    assert type(build_optimizer(tiny.Net(points=True), settings)) is RiemannianSGD
    for name, ignored in (("sgd", {"betas": (0.9, 0.98)}), ("sgd", {"eps": 1e-6}), ("adamw", {"momentum": 0.5})):
        with pytest.raises(ValueError, match=rf"{next(iter(ignored))} means nothing to {name}; leave it out"):
            OptimSettings(name=name, **ignored)


def test_curvatures_under_names_of_their_own_get_that_rate_too():
    from hyptree.lm.experts.mixture import ExpertStack
    from hyptree.models.himapper.plain import TreeSpace

    stack = ExpertStack(2, 4, 8, 1.0, [0.5, 1.5], bias=True, norm=True, eps=1e-6)
    model = nn.ModuleDict({"stack": stack, "space": TreeSpace(8, 4)})
    own = [stack.log_curvature, model["space"].log_c]
    groups = [g for g in param_groups(model, OptimSettings(lr=0.1, curvature_lr=0.02)) if g["kind"] == "curvature"]
    assert [id(p) for g in groups for p in g["params"]] == [id(p) for p in own]
    assert all(g["lr_scale"] == pytest.approx(0.2) and g["weight_decay"] == 0 for g in groups)
    scales = {id(p): g["lr_scale"] for g in param_groups(model, OptimSettings(lr=0.1)) for p in g["params"]}
    assert [scales[id(p)] for p in own] == [0.1, 1.0]  # without it, what the layer says about itself
    named = {g["name"]: g for g in library_groups(model, lr=0.1, curvature_lr=0.02)}
    assert len(named["curvature"]["params"]) == 2 and named["curvature"]["lr"] == 0.02


def test_a_rate_for_what_the_model_has_not_is_said():
    with pytest.warns(UserWarning, match=r"optim\.curvature_lr 0\.01 has no effect: .* no learned curvature"):
        build_optimizer(tiny.Net(), OptimSettings(curvature_lr=0.01))
    with pytest.warns(UserWarning, match=r"optim\.point_lr 0\.01 has no effect: this model has no point"):
        build_optimizer(tiny.Net(), OptimSettings(point_lr=0.01))
    with pytest.warns(UserWarning, match=r"optim\.max_step 0\.5 has no effect: this model has no point"):
        build_optimizer(tiny.Net(), OptimSettings(max_step=0.5, name="sgd"))


@pytest.mark.parametrize("limit", [None, 0.5])
def test_sparse_gradients_have_the_norm_of_dense_ones_and_are_clipped_alike(limit):
    gradients, norms = [], []
    for sparse in (False, True):
        table = nn.Embedding.from_pretrained(torch.arange(12.0).view(4, 3), freeze=False, sparse=sparse)
        model = nn.ModuleDict({"table": table, "linear": nn.Linear(3, 1, bias=False)})
        nn.init.ones_(model["linear"].weight)
        for index in ([0, 2, 2], [2, 3, 0]):  # a row may come twice in one gradient, and again in the next part
            model["linear"](table(torch.tensor(index))).square().sum().backward()
        norms.append(clip_gradients(model, limit))
        gradients.append([table.weight.grad.to_dense(), model["linear"].weight.grad])
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert limit is None or torch.cat([g.flatten() for g in gradients[1]]).norm() <= 0.5


def test_timm_models_say_what_is_not_decayed_and_which_layer_is_where():
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", num_classes=3)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups(model, OptimSettings(weight_decay=0.1))
    decayed = {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}
    assert "pos_embed" not in decayed and "cls_token" not in decayed  # matrices that the model excludes
    assert {"head.weight", "blocks.0.attn.qkv.weight"} <= decayed
    assert not [name for name in decayed if name.endswith("bias") or "norm" in name]
    assert sum(len(g["params"]) for g in groups) == len(names)

    scale = {}
    for group in param_groups(model, OptimSettings(layer_decay=0.5)):
        scale |= {names[id(p)]: group["lr_scale"] for p in group["params"]}
    depth = len(model.blocks)
    assert scale["head.weight"] == 1.0
    for i in range(1, depth):
        assert scale[f"blocks.{i}.mlp.fc1.weight"] == pytest.approx(2 * scale[f"blocks.{i - 1}.mlp.fc1.weight"])
    assert scale["patch_embed.proj.weight"] == pytest.approx(scale["blocks.0.mlp.fc1.weight"] / 2)


@pytest.mark.parametrize("make", [WithPoints, tiny.Net])
def test_model_and_optimiser_state_round_trip_to_the_last_bit(make):
    def step(model, optimizer, number):
        generator = torch.Generator().manual_seed(number)
        shape = (6, 3) if make is WithPoints else (6, 3, 8, 8)
        model(torch.randn(shape, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, settings = make(), OptimSettings(lr=0.05)
    optimizer = build_optimizer(model.eval(), settings)
    for number in range(3):
        step(model, optimizer, number)
    weights, moments = full_tensors(model.state_dict()), optimizer_tensors(model, optimizer)
    assert any(name.endswith("/exp_avg_sq") for name in moments)
    other = make().eval()
    fresh = build_optimizer(other, settings)
    fill_tensors(other.state_dict(), weights, "checkpoint")
    fill_optimizer(other, fresh, moments)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, fresh, number)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_weights_of_another_model_are_refused():
    with pytest.raises(UserError, match=r"here has \(5, 8\) for head.weight, the model of this recipe \(5, 16\)"):
        fill_tensors(
            {"head.weight": torch.zeros(5, 16)},
            {"head.weight": torch.zeros(5, 8)},
            "here",
        )
    with pytest.raises(UserError, match=r"here has \(1,\) for extra, the model of this recipe nothing"):
        fill_tensors({"a": torch.zeros(2)}, {"a": torch.zeros(2), "extra": torch.zeros(1)}, "here")


# ------------------------------------------------------------------------------------------------------------ average


def test_average_follows_its_formula_and_swaps_cleanly():
    model = tiny.Net(norm="batch")
    ema = Ema(model, decay=0.7)
    expected = {name: t.double() for name, t in model.state_dict().items()}
    for t in range(1, 30):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
            model.norm.num_batches_tracked += 1
        ema.update(model)
        decay = min(0.7, (1 + t) / (10 + t))
        for name, value in model.state_dict().items():
            expected[name] = value.double() + decay * (expected[name] - value.double())
    for name, value in ema.tensors.items():
        if name == "norm.num_batches_tracked":
            assert value == 29  # a counter is copied, not averaged
        else:
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-5)
    own = {name: t.clone() for name, t in model.state_dict().items()}
    with ema.swapped_in(model):
        assert all(torch.equal(t, ema.tensors[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())


# ------------------------------------------------------------------------------------------------------------- folder


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint({"w": torch.full((3,), float(step))}, None, {"w/exp_avg": torch.zeros(3)}, {"step": step})


def test_folder_keeps_last_and_previous(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.find(print) is None
    for step in (1, 2, 3):
        folder.save(checkpoint(step))
    assert folder.find(print) == "last"
    assert folder.load("last").progress == {"step": 3} and folder.load("previous").model["w"].tolist() == [2.0] * 3
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["last", "previous"]


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "manifest.json"])
def test_any_changed_byte_is_noticed(tmp_path, name, seed):
    folder = RunFolder(tmp_path)
    folder.save(checkpoint(1))
    path = folder.checkpoints / "last" / name
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(seed)
    for place in torch.randint(len(content), (40,), generator=generator).tolist():
        harmed = bytearray(content)
        harmed[place] ^= 0x15
        path.write_bytes(harmed)
        problem = damage(path.parent)
        if name == "manifest.json" and problem is None:  # white space, or the step, which is there for people
            kept, before = json.loads(harmed), json.loads(content)
            assert kept["files"] == before["files"]
        else:
            assert problem is not None, place
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        if name != "manifest.json" or length < len(content) - 2:
            assert damage(path.parent) is not None, length


def test_metrics_cut_short_by_a_kill_are_read_up_to_there(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
    folder.tidy(1)
    assert folder.metrics.read_text() == '{"step": 1, "loss": 2.5}\n'


def test_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(UserError, match=r"is not the folder of a run: it has no recipe.yaml"):
        best_weights(tmp_path)
    RunFolder(tmp_path).start(tiny.recipe(), {"classes": []})
    with pytest.raises(UserError, match="has no checkpoint yet; train it first"):
        best_weights(tmp_path)


@dataclass
class GardenSettings:
    """The section of a task that has defaults of its own for common keys."""

    plant: str = "oak"

    def common_defaults(self) -> dict[str, Any]:
        rate = 1e-7 if self.plant == "oak" else 1e-4
        own = {"optim.betas": [0.8, 0.9], "optim.momentum": 0.0}  # of two optimisers: one of them is given
        return {"optim.lr": rate, "optim.clip": None, "data.batch_size": 8, **own}


@dataclass
class GardenRecipe(Recipe):
    garden: GardenSettings | None = None


@pytest.mark.parametrize(
    ("lines", "rate", "clip", "size"),
    [
        ([], 1e-7, None, 8),
        (["garden.plant=rose"], 1e-4, None, 8),
        (["garden=", "optim=", "data.batch_size=2"], 1e-7, None, 2),
        (["optim.lr=0.1", "optim.clip=3"], 0.1, 3.0, 8),
        (["task=classify", "garden.plant=rose"], 1e-3, 1.0, 128),
    ],
)
def test_a_task_has_its_own_defaults_for_common_keys_that_are_not_given(tmp_path, lines, rate, clip, size):
    recipe = load(GardenRecipe, None, ["task=garden", *lines])
    assert (recipe.optim.lr, recipe.optim.clip, recipe.data.batch_size) == (rate, clip, size)
    assert recipe.optim.eps == 1e-8
    assert recipe.optim.betas == ((0.9, 0.999) if recipe.task == "classify" else (0.8, 0.9))
    assert load(GardenRecipe, None, ["task=garden", "optim.name=sgd"]).optim.momentum == 0.0
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    assert load(GardenRecipe, tmp_path / "recipe.yaml") == recipe
    with pytest.raises(UserError, match="optim must be a section of keys, got 3"):
        load(GardenRecipe, None, ["task=garden", "optim=3"])


@pytest.mark.parametrize(
    ("task", "key"),
    [
        ("classify", "text.vocab_size=512"),
        ("classify", "model.head={channels: 8}"),
        ("classify", "data.augment.scale_jitter=[0.5, 2.0]"),
        ("segment", "data.augment.mixup=0.2"),
        ("segment", "data.crop_pct=0.9"),
        ("detect", "loss.label_smoothing=0.1"),
        ("openvocab", "data.mean=[0.5, 0.5, 0.5]"),
        ("contrast", "data.augment.cutmix=1.0"),
        ("language", "data.num_train=10"),
        ("language", "data.augment.flip=0"),
    ],
)
def test_a_key_that_its_task_does_not_read_is_refused(tmp_path, task, key):
    recipe = load(Recipe, None, [f"task={task}", key])
    name = key.partition("=")[0]
    with pytest.raises(UserError, match=rf"{name}\S* .* means nothing to the task {task}; leave it out"):
        fit(recipe, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_that_is_not_in_use_yet_is_seeded_too(there, monkeypatch):
    """What is drawn on it first, when a model is built there, must follow from the seed."""
    from hyptree.data.seeding import reseed

    seeds = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    reseed(3, 4, gpus=True)
    first = torch.rand(2)
    reseed(3, 4, gpus=True)
    assert len(seeds) == 2 * there and len(set(seeds)) <= 1
    assert there or torch.equal(first, torch.rand(2))
