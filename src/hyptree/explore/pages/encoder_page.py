"""The page of a vision-language model (or of any encoder of text): what hierarchy lies in it, for the eye.

    from hyptree.explore import vlm_page
    vlm_page.write(encoder, "clip.html")                         # chains of the built-in world
    vlm_page.write(encoder, "clip.html", chains=read_hierarcaps("hierarcaps", "test"), pairs=read_hyperlex("hyperlex"))

One HTML file that needs nothing else. Every number stands beside its baseline: order by distance beside order by word
count, angles beside cosines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyptree import __version__
from hyptree.data.hierarchies.hierarcaps import Chain
from hyptree.errors import as_user_error
from hyptree.explore.draw.latent_tree import LatentTree
from hyptree.explore.draw.radial import radial_picture, same_levels
from hyptree.explore.draw.radial_layout import svg_radial
from hyptree.explore.pages import encoder_parts as parts
from hyptree.explore.pages.encoder_parts import STYLE, EncodedPicture
from hyptree.explore.pages.page import Section, page

if TYPE_CHECKING:
    from hyptree.data.hierarchies.hyperlex import WordPair
    from hyptree.vlm.radial.suites import Texts

__all__ = ["EncodedPicture", "write"]

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
    from hyptree.vlm.radial.suites import Texts

    if chains is None:
        from hyptree.data.world import World
        from hyptree.vlm.clip.world_text import captions_of

        words = captions_of(World("val", num_images=NUM_WORLD_CHAINS))
        chains = [Chain(captions, wrong) for captions, wrong in words]
    own = getattr(encoder, "curvature", None)
    geometry = geometry or ("chord" if own is None else "lorentz")
    c = 1.0 if own is None else float(own)
    with as_user_error():
        texts = Texts(getattr(encoder, "encode_text", encoder), geometry, c, own_c=own)
        texts.distance([""])  # an unknown geometry is told before the work
    name = getattr(encoder, "name", getattr(encoder, "__name__", type(encoder).__name__))
    report = measured(texts, name, chains, pairs) if report is None else report
    captions = [chain.captions for chain in chains]
    radial = radial_picture(texts, captions)
    distance = texts.distance([caption for chain in captions for caption in chain]).double().numpy()
    distance = distance.reshape(len(chains), -1)
    alarm = '<p class="warned"><b>Random weights.</b> Nothing here was learned; read it as a control.</p>'
    sections = [
        *([Section("", alarm)] if random_init else []),
        Section("", parts.cards_html(captions, distance, texts, pairs)),
        Section(
            "Captions around the root",
            f"<p><b>{escape(radial.title)}.</b> A long caption is mostly a specific one, so the number of its words "
            f'orders chains well by itself: what an encoder knows is what it has above that.</p><figure class="sheets">'
            f"{svg_radial(radial)}<figcaption>{escape(radial.caption)} Point at a dot for its caption.</figcaption>"
            "</figure>",
        ),
        Section("Distance by level", parts.levels_html(captions, distance)),
        Section("Best and worst chains", parts.extremes_html(captions, distance)),
    ]
    if len(pictures):
        sections.append(
            Section("From a picture to a chain of captions", parts.retrieval_html(texts, chains, pictures, encoder))
        )
    if latent is not None:
        sections.append(Section("Classes, attributes, pictures", parts.latent_html(latent)))
    if len(pairs):
        sections.append(Section("Is X a type of Y?", parts.hyperlex_html(texts, pairs)))
    sections.append(Section("All numbers, with their baselines", parts.tables_html(report)))
    lead = (
        f"{name}: embeddings of {texts.root.shape[0]} numbers. General texts should lie near the root, the embedding "
        f"of the empty text, and specific ones straight behind them. {says}"
    )
    footer = f"hyptree {__version__}. Written by hyptree explain."
    return page(out, "The hierarchy in an encoder", lead.strip(), sections, style=STYLE, footer=footer)


def measured(texts: Texts, name: str, chains: Sequence[Chain], pairs: Sequence[WordPair] = ()) -> dict[str, Any]:
    """The report of what a page shows, by the measures of ``hierarchy_report``."""
    from hyptree.vlm.radial.suites import chain_angles, chain_order, graded_entailment

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
