"""What a Hi-Mapper gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


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
