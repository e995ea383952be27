"""``hyptree explain`` and ``hyptree demo`` on the command line: a real short run, its page, its table, its mistakes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyptree import cli
from hyptree.config import load
from hyptree.errors import UserError
from hyptree.train.run.recipe import Recipe
from tests.explore.html import explorer_data, read

RECIPE = """
data: {name: world, size: 32, num_train: 32, num_val: 24, batch_size: 16, cache: false}
model: {name: hcformer_pico, args: {img_size: 32, dims: [8, 16, 16, 24], head_dim: 4}}
schedule: {steps: 2}
run: {device: cpu, tensorboard: false, log_steps: 1, threads: 1}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a whole demo with a small recipe, and what it printed."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("demo")
    (folder / "small.yaml").write_text(RECIPE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert (
            cli.main(["demo", "--out", str(folder / "run"), "--recipe", str(folder / "small.yaml"), "--seed", "3"]) == 0
        )
    return folder / "run", printed.getvalue()


def test_demo_ends_with_numbers_and_the_page(finished: tuple[Path, str]) -> None:
    folder, text = finished
    lines = text.rstrip().splitlines()
    assert lines[-1] == str(folder / "index.html") and (folder / "index.html").is_file()
    numbers = json.loads((folder / "numbers.json").read_text())
    assert f"leaf accuracy    {numbers['leaf accuracy']:6.1%}" in lines
    assert numbers["leaf accuracy"] <= numbers["family accuracy"] <= numbers["group accuracy"]
    val = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert val["split"] == "val" and val["top1"] == pytest.approx(numbers["leaf accuracy"])
    assert val["top1_up2"] == pytest.approx(numbers["group accuracy"])
    assert any(re.match(r"time +\d+ s  \(training", line) for line in lines)


def test_demo_page_is_that_of_the_run(finished: tuple[Path, str]) -> None:
    html = (finished[0] / "index.html").read_text(encoding="utf-8")
    text = read(html).text
    assert not re.search(r"https?://", html)
    for title in ("What it clustered", "Do clusters follow things?", "How it learned", "Where it is right and wrong"):
        assert title in text
    data = explorer_data(html)
    assert len(data["images"]) == 8 and len(data["layers"]) == 6
    assert "background" in data["regions"] and all("mostly" in one["layers"][1][0] for one in data["images"])


def test_demo_replaces_an_earlier_one_and_nothing_else(finished: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    (out / "checkpoints" / "last" / "old").write_text("old")
    (out / "mine.txt").write_text("keep")
    before = (out / "recipe.yaml").stat().st_mtime_ns
    assert cli.main(["demo", "--out", str(out), "--recipe", str(finished[0].parent / "small.yaml"), "--seed", "3"]) == 0
    assert (out / "mine.txt").read_text() == "keep" and not (out / "checkpoints" / "last" / "old").exists()
    assert (out / "recipe.yaml").stat().st_mtime_ns > before and (out / "index.html").is_file()


def test_demo_recipe_is_sound() -> None:
    recipe = load(Recipe, "recipes/demo.yaml")
    assert (recipe.task, recipe.data.name, recipe.model.name) == ("classify", "world", "hcformer_pico")
    assert recipe.model.args["img_size"] == recipe.data.size  # no bias is interpolated
    assert recipe.run.device == "auto"


def test_explain_writes_the_page_of_a_run_again(
    finished: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", str(finished[0]), "--out", str(tmp_path / "p.html"), "--pictures", "2"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "p.html")
    assert len(explorer_data((tmp_path / "p.html").read_text(encoding="utf-8"))["images"]) == 2


def test_explain_takes_pictures_of_ones_own(finished: tuple[Path, str], tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    files = [tmp_path / "wide <1>.png", tmp_path / "small.jpg"]
    Image.fromarray(rng.integers(0, 256, (50, 90, 3), dtype=np.uint8)).save(files[0])
    Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(files[1])
    assert cli.main(["explain", str(finished[0]), *map(str, files), "--out", str(tmp_path / "p.html")]) == 0
    html = (tmp_path / "p.html").read_text(encoding="utf-8")
    reader = read(html)
    assert ("img", "alt", "wide <1>.png") in reader.attributes
    assert "How it learned" not in reader.text
    assert all("guess" in one["answer"] for one in explorer_data(html)["images"])  # class names are those of the run


def test_explain_takes_a_name(tmp_path: Path, seed: int) -> None:
    picture = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(picture)
    assert cli.main(["explain", "hcformer_pico", str(picture), "--out", str(tmp_path / "p.html")]) == 0
    html = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "nothing was learned yet" in html and explorer_data(html)["images"][0]["answer"] == ""


def test_table_as_text_and_as_json(finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("skimage")
    assert cli.main(["explain", str(finished[0]), "--table", "--samples", "2", "--target", "parts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in rows if row["rival"]} == {"grid", "SLIC"}
    assert {row["stage"] for row in rows} == {1, 2, 3, 4} and all(0 < row["asa"] <= 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "hcformer_picoo", "a.png"], "unknown model 'hcformer_picoo'; did you mean 'hcformer_pico'?"),
        (["explain", "no/such/run"], "no/such/run: no such folder"),
        (["explain", "hcformer_pico"], "give pictures to explain"),
        (["explain", "hcformer_pico", "absent.png"], "absent.png: no such picture"),
        (["explain", "resnet10t", "a.png"], "resnet10t cannot be explained: it does not cluster"),
        (["explain", "hcformer_pico", "a.png", "--table"], "leave the pictures out"),
        (["explain", "hcformer_pico", "a.png", "--heads"], "--heads is for tables of clusters, not for pages of"),
        (["explain", "hcformer_pico", "a.png", "--json"], "--json is for tables of clusters, not for pages of"),
        (["explain", "hcformer_pico", "--table", "--out", "x.html"], "--out is for encoders and language models and"),
        (["explain", "hcformer_pico", "--pictures", "0"], "--pictures must be at least 1, got 0"),
        (["explain", "hcformer_pico", "a.png", "--pictures", "3"], "--pictures counts validation pictures, and here"),
        (["demo", "--seed", "-1"], "seed must be from 0"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64)).save("a.png")
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and message in shown.err


def test_folder_without_a_run_and_out_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(tmp_path)]) == 2
    assert "holds no model, it has none of recipe.yaml" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "is a file; the run needs a folder" in capsys.readouterr().err


def test_a_run_with_a_dense_head_is_not_said_to_have_no_clusters() -> None:
    """Its backbone may well cluster: what hides them is the head."""
    import torch

    from hyptree.explore.pages.run_pictures import Subject

    subject = Subject(torch.nn.Identity(), "hcformer_pico", 64, task="segment")
    with pytest.raises(UserError, match=r"^a run of the task segment cannot be explained: its head shows no clusters"):
        subject.require_clusters()
