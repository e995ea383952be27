"""Hooks of mkdocs: README and changelog as pages, a list of all operations, links from docs/ to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
SOURCES = {source: page for page, source in PAGES.items()}


def on_files(files: Any, config: Any) -> None:
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = re.sub(r"""(\]\(|src=["'])docs/""", r"\1", text)
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """``../recipes/demo.yaml``, and what README links to outside of docs, is not on the site."""
    if page.file.src_uri == "api/ops.md":
        for path in sorted((ROOT / "src" / "hyptree" / "ops").glob("*/__init__.py")):
            name = path.parent.name
            markdown += f"\n\n## {name}\n\n::: hyptree.ops.{name}\n    options: {{heading_level: 3}}\n"
    prefix = "" if page.file.src_uri in PAGES else r"\.\./"

    def outside(match: re.Match[str]) -> str:
        path, hash, anchor = match[1].partition("#")
        if path in SOURCES:
            return f"]({SOURCES[path]}{hash}{anchor})"
        here = files.get_file_from_path(path) if not prefix else None
        return match[0] if here or not (ROOT / path).exists() else f"]({config.repo_url}/blob/main/{match[1]})"

    return re.sub(rf"\]\({prefix}([\w][^):]*)\)", outside, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Sphinx's roles (``:func:`name```) are in docstrings; mkdocs knows the code in them alone."""
    return re.sub(r":(?:mod|class|func|meth|attr|data):(?=<code)", "", html)
