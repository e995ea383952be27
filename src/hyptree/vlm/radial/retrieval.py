"""Retrieval: from one picture a chain of captions, general first; and what an encoder must still do, plain retrieval.

A chain comes from widening the circle around the root: among the captions within each of 50 radii the one most like the
picture is taken. The chains are scored against the true ones by string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hyptree.errors import UserError, require_one_of
from hyptree.geometry.core.numerics import wide
from hyptree.vlm.clip.contrast import similarity

RADII = ("chord", "one_minus_cos")


@dataclass(frozen=True)
class RetrievalScores:
    """Means over pictures."""

    precision: float
    """Share of the retrieved captions that are true."""
    recall: float
    """Share of the levels that were retrieved."""
    ordered_recall: float
    """The same, counting only levels in rising order: the longest such row of hits."""
    length: float
    """Captions per chain."""
    num_images: int


def radii(texts: Tensor, root: Tensor, radius: str = "chord") -> Tensor:
    """(m,) float64 distance of normalised texts (m, d) from the root, ``|e - r|`` or ``1 - cos``."""
    require_one_of("radius", radius, RADII)
    difference = F.normalize(wide(texts), dim=-1) - F.normalize(wide(root), dim=-1)
    chord = difference.norm(dim=-1)
    return chord if radius == "chord" else chord.square() / 2


def thresholds_of(values: Tensor, num_thresholds: int = 50) -> Tensor:
    """Equally spaced from the least to the largest of the values, both included to the bit."""
    if num_thresholds < 1:
        raise ValueError(f"num_thresholds must be 1 or more, got {num_thresholds}")
    low, high = values.min(), values.max()
    steps = low + (high - low) * torch.linspace(0, 1, num_thresholds, dtype=values.dtype, device=values.device)
    steps[-1] = high  # rounding must not lose the farthest caption
    return steps


def hierarchical_retrieval(
    images: Tensor,
    texts: Tensor,
    captions: Sequence[str],
    root: Tensor,
    *,
    num_thresholds: int = 50,
    radius: str | Tensor = "chord",
    c: float | None = None,
    block: int = 256,
) -> list[list[str]]:
    """A chain of captions for each picture, general first, consecutive repeats dropped.

    Args:
        images: (n, d). texts: (m, d), the pool, not necessarily normalised. captions: m strings.
        root: (d,) embedding of the empty text under the encoder as it is now.
        num_thresholds: radii, from the least to the largest of the pool; they are the same for all pictures.
        radius: "chord", or "one_minus_cos", which rises with it and spaces the radii differently; or the distances (m,)
            of the texts from the root in another geometry.
        c: curvature, where pictures and texts are points of the hyperboloid: the nearest caption is taken then, not the
            one with the largest cosine.
        block: pictures at once.
    """
    if len(captions) != len(texts) or not len(captions):
        raise ValueError(f"expected a caption for each of the {len(texts)} texts, got {len(captions)}")
    away = radii(texts, root, radius) if isinstance(radius, str) else wide(radius).to(texts.device)
    near_first = away.argsort(stable=True)
    # The last caption within each radius, in the order from near to far.
    steps = thresholds_of(away, num_thresholds)
    last = torch.searchsorted(away[near_first], steps, right=True) - 1  # (T,)
    pool = texts[near_first]
    names = [captions[i] for i in near_first.tolist()]
    chains: list[list[str]] = []
    for part in images.to(pool).split(block):
        best = similarity(part, pool, c).cummax(dim=1).indices[:, last]  # (b, T): best caption up to each radius
        chains += [[caption for caption, _ in groupby(names[i] for i in row)] for row in best.tolist()]
    return chains


def score_chains(retrieved: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> RetrievalScores:
    """Precision, recall and ordered recall of chains, by string.

    A picture has one or several true chains, from general to specific; a level counts if any of them has it there.
    """
    if len(retrieved) != len(references) or not len(retrieved):
        raise ValueError(f"expected references for each of the {len(retrieved)} chains, got {len(references)}")
    precision = recall = ordered = length = 0.0
    for chain, truths in zip(retrieved, references, strict=True):
        num_levels = max(map(len, truths), default=0)
        if num_levels == 0 or not chain:
            raise ValueError("every picture needs a retrieved chain and a reference, one is empty")
        levels = [{truth[level] for truth in truths if level < len(truth)} for level in range(num_levels)]
        answer, true = set(chain), set().union(*levels)
        precision += len(answer & true) / len(answer)
        recall += sum(not level.isdisjoint(answer) for level in levels) / num_levels
        ordered += _longest_rise(chain, levels) / num_levels
        length += len(chain)
    n = len(retrieved)
    return RetrievalScores(precision / n, recall / n, ordered / n, length / n, n)


def _longest_rise(chain: Sequence[str], levels: Sequence[set[str]]) -> int:
    """Length of the longest row of strictly rising levels that the captions hit, in the order they come."""
    longest = [0] * len(levels)  # ending at this level
    for caption in chain:
        # From specific to general, so that one caption on two levels is not counted twice.
        for level in reversed(range(len(levels))):
            if caption in levels[level]:
                longest[level] = max(longest[level], 1 + max(longest[:level], default=0))
    return max(longest)


TEMPLATE = "a photo of a {}."


def image_text_recall(
    images: Tensor, texts: Tensor, image_of_text: Any = None, ks: Sequence[int] = (1, 5, 10), c: float | None = None
) -> dict[str, float]:
    """Recall at k of retrieving texts by picture and pictures by text.

    Args:
        images: (n, d). texts: (m, d).
        image_of_text: (m,) the picture of each text; by default text i belongs to picture i.
        c: curvature, where embeddings are points of the hyperboloid and compared by distance; else by cosine.

    Returns:
        ``text R@k``, for pictures with one of their texts among the k most similar, and ``image R@k`` for texts.
    """
    owner = torch.arange(len(texts)) if image_of_text is None else torch.as_tensor(np.asarray(image_of_text)).long()
    if len(owner) != len(texts) or int(owner.max()) >= len(images) or int(owner.min()) < 0:
        raise ValueError(f"expected for each of {len(texts)} texts one of the {len(images)} pictures")
    owner = owner.to(texts.device)
    images, number = images.to(texts), torch.arange(len(images), device=texts.device)
    has_text = torch.isin(number, owner)  # a picture without a text asks nothing
    by_image = recall_at(images[has_text], texts, number[has_text], owner, ks, c)
    by_text = recall_at(texts, images, owner, number, ks, c)
    return {f"text R@{k}": by_image[k] for k in ks} | {f"image R@{k}": by_text[k] for k in ks}


def recall_at(
    queries: Tensor,
    pool: Tensor,
    group_of_query: Tensor,
    group_of_pool: Tensor,
    ks: Sequence[int],
    c: float | None = None,
    block: int = 2048,
) -> dict[int, float]:
    """k -> share of queries (n, d) with a row of their own group among the k most similar of the pool (m, d).

    Args:
        group_of_query, group_of_pool: (n,) and (m,) numbers; equal ones belong together.
        c: curvature, where embeddings are points of the hyperboloid and compared by distance; else by cosine.
        block: queries at once.
    """
    most = min(max(ks), len(pool))
    near = [similarity(part, pool, c).topk(most).indices for part in queries.split(block)]
    hits = group_of_pool[torch.cat(near)] == group_of_query[:, None]  # (n, most), the most similar first
    return {k: float(hits[:, :k].any(1).double().mean()) for k in ks}


def class_embeddings(
    encode: Callable[[list[str]], Tensor],
    names: Sequence[str],
    templates: Sequence[str] = (TEMPLATE,),
    normalize: bool = True,
) -> Tensor:
    """(C, d) unit vectors of classes: the mean over templates of their normalised embeddings.

    Without ``normalize`` the plain mean of embeddings, whose lengths mean something to a hyperbolic encoder.
    """
    if any(not name.strip() for name in names):
        raise UserError("the class list has an empty name")
    if len(set(names)) < len(names):
        raise UserError(f"the class list has {next(name for name in names if names.count(name) > 1)!r} twice")
    if not templates or any("{}" not in template for template in templates):
        raise UserError(f"a template holds {{}} where the class goes, e.g. {TEMPLATE!r}; got {list(templates)}")
    with torch.no_grad():
        parts = [encode([template.replace("{}", name) for name in names]).float() for template in templates]
    if not normalize:
        return torch.stack(parts).mean(0)
    return F.normalize(torch.stack([F.normalize(part, dim=-1) for part in parts]).mean(0), dim=-1)


def zero_shot_accuracy(
    images: Tensor, classes: Tensor, labels: Any, ks: Sequence[int] = (1, 5), c: float | None = None
) -> dict[str, float]:
    """``top-k`` accuracy of the class (C, d) most like the picture (n, d): by cosine, or distance at a curvature c."""
    truth = torch.as_tensor(np.asarray(labels)).long().to(classes.device)
    if len(truth) != len(images) or int(truth.max()) >= len(classes) or int(truth.min()) < 0:
        raise ValueError(f"expected for each of {len(images)} pictures one of the {len(classes)} classes")
    best = similarity(images.to(classes), classes, c).topk(min(max(ks), len(classes)), dim=1).indices == truth[:, None]
    return {f"top-{k}": float(best[:, :k].any(1).double().mean()) for k in ks}
