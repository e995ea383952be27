"""What pages, recipes and comments name is there: names, files, commands. And how pages are written.

Links and the commands of the pages are checked by test_site.py, their code by test_examples.py and test_readme.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "src", "tests", "benchmarks", "results", "recipes", "examples", ".github", ".ci")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
WIDTH = 100


def texts(*folders: str) -> dict[str, str]:
    """Every text file of some folders, by its path in the checkout; those at the top as well."""
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    actual = {}
    for path in paths:
        with contextlib.suppress(UnicodeDecodeError, IsADirectoryError):
            actual[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    return actual


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -------------------------------------------------------------------------------------------------- what is there


@functools.cache
def resolves(name: str) -> bool:
    """Whether a dotted name is a module of ours or something in one."""
    parts = name.split(".")
    depth = 1
    while depth < len(parts):
        place = ROOT.joinpath("src", *parts[: depth + 1])
        if not (place.is_dir() or place.with_suffix(".py").is_file()):
            break
        depth += 1
    if depth == len(parts):
        return True
    actual = importlib.import_module(".".join(parts[:depth]))
    for part in parts[depth:]:
        if actual is None or not (hasattr(actual, part) or part in getattr(actual, "__annotations__", {})):
            return False
        actual = getattr(actual, part, None)
    return True


def named(text: str) -> set[str]:
    return set(re.findall(r"""(?<![\w.@:/"'-])hyptree(?:\.[A-Za-z]\w*)+(?!\w*[*<{])""", text))


def test_names_in_pages_and_code_exist() -> None:
    """``hyptree.room.thing`` in a page, a recipe, a comment or a docstring is a module or something in it."""
    missing = []
    for path, text in texts("docs", "src", "benchmarks", "results", "recipes", "examples").items():
        missing += [f"{path}: {name}" for name in sorted(named(text)) if not resolves(name)]
    assert not missing, "\n".join(missing)


def test_a_wrong_name_is_seen() -> None:
    assert named("see `hyptree.train.run.log` and hyptree.nowhere.at_all.") == {
        "hyptree.train.run.log",
        "hyptree.nowhere.at_all",
    }
    assert resolves("hyptree.train.run.log.headline") and not resolves("hyptree.train.run.log.nothing")
    assert not resolves("hyptree.nowhere.at_all")


def test_files_in_pages_and_code_exist() -> None:
    """A path such as ``src/hyptree/cli/train.py`` in a page, a recipe or a comment is a file or a folder here."""
    rooms = "src|docs|tests|benchmarks|results|recipes|examples"
    missing = []
    for path, text in texts(*FOLDERS).items():
        actual = re.findall(rf"""(?<![\w./${{}}"'-])((?:{rooms})/[\w./-]++)(?![*{{<$"'])""", text)
        missing += [f"{path}: {file}" for file in actual if not (ROOT / file.rstrip(".-")).exists()]
    assert not missing, "\n".join(missing)


def commands(text: str) -> Iterator[list[str]]:
    """The words after ``hyptree`` of every command line in a page: blocks, comments of recipes, code in a line."""
    text = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(
        r"^(?:    |#   |```text\n|)(?:[A-Z_]+=\S+ )*(?:torchrun .*-m (?:-- )?)?(hyptree [a-z].*)$", text, re.M
    )
    for line in lines + re.findall(r"`(?:torchrun [^`]*-m (?:-- )?)?(hyptree [a-z][^`\n]*)`", text):
        line = re.split(r"\s#|\s{2,}[(]|;", line)[0]
        yield [word for word in shlex.split(line.replace("...", " ")) if word][1:]


@functools.cache
def help_of(*verb: str) -> str:
    from hyptree import cli

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        assert cli.main([*verb, "--help"]) == 0, f"hyptree {' '.join(verb)}: {shown.getvalue()}"
    return shown.getvalue()


def wrong(words: list[str]) -> list[str]:
    """What a command line has that the command does not: a verb, a flag."""
    from hyptree import cli

    if words[0] not in cli.VERBS:
        return [f"no verb {words[0]}"]
    has_subverbs = "VERB [options]" in help_of(words[0])
    if has_subverbs and len(words) > 1 and re.match(r"[a-z-]+$", words[1]):
        if not re.search(rf"^  {words[1]} ", help_of(words[0]), re.M):
            return [f"no verb {words[0]} {words[1]}"]
        verb = words[:2]
    else:
        verb = words[:1]
    known = help_of(*verb) if verb[-1] != "eval" else help_of("eval") + help_of("train")
    flags = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")} - {"--"}
    free = ("--model.args", "--model.head", "--model.plugin", "--print-config", "--config", "--traceback")
    return [flag for flag in flags if not flag.startswith(free) and not re.search(rf"{flag}(?![\w.-])", known)]


def test_commands_in_recipes_and_code_exist() -> None:
    """Every ``hyptree VERB --flag`` of a recipe, a script or a docstring is one that the command knows."""
    mistakes, count = [], 0
    for path, text in texts("benchmarks", "results", "recipes", "examples", "src").items():
        if path.endswith(("cli/__init__.py", "cli/config.py")):
            continue  # how to write a verb
        for words in commands(text):
            count += 1
            mistakes += [f"{path}: hyptree {' '.join(words)}: {what}" for what in wrong(words)]
    assert not mistakes, "\n".join(mistakes)
    assert count > 40, count


def test_a_wrong_command_is_seen() -> None:
    page = "    hyptree train a.yaml --out a      # why\n`hyptree bench tokens --nothing 3`\n    hyptree trian b.yaml\n"
    assert [wrong(words) for words in commands(page)] == [[], ["no verb trian"], ["--nothing"]]


# ------------------------------------------------------------------------------------------- how it is written


def long_lines(text: str) -> list[int]:
    """Numbers of lines beyond the width, but for tables, code, pictures and the targets of links."""
    actual, is_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        prose = re.sub(r"\]\([^)]*\)", "]", line)
        if len(prose) > WIDTH and not is_code and not line.startswith(("|", "    ", "!", "<")):
            actual.append(number)
    return actual


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_lines_are_short(page: Path) -> None:
    assert long_lines(page.read_text(encoding="utf-8")) == []


def test_a_long_line_is_seen() -> None:
    word = "x" * WIDTH
    assert long_lines(f"{word}y\n| {word} |\n    {word}\n```text\n{word}y\n```\n[a]({word}) b\n") == [1]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_rows_of_a_table_have_the_cells_of_its_head(page: Path) -> None:
    """A bar inside of code ends a cell, too: that is how a row comes to have too many."""
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.M)
    rows = [(table.split("\n")[0].count("|"), row) for table in tables for row in table.splitlines()]
    assert [row for cells, row in rows if row.count("|") != cells] == []


def test_no_page_names_a_registry() -> None:
    hosts = r"[\w.]*(?:pypi\.|pythonhosted|anaconda\.org|npmjs|artifactory)\S*"
    actual = {ids(page): re.findall(hosts, page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: names for page, names in actual.items() if names} == {}


def test_the_old_name_is_in_one_line_of_the_changelog() -> None:
    old = "ram" + "ify"
    lines = {
        path: [line for line in text.splitlines() if old in line.lower()] for path, text in texts(*FOLDERS).items()
    }
    assert {path: len(actual) for path, actual in lines.items() if actual} == {"CHANGELOG.md": 1}
