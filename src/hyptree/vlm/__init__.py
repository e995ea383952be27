"""Hierarchy in CLIP: adapters that attach to open_clip and transformers models, few-shot heads, radial embeddings.

    from hyptree import vlm

    encoder = vlm.load_encoder("open_clip:ViT-B-16:openai")
    handle = vlm.attach(encoder, vlm.ScaleAdapterConfig(block_size=128))
    handle.print_trainable_parameters()

Nothing is imported until it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyptree.lazy import lazy

if TYPE_CHECKING:
    from hyptree.vlm.adapters.adapter import AdapterConfig
    from hyptree.vlm.adapters.handle import AdapterHandle, attach, handle_of
    from hyptree.vlm.adapters.kinds.lora import FullConfig, LoraConfig
    from hyptree.vlm.adapters.kinds.orthogonal import OrthogonalConfig
    from hyptree.vlm.adapters.kinds.scale import DiagonalConfig, ScaleAdapterConfig, reference_mobius
    from hyptree.vlm.adapters.structure import attachment_points
    from hyptree.vlm.encoders.encoder import Encoder, load_encoder
    from hyptree.vlm.lathadapter.head import LatentHierarchyHead
    from hyptree.vlm.radial.hierarchy_report import hierarchy_report
    from hyptree.vlm.radial.loss import RadialLoss, exterior_angle
    from hyptree.vlm.radii import RadiusLoss, radius

__all__ = [
    "AdapterConfig",
    "AdapterHandle",
    "DiagonalConfig",
    "Encoder",
    "FullConfig",
    "LatentHierarchyHead",
    "LoraConfig",
    "OrthogonalConfig",
    "RadialLoss",
    "RadiusLoss",
    "ScaleAdapterConfig",
    "attach",
    "attachment_points",
    "exterior_angle",
    "handle_of",
    "hierarchy_report",
    "load_encoder",
    "radius",
    "reference_mobius",
]

__getattr__, __dir__ = lazy(__name__, __file__)
