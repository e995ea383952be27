"""The task contrast: learns pairs, flat and hyperbolic, resumes bit for bit, exports what ``hf:`` loads everywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hyptree.config import load
from hyptree.data.world import World
from hyptree.errors import UserError
from hyptree.geometry import lorentz
from hyptree.runs import RunFolder
from hyptree.train.evaluate import evaluate_run, load_model
from hyptree.train.export import export
from hyptree.train.loop import fit
from hyptree.train.run.recipe import Recipe
from hyptree.train.tasks.contrast import Contrast, ContrastSettings
from hyptree.vlm.clip.world_text import captions_of, encode_table
from hyptree.vlm.encoders.encoder import load_encoder
from tests.train.test_resume import assert_same_run, dying_before_step

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "task=contrast",
    "model.name=clip-world-tiny",
    "model.args={patch: 8, image_width: 32, image_layers: 1, text_width: 32, text_layers: 1, embed_dim: 16}",
    "data.size=32",
    "data.num_train=48",
    "data.num_val=24",
    "data.batch_size=16",
    "data.augment.flip=0.5",
    "optim.lr=0.003",
    "schedule.steps=9",
    "run.device=cpu",
    "run.log_steps=3",
    "run.eval_every=1",
    "run.tensorboard=false",
)
LORENTZ = "model.head={geometry: lorentz}"


def recipe(*overrides: str) -> Recipe:
    """Nine steps of two towers of one layer each."""
    return load(Recipe, None, [*SMALL, *overrides])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished hyperbolic run."""
    out = tmp_path_factory.mktemp("run")
    fit(recipe(LORENTZ), out, quiet=True)
    return out


# --------------------------------------------------------------------------------------------------------------- data


def test_a_batch_holds_a_caption_of_its_picture_at_the_level_it_says() -> None:
    task = Contrast(recipe("model.head={prompted: 0.0, levels: drawn}"))
    train, val = task.build_dataset("train"), task.build_dataset("val")
    task.build_model(task.describe(train))
    for dataset, world, is_train in (
        (train, World("train", num_images=48, size=32), True),
        (val, World("val", num_images=24, size=32), False),
    ):
        truth = captions_of(world)
        loader = task.build_loader(dataset, is_train)
        batch = task.prepare_batch(next(iter(loader)), 0)
        for row in range(16):
            index = int(batch["place"][row]) - dataset.first
            assert [task.texts[i] for i in batch["captions"][row].tolist()] == list(truth[index][0])
            (chosen,) = batch["chosen"][row].tolist()
            words = task.tokenizer.decode(batch["tokens"][row, 0], skip_special_tokens=True)
            assert words == task.texts[chosen] in truth[index][0]
        levels = (batch["captions"] == batch["chosen"]).nonzero()[:, 1]
        assert len(set(levels.tolist())) > 1
        loader.close()


def test_levels_and_prompts_follow_the_settings() -> None:
    task = Contrast(recipe("model.head={levels: specific, prompted: 1.0}"))
    dataset = task.build_dataset("train")
    batch = task.prepare_batch(next(iter(task.build_loader(dataset, True))), 0)
    assert torch.equal(batch["chosen"], batch["captions"][:, 3:]) and batch["tokens"].shape[:2] == (16, 1)
    texts = task.tokenizer.batch_decode(batch["tokens"][:, 0], skip_special_tokens=True)
    assert all(text.startswith(("a photo of", "a picture of")) or text.endswith("in the scene") for text in texts)
    everything = Contrast(recipe())
    batch = everything.prepare_batch(next(iter(everything.build_loader(everything.build_dataset("train"), True))), 0)
    assert torch.equal(batch["chosen"], batch["captions"]) and batch["tokens"].shape[:2] == (16, 4)
    chain = Contrast(recipe("model.head={geometry: lorentz, levels: drawn}"))
    batch = chain.prepare_batch(next(iter(chain.build_loader(chain.build_dataset("train"), True))), 0)
    assert batch["tokens"].shape[:2] == (16, 4) and batch["chosen"].shape == (16, 1)
    assert torch.equal(batch["captions"].gather(1, batch["level"]), batch["chosen"])


# ----------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    "head", ["{levels: specific, prompted: 0.0}", "{geometry: lorentz, levels: drawn, prompted: 0.0}"]
)
def test_a_few_pictures_are_learned_by_heart(head: str, tmp_path: Path) -> None:
    inputs = recipe(
        f"model.head={head}",
        "data.num_train=12",
        "data.batch_size=12",
        "data.augment.flip=0",
        "schedule.steps=120",
        "schedule.warmup=10",
        "optim.weight_decay=0",
        "run.eval_every=0",
        "run.save_every=0",
        "run.log_steps=50",
    )
    fit(inputs, tmp_path, quiet=True)
    lines = [line for line in RunFolder(tmp_path).read_metrics() if line["split"] == "train"]
    assert lines[0]["contrast"] > lines[-1]["contrast"]
    actual = evaluate_run(tmp_path, "train")
    assert actual["i2t_r1"] > 0.9 and actual["t2i_r1"] > 0.9 and actual["r1"] > 0.9
    assert actual["samples"] == 12


def test_the_loss_is_the_sum_of_its_parts_and_falls(run: Path) -> None:
    lines = RunFolder(run).read_metrics()
    train = [line for line in lines if line["split"] == "train"]
    parts = train[0]["contrast"] + 0.2 * train[0]["entail"] + 0.2 * train[0]["chain"]
    assert train[0]["loss"] == pytest.approx(parts, rel=1e-5)
    assert train[-1]["loss"] < train[0]["loss"]
    assert 0.1 < train[-1]["curvature"] < 10 and train[-1]["curvature"] != 1.0
    val = [line for line in lines if line["split"] == "val"][-1]
    assert {"r1", "i2t_r5", "zero_shot", "zero_shot_bare", "truth1", "tau_d", "tau_words", "radius4"} <= val.keys()


