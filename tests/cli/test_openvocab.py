"""``hyptree vlm train-scale`` and the recipes of the task: what they say, what they leave behind, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="install hyptree[vlm]")

from hyptree.cli import main
from hyptree.cli.vlm.scale import TrainScaleConfig
from hyptree.config import load
from hyptree.train import load_model
from hyptree.train.run.recipe import Recipe
from hyptree.vlm.openvocab.settings import METHODS, OpenVocabSettings
from tests.vlm.small_models import save_bert, save_dual

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [f"openvocab_{name}.yaml" for name in ("world", "pets", "camvid", "coco_stuff")]
TINY = (
    "--size",
    "32",
    "--eval-size",
    "32",
    "--num-train",
    "4",
    "--num-val",
    "3",
    "--steps",
    "1",
    "--batch-size",
    "2",
    "--device",
    "cpu",
)


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Flags for a run of a second: a recipe with a small head, few small pictures."""
    recipe = tmp_path / "tiny.yaml"
    head = "{channels: 16, guide: 8, num_heads: 2, window: 4, decoder: [8, 8]}"
    recipe.write_text(f"task: openvocab\nmodel: {{head: {head}}}\nrun: {{tensorboard: false}}\n")
    return ["--recipe", str(recipe), *TINY]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{save_dual(tmp_path_factory.mktemp('command') / 'clip', 'clip')}"


