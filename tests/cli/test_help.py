"""The help of every verb: what may be left out looks so, and no path of the machine that wrote it is in it."""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from hyptree import cli
from hyptree.cli import config as configs
from tests.cli.test_print_config import every_verb


def command(verb: str):
    group, _, name = verb.partition(" ")
    module = import_module(f"hyptree.cli.{group}")
    return module.SUBVERBS[name] if name else module.run


@pytest.fixture(params=[*every_verb(), "eval"])
def verb(request):
    return request.param


@pytest.fixture
def page(verb, monkeypatch, capsys) -> str:
    monkeypatch.setenv("COLUMNS", "1000")
    assert cli.main([*verb.split(), "--help"]) == 0
    return capsys.readouterr().out


def test_no_path_of_ours(page):
    assert not re.findall(r"(?<![\w.*~/)])/\w[^\s)]*|\.\./\S*", page)


def test_the_usage_shows_what_may_be_left_out(verb, page):
    usage = page.split("\n")[0]
    assert "  " not in usage and usage == usage.rstrip()
    cls = configs.config_class(command(verb))
    for field in dataclasses.fields(cls):
        marks = getattr(get_type_hints(cls, include_extras=True)[field.name], "__metadata__", ())
        if not marks:
            continue
        (metavar,) = marks
        assert f" {metavar}" in usage
        is_optional = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        assert metavar.startswith("[") == metavar.endswith("]") == is_optional


def test_every_field_is_explained(verb, page):
    cls = configs.config_class(command(verb))
    for option in [
        *configs._options(cls),
        *configs._options(getattr(cls, "keys", dataclasses.make_dataclass("No", []))),
    ]:
        text = configs._docs(option.owner).get(option.name.rpartition(".")[2], "")
        shown = option.metavar or (f"{option.name}:" if dataclasses.is_dataclass(option.kind) else option.flag)
        assert re.search(rf"^(  )?(--[\w-]+, )?{re.escape(shown)}(?![\w-])", page, re.MULTILINE), shown
        assert text in page and (text or verb.startswith("bench "))


def test_an_empty_default_is_not_shown(page):
    assert not re.findall(r"\[(?:None|''|\(\))?\]", page.replace("[[", ""))


@pytest.mark.parametrize("width", [60, 79, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal(verb, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main([*verb.split(), "--help"]) == 0
    page = capsys.readouterr().out.partition("options of every verb")[0]
    assert [line for line in page.splitlines() if len(line) > width] == []


WORDS = {
    "out": (Path, r"(?i)folder|page|picture|file|csv"),
    "resume": (bool, r"Go on|Keep what"),
    "overwrite": (bool, r"Replace|Write into"),
    "device": (str, r"auto takes a GPU if there is one; cpu or cuda to insist\."),
    "seed": (int, r"Of |Same seed|First seed"),
    "threads": (int, r"CPU threads"),
    "json": (bool, r"(?i)print .*JSON"),
}
"""Flags that mean the same in every verb: their type, and what the help says."""

EXPECTED = {
    "demo": "out seed device threads",
    "train": "out resume overwrite seed device threads json",
    "runs": "json",
    "eval": "device threads json",
    "generate": "seed device threads json",
    "compare": "out",
    "explain": "out device threads json",
    "reduce": "out overwrite seed device threads json",
    "models": "json",
    "export": "out",
    "tree draw": "out",
    "tree show": "",
    "tree demo": "out seed",
    "lab sweep": "out resume overwrite seed device threads json",
    "lab fit": "out json",
    "lab plot": "out",
    "lab theory": "json",
    "lab overlap": "seed json",
    "lab llm-fit": "seed json",
    "vlm attach-info": "seed json",
    "vlm merge": "out overwrite seed json",
    "vlm eval-openvocab": "out device threads json",
    "vlm eval-hierarchy": "out resume seed device threads json",
    "vlm build-chains": "out overwrite seed device threads",
}
"""Which of them each verb has; all have --print-config."""


def test_the_same_words_everywhere(verb):
    """The benchmarks keep their own: what they measure depends on where."""
    if verb.startswith("bench "):
        return
    cls = configs.config_class(command(verb))
    short = getattr(cls, "short", {})
    options = [*configs._options(cls), *(configs._options(cls.keys, short=short) if hasattr(cls, "keys") else [])]
    named = {option.short or option.name: option for option in options}
    for name in WORDS.keys() & named.keys():
        option, (kind, said) = named[name], WORDS[name]
        text = configs._docs(option.owner)[option.name.rpartition(".")[2]]
        assert kind in option.kinds and re.search(said, text), (name, text)
    device = named.get("device")
    assert device is None or device.default in ("auto", None)
    given = (WORDS.keys() | {"device", "threads"}) & named.keys()
    assert given == set(EXPECTED[verb].split()), "a verb has the words that mean something to it"


def test_short_names_are_the_recipes_keys(capsys):
    words = ["--device", "cpu", "--seed", "7", "--threads", "1", "--strict"]
    assert cli.main(["train", "world_classify", *words, "--print-config"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    run = recipe["run"]
    assert (run["device"], run["seed"], run["threads"], recipe["data"]["strict"]) == ("cpu", 7, 1, True)


def test_a_sweep_prints_parts_that_it_reads_again(tmp_path, capsys):
    for words in (["--m", "3", "4"], ["--preset", "smoke", "--steps", "5"]):
        assert cli.main(["lab", "sweep", *words, "--print-config"]) == 0
        shown = capsys.readouterr().out
        (tmp_path / "parts.yaml").write_text(shown)
        assert cli.main(["lab", "sweep", "--config", str(tmp_path / "parts.yaml"), "--print-config"]) == 0
        assert capsys.readouterr().out == shown
    parts = yaml.safe_load(shown)["parts"]
    assert [part["name"] for part in parts] == ["strong-flat", "strong-skewed", "weak"]
    assert {part["steps"] for part in parts} == {5}
    assert cli.main(["lab", "sweep", "--preset", "smoke", "--config", str(tmp_path / "parts.yaml")]) == 2
    assert "leave one of them out" in capsys.readouterr().err