def test_pictures_shall_lie_in_the_cones_of_their_own_captions_and_captions_in_those_of_more_general_ones() -> None:
    task = Contrast(recipe("model.head={geometry: lorentz}"))
    dataset = task.build_dataset("train")
    model = task.build_model(task.describe(dataset)).eval()
    batch = task.prepare_batch(next(iter(task.build_loader(dataset, True))), 0)
    with torch.no_grad():
        numbers = task.training_loss(model, batch)[1]
        actual = model(batch["image"], batch["tokens"].flatten(0, 1))
        text, c = actual["text"].unflatten(0, (16, 4)), actual["c"]
        entail = torch.stack([lorentz.cone_energy(text[:, k], actual["image"], c) for k in range(4)])
        chain = torch.stack([lorentz.cone_energy(text[:, k], text[:, k + 1], c) for k in range(3)])
    torch.testing.assert_close(numbers["entail"], entail.mean())
    torch.testing.assert_close(numbers["chain"], chain.mean())


@pytest.mark.parametrize(
    "overrides",
    [
        ("run.save_steps=2",),
        ("model.head={geometry: lorentz, levels: drawn}", "run.accumulate=2", "run.precision=bf16"),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(overrides: tuple[str, ...], tmp_path: Path) -> None:
    inputs = recipe(*overrides, "run.save_steps=2")
    fit(inputs, tmp_path / "whole", quiet=True)
    with dying_before_step(5):
        fit(inputs, tmp_path / "parts", quiet=True)
    fit(inputs, tmp_path / "parts", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


# -------------------------------------------------------------------------------------------------------------- after


def test_weights_of_a_run_that_may_not_be_finished_are_not_used_silently(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    load_encoder(f"hf:{copy}")
    assert "finished" not in capsys.readouterr().err
    shutil.rmtree(copy / "checkpoints" / "best")  # as it is before the first evaluation
    load_encoder(f"hf:{copy}")
    assert "its newest weights are used, and it may not be finished" in capsys.readouterr().err


def test_a_run_with_random_weights_is_a_control(run: Path) -> None:
    trained, first, same, other = (
        load_encoder(f"hf:{run}", random_init=random_init, seed=seed).encode_text(["a yellow duck"]).detach()
        for random_init, seed in ((False, 0), (True, 1), (True, 1), (True, 2))
    )
    assert torch.equal(first, same)
    assert not torch.allclose(first, other) and not torch.allclose(first, trained)


def test_the_export_loads_back_with_equal_embeddings(run: Path, tmp_path: Path) -> None:
    model, _ = load_model(run)
    path, difference = export(run, "hf", tmp_path / "hf")
    assert difference is None
    texts = ["an animal", "a yellow duck", "a yellow duck with two legs in a city at night"]
    images = World("val", num_images=4, size=32).images()
    task = Contrast(RunFolder(run).recipe(Recipe))
    transform = task.transform(False)
    for encoder in (load_encoder(f"hf:{path}"), load_encoder(f"hf:{run}")):
        with torch.no_grad():
            text = lorentz.expmap0(encoder.encode_text(texts), encoder.curvature)
            image = lorentz.expmap0(encoder.encode_images(images), encoder.curvature)
            torch.testing.assert_close(text, model.embed_texts(encode_table(task.tokenizer, texts, 24)))  # type: ignore[operator]
            torch.testing.assert_close(image, model.embed_images(transform.normalise(images)))  # type: ignore[operator,attr-defined]
    with pytest.raises(UserError, match="already there and not empty"):
        export(run, "hf", tmp_path / "hf")
    with pytest.raises(UserError, match=r"a CLIP is exported as hf .* or safetensors, not torch-export"):
        export(run, "torch-export")


def test_evaluating_again_gives_the_numbers_of_training(run: Path) -> None:
    best = max((line for line in RunFolder(run).read_metrics() if line["split"] == "val"), key=lambda line: line["r1"])
    again = evaluate_run(run)
    assert again["zero_shot"] == best["zero_shot"] and again["tau_d"] == best["tau_d"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.head={geometri: lorentz}",), "unknown key 'model.head.geometri'; did you mean 'model.head.geometry'"),
        (("model.head={geometry: flat}",), "model.head.geometry must be one of cosine, lorentz, got 'flat'"),
        (("model.head={prompted: 2}",), "model.head.prompted is a share from 0 to 1, got 2"),
        (("model.head={chain: -1}",), "model.head.chain must be 0 or a positive number, got -1"),
        (("model.name=hcformer_pico",), "unknown model 'hcformer_pico' of the task contrast; expected one of"),
        (("model.args={size: 64}",), "model.args.size 64 is not data.size 32; leave it out"),
        (("model.pretrained=true",), "there are no weights to download"),
        (("data.name=folder", "data.root=."), "data folder has no captions of four levels; take data.name world"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_one_line(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        fit(recipe(*overrides), tmp_path / "run", quiet=True)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["clip_world", "clip_world_tiny", "meru_world"])
def test_the_recipes_are_whole(name: str) -> None:
    inputs = load(Recipe, ROOT / "recipes" / f"{name}.yaml")
    task = Contrast(inputs)
    assert inputs.task == "contrast" and task.shape.size == inputs.data.size
    assert task.settings.geometry == ("lorentz" if name == "meru_world" else "cosine")
    assert ContrastSettings.of(inputs.model.head) == task.settings
