"""Parts of the page of an encoder, as HTML: numbers, charts, chains, pictures, trees, tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.data.hierarchies.hierarcaps import Chain
from hyptree.data.pictures.single import data_url, fit
from hyptree.errors import UserError
from hyptree.explore.draw import text_charts as charts
from hyptree.explore.draw.latent_tree import LatentTree, dendrogram_caption, svg_dendrogram, svg_tree_disk
from hyptree.explore.draw.radial_layout import level_colours

if TYPE_CHECKING:
    from hyptree.data.hierarchies.hyperlex import WordPair
    from hyptree.vlm.radial.suites import Texts

STYLE = (
    charts.STYLE
    + """
.sheets { background: var(--surface); border-radius: 14px; padding: .8rem; box-shadow: var(--shadow); margin: .8rem 0;
  overflow-x: auto; }
.sheets svg { min-width: 40rem; }
.radial .hole { fill: var(--line); }
.radial .round, .radial .hole { stroke: color-mix(in srgb, var(--soft) 35%, transparent); }
.radial .root, .radial .names, .dendrogram .ink { fill: var(--ink); }
.radial .soft, .dendrogram .soft { fill: var(--soft); } .dendrogram .blank { fill: var(--line); }
.radial .names, .radial .halo { stroke: var(--ground); } .radial .caption { stroke: var(--ground); }
.radial .marks, .dendrogram .tone { filter: var(--lift); }
svg.radial, svg.dendrogram, svg.disk { display: block; width: 100%; height: auto; }
svg.radial, svg.disk { max-width: 58rem; margin: 0 auto; }
.warned { border-left: 4px solid var(--bad); padding: .5rem .9rem; background: var(--surface); border-radius: 6px; }
.chains { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: .8rem; margin: .6rem 0; }
.chain { margin: 0; padding: 0; list-style: none; font-size: .92rem; line-height: 1.35; }
.chain li { display: grid; grid-template-columns: 3.2rem 1fr; gap: .6rem; padding: .16rem .3rem; border-radius: 5px;
  background: linear-gradient(90deg, color-mix(in srgb, var(--tone) 20%, transparent) calc(var(--p) * 100%),
  transparent 0); }
