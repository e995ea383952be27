"""Makes docs/options.md, every flag of every verb and every key of a recipe: ``python docs/options.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from hyptree.cli import VERBS
from hyptree.cli.config import Option, _docs, _options, config_class
from hyptree.config import expected
from hyptree.tables import markdown_head, markdown_row
from hyptree.train.run.recipe import Recipe

PAGE = Path(__file__).parent / "options.md"
HEAD = """# All options

Made by `python docs/options.py`. Every verb also takes `--help`, `--config FILE`, `--print-config`
and `--traceback`. A value in brackets is the default.
"""


def commands() -> Iterator[tuple[str, Any]]:
    """The name and the configuration of every verb but those of the benchmarks, which are not installed."""
    for verb in VERBS:
        if verb == "bench":
            continue
        module = import_module(f"hyptree.cli.{verb}")
        for name, command in getattr(module, "SUBVERBS", {"": getattr(module, "run", None)}).items():
            yield f"{verb} {name}".strip(), config_class(command)


def table(options: Iterable[Option]) -> Iterator[str]:
    """One row for each option."""
    yield from markdown_head(["option", "value", "meaning"])
    for option in options:
        kind = "" if option.kind is bool else expected(option.kind).removesuffix(" or null")
        value = option.default
        if option.kind is not bool and value not in (dataclasses.MISSING, None, "", (), [], {}):
            kind += f" [{' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}]"
        name = option.flag + (".KEY" if str(option.kind).startswith("dict") else "")
        name += f", --{option.short}" if option.short else ""
        text = _docs(option.owner).get(option.name.rpartition(".")[2], "")
        cells = (f"`{name}`", "on" if value is True else kind, text)
        yield markdown_row(cell.replace("|", "\\|") for cell in cells)


def sections(options: Iterable[Option], title: str) -> Iterator[str]:
    """A table for the options that come first, and one for each section."""
    part: list[Option] = []
    for option in [*options, None]:
        if option is None or dataclasses.is_dataclass(option.kind):
            if part:
                yield from (f"\n## {title}\n", *table(part))
            if option is not None:
                title, part = f"Recipe: {option.name}", []
        else:
            part.append(option)


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    short: dict[str, str] = {}
    for name, cls in commands():
        short |= getattr(cls, "short", {})
        options = [option for option in _options(cls, short=short) if not dataclasses.is_dataclass(option.kind)]
        lines += [f"\n## hyptree {name}\n", *table(options)]
        if getattr(cls, "keys", None) is Recipe:
            lines.append("\nAnd the keys of a recipe, below.")
    lines += sections(_options(Recipe, short=short), "Recipe")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
