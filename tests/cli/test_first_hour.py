"""What somebody meets in the first hour: options that work where they are shown, help that is true."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from hyptree import cli


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A file for ``--config``."""
    path = tmp_path / "settings.yaml"
    path.write_text("run: {seed: 3, log_steps: 7}\noptim: {lr: 0.5}\ndata:\n")
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> dict:
    out, err = capsys.readouterr()
    assert not err
    return yaml.safe_load(out)


def test_config_lies_over_the_recipe_and_below_the_flags(settings, capsys):
    words = ["train", "world_classify", "--print-config"]
    assert cli.main(words) == 0
    plain = printed(capsys)
    assert cli.main([*words, "--config", str(settings), "--run.seed", "4"]) == 0
    actual = printed(capsys)
    assert (actual["run"]["seed"], actual["run"]["log_steps"], actual["optim"]["lr"]) == (4, 7, 0.5)
    actual["run"] |= {"seed": plain["run"]["seed"], "log_steps": plain["run"]["log_steps"]}
    actual["optim"]["lr"] = plain["optim"]["lr"]
    assert actual == plain


def test_config_alone_is_the_recipe(settings, capsys):
    assert cli.main(["train", "--config", str(settings), "--print-config"]) == 0
    assert printed(capsys)["run"]["seed"] == 3


def test_config_lies_over_the_recipe_of_a_run_that_is_measured(settings, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("run: {seed: 1}\ndata: {size: 48}\n")
    assert cli.main(["eval", str(tmp_path), "--config", str(settings), "--print-config"]) == 0
    actual = printed(capsys)
    assert (actual["run"]["seed"], actual["data"]["size"]) == (3, 48)
    assert cli.main(["eval", str(tmp_path), "--config", str(settings), "--tasks", "piqa"]) == 2
    assert "does not go with --tasks" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 1, 2])
def test_options_of_every_verb_may_stand_anywhere(place, tmp_path, capsys):
    path = tmp_path / "demo.yaml"
    path.write_text("seed: 3\n")
    words = ["tree", "demo"]
    words[place:place] = ["--config", str(path), "--print-config"]
    assert cli.main(words) == 0
    assert printed(capsys)["seed"] == 3


def test_a_wrong_key_names_the_files_it_may_be_in(settings, capsys):
    settings.write_text("optim: {lrr: 1}\n")
    assert cli.main(["train", "demo", "--config", str(settings)]) == 2
    assert f"demo with {settings}: unknown key 'optim.lrr'; did you mean 'optim.lr'?" in capsys.readouterr().err


def test_the_help_of_a_verb_tells_of_the_options_of_every_verb(capsys):
    for words in (["demo"], ["train"], ["tree", "demo"], ["tree"]):
        assert cli.main([*words, "--help"]) == 0
        assert "--config FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["tree", "demo", "--out", "run"],
        ["demo", "--recipe", "himapper_demo", "--out", "run"],
        ["lab", "overlap", "model.safetensors", "--plot", "run/heads.png"],
        ["lab", "llm-fit", "losses.csv", "--plot", "run/losses.png"],
    ],
    ids=" ".join,
)
def test_what_draws_asks_for_matplotlib_before_its_work(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert err.endswith(" needs matplotlib: pip install hyptree[plot]\n") and err.count("\n") == 1
    assert not out
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("compare nope.yaml", None),
        ("train nope.yaml", None),
        ("train a/folder/of/mine/nope.yaml", None),
        ("train recipes/nope.yaml", None),
        ("train wrold_classify", "recipes/world_classify.yaml"),
        ("train dem.yaml", "recipes/demo.yaml"),
        ("train here/mine1.yaml", "here/mine.yaml"),
        ("train here/nope.yaml", None),
    ],
)
def test_only_close_names_are_suggested(words, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("here/mine.yaml").touch()
    assert cli.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.endswith("No such file or directory" + (f"; did you mean {hint!r}?" if hint else "") + "\n")
