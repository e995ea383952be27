"""Runs and recipes of the task openvocab: what they say, what they leave behind, what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="install hyptree[vlm]")

from hyptree.cli import main
from hyptree.config import load
from hyptree.runs import RunFolder
from hyptree.train import load_model
from hyptree.train.run.recipe import Recipe
from hyptree.vlm import AdapterHandle, load_encoder
from hyptree.vlm.openvocab.settings import METHODS, OpenVocabSettings
from tests.vlm.small_models import save_bert, save_dual

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [f"openvocab_{name}.yaml" for name in ("world", "pets", "camvid", "coco_stuff")]


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """A run of a second: a small head, few small pictures."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        "task: openvocab\n"
        "data: {size: 32, num_train: 4, num_val: 3, batch_size: 2}\n"
        "model:\n"
        "  args: {eval_size: 32, adapter: {block_size: 8}}\n"
        "  head: {channels: 16, guide: 8, num_heads: 2, window: 4, decoder: [8, 8]}\n"
        "schedule: {steps: 1}\n"
        "run: {tensorboard: false, device: cpu, eval_first: true}\n"
    )
    return [str(recipe), "--out", str(tmp_path / "run")]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"hf:{save_dual(tmp_path_factory.mktemp('command') / 'clip', 'clip')}"


def test_a_run_says_what_was_before_and_leaves_an_adapter(
    clip: str, tmp_path: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*tiny, "--model.name", clip, "--model.args.unseen", "[bus, dog]", "--optim.lr", "0.1"]
    assert main(["train", *flags]) == 0
    run = tmp_path / "run"
    before, after = (line for line in RunFolder(run).read_metrics() if line["split"] == "val")
    assert before["step"] == 0 and after["step"] == 1
    for name in ("miou_seen", "miou_unseen", "miou_harmonic", "cosine_seen", "cosine_unseen", "text_radius"):
        assert name in before and name in after
    assert before["text_radius"] == before["text_radius_before"] == after["text_radius_before"] != after["text_radius"]

    assert main(["export", str(run), "--format", "adapter"]) == 0
    assert capsys.readouterr().out.endswith(f"{run / 'adapter'}\n")
    encoder = load_encoder(clip)
    handle = AdapterHandle.load(encoder, run / "adapter")
    assert handle.num_parameters() == 2 * 3 * 2 * 32 * 8  # towers, q k v, layers, width, block
    model, _ = load_model(run)
    with torch.no_grad():
        texts = ["A photo of a bus in the scene", "A photo of a car in the scene"]
        torch.testing.assert_close(encoder.encode_text(texts), model.text_features(["bus", "car"]))
    assert main(["export", str(run), "--format", "adapter"]) == 2
    assert "already there and not empty" in capsys.readouterr().err

    assert main(["train", *flags, "--resume"]) == 0
    assert main(["train", *flags]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["vlm", "train-scale", "--recipe", "x"]) == 2
    assert "no more; type: hyptree train recipes/openvocab_world.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.args.unseen", "[bus, buss]"], "no class 'buss'; did you mean 'bus'"),
        (["--model.args.adapter.block_size", "5"], "block_size 5"),
        (["--model.args.method", "lora"], "model.args.adapter of method lora has no setting 'block_size'"),
        (["--data.size", "36"], "multiple of the patch"),
        (["--model.args.template", "a photo"], "template must hold {}"),
        (["--data.name", "camvid"], "needs root"),
    ],
)
def test_mistakes_are_one_line(
    clip: str, tiny: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["train", *tiny, "--model.name", clip, *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_an_encoder_of_text_is_refused(tmp_path: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *tiny, "--model.name", f"hf:{save_bert(tmp_path / 'bert', None)}"]) == 2
    assert capsys.readouterr().err.endswith("reads text alone; to segment pictures load a CLIP\n")


def test_random_weights_are_asked_for(tmp_path: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_dual(tmp_path / "clip", "clip")
    (folder / "model.safetensors").unlink()
    frozen = ["--model.args.method", "frozen", "--model.args.adapter", "{}"]
    flags = [*tiny, "--model.name", f"hf:{folder}", *frozen]
    assert main(["train", *flags]) == 2
    assert "--random-init" in capsys.readouterr().err
    assert main(["train", *flags, "--model.args.random_init"]) == 0


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_hold_the_published_setting(name: str) -> None:
    root = () if "world" in name else ("data.root=data",)
    recipe = load(Recipe, ROOT / "recipes" / name, root)
    settings = OpenVocabSettings.read(recipe.model.args)
    assert recipe.task == "openvocab" and settings.method == "scale" and settings.adapter_lr == 0.075
    assert (recipe.optim.lr, recipe.optim.weight_decay, recipe.optim.clip) == (2e-4, 1e-4, 0.01)
    assert recipe.schedule.name == "cosine" and recipe.schedule.warmup == 0 and settings.overlap == pytest.approx(1 / 3)


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
