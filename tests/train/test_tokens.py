"""Training with fewer tokens: the section ``tokens`` of a recipe, from scratch and from the weights of another run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hyptree.cli import main
from hyptree.config import load, read_yaml
from hyptree.errors import UserError
from hyptree.runs import best_weights
from hyptree.tokens.patch import handle_of
from hyptree.train import evaluate_run, load_model
from hyptree.train.loop import fit
from hyptree.train.run.recipe import Recipe, TokenSettings

ROOT = Path(__file__).resolve().parents[2]

RECIPE = """
data: {name: world, size: 32, num_train: 48, num_val: 24, batch_size: 16, cache: false}
model:
  name: vit_tiny_patch16_224
  args: {img_size: 32, patch_size: 8, embed_dim: 24, depth: 4, num_heads: 3}
schedule: {steps: 4}
run: {device: cpu, tensorboard: false, log_steps: 1, threads: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "vit.yaml"
    path.write_text(RECIPE)
    return path


def test_a_run_with_a_reduction_trains_resumes_and_evaluates_reduced(recipe: Path, tmp_path: Path) -> None:
    changes = ["tokens.keep=0.5", "tokens.layers=[1, 2]"]
    whole = fit(load(Recipe, recipe, changes), tmp_path / "whole", quiet=True)
    model, saved = load_model(tmp_path / "whole")
    assert saved.tokens == TokenSettings(keep=0.5, layers=(1, 2))
    handle = handle_of(model)
    assert handle is not None
    with torch.no_grad():
        model(torch.randn(2, 3, 32, 32))
    assert handle.num_tokens == [8, 4]
    assert evaluate_run(tmp_path / "whole")["top1"] == whole.numbers["top1"]

    plain = fit(load(Recipe, recipe), tmp_path / "plain", quiet=True)
    assert handle_of(load_model(tmp_path / "plain")[0]) is None
    assert plain.numbers["loss"] != whole.numbers["loss"], "the reduction takes part in training"
    weights, others = best_weights(tmp_path / "whole"), best_weights(tmp_path / "plain")
    assert weights.keys() == others.keys(), "hooks are no part of the weights"
    again = fit(load(Recipe, recipe, changes), tmp_path / "again", quiet=True)
    assert again.numbers == whole.numbers
    assert all(torch.equal(value, best_weights(tmp_path / "again")[name]) for name, value in weights.items())
    with pytest.raises(UserError, match=r"made with tokens.keep = 0.5, now it is 0.25"):
        fit(
            load(Recipe, recipe, ["tokens.keep=0.25", "tokens.layers=[1, 2]"]),
            tmp_path / "whole",
            resume=True,
            quiet=True,
        )


def test_fine_tuning_starts_from_a_plain_run(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(load(Recipe, recipe), tmp_path / "plain", quiet=True)
    flags = ["--tokens.keep", "0.5", "--tokens.method", "topk", "--model.weights", str(tmp_path / "plain")]
    # A learning rate at which nothing moves: what comes out is the plain run's weights, reduced.
    still = ["--optim.lr", "1e-30", "--schedule.steps", "1"]
    assert main(["train", str(recipe), "--out", str(tmp_path / "tuned"), *flags, *still]) == 0
    assert f"weights from {tmp_path / 'plain'}\n" in capsys.readouterr().out, "nothing starts fresh"
    before, after = best_weights(tmp_path / "plain"), best_weights(tmp_path / "tuned")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    handle = handle_of(load_model(tmp_path / "tuned")[0])
    assert handle is not None and handle.options.method == "topk" and handle.layers == (1, 2, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens.keep", "1.5"], "tokens: keep must be in (0, 1], got 1.5"),
        (["--tokens.kep", "0.5"], "unknown flag --tokens.kep for hyptree train; did you mean '--tokens.keep'?"),
        (["--tokens.keep", "0.5", "--task", "segment"], "tokens.keep below 1 is for the task classify"),
        (["--tokens.keep", "0.5", "--tokens.method", "tomm"], "got 'tomm'; did you mean 'tome'?"),
        (["--tokens.keep", "0.5", "--tokens.method", "random"], "which a resumed run cannot repeat"),
        (["--tokens.keep", "0.5", "--tokens.layers", "[9]"], "layer 9 does not exist: the model has 4 blocks"),
        (["--tokens.keep", "0.5", "--model.name", "resnet18", "--model.args", "{}"], "ResNet cannot be reduced"),
    ],
)
def test_mistakes_are_one_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_the_shipped_recipe_is_that_of_the_plain_model_with_a_reduction() -> None:
    tuned = load(Recipe, ROOT / "recipes" / "finetune_reduced.yaml", ["data.root=x.npz"])
    plain = load(Recipe, ROOT / "recipes" / "vit_cifar10.yaml", ["data.root=x.npz"])
    assert tuned.model == plain.model, "or its weights would not fit"
    assert all(getattr(tuned.data, key) == getattr(plain.data, key) for key in ("name", "size", "mean", "std"))
    assert tuned.tokens.keep == 0.5 and tuned.optim.lr < plain.optim.lr
    assert "tokens" in read_yaml(ROOT / "recipes" / "finetune_reduced.yaml")