.chain li span { color: var(--soft); font-variant-numeric: tabular-nums; text-align: right; }
.chain li.true { font-weight: 650; } .chain .falls { color: var(--bad); }
.looked { display: grid; grid-template-columns: 7.5rem 1fr; gap: .9rem; align-items: start; }
.looked img { width: 100%; border-radius: 8px; }
.looked figcaption { min-height: 0; margin: .3rem 0 0; font-size: .82rem; }
.report h3 { margin-top: 1.4rem; } .report table { width: auto; margin: .7rem 0 1.1rem; font-size: .92rem; }
.report tbody tr:not(.rival) td { border-top: 0; } .numbers dd small { display: block; }
"""
)


@dataclass(frozen=True)
class EncodedPicture:
    """A picture to find captions for.

    Attributes:
        picture: (H, W, 3) uint8. name: what the page calls it.
        true: captions that are true of it, where that is known.
    """

    picture: np.ndarray
    name: str
    true: frozenset[str] = field(default=frozenset())


def cards_html(captions: Sequence[Sequence[str]], distance: np.ndarray, texts: Texts, pairs: Sequence[WordPair]) -> str:
    """The first numbers, each with its baseline below."""
    from hyptree.vlm.radial.order import length_baselines, order_of_levels
    from hyptree.vlm.radial.suites import graded_entailment

    mine, words = order_of_levels(distance), length_baselines(captions)["words"]
    cards = [
        ("order of chains, tau_d", mine.tau_a, f"word count alone {words.tau_a:.3f}"),
        ("order of levels 1 and 2", mine.first_two, f"word count alone {words.first_two:.3f}"),
    ]
    if len(pairs) and (lexical := graded_entailment(texts, pairs).get("all")):
        cards.append(("HyperLex, rho of the angle", lexical["angle"], f"cosine {lexical['cosine']:.3f}"))
    cards.append(("chains", float(len(captions)), f"of {len(captions[0])} levels"))
    drawn = "".join(
        f"<div><dt>{title}</dt><dd>{f'{value:.0f}' if title == 'chains' else f'{value:.3f}'}<small>{beside}</small>"
        "</dd></div>"
        for title, value, beside in cards
    )
    return f'<dl class="numbers">{drawn}</dl>'


def levels_html(captions: Sequence[Sequence[str]], distance: np.ndarray) -> str:
    """Distance by level, and tau of every chain."""
    from hyptree.vlm.radial.order import kendall_tau

    counts = np.array([[len(caption.split()) for caption in chain] for chain in captions], np.float64)
    tau, by_words = kendall_tau(distance)[0], kendall_tau(counts)[0]
    return (
        '<div class="charts"><figure class="card"><h3>Distance from the root</h3>'
        f"{charts.level_chart(distance, counts.mean(0).tolist())}<figcaption>Boxes hold half of the captions of a "
        "level, lines 90 %, dots are means; below, the level and its mean number of words.</figcaption></figure>"
        f'<figure class="card"><h3>Order along each chain</h3>{charts.tau_chart(tau, by_words)}<figcaption>Kendall\'s '
        "tau of every chain: 1 where distance rises from level to level, -1 where it falls all the way. Captions of "
        f"equal length have no order. {int(np.isnan(tau).sum())} chains have no tau.</figcaption></figure></div>"
    )


def extremes_html(captions: Sequence[Sequence[str]], distance: np.ndarray, count: int = 3) -> str:
    """The chains whose smallest step outwards is largest, and those that fall most."""
    step = np.diff(distance, axis=1).min(1)
    order = np.argsort(step, kind="stable").tolist()
    highest = float(distance.max())
    best, worst = _different(captions, order[::-1]), _different(captions, order)
    count = min(count, -(-len(best) // 2))
    best, worst = best[:count], [i for i in worst if i not in best[:count]][:count]

    def drawn(index: Sequence[int]) -> str:
        chains = [_chain(captions[i], distance[i], highest) for i in index]
        return f'<div class="chains">{"".join(f"<div class=card>{one}</div>" for one in chains)}</div>'

    return (
        "<p>Numbers are distances from the root. Best: the smallest step outwards is largest. Worst: a step leads "
        "farthest back; where it does, the number is orange. One chain of each second caption.</p>"
        f"<h3>Best</h3>{drawn(best)}{f'<h3>Worst</h3>{drawn(worst)}' if worst else ''}"
    )


def _different(captions: Sequence[Sequence[str]], order: Sequence[int]) -> list[int]:
    """The first chain of each second caption, in this order."""
    first: dict[str, int] = {}
    for i in order:
        first.setdefault(captions[i][1], i)
    return list(first.values())


def _chain(captions: Sequence[str], distance: Any, highest: float, true: frozenset[str] = frozenset()) -> str:
    """Captions from general to specific, with their distances as numbers and bars."""
    colours = level_colours(len(captions))
    rows = []
    for k, (caption, value) in enumerate(zip(captions, distance, strict=True)):
        falls = ' class="falls"' if k and value < distance[k - 1] else ""
        mark = ' class="true"' if caption in true else ""
        rows.append(
            f'<li{mark} style="--p:{value / max(highest, 1e-12):.3f};--tone:{colours[k]}"><span{falls}>{value:.3f}'
            f"</span><div>{escape(caption)}{'&nbsp;✓' if caption in true else ''}</div></li>"
        )
    return f'<ol class="chain">{"".join(rows)}</ol>'


def retrieval_html(texts: Texts, chains: Sequence[Chain], pictures: Sequence[EncodedPicture], encoder: Any) -> str:
    """For each picture the chain of captions that widening the circle around the root finds."""
    import torch

    from hyptree.vlm.radial.retrieval import hierarchical_retrieval, score_chains

    if getattr(encoder, "image_tower", None) is None:
        raise UserError(f"{getattr(encoder, 'name', 'this encoder')} reads text alone; leave the pictures out")
    pool = list(dict.fromkeys(caption for chain in chains for caption in chain.captions))
    away = texts.distance(pool)
    with torch.no_grad():
        images = encoder.encode_images([one.picture for one in pictures]).float().cpu()
    points = texts.comparable(texts.raw(pool))
    retrieved = hierarchical_retrieval(texts.comparable(images), points, pool, texts.root, radius=away, c=texts.own_c)
    place = {caption: i for i, caption in enumerate(pool)}
    parts = []
    for one, chain in zip(pictures, retrieved, strict=True):
        values = [float(away[place[caption]]) for caption in chain]
        parts.append(
            f'<figure class="card looked"><div><img alt="{escape(one.name, quote=True)}" '
            f'src="{data_url(fit(one.picture, 240), 88)}"><figcaption>{escape(one.name)}</figcaption></div>'
            f"{_chain(chain, values, float(away.max()), one.true)}</figure>"
        )
    known = [(chain, one.true) for one, chain in zip(pictures, retrieved, strict=True) if one.true]
    text = ""
    if known:
        scores = asdict(score_chains([chain for chain, _ in known], [[sorted(true, key=len)] for _, true in known]))
        text = (
            f" True captions are marked: {scores['precision']:.0%} of those found are true, and {scores['recall']:.0%} "
            "of the true ones are found."
        )
    return (
        f"<p>Among the captions within each of 50 circles around the root the one most like the picture is taken, out "
        f'of {len(pool)}; general ones come first.{text}</p><div class="chains">{"".join(parts)}</div>'
    )


def latent_html(latent: LatentTree) -> str:
    """The tree class > attribute > image, as a dendrogram and on the disk."""
    disk, says = svg_tree_disk(latent)
    return (
        f"<p>{escape(latent.caption)} {escape(dendrogram_caption(latent))}</p>"
        f'<figure class="sheets">{svg_dendrogram(latent)}</figure>'
        f'<figure class="sheets">{disk}<figcaption>{escape(says)}</figcaption></figure>'
    )


def hyperlex_html(texts: Texts, pairs: Sequence[WordPair]) -> str:
    """People's answers against the angle, and against the cosine."""
    from hyptree.vlm.radial.order import spearman

    words, general = [pair.word for pair in pairs], [pair.general for pair in pairs]
    scores = [pair.score for pair in pairs]
    ways = (
        ("Angle at Y on the way to X", "minus the angle at Y", -texts.angle(general, words).numpy()),
        ("Baseline: cosine", "cosine of X and Y", texts.cosine(words, general).numpy()),
    )
    drawn = "".join(
        f'<figure class="card"><h3>{title}: rho {spearman(values, scores):.3f}</h3>'
        f"{charts.dot_chart(f'{title} against the answers', values, scores, axis)}</figure>"
        for title, axis, values in ways
    )
    same = int((texts.raw(words) == texts.raw(general)).all(1).sum())
    alike = f" {same} pairs have one embedding for both words, which the tokenizer does not tell apart." if same else ""
    return (
        f"<p>{len(pairs)} pairs of words, and people's answer from 0 to 10 to the question whether X is a type of Y "
        f'(HyperLex), upwards. The line goes through medians.{alike}</p><div class="charts">{drawn}</div>'
    )


def tables_html(report: Mapping[str, Any]) -> str:
    """The tables that ``hyptree vlm eval-hierarchy`` prints, as HTML."""
    from hyptree.vlm.radial.report_lines import report_lines

    first, *lines = report_lines(report)
    parts = [f"<p>{escape(first)}.</p>"]
    block: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("  "):
            block.append(line[2:])
            continue
        parts += [_table(block)] if block else []
        block = []
        parts += [f"<h3>{escape(line)}</h3>"] if line else []
    return f'<div class="card report">{"".join(parts)}</div>'


def _table(lines: Sequence[str]) -> str:
    """Aligned lines as a table: columns begin where the names of the first line begin."""
    starts = [match.start() for match in re.finditer(r"(?:(?<=^)|(?<=  ))\S", lines[0])]
    rows = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        f"<tr{' class=rival' if 'baseline' in row[0] or row[0] == 'chance' else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows[1:]
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
