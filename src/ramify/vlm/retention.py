"""What an encoder could do before and must still do: image-text retrieval and zero-shot classification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ramify.errors import UserError
from ramify.vlm.contrast import similarity

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
    alike = similarity(images.to(texts), texts, c)  # (n, m)
    numbers = {}
    for k in ks:
        found = owner[alike.topk(min(k, len(texts)), dim=1).indices]  # (n, k) pictures that the texts belong to
        hit = (found == torch.arange(len(images), device=found.device)[:, None]).any(1)
        has_text = torch.bincount(owner, minlength=len(images)) > 0  # a picture without a text asks nothing
        numbers[f"text R@{k}"] = float(hit[has_text].double().mean())
    for k in ks:
        near = alike.T.topk(min(k, len(images)), dim=1).indices
        numbers[f"image R@{k}"] = float((near == owner[:, None]).any(1).double().mean())
    return numbers


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
    seen: set[str] = set()
    for name in names:
        if not name.strip() or name in seen:
            raise UserError(
                f"the class list has {name!r} twice" if name in seen else "the class list has an empty name"
            )
        seen.add(name)
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
