"""The measurements of a hierarchy report, one function each: plain dictionaries, every number beside its baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from hyptree.data.hierarchies.hierarcaps import Chain
from hyptree.data.hierarchies.hyperlex import WordPair
from hyptree.errors import UserError, as_user_error
from hyptree.geometry import lorentz
from hyptree.vlm.encoders.texts import TextTable
from hyptree.vlm.radial.coarse import lifted
from hyptree.vlm.radial.loss import exterior_angle, root_distance
from hyptree.vlm.radial.order import length_baselines, order_of_levels, spearman
from hyptree.vlm.radial.retrieval import RADII, hierarchical_retrieval, image_text_recall, radii, score_chains


class Texts:
    """Embeddings of texts under an encoder as it is now: each made once, without gradient, in float32.

    Args:
        encode: (n, d) embeddings of n texts.
        geometry: in which distances and angles are measured.
        c: curvature of "lorentz", onto whose hyperboloid embeddings are lifted as tangent vectors at the origin.
        own_c: curvature of the encoder itself if it is hyperbolic: pictures and texts are compared by distance then.
    """

    def __init__(
        self,
        encode: Callable[[list[str]], Tensor],
        geometry: str = "chord",
        c: float = 1.0,
        *,
        own_c: float | None = None,
        block: int = 256,
    ):
        self.geometry, self.c, self.own_c, self.name = geometry, c, own_c, ""
        self.raw = TextTable(encode, block)
        """(n, d) as the encoder gives them, on the CPU."""
        self.root = self.raw([""])[0]

    @classmethod
    def of(cls, encoder: Any, geometry: str | None = None, curvature: float | None = None) -> Texts:
        """Those of an encoder, or of a function from texts to embeddings; by default in its own geometry.

        Raises:
            UserError: an unknown geometry, before any work.
        """
        own = getattr(encoder, "curvature", None)
        geometry = geometry or ("chord" if own is None else "lorentz")
        with as_user_error():
            texts = cls(getattr(encoder, "encode_text", encoder), geometry, float(curvature or own or 1.0), own_c=own)
            texts.distance([""])
        texts.name = getattr(encoder, "name", getattr(encoder, "__name__", type(encoder).__name__))
        return texts

    def about(self) -> dict[str, Any]:
        """The beginning of a report on them."""
        return {
            "encoder": self.name,
            "width": len(self.root),
            "geometry": self.geometry,
            "curvature": self.c if self.geometry == "lorentz" else None,
            "root_norm": float(self.root.norm()),
        }

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """(n, d) points: unit vectors, or points of the hyperboloid."""
        raw = self.raw(texts)
        return lorentz.expmap0(raw, self.c) if self.geometry == "lorentz" else F.normalize(raw, dim=-1)

    def comparable(self, raw: Tensor) -> Tensor:
        """Embeddings of texts or pictures as the encoder compares them: points of its hyperboloid, or as they are."""
        return lifted(raw, self.own_c)

    def distance(self, texts: Sequence[str]) -> Tensor:
        """(n,) from the root."""
        return root_distance(self(texts), self._root_point(), geometry=self.geometry, c=self.c)

    def angle(self, general: Sequence[str], specific: Sequence[str]) -> Tensor:
        """(n,) exterior angle at each general text, of the way on to the specific one."""
        root = self._root_point()
        return exterior_angle(self(general), self(specific), root, geometry=self.geometry, c=self.c)

    def cosine(self, a: Sequence[str], b: Sequence[str]) -> Tensor:
        """(n,) cosine similarities."""
        return F.cosine_similarity(self.raw(a), self.raw(b), dim=-1)

    def _root_point(self) -> Tensor | None:
        return None if self.geometry == "lorentz" else F.normalize(self.root, dim=-1)


def chain_order(texts: Texts, chains: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Do distances from the root rise along the chains? By level, tau_d, and what the length of captions gives."""
    flat = [caption for chain in chains for caption in chain]
    num_levels = len(chains[0])
    distance = texts.distance(flat).double().view(-1, num_levels)
    norm = texts.raw(flat).norm(dim=-1).double().view(-1, num_levels)
    levels = [
        {
            "level": level + 1,
            "distance": float(distance[:, level].mean()),
            "distance_sd": float(distance[:, level].std(correction=min(1, len(chains) - 1))),
            "norm": float(norm[:, level].mean()),
            "norm_sd": float(norm[:, level].std(correction=min(1, len(chains) - 1))),
            "radius": 2 * float(norm[:, level].mean()),
            "words": float(np.mean([len(chain[level].split()) for chain in chains])),
        }
        for level in range(num_levels)
    ]
    return {
        "num_chains": len(chains),
        "root_norm": float(texts.root.norm()),
        "levels": levels,
        "tau_d": asdict(order_of_levels(distance.numpy())),
        "by_norm": asdict(order_of_levels(norm.numpy())),
        "baselines": {name: asdict(order) for name, order in length_baselines(chains).items()},
    }


