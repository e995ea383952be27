"""``hyptree reduce`` on the command line: a run, a name, pictures, mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyptree.cli import main
from hyptree.config import load
from hyptree.train.loop import fit
from hyptree.train.run.recipe import Recipe

RECIPE = """
data: {name: world, size: 32, num_train: 32, num_val: 24, batch_size: 16, cache: false}
model:
  name: vit_tiny_patch16_224
  args: {img_size: 32, patch_size: 8, embed_dim: 24, depth: 4, num_heads: 3}
schedule: {steps: 2}
run: {device: cpu, tensorboard: false, threads: 1}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reduce")
    (folder / "vit.yaml").write_text(RECIPE)
    fit(load(Recipe, folder / "vit.yaml"), folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture
def photo(tmp_path: Path, seed: int) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (48, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


FAST = ["--batch-size", "8", "--repeats", "1", "--device", "cpu"]


def test_a_run_is_measured_on_its_own_data(
    trained: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hyptree.train import evaluate_run

    out = tmp_path / "out"
    methods = ["atc", "tome", "kmeans", "kmedoids", "dpcknn", "topk", "evit", "random"]
    flags = ["--keep", "0.5", "0.25", "--method", *methods, "--linkage", "average", "complete", "single"]
    assert (
        main(["reduce", str(trained), *flags, "--layers", "1", "2", "--image", str(photo), "--out", str(out), *FAST])
        == 0
    )
    printed = capsys.readouterr().out
    actual = json.loads((out / "results.json").read_text())
    assert len(actual["rows"]) == 1 + 2 * 10
    assert {tuple(row["tokens"]) for row in actual["rows"][1:]} == {(8, 4), (4, 1)}
    assert actual["rows"][0]["top1"] == evaluate_run(trained)["top1"], "the plain model as hyptree eval sees it"
    assert actual["about"]["data"] == "24 pictures of world, val" and actual["about"]["layers"] == [1, 2]
    assert "reduce: 21/21, random keep 0.25: 4 1 tokens" in printed and "atc complete" in printed and "top-1" in printed
    with (out / "results.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == [row["method"] for row in actual["rows"]]
    page = (out / "index.html").read_text()
    assert "photo.png" in page and page.count("<summary>") == 2 and page.count('<figure class="merge">') == 2
    assert (out / "pareto.png").stat().st_size > 5000 and (out / "picture1.png").is_file()

    assert (
        main(
            ["reduce", str(trained), "--keep", "0.5", "--method", "atc", "--layers", "1", "2", "--out", str(out), *FAST]
        )
        == 0
    )
    assert "reduce: 2/2, atc average keep 0.5" in capsys.readouterr().out
    assert sorted(map(str, json.loads((out / "results.json").read_text())["rows"])) == sorted(map(str, actual["rows"]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["vit_tinny_patch16_224"], "unknown model 'vit_tinny_patch16_224'; did you mean 'vit_tiny_patch16_224'?"),
        (["no/such/run"], "no/such/run: no such folder"),
        (["{run}", "--method", "atc", "tomee"], "got 'tomee'; did you mean 'tome'?"),
        (["{run}", "--keep", "0.5", "1.2"], "--keep must be in (0, 1], got 1.2; 1 keeps all tokens"),
        (["{run}", "--linkage", "averge"], "average"),
        (["{run}", "--layers", "7"], "layer 7 does not exist: the model has 4 blocks"),
        (["{run}", "--image", "missing.jpg"], "missing.jpg: no such picture"),
        (["{run}", "--image", "{run}/recipe.yaml"], "recipe.yaml: not a picture that can be read"),
        (["{run}", "--data", "wolrd"], "did you mean 'world'?"),
        (["{run}", "--size", "64"], "leave out --pretrained, --weights and --size"),
        (["{run}", "--data", "{folder}"], "knows 30 classes, the data has 2: accuracy would mean nothing"),
        (["resnet18"], "ResNet cannot be reduced"),
        (["swin_tiny_patch4_window7_224"], "uses window attention"),
        (["{run}", "--device", "tpu"], "device must be auto, cpu or cuda"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "set" / name / "1.png")
    out = tmp_path / "out"
    inputs = [flag.format(run=trained, folder=tmp_path / "set") for flag in flags]
    device = [] if "--device" in inputs else ["--device", "cpu"]
    assert main(["reduce", *inputs, "--out", str(out), *device]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not (out / "results.json").exists()


def test_a_dense_run_is_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "recipe.yaml").write_text("task: segment\n")
    assert main(["reduce", str(tmp_path / "dense")]) == 2
    assert "is a run of the task segment; hyptree reduce measures classifiers" in capsys.readouterr().err
