"""The page of a vision-language model (or of any encoder of text): what hierarchy lies in it, for the eye.

    from ramify.explore import vlm_page
    vlm_page.write(encoder, "clip.html")                         # chains of the built-in world
    vlm_page.write(encoder, "clip.html", chains=read_hierarcaps("hierarcaps", "test"), pairs=read_hyperlex("hyperlex"))

One HTML file that needs nothing else. Every number stands beside its baseline: order by distance beside order by word
count, angles beside cosines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ramify import __version__
from ramify.data.hierarcaps import Chain
from ramify.errors import UserError
from ramify.explore import vlm_charts as charts
from ramify.explore.page import Section, page
from ramify.explore.picture import data_url, fit
from ramify.explore.vlm import level_colours, radial_picture, same_levels, svg_radial
from ramify.explore.vlm_tree import LatentTree, dendrogram_says, svg_dendrogram, svg_tree_disk
from ramify.files import full_disk_is_one_line, write_atomic

if TYPE_CHECKING:
    from ramify.data.hyperlex import WordPair
    from ramify.vlm.suites import Texts

__all__ = ["Looked", "sections", "write"]

NUM_WORLD_CHAINS = 500
STYLE = (
    charts.STYLE
    + """
.sheets { background: #fff; border-radius: 14px; padding: .8rem; box-shadow: var(--shadow); margin: .8rem 0;
  overflow-x: auto; }
