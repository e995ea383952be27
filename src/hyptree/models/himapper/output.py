"""What a Hi-Mapper gives back, and the numbers in it that say how much of a tree was read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hyptree.models.himapper.plain import TreeLoss


@dataclass
class HiMapperOutput:
    """Logits, and the tree that was read from each image. A pytree: DDP and compilers find the tensors inside.

    Attributes:
        logits: (B, classes). pre_logits: (B, Cv) the enriched global feature; None when switched off.
        losses: ``contrastive``, ``kl`` and ``aux_total = alpha contrastive + beta kl``, what is added to the task's
            loss; None where they were not asked for.
        nodes: per level (B, N_l, w), leaves first. hyperbolic: per level (B, N_l, d_h), space components.
        curvature: () ``c`` of their space, meaning ``-c``; 0 in flat space.
        maps: per level (B, N_l, H, W), each summing to 1, where a node looked; None unless asked for.
        stats: detached numbers to log, wherever losses are computed or maps asked for: ``parent_retrieval``,
            ``parent_distance``, ``level_distance``, ``distance_ratio``, ``image_dependence``, ``curvature`` and, with
            maps, ``map_entropy`` (1 for uniform maps).
    """

    logits: Tensor
    pre_logits: Tensor | None = None
    losses: dict[str, Tensor] | None = None
    nodes: list[Tensor] = field(default_factory=list)
    hyperbolic: list[Tensor] = field(default_factory=list)
    curvature: Tensor | None = None
    maps: list[Tensor] | None = None
    stats: dict[str, Tensor] = field(default_factory=dict)


torch.export.register_dataclass(HiMapperOutput, serialized_type_name="hyptree.HiMapperOutput")


@torch.no_grad()
def tree_stats(loss: TreeLoss, nodes: Tensor, distances: Tensor, maps: Tensor | None) -> dict[str, Tensor]:
    """How much of a tree the nodes are, and how much of the pictures is in them; each level counts the same.

    Parents start as averages of their children, so ``parent_retrieval`` is high before any training: read it together
    with ``distance_ratio``.

    Args:
        nodes: (B, nodes, w). distances: (B, children, nodes). maps: (B, nodes, M).
    """
    nearest = distances.masked_fill(~loss.is_above, float("inf")).argmin(-1)
    same_level = loss.is_candidate & ~loss.is_above
    to_level = loss.mean((distances * same_level).sum(-1) / same_level.sum(-1).clamp_min(1))
    to_parent = loss.mean(loss.of_parent(distances))
    stats = {
        "parent_retrieval": loss.mean((nearest == loss.parent).float()),
        "parent_distance": to_parent,
        "level_distance": to_level,
        "distance_ratio": to_parent / to_level.clamp_min(1e-12),
        "image_dependence": image_dependence(nodes, loss.shape.sizes),
    }
    if maps is not None:
        stats["map_entropy"] = torch.special.entr(maps).sum(-1).mean() / max(math.log(maps.shape[-1]), 1e-12)
    return stats


def image_dependence(nodes: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Variance of a node (B, nodes, w) over images over that of the nodes of a level in one image; 0 for one image.

    Near 0 the nodes are the queries and the picture does not matter.
    """
    nodes = nodes.float()
    over_images = (nodes - nodes.mean(0)).square().mean()
    centred = [level - level.mean(1, keepdim=True) for level in nodes.split(sizes, 1)]
    return over_images / torch.cat(centred, 1).square().mean().clamp_min(1e-12)