def chain_angles(texts: Texts, chains: Sequence[Chain]) -> dict[str, Any]:
    """Is the next caption straighter on than one that does not follow? Angles, and the same by cosine alone.

    ``negative``: against the contradiction of the general caption, as in training. It is shorter than the next caption,
    and even an encoder with random weights tells them apart by that. (The contradiction of the next level would not do:
    a car is no motorcycle, but follows from "vehicle" as well.) ``other``: against the next caption of another chain,
    which is as long; the first chain behind that starts from another text. Left out where there is none.
    """
    angles: dict[str, Any] = {"num_chains": len(chains)}
    wrong_ones: dict[str, Callable[[int, int], str | None]] = {
        "negative": lambda i, level: chains[i].negatives[level] if chains[i].negatives else None,
        "other": lambda i, level: _caption_of_another(chains, i, level),
    }
    for name, choose in wrong_ones.items():
        triples = [
            (chain.captions[level], chain.captions[level + 1], wrong)
            for i, chain in enumerate(chains)
            for level in range(len(chain.captions) - 1)
            if (wrong := choose(i, level)) is not None
        ]
        if not triples:
            continue
        general, further, wrong_texts = (list(column) for column in zip(*triples, strict=True))
        P, N = texts.angle(general, further), texts.angle(general, wrong_texts)
        right, other = texts.cosine(general, further), texts.cosine(general, wrong_texts)
        angles[name] = {
            "num_pairs": len(triples),
            "angle_next": float(P.mean()),
            "angle_wrong": float(N.mean()),
            "accuracy": _share_below(P, N),
            "cosine_next": float(right.mean()),
            "cosine_wrong": float(other.mean()),
            "cosine_accuracy": _share_below(-right, -other),
        }
    return angles


def _caption_of_another(chains: Sequence[Chain], i: int, level: int) -> str | None:
    """The next caption of the first chain behind ``i``, cyclically, whose caption of this level differs."""
    mine = chains[i].captions[level].lower()
    behind = (chains[(i + k) % len(chains)] for k in range(1, len(chains)))
    return next((chain.captions[level + 1] for chain in behind if chain.captions[level].lower() != mine), None)


def graded_entailment(texts: Texts, pairs: Sequence[WordPair]) -> dict[str, dict[str, float]]:
    """Spearman's rho of people's "X is a type of Y" with what the encoder says, for all pairs, nouns and verbs.

    ``angle``: minus the angle at the general word Y on the way to X. ``reversed``: at X on the way to Y. Baselines:
    ``cosine``, ``distance`` (how much farther out X lies than Y), ``characters`` (how much longer X is than Y).
    """
    words, general = [pair.word for pair in pairs], [pair.general for pair in pairs]
    values = {
        "angle": (-texts.angle(general, words)).numpy(),
        "reversed": (-texts.angle(words, general)).numpy(),
        "cosine": texts.cosine(words, general).numpy(),
        "distance": (texts.distance(words) - texts.distance(general)).numpy(),
        "characters": np.array([len(pair.word) - len(pair.general) for pair in pairs]),
    }
    scores = np.array([pair.score for pair in pairs])
    kinds = np.array([pair.pos for pair in pairs])
    correlations: dict[str, dict[str, float]] = {}
    for name, keep in (("all", kinds != ""), ("nouns", kinds == "N"), ("verbs", kinds == "V")):
        if keep.sum() >= 2:
            rho = {way: spearman(value[keep], scores[keep]) for way, value in values.items()}
            correlations[name] = {"num_pairs": int(keep.sum()), **rho}
    return correlations


def picture_chains(
    texts: Texts, images: Tensor, chains: Sequence[Sequence[str]], num_thresholds: int = 50
) -> dict[str, Any]:
    """Hierarchical retrieval of the captions of all pictures, by each radius, and plain retrieval of the last captions.

    Pictures (n, d) are in the order of the chains. Beside the two radii of the paper there is the distance of another
    geometry, if the texts are measured in one.
    """
    if len(images) != len(chains):
        raise UserError(f"expected a picture for each of the {len(chains)} chains, got {len(images)}")
    pool = [caption for chain in chains for caption in chain]
    rows = texts.raw(pool)
    if images.shape[1] != rows.shape[1]:
        raise UserError(f"pictures have {images.shape[1]} features and texts {rows.shape[1]}; use one encoder for both")
    radius = {name: radii(rows, texts.root, name) for name in RADII}
    radius.setdefault(texts.geometry, texts.distance(pool))
    images, points, c = texts.comparable(images.detach().float().cpu()), texts.comparable(rows), texts.own_c
    scores = {}
    for name, away in radius.items():
        retrieved = hierarchical_retrieval(
            images, points, pool, texts.root, num_thresholds=num_thresholds, radius=away, c=c
        )
        scores[name] = asdict(score_chains(retrieved, [[tuple(chain)] for chain in chains]))
    last = texts.comparable(texts.raw([chain[-1] for chain in chains]))
    return {"retrieval": scores, "retention": image_text_recall(images, last, c=c)}


def _share_below(a: Tensor, b: Tensor) -> float:
    """Share of places where ``a < b``; a tie counts half."""
    return float(((a < b).double() + (a == b).double() / 2).mean())
