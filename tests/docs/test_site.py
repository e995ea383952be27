"""The site without building it: navigation, links, anchors, pictures, names of the API, commands of the guides."""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MADE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}  # by docs/site.py
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*DOCS.rglob("*.md"), *map(ROOT.joinpath, MADE.values())])
API = sorted(path.relative_to(ROOT).as_posix() for path in (DOCS / "api").glob("*.md"))


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def settings() -> dict[str, Any]:
    class Loader(yaml.SafeLoader):
        """Leaves tags of Python aside."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    return yaml.load(text_of("mkdocs.yml"), Loader)  # a SafeLoader


def leaves(entry: Any) -> list[str]:
    """Pages below an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for child in (entry.values() if isinstance(entry, dict) else entry) for page in leaves(child)]


def public(name: str) -> Any:
    """What a dotted name stands for: a module, or something inside of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


def anchors(text: str) -> set[str]:
    """The anchors that headings of a page get."""
    heads = re.findall(r"^#+ (.+)$", outside_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_navigation_once() -> None:
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(leaves(settings()["nav"])) == sorted([*there, *MADE])


def test_every_room_has_its_page_of_the_api() -> None:
    rooms = {path.parent.name for path in (ROOT / "src" / "hyptree").glob("*/__init__.py")} - {"cli"}
    assert {Path(page).stem for page in API} == {"hyptree", *rooms}


@pytest.mark.parametrize("page", API)
def test_public_names_of_a_room_are_importable(page: str) -> None:
    names = re.findall(r"^::: (\S+)$", text_of(page), re.MULTILINE)
    assert names
    for name in names:
        assert public(name).__doc__, name
        for member in getattr(public(name), "__all__", ()):
            public(f"{name}.{member}")


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_names_on_a_page_are_importable(page: str) -> None:
    for name in set(re.findall(r"`(hyptree(?:\.[A-Za-z]\w*)+)(?:\(.*?\))?`", text_of(page))):
        public(name)


def test_the_site_asks_nobody_else_and_names_the_repository() -> None:
    config = settings()
    assert config["theme"]["font"] is False
    assert config["repo_url"] == tomllib.loads(text_of("pyproject.toml"))["project"]["urls"]["Homepage"]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_somewhere(page: str) -> None:
    text = outside_code(text_of(page))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"""(?:src|href)=["']([^"']+)["']""", text)
    for target in targets:
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if anchor.startswith("hyptree."):
            assert public(anchor), f"{page} links to {target}"
        elif anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page} links to {target}"


def test_every_page_is_found_by_reading() -> None:
    """From README on, by links alone: what only the navigation of the site knows is lost in the repository."""
    seen, ahead = set(), {"README.md"}
    while ahead:
        page = ahead.pop()
        seen.add(page)
        for target in re.findall(r"\]\(([^)\s#]+\.md)", text_of(page)):
            other = ((ROOT / page).parent / target).resolve()
            if other.is_relative_to(ROOT):
                ahead |= {other.relative_to(ROOT).as_posix()} - seen
    assert set(PAGES) <= seen, sorted(set(PAGES) - seen)


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_place_of_one_machine(page: str) -> None:
    assert re.findall(r"(?<![\w.:/])/(?:work|tmp|root|home|opt|mnt|Users|data)/[^\s)`]*", text_of(page)) == []


@cache
def help_of(verb: tuple[str, ...]) -> str:
    import contextlib
    import io

    from hyptree import cli

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert cli.main([*verb, "--help"]) == 0, f"hyptree {' '.join(verb)}"
    return shown.getvalue()


FREE = re.compile(r"--(model\.(args|head|plugin\.args)|radial\.adapter)\.")
"""Keys that belong to a model, a head or an adapter: no help can list them."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_commands_exist_with_their_flags(page: str) -> None:
    text = re.sub(r"\\\n\s*", " ", text_of(page))
    for line in re.findall(r"^(?:    )?(hyptree [a-z].*)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)[1:]
        verb = words[:2] if words[0] in ("tree", "bench", "vlm", "lab") else words[:1]
        flags = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
        known = set(re.findall(r"--[\w.-]+", help_of(tuple(verb)) + help_of(())))
        assert {flag for flag in flags if not FREE.match(flag)} <= known, f"{page}: {line}"