.sheets figcaption { color: #5a6172; } .sheets svg { min-width: 40rem; }
.sheets .rim { fill: #f7f8fb; stroke: #c3c8d4; }
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
class Looked:
    """A picture to find captions for.

    Attributes:
        picture: (H, W, 3) uint8. name: what the page calls it.
        true: captions that are true of it, where that is known.
    """

    picture: np.ndarray
    name: str
    true: frozenset[str] = field(default=frozenset())


def write(
    encoder: Any,
    out: Path | str,
    *,
    chains: Sequence[Chain] | None = None,
    pictures: Sequence[Looked] = (),
    pairs: Sequence[WordPair] = (),
    latent: LatentTree | None = None,
    report: Mapping[str, Any] | None = None,
    geometry: str | None = None,
    curvature: float | None = None,
    shown: int | None = None,
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
        curvature: of lorentz; by default the encoder's own, else 1.
        shown: chains in the radial picture; by default as many as can be read.
        says: a sentence more below the title.
        random_init: the weights are random: the page says so in red.
    """
    from ramify.errors import as_user_error
    from ramify.vlm.suites import Texts

    if chains is None:
        from ramify.data.world import World
        from ramify.vlm.world_text import captions_of

        words = captions_of(World("val", num_images=NUM_WORLD_CHAINS))
        chains = [Chain(captions, wrong) for captions, wrong in words]
    own = getattr(encoder, "curvature", None)
    geometry = geometry or ("chord" if own is None else "lorentz")
    with as_user_error():
        texts = Texts(getattr(encoder, "encode_text", encoder), geometry, float(curvature or own or 1.0), own_c=own)
        texts.distance([""])  # an unknown geometry is told before the work
    name = getattr(encoder, "name", getattr(encoder, "__name__", type(encoder).__name__))
    report = measured(texts, name, chains, pairs) if report is None else report
    found = sections(texts, chains, report, pictures, pairs, latent, encoder, shown)
    if random_init:
        alarm = '<p class="warned"><b>Random weights.</b> Nothing here was learned; read it as a control.</p>'
        found.insert(0, Section("", alarm))
    lead = (
        f"{name}: embeddings of {texts.root.shape[0]} numbers. General texts should lie near the root, the embedding "
        f"of the empty text, and specific ones straight behind them. {says}"
    )
    here, path = Path(__file__).parent, Path(out)

    def save(temporary: Path) -> None:
        page(
            *(temporary, "The hierarchy in an encoder", lead.strip(), found),
            script=(here / "explorer.js").read_text(encoding="utf-8"),
            style=(here / "explorer.css").read_text(encoding="utf-8") + STYLE,
            top='<button class="theme" type="button" data-theme-button>light / dark</button>',
            footer=f"ramify {__version__}. Written by ramify explain.",
        )

    with full_disk_is_one_line(path.parent, "write the page again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save)
    return path


def measured(texts: Texts, name: str, chains: Sequence[Chain], pairs: Sequence[WordPair] = ()) -> dict[str, Any]:
    """The report of what a page shows, by the measures of ``hierarchy_report``."""
    from ramify.vlm.suites import chain_angles, chain_order, graded_entailment

    same_levels([chain.captions for chain in chains])
    order = chain_order(texts, [chain.captions for chain in chains])
    if all(len(chain.negatives) == len(chain.captions) for chain in chains):
        order["angles"] = chain_angles(texts, chains)
    suites: dict[str, Any] = {"chains of captions": order}
    if len(pairs):
        suites["hyperlex"] = graded_entailment(texts, pairs)
    return {
        "encoder": name,
        "width": len(texts.root),
        "geometry": texts.geometry,
        "curvature": texts.c if texts.geometry == "lorentz" else None,
        "root_norm": float(texts.root.norm()),
        "suites": suites,
    }


def sections(
    texts: Texts,
    chains: Sequence[Chain],
    report: Mapping[str, Any],
    pictures: Sequence[Looked] = (),
    pairs: Sequence[WordPair] = (),
    latent: LatentTree | None = None,
    encoder: Any = None,
    shown: int | None = None,
) -> list[Section]:
    """The parts of the page, for pages that show more."""
    captions = [chain.captions for chain in chains]
    radial = radial_picture(texts, captions, shown)
    distance = texts.distance([caption for chain in captions for caption in chain]).double().numpy()
    distance = distance.reshape(len(chains), -1)
    found = [
        Section("", _cards(captions, distance, texts, pairs)),
        Section(
            "Captions around the root",
            f"<p><b>{escape(radial.title)}.</b> A long caption is mostly a specific one, so the number of its words "
            f'orders chains well by itself: what an encoder knows is what it has above that.</p><figure class="sheets">'
            f"{svg_radial(radial)}<figcaption>{escape(radial.says)} Point at a dot for its caption.</figcaption>"
            "</figure>",
        ),
        Section("Distance by level", _levels(captions, distance)),
        Section("Best and worst chains", _extremes(captions, distance)),
    ]
    if len(pictures):
        found.append(Section("From a picture to a chain of captions", _retrieval(texts, chains, pictures, encoder)))
    if latent is not None:
        found.append(Section("Classes, attributes, pictures", _latent(latent)))
    if len(pairs):
        found.append(Section("Is X a type of Y?", _hyperlex(texts, pairs)))
    found.append(Section("All numbers, with their baselines", _tables(report)))
    return found


# ---- parts -----------------------------------------------------------------------------------------------------------


def _cards(captions: Sequence[Sequence[str]], distance: np.ndarray, texts: Texts, pairs: Sequence[WordPair]) -> str:
    from ramify.vlm.order import length_baselines, order_of_levels
    from ramify.vlm.suites import graded_entailment

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


def _levels(captions: Sequence[Sequence[str]], distance: np.ndarray) -> str:
    from ramify.vlm.order import kendall_tau

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


def _extremes(captions: Sequence[Sequence[str]], distance: np.ndarray, count: int = 3) -> str:
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


def _retrieval(texts: Texts, chains: Sequence[Chain], pictures: Sequence[Looked], encoder: Any) -> str:
    import torch

    from ramify.vlm.retrieval import hierarchical_retrieval, score_chains

    if getattr(encoder, "image_tower", None) is None:
        raise UserError(f"{getattr(encoder, 'name', 'this encoder')} reads text alone; leave the pictures out")
    pool = list(dict.fromkeys(caption for chain in chains for caption in chain.captions))
    away = texts.distance(pool)
    with torch.no_grad():
        images = encoder.encode_images([one.picture for one in pictures]).float().cpu()
    points = texts.comparable(texts.raw(pool))
    found = hierarchical_retrieval(texts.comparable(images), points, pool, texts.root, radius=away, c=texts.own_c)
    place = {caption: i for i, caption in enumerate(pool)}
    parts = []
    for one, chain in zip(pictures, found, strict=True):
        values = [float(away[place[caption]]) for caption in chain]
        parts.append(
            f'<figure class="card looked"><div><img alt="{escape(one.name, quote=True)}" '
            f'src="{data_url(fit(one.picture, 240), 88)}"><figcaption>{escape(one.name)}</figcaption></div>'
            f"{_chain(chain, values, float(away.max()), one.true)}</figure>"
        )
    known = [(chain, one.true) for one, chain in zip(pictures, found, strict=True) if one.true]
    said = ""
    if known:
        scores = asdict(score_chains([chain for chain, _ in known], [[sorted(true, key=len)] for _, true in known]))
        said = (
            f" True captions are marked: {scores['precision']:.0%} of those found are true, and {scores['recall']:.0%} "
            "of the true ones are found."
        )
    return (
        f"<p>Among the captions within each of 50 circles around the root the one most like the picture is taken, out "
        f'of {len(pool)}; general ones come first.{said}</p><div class="chains">{"".join(parts)}</div>'
    )


def _latent(latent: LatentTree) -> str:
    disk, says = svg_tree_disk(latent)
    return (
        f"<p>{escape(latent.says)} {escape(dendrogram_says(latent))}</p>"
        f'<figure class="sheets">{svg_dendrogram(latent)}</figure>'
        f'<figure class="sheets">{disk}<figcaption>{escape(says)}</figcaption></figure>'
    )


def _hyperlex(texts: Texts, pairs: Sequence[WordPair]) -> str:
    from ramify.vlm.order import spearman

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


def _tables(report: Mapping[str, Any]) -> str:
    """The tables that ``ramify vlm eval-hierarchy`` prints, as HTML."""
    from ramify.vlm.report_table import report_lines

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