def test_train_scale_reports_before_and_after(
    clip: str,
    tmp_path: Path,
    tiny: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hyptree.train.tasks import openvocab_job

    scored, numbers = [], openvocab_job._numbers

    def watched(task: Any, dataset: Any, model: Any) -> Any:
        scored.append(max(float(p.detach().abs().max()) for p in model.handle.parameters()))
        return numbers(task, dataset, model)

    monkeypatch.setattr(openvocab_job, "_numbers", watched)
    out = tmp_path / "run"
    flags = ["--model", clip, "--unseen", "bus", "dog", "--block-size", "8", "--out", str(out), *tiny]
    assert main(["vlm", "train-scale", *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "openvocab.json").read_text())
    assert report["method"] == "scale" and report["classes"]["unseen"] == ["bus", "dog"]
    assert report["parameters"]["adapter"] == 2 * 3 * 2 * 32 * 8  # towers, q k v, layers, width, block
    assert set(report["rows"]) == {"cosine before", "cosine after", "head"}
    assert scored[0] == 0  # "before" is of a fresh adapter
    assert report["radius"]["before"]["radius"]["mean"] != report["radius"]["after"]["radius"]["mean"]

    from hyptree.vlm import AdapterHandle, load_encoder

    encoder = load_encoder(clip)
    AdapterHandle.load(encoder, out / "adapter")
    model, _ = load_model(out)
    with torch.no_grad():
        texts = ["A photo of a bus in the scene", "A photo of a car in the scene"]
        torch.testing.assert_close(encoder.encode_text(texts), model.text_features(["bus", "car"]))

    assert main(["vlm", "train-scale", *flags, "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "cosine before" in shown and "harmonic" in shown and "3,072 parameters of scale" in shown
    assert main(["vlm", "train-scale", *flags]) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--unseen", "bus", "buss"], "no class 'buss'; did you mean 'bus'"),
        (["--block-size", "5"], "block_size 5"),
        (["--method", "lora", "--block-size", "8"], "model.args.adapter of method lora has no setting 'block_size'"),
        (["--size", "36"], "multiple of the patch"),
        (["--template", "a photo"], "template must hold {}"),
        (["--data", "camvid"], "needs root"),
    ],
)
def test_mistakes_are_one_line(
    clip: str, tmp_path: Path, tiny: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["vlm", "train-scale", "--model", clip, "--out", str(tmp_path / "run"), *tiny, *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_an_encoder_of_text_is_refused(tmp_path: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"hf:{save_bert(tmp_path / 'bert', None)}"
    assert main(["vlm", "train-scale", "--model", spec, "--out", str(tmp_path / "run"), *tiny]) == 2
    assert capsys.readouterr().err.endswith("reads text alone; to segment pictures load a CLIP\n")


def test_recipes_of_other_tasks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "recipes" / "world_segment.yaml"
    assert main(["vlm", "train-scale", "--recipe", str(recipe), "--out", str(tmp_path / "run")]) == 2
    assert "recipe of the task segment; expected openvocab" in capsys.readouterr().err


def test_random_weights_are_asked_for(tmp_path: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_dual(tmp_path / "clip", "clip")
    (folder / "model.safetensors").unlink()
    flags = ["--model", f"hf:{folder}", "--method", "frozen", "--out", str(tmp_path / "run"), *tiny]
    assert main(["vlm", "train-scale", *flags]) == 2
    assert "--random-init" in capsys.readouterr().err
    assert main(["vlm", "train-scale", *flags, "--random-init", "--quiet"]) == 0


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_hold_the_published_setting(name: str) -> None:
    root = () if "world" in name else ("data.root=data",)
    recipe = load(Recipe, ROOT / "recipes" / name, root)
    settings = OpenVocabSettings.read(recipe.model.args)
    assert recipe.task == "openvocab" and settings.method == "scale" and settings.adapter_lr == 0.075
    assert (recipe.optim.lr, recipe.optim.weight_decay, recipe.optim.clip) == (2e-4, 1e-4, 0.01)
    assert recipe.schedule.name == "cosine" and recipe.schedule.warmup == 0 and settings.overlap == pytest.approx(1 / 3)


def test_a_flag_of_zero_is_a_flag() -> None:
    assert TrainScaleConfig(seed=0, random_init=True).overrides() == ["model.args.random_init=true", "run.seed=0"]
    given = TrainScaleConfig(model="hf:x", root=Path("y"), unseen=("a",), rank=2, steps=3, lr=0.5, data="pets")
    assert sorted(given.overrides()) == [
        'data.name="pets"', 'data.root="y"', "model.args.adapter.rank=2", 'model.args.unseen=["a"]',
        'model.name="hf:x"', "optim.lr=0.5", "schedule.steps=3",
    ]  # fmt: skip


def test_flags_go_over_a_recipe() -> None:
    recipe = ROOT / "recipes" / "openvocab_world.yaml"
    chosen = TrainScaleConfig(recipe=recipe, method="lora", rank=3, unseen=("car",), lr=1e-3, seed=7).settings()
    settings = OpenVocabSettings.read(chosen.model.args)
    assert settings.method == "lora" and settings.adapter == {"rank": 3} and settings.unseen == ("car",)
    assert chosen.optim.lr == 1e-3 and chosen.run.seed == 7 and chosen.data.num_train == 6000
    same = TrainScaleConfig(recipe=recipe, method="scale").settings()
    assert same.model.args["adapter"] == {"block_size": 64}
    assert set(METHODS) == {"frozen", "scale", "lora", "diagonal", "orthogonal", "full"}


@pytest.mark.parametrize("method", [None, *METHODS])
def test_without_a_recipe_every_method_fits_the_clip_of_the_world(method: Any) -> None:
    """The command of the README: blocks of 128 would not divide its width."""
    from hyptree.vlm.clip.world_clip import build_clip, preset
    from hyptree.vlm.openvocab.segmenter import attach_method

    settings = OpenVocabSettings.read(TrainScaleConfig(method=method).settings().model.args)
    assert settings.adapter == ({"block_size": 64} if method in (None, "scale", "orthogonal") else {})
    with torch.device("meta"):
        clip = build_clip(preset("clip-world"), 50)
    assert (attach_method(clip, settings.method, settings.adapter) is None) == (method == "frozen")
    wider = TrainScaleConfig(method="scale", block_size=96).settings().model.args
    assert wider["adapter"] == {"block_size": 96}


def test_methods_are_compared_at_equal_parameters() -> None:
    """The table's rows fit the small CLIP, and HyperCLIP's blocks and LoRA train equally many numbers there."""
    from hyptree.train.compare import read_table, row_recipe
    from hyptree.vlm.clip.world_clip import build_clip, preset
    from hyptree.vlm.clip.world_text import world_tokenizer
    from hyptree.vlm.encoders.pixels import PixelFormat
    from hyptree.vlm.encoders.transformers import HfEncoder
    from hyptree.vlm.openvocab.segmenter import attach_method

    table = read_table(ROOT / "recipes" / "compare_openvocab.yaml")
    tokenizer = world_tokenizer()
    counts = {}
    for row in table.rows:
        settings = OpenVocabSettings.read(row_recipe(table, row, 0).model.args)
        encoder = HfEncoder(build_clip(preset("clip-world"), len(tokenizer)), "fresh", tokenizer, PixelFormat(64))
        handle = attach_method(encoder, settings.method, settings.adapter)
        counts[settings.method] = 0 if handle is None else handle.num_parameters()
    assert set(counts) == set(METHODS)
    assert counts["scale"] == counts["lora"] == 442_368 and counts["frozen"] == 0
