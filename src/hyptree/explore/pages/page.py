"""One HTML file that needs nothing else: no network, no fonts, no scripts from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hyptree.explore.draw.charts import line_chart
from hyptree.explore.draw.style import read_beside
from hyptree.files import full_disk_is_one_line, write_text
from hyptree.lab.figures.panels import Panel

STYLE = read_beside(__file__, "page.css")
"""Of every page, in light and in dark."""


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading (may be empty) and HTML that is trusted as it is."""

    title: str
    html: str


def page(
    path: Path | str,
    title: str,
    lead: str,
    sections: Iterable[Section],
    *,
    script: str = "",
    style: str = "",
    footer: str = "",
) -> Path:
    """Writes a self-contained page and gives its path. Title, lead (a sentence or two) and footer are plain text."""
    body = "".join(
        f"<section>{f'<h2>{escape(part.title)}</h2>' if part.title else ''}{part.html}</section>" for part in sections
    )
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>\n<body><main>"
        '<button class="theme" type="button" data-theme-button>light / dark</button>'
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{body}'
        f"{f'<footer>{escape(footer)}</footer>' if footer else ''}</main>"
        f"<script>{read_beside(__file__, 'page.js')}{script}</script></body></html>\n"
    )
    path = Path(path)
    with full_disk_is_one_line(path.parent, "write the page again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, html)
    return path


class Html(str):
    """A text that is HTML already, trusted as it is."""


def _html(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kinds: Mapping[int, str] | None = None) -> str:
    """An HTML table, the first column on the left, numbers on the right.

    Args:
        kinds: which rows are ``best`` (they stand out) or ``rival`` (they stand back).
    """
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = [
        (f'<tr class="{kinds[k]}">' if kinds and k in kinds else "<tr>")
        + "".join(f"<td>{_html(cell)}</td>" for cell in row)
        + "</tr>"
        for k, row in enumerate(rows)
    ]
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def cards(numbers: Mapping[str, str]) -> str:
    """Numbers shown large, under their names; nothing where there are none."""
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{_html(value)}</dd></div>" for name, value in numbers.items())
    return f'<dl class="numbers">{shown}</dl>' if shown else ""


def chart(title: str, drawn: str, *, note: str = "", caption: str = "", kind: str = "card") -> str:
    """A drawing under its title; below them what there is to say about it, HTML as the drawing is."""
    above = f'<p class="note">{escape(note)}</p>' if note else ""
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure class="{kind}"><h3>{escape(title)}</h3>{above}{drawn}{below}</figure>'


def line_charts(panels: Iterable[Panel]) -> str:
    """A :func:`chart` of lines for each panel."""
    return "".join(chart(panel.title, line_chart(panel), note=panel.note) for panel in panels)


def image(path: Path | str, alt: str) -> str:
    """An ``<img>`` with the PNG inside it."""
    data = base64.b64encode(Path(path).read_bytes()).decode("ascii")
    return f'<img alt="{escape(alt, quote=True)}" src="data:image/png;base64,{data}">'
