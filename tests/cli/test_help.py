"""The help of every verb: what may be left out looks so, and no path of the machine that wrote it is in it."""

from __future__ import annotations

import dataclasses
import re
from importlib import import_module
from typing import get_type_hints

import pytest
import tyro

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
    cls = getattr(cls, "help", cls)
    for field in dataclasses.fields(cls):
        marks = getattr(get_type_hints(cls, include_extras=True)[field.name], "__metadata__", ())
        if tyro.conf.Positional not in marks:
            continue
        (metavar,) = [mark.metavar for mark in marks if hasattr(mark, "metavar")]
        assert f" {metavar}" in usage
        is_optional = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        assert metavar.startswith("[") == metavar.endswith("]") == is_optional


def test_an_empty_default_is_not_shown(page):
    assert not re.findall(r"\(default:\s*(?:None|'')?\s*\)", page)


@pytest.mark.parametrize("width", [60, 79, 80, 81, 100])
@pytest.mark.parametrize("name", ["train", "eval", "explain", "compare"])
def test_frames_stay_straight(name, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main([name, "--help"]) == 0
    framed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(tuple("╭│╰"))]
    assert framed and len({len(line) for line in framed}) == 1
    assert not [line for line in framed if not line.strip("│ ")]
