"""Losses that bring pictures and captions together: symmetric InfoNCE over all processes, cosine or on the hyperboloid.

On the hyperboloid (as in MERU) logits are negative distances, and entailment cones order things: a picture shall lie in
the cone of its caption, a caption in the cone of the more general one. All of it runs in float32 or better.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry import lorentz


def similarity(x: Tensor, y: Tensor, c: Tensor | float | None = None) -> Tensor:
    """(n, m): cosines of (n, d) and (m, d), or with a curvature ``c`` their negative distances on the hyperboloid."""
    with torch.autocast(x.device.type, enabled=False):
        x, y = _wide(x), _wide(y)
        if c is None:
            return F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).mT
        return -lorentz.pairwise_dist(x, y, c, mode="matmul")


def info_nce(logits: Tensor, own: Tensor, also_true: Tensor | None = None) -> Tensor:
    """Mean over rows (n, m) of minus the log softmax at their own column (n,).

    Args:
        also_true: (n, m) pairs that belong together: such a column is left out of the row's softmax, unless it is its
            own. So "a vehicle" of one picture is not held against another vehicle.
    """
    if also_true is not None:
        is_own = torch.zeros_like(also_true).scatter_(1, own[:, None], True)
        logits = logits.masked_fill(also_true & ~is_own, float("-inf"))
    return F.cross_entropy(logits, own)


def contrastive_loss(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    *,
    c: Tensor | float | None = None,
    captions: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Symmetric InfoNCE of n pictures (n, d) and their texts against those of all processes.

    Its mean over processes is the loss of the joint batch, and so are the gradients once DDP has averaged them.

    Args:
        text: (n, d), or (n k, d): the k texts of the first picture, then those of the second one, and so on. Each of
            them is a pair of its own.
        scale: factor of the similarities.
        c: curvature, when the embeddings are points of the hyperboloid.
        captions: (n, levels) numbers of all captions that are true of each picture; with ``chosen`` (n k,), the number
            of each text, true pairs across pictures are no negatives.
    """
    count = len(text) // len(image)
    if len(text) != count * len(image):
        raise ValueError(f"expected equally many texts for each of {len(image)} pictures, got {len(text)} texts")
    images, texts = gather_rows(image), gather_rows(text)
    place = torch.arange(len(text), device=text.device)  # among the texts of this process
    true_texts = true_images = None
    if captions is not None and chosen is not None:
        true_texts = _describes(captions, gather_rows(chosen)).repeat_interleave(count, 0)
        true_images = _describes(gather_rows(captions), chosen).mT
    by_image = (scale * similarity(image, texts, c)).repeat_interleave(count, 0)
    by_text = scale * similarity(text, images, c)
    image_loss = info_nce(by_image, _rank() * len(text) + place, true_texts)
    return (image_loss + info_nce(by_text, _rank() * len(image) + place // count, true_images)) / 2


def entailment_loss(general: Tensor, specific: Tensor, c: Tensor | float) -> Tensor:
    """Mean angle by which points (n, d) lie outside the cones of more general ones (n, d), on the hyperboloid."""
    with torch.autocast(general.device.type, enabled=False):
        return lorentz.cone_energy(_wide(general), _wide(specific), c).mean()


def chain_loss(levels: Tensor, c: Tensor | float) -> Tensor:
    """``entailment_loss`` of every level in the next one; (n, levels, d) from general to specific."""
    return entailment_loss(levels[:, :-1].flatten(0, 1), levels[:, 1:].flatten(0, 1), c)


def gather_rows(x: Tensor) -> Tensor:
    """(n, ...) of all processes one below the other, with gradients; they must have equally many rows."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return x
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(x.contiguous()))


def _describes(captions: Tensor, texts: Tensor) -> Tensor:
    """(n, m) whether text j (m,) is one of the captions (n, levels) of picture i."""
    return (captions[:, None, :] == texts[None, :, None]).any(-1)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
