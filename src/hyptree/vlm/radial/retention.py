"""What an encoder could do before and must still do: image-text retrieval and zero-shot classification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hyptree.errors import UserError
from hyptree.vlm.clip.contrast import similarity

TEMPLATE = "a photo of a {}."


def image_text_recall(
    images: Tensor, texts: Tensor, image_of_text: Any = None, ks: Sequence[int] = (1, 5, 10), c: float | None = None
) -> dict[str, float]:
    """Recall at k of retrieving texts by picture and pictures by text.

    Args:
        images: (n, d). texts: (m, d).
        image_of_text: (m,) the picture of each text; by default text i belongs to picture i.
        ks: a picture is found if one of its texts is among the k most similar, a text if its picture is.
        c: curvature, where embeddings are points of the hyperboloid and compared by distance; else by cosine.

    Returns:
        ``text R@k`` (picture to text) and ``image R@k`` (text to picture) for every k.
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

    Args:
        normalize: False for the plain mean of embeddings, whose lengths mean something to a hyperbolic encoder.

    Raises:
        UserError: an empty name, a name twice, or a template without ``{}``.
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
    """``top-k`` accuracy of the class whose embedding is most like the picture's.

    Args:
        images: (n, d). classes: (C, d). labels: (n,) true classes.
        c: curvature, where embeddings are points of the hyperboloid and compared by distance; else by cosine.
    """
    truth = torch.as_tensor(np.asarray(labels)).long().to(classes.device)
    if len(truth) != len(images) or int(truth.max()) >= len(classes) or int(truth.min()) < 0:
        raise ValueError(f"expected for each of {len(images)} pictures one of the {len(classes)} classes")
    best = similarity(images.to(classes), classes, c).topk(min(max(ks), len(classes)), dim=1).indices == truth[:, None]
    return {f"top-{k}": float(best[:, :k].any(1).double().mean()) for k in ks}
