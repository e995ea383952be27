"""The page of a vision-language model (or of any encoder of text): what hierarchy lies in it, for the eye.

    from hyptree.explore.pages import encoder_page
    encoder_page.write(encoder, "clip.html")                         # chains of the built-in world
    encoder_page.write(encoder, "clip.html", chains=read_hierarcaps("hierarcaps", "test"))

One HTML file that needs nothing else. Every number stands beside its baseline: order by distance beside order by word
count, angles beside cosines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree import __version__
from hyptree.data.hierarchies.hierarcaps import Chain
from hyptree.data.pictures.single import fit
from hyptree.errors import UserError
from hyptree.explore.draw import charts
from hyptree.explore.draw.latent_tree import LatentTree, dendrogram_caption, svg_dendrogram, svg_tree_disk
from hyptree.explore.draw.radial import radial_picture, same_levels, svg_radial
from hyptree.explore.draw.style import img, level_colours, read_beside
from hyptree.explore.pages.page import Html, Section, cards, chart, page, table

if TYPE_CHECKING:
    from hyptree.data.hierarchies.hyperlex import WordPair
    from hyptree.vlm.radial.suites import Texts

NUM_WORLD_CHAINS = 500


def write(
    encoder: Any,
    out: Path | str,
    *,
    chains: Sequence[Chain] | None = None,
    pictures: Sequence[EncodedPicture] = (),
    pairs: Sequence[WordPair] = (),
    latent: LatentTree | None = None,
    report: Mapping[str, Any] | None = None,
    geometry: str | None = None,
    says: str = "",
    random_init: bool = False,
) -> Path:
    """Writes the page of an encoder, and gives its path.

    Args:
        encoder: of ``load_encoder``, or a function from texts to (n, d) embeddings.
        chains: captions from general to specific; by default those of 500 pictures of the built-in world.
        pictures: for each, the chain of captions that is found by widening the circle around the root.
        pairs: of HyperLex.
        latent: the tree of a ``LatentHierarchyHead``.
        report: of ``hierarchy_report``; by default the same measures of what the page shows.
        geometry: chord, geodesic or lorentz; by default lorentz for an encoder with a curvature, chord for the others.
        says: a sentence more below the title.
        random_init: the weights are random: the page says so in red.
    """
    from hyptree.vlm.radial.suites import Texts, chain_angles, chain_order, graded_entailment

    if chains is None:
        from hyptree.data.world import World
        from hyptree.vlm.clip.world_text import captions_of

        words = captions_of(World("val", num_images=NUM_WORLD_CHAINS))
        chains = [Chain(captions, wrong) for captions, wrong in words]
    texts = Texts.of(encoder, geometry)
    captions = [chain.captions for chain in chains]
    same_levels(captions)
    order, lexical = chain_order(texts, captions), graded_entailment(texts, pairs) if len(pairs) else {}
    if report is None:
        has_negatives = all(len(chain.negatives) == len(chain.captions) for chain in chains)
        suites = {"chains of captions": order | ({"angles": chain_angles(texts, chains)} if has_negatives else {})}
        report = texts.about() | {"suites": suites | ({"hyperlex": lexical} if len(pairs) else {})}
    radial = radial_picture(texts, captions)
    distance = texts.distance([caption for chain in captions for caption in chain]).double().numpy()
    distance = distance.reshape(len(chains), -1)
    alarm = '<p class="warned"><b>Random weights.</b> Nothing here was learned; read it as a control.</p>'
    sections = [
        *([Section("", alarm)] if random_init else []),
        Section("", cards_html(order, lexical, captions)),
        Section(
            "Captions around the root",
            f"<p><b>{escape(radial.title)}.</b> A long caption is mostly a specific one, so the number of its words "
            f'orders chains well by itself: what an encoder knows is what it has above that.</p><figure class="sheets">'
            f"{svg_radial(radial)}<figcaption>{escape(radial.caption)} Point at a dot for its caption.</figcaption>"
            "</figure>",
        ),
        Section("Distance by level", levels_html(captions, distance)),
        Section("Best and worst chains", extremes_html(captions, distance)),
    ]
    if len(pictures):
        sections.append(
            Section("From a picture to a chain of captions", retrieval_html(texts, chains, pictures, encoder))
        )
    if latent is not None:
        sections.append(Section("Classes, attributes, pictures", latent_html(latent)))
    if len(pairs):
        sections.append(Section("Is X a type of Y?", hyperlex_html(texts, pairs)))
    sections.append(Section("All numbers, with their baselines", tables_html(report)))
    lead = (
        f"{texts.name}: embeddings of {len(texts.root)} numbers. General texts should lie near the root, the embedding "
        f"of the empty text, and specific ones straight behind them. {says}"
    )
    footer = f"hyptree {__version__}. Written by hyptree explain."
    return page(out, "The hierarchy in an encoder", lead.strip(), sections, style=STYLE, footer=footer)


STYLE = read_beside(__file__, "encoder.css")


@dataclass(frozen=True)
class EncodedPicture:
    """A picture (H, W, 3) uint8 to find captions for, and those that are true of it, where that is known."""

    picture: np.ndarray
    name: str
    true: frozenset[str] = frozenset()


def cards_html(order: Mapping[str, Any], lexical: Mapping[str, Any], captions: Sequence[Sequence[str]]) -> str:
    """The first numbers, each with its baseline below."""
    mine, words = order["tau_d"], order["baselines"]["words"]
    shown = [
        ("order of chains, tau_d", f"{mine['tau_a']:.3f}", f"word count alone {words['tau_a']:.3f}"),
        ("order of levels 1 and 2", f"{mine['first_two']:.3f}", f"word count alone {words['first_two']:.3f}"),
    ]
    if rho := lexical.get("all"):
        shown.append(("HyperLex, rho of the angle", f"{rho['angle']:.3f}", f"cosine {rho['cosine']:.3f}"))
    shown.append(("chains", str(len(captions)), f"of {len(captions[0])} levels"))
    return cards({title: Html(f"{value}<small>{beside}</small>") for title, value, beside in shown})


def levels_html(captions: Sequence[Sequence[str]], distance: np.ndarray) -> str:
    """Distance by level, and tau of every chain."""
    from hyptree.vlm.radial.order import kendall_tau

    counts = np.array([[len(caption.split()) for caption in chain] for chain in captions], np.float64)
    tau, by_words = kendall_tau(distance)[0], kendall_tau(counts)[0]
    levels = chart(
        "Distance from the root",
        charts.level_chart(distance, counts.mean(0).tolist()),
        caption="Boxes hold half of the captions of a level, lines 90 %, dots are means; below, the level and its mean "
        "number of words.",
    )
    order = chart(
        "Order along each chain",
        charts.tau_chart(tau, by_words),
        caption="Kendall's tau of every chain: 1 where distance rises from level to level, -1 where it falls all the "
        f"way. Captions of equal length have no order. {int(np.isnan(tau).sum())} chains have no tau.",
    )
    return f'<div class="charts">{levels}{order}</div>'


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
            f'<figure class="card looked"><div>{img(fit(one.picture, 240), one.name, 88)}'
            f"<figcaption>{escape(one.name)}</figcaption></div>"
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
        chart(f"{title}: rho {spearman(values, scores):.3f}", charts.dot_chart(title, values, scores, axis, bins=12))
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
    from hyptree.vlm.radial.report_lines import report_head, report_tables

    parts = [f"<p>{escape(report_head(report))}.</p>"]
    for name, suite in report["suites"].items():
        parts.append(f"<h3>{escape(name)}</h3>")
        for head, *rows in report_tables(suite):
            rivals = {k: "rival" for k, row in enumerate(rows) if "baseline" in row[0] or row[0] == "chance"}
            parts.append(table(head, rows, rivals))
    return f'<div class="card report">{"".join(parts)}</div>'
