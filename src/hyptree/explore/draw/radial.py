"""The radial picture of an encoder's text: captions by their distance from the root, lines from general to specific.

    picture = radial_picture(Texts(encoder.encode_text), chains)
    svg_radial(picture)  # of radial_layout.py: a picture for a page or a file

The radius is the true distance. The angle is a projection, and the picture says how good a one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hyptree.errors import UserError
from hyptree.explore.draw.curves import ticks
from hyptree.explore.draw.style import main_axes

if TYPE_CHECKING:
    from hyptree.vlm.radial.suites import Texts

__all__ = ["RadialPicture", "axis_of", "radial_picture", "same_levels"]

MAX_CAPTIONS = 90


@dataclass(frozen=True)
class RadialPicture:
    """Captions around the root, each once.

    Attributes:
        captions: n distinct texts. level: (n,) from 0, the first level at which each stands.
        radius: (n,) true distance from the root. angle: (n,) drawn direction, in radians.
        lines: (m, 2) general and specific caption of each step of a chain.
        num_levels: of the chains. geometry: in which distances are measured.
        tau, tau_words: mean Kendall's tau (ties count as no order) of distance and of word count along all chains.
        num_chains, num_shown: measured, and drawn.
        kept: share of the variance of directions that the plane of the picture keeps.
        agreement: Spearman's correlation of true and drawn angles between captions; NaN for fewer than three.
    """

    captions: tuple[str, ...]
    level: np.ndarray
    radius: np.ndarray
    angle: np.ndarray
    lines: np.ndarray
    num_levels: int
    geometry: str
    tau: float
    tau_words: float
    num_chains: int
    num_shown: int
    kept: float
    agreement: float

    @property
    def title(self) -> str:
        """tau_d, and the baseline without which it says nothing."""
        return f"tau_d {_format(self.tau)} · word count alone {_format(self.tau_words)}"

    @property
    def num_inward(self) -> int:
        """Lines whose specific caption is nearer to the root than its general one."""
        return int((self.radius[self.lines[:, 1]] < self.radius[self.lines[:, 0]]).sum())

    @property
    def caption(self) -> str:
        """What is true in the picture and what is not, in words."""
        which = "all" if self.num_shown == self.num_chains else f"{self.num_shown} of"
        agree = (
            "" if math.isnan(self.agreement) else f", and drawn angles follow true ones with rho {self.agreement:.2f}"
        )
        start = axis_of(self)[0]
        begins = f" The scale begins at {start:.4g}, at the edge of the grey disk." if start else ""
        return (
            f"The middle is the root, the embedding of the empty text. Distance from it is true ({self.geometry}), and "
            f"rings carry its scale.{begins} The angle is a projection: the direction in which a caption leaves the "
            f"root, on the two main axes of all of them, which keep {self.kept:.0%} of their variance{agree}. Lines go "
            f"from general to specific along {which} {self.num_chains} chains; {self.num_inward} of {len(self.lines)} "
            "lead inwards and are red."
        )


def radial_picture(texts: Texts, chains: Sequence[Sequence[str]]) -> RadialPicture:
    """Where the captions of chains lie around the root.

    Args:
        texts: the encoder's texts, see ``hyptree.vlm.radial.suites.Texts``.
        chains: captions from general to specific, all with as many levels. The first ones that differ are drawn, as
            many as have about 90 captions together; tau is that of all.
    """
    from hyptree.vlm.radial.order import length_baselines, order_of_levels

    num_levels = same_levels(chains)
    every = texts.distance([caption for chain in chains for caption in chain]).double().view(-1, num_levels)
    drawn = list(dict.fromkeys(tuple(chain) for chain in chains))
    seen = [len(set().union(*drawn[: k + 1])) for k in range(min(len(drawn), MAX_CAPTIONS))]
    drawn = drawn[: max(1, sum(count <= MAX_CAPTIONS for count in seen))]
    captions = tuple(dict.fromkeys(caption for level in zip(*drawn, strict=True) for caption in level))  # general first
    place = {caption: i for i, caption in enumerate(captions)}
    first = {caption: k for k in reversed(range(num_levels)) for caption in (chain[k] for chain in drawn)}
    steps = {(place[chain[k]], place[chain[k + 1]]) for chain in drawn for k in range(num_levels - 1)}
    lines = np.array(sorted(step for step in steps if step[0] != step[1]), np.int64).reshape(-1, 2)
    angle, kept, agreement = _projected(_directions(texts, captions))
    return RadialPicture(
        captions=captions,
        level=np.array([first[caption] for caption in captions]),
        radius=texts.distance(captions).double().numpy(),
        angle=angle,
        lines=lines,
        num_levels=num_levels,
        geometry=texts.geometry,
        tau=order_of_levels(every.numpy()).tau_a,
        tau_words=length_baselines(chains)["words"].tau_a,
        num_chains=len(chains),
        num_shown=len(drawn),
        kept=kept,
        agreement=agreement,
    )


def same_levels(chains: Sequence[Sequence[str]]) -> int:
    """The number of levels of all chains, or a ``UserError``: none, fewer than two, or not all alike."""
    lengths = sorted({len(chain) for chain in chains})
    if len(lengths) != 1 or lengths[0] < 2:
        counts = ", ".join(map(str, lengths)) or "no chains"
        raise UserError(f"chains must all have the same number of captions, two or more, got {counts}")
    return lengths[0]


def _directions(texts: Texts, captions: Sequence[str]) -> np.ndarray:
    """(n, d) unit tangent vectors at the root of the ways to the captions; 0 for a caption that lies there."""
    rows = texts.raw(captions).double().numpy()
    if texts.geometry != "lorentz":  # the way on the sphere, which the chord cuts short
        root = texts.root.double().numpy()
        root = root / np.linalg.norm(root)
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows - np.outer(rows @ root, root)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(length > 1e-6, rows / np.maximum(length, 1e-300), 0.0)


def _projected(unit: np.ndarray) -> tuple[np.ndarray, float, float]:
    """(n,) angles of directions on their two main axes, the share of variance kept, and how true the angles are."""
    from hyptree.vlm.radial.order import spearman

    centred = unit - unit.mean(0)
    flat = centred @ main_axes(centred).T
    angle = np.arctan2(flat[:, 1], flat[:, 0])
    kept = float((flat**2).sum() / max((centred**2).sum(), 1e-300))
    i, j = np.triu_indices(len(unit), 1)
    if len(unit) < 3:
        return angle, kept, math.nan
    true = np.arccos(np.clip((unit[i] * unit[j]).sum(1), -1, 1))
    return angle, kept, spearman(true, np.abs(np.angle(np.exp(1j * (angle[i] - angle[j])))))


def axis_of(picture: RadialPicture) -> list[float]:
    """Distances that get a ring; the first is where the scale begins: 0, unless all captions are far from there."""
    low, high = float(picture.radius.min()), float(picture.radius.max())
    first, *rest = ticks(low if low > 0.3 * high else 0.0, high)
    return [first, *(tick for tick in rest if tick <= high)]


def _format(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"
