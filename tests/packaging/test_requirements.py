"""What is required of other packages: ranges in pyproject.toml, tested versions in constraints.txt, names of extras."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hyptree

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
EVERY = [Requirement(text) for texts in (PROJECT["dependencies"], *EXTRAS.values()) for text in texts]
OTHERS = [requirement for requirement in EVERY if requirement.name != "hyptree"]
PINS = (ROOT / "constraints.txt").read_text("utf-8").splitlines()


def test_pins_are_names_and_versions_alone() -> None:
    """No address, no hash, no build of one machine (``torch==2.15.0+cpu``), each package once."""
    assert [line for line in PINS if not re.fullmatch(r"[A-Za-z0-9][\w.-]*==[0-9][0-9a-z.]*", line)] == []
    names = [canonicalize_name(line.partition("==")[0]) for line in PINS]
    assert len(set(names)) == len(names) and "hyptree" not in names


@pytest.mark.parametrize("requirement", OTHERS, ids=str)
def test_pins_are_in_range(requirement: Requirement) -> None:
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in PINS)}
    assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("requirement", OTHERS, ids=str)
def test_lower_bounds_are_written_as_make_test_oldest_reads_them(requirement: Requirement) -> None:
    (bound,) = requirement.specifier
    assert bound.operator == ">="
    text = f'"{requirement.name}{"".join(f"[{extra}]" for extra in requirement.extras)}>={bound.version}"'
    assert text in (ROOT / "pyproject.toml").read_text("utf-8")


def test_extras_that_are_named_exist() -> None:
    """In messages (``pip install hyptree[plot]``), in the docs and in pyproject.toml itself."""
    named = {extra for requirement in EVERY if requirement.name == "hyptree" for extra in requirement.extras}
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    for path in sources:
        text = path.read_text("utf-8")
        named |= {extra for group in re.findall(r"hyptree\[([a-z,]+)\]", text) for extra in group.split(",")}
        named |= set(re.findall(r"""\brequire\("[\w.]+", "(\w+)"\)""", text))
    assert {"plot", "vlm", "lm"} <= named
    assert named <= set(EXTRAS)


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [hyptree.__version__]
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)[0] == hyptree.__version__
