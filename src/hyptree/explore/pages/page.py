"""One HTML file that needs nothing else: no network, no fonts, no scripts from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hyptree.files import full_disk_is_one_line, write_text

__all__ = ["Html", "Section", "cards", "chart", "explorer_page", "explorer_style", "image", "page", "table"]

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --panel: #f3f5fa; --ink: #1c2030; --soft: #5b6274; --line: #dfe3ec;
  --accent: #3b6fb6; --good: #23733f; --bad: #a8432f; --best: #f3f7fd; --inside: #f7f8fb; --rim: #c3c8d4; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #10131a; --panel: #1c212d; --ink: #e8eaf1; --soft: #9aa2b5; --line: #2b3140;
    --accent: #8ab0f0; --good: #5cc896; --bad: #ff9b7a; --best: #1a2435; --inside: #181c26; --rim: #414a5e; }
  svg.disk > g:not(.names) { filter: brightness(1.35); }
}
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--ground); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .6rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; }
p, ul { max-width: 46rem; margin: .6rem 0; }
.lead { font-size: 1.1rem; color: var(--soft); }
.note, figcaption, footer { font-size: .92rem; color: var(--soft); }
figure { margin: 1.2rem 0; }
a { color: var(--accent); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: 1.5rem; }
.pair figure { margin: 0; }
svg.disk { display: block; width: 100%; height: auto; max-width: 54rem; margin: 0 auto; }
svg.disk .rim { fill: var(--inside); stroke: var(--rim); }
svg.disk .node { stroke: var(--ground); } svg.disk .names { fill: var(--ink); stroke: var(--ground); }
.node { cursor: pointer; }
.edge, .node, .names text { transition: opacity .15s; }
.lit .edge:not(.on), .lit .node:not(.on), .lit .names text:not(.on) { opacity: .22; }
.lit .names text.on { font-weight: 700; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .9rem; border-bottom: 1px solid var(--line); text-align: right; }
th { font-weight: 600; color: var(--soft); font-size: .88rem; border-bottom-width: 2px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr.best td { font-weight: 600; background: var(--best); }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .92em;
  background: var(--panel); padding: .1em .3em; border-radius: 4px; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
@media (max-width: 40rem) { main { padding: 1.4rem 1rem 3rem; } h1 { font-size: 1.6rem; }
  th, td { padding: .35rem .55rem; } }
@media print { :root { color-scheme: light; } }
"""


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
    style: str = STYLE,
    top: str = "",
    footer: str = "",
) -> Path:
    """Writes a self-contained page and gives its path.

    Args:
        title: plain text. lead: a sentence or two below it, plain text.
        sections: what the page shows, in order.
        script: JavaScript put at the end of the page.
        style: CSS, instead of the plain one.
        top: HTML above the title, trusted as it is.
        footer: plain text.
    """
    body = "".join(
        f"<section>{f'<h2>{escape(part.title)}</h2>' if part.title else ''}{part.html}</section>" for part in sections
    )
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body><main>"
        f'{top}<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{body}'
        f"{f'<footer>{escape(footer)}</footer>' if footer else ''}</main>"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )
    path = Path(path)
    with full_disk_is_one_line(path.parent, "write the page again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, html)
    return path


def explorer_style() -> str:
    """The CSS of pages that one can explore, in light and in dark."""
    return Path(__file__).with_name("explorer.css").read_text(encoding="utf-8")


def explorer_page(
    path: Path | str, title: str, lead: str, sections: Iterable[Section], *, style: str = "", footer: str = ""
) -> Path:
    """A :func:`page` that one can explore; ``style`` is put behind its own."""
    return page(
        *(path, title, lead, sections),
        script=Path(__file__).with_name("explorer.js").read_text(encoding="utf-8"),
        style=explorer_style() + style,
        top='<button class="theme" type="button" data-theme-button>light / dark</button>',
        footer=footer,
    )


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


def image(path: Path | str, alt: str) -> str:
    """An ``<img>`` with the PNG inside it."""
    data = base64.b64encode(Path(path).read_bytes()).decode("ascii")
    return f'<img alt="{escape(alt, quote=True)}" src="data:image/png;base64,{data}">'
