"""Hierarchy in CLIP: adapters that attach to open_clip and transformers models, few-shot heads, radial embeddings.

from hyptree import vlm

encoder = vlm.load_encoder("open_clip:ViT-B-16:openai")
handle = vlm.attach(encoder, vlm.ScaleAdapterConfig(block_size=128))
handle.print_trainable_parameters()

Nothing is imported until it is asked for. The function ``attach`` lives in ``attachment.py``: a module of its own name
would hide it here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyptree.lazy import lazy

if TYPE_CHECKING:
    from hyptree.vlm.adapters.base import AdapterConfig
    from hyptree.vlm.adapters.diagonal import DiagonalConfig
    from hyptree.vlm.adapters.full import FullConfig
    from hyptree.vlm.adapters.lora import LoraConfig
    from hyptree.vlm.adapters.orthogonal import OrthogonalConfig
    from hyptree.vlm.adapters.scale import ScaleAdapterConfig, reference_mobius
    from hyptree.vlm.attachment import attach, handle_of
    from hyptree.vlm.encoders import Encoder, load_encoder
    from hyptree.vlm.handle import AdapterHandle
    from hyptree.vlm.lathadapter import LatentHierarchyHead
    from hyptree.vlm.radial import RadialLoss, exterior_angle
    from hyptree.vlm.radial_trainer import RadialTrainer
    from hyptree.vlm.radii import RadiusLoss, radius
    from hyptree.vlm.report import hierarchy_report
    from hyptree.vlm.structure import attachment_points

_HOMES = {
    "AdapterConfig": "adapters.base",
    "AdapterHandle": "handle",
    "DiagonalConfig": "adapters.diagonal",
    "Encoder": "encoders",
    "FullConfig": "adapters.full",
    "LatentHierarchyHead": "lathadapter",
    "LoraConfig": "adapters.lora",
    "OrthogonalConfig": "adapters.orthogonal",
    "RadialLoss": "radial",
    "RadialTrainer": "radial_trainer",
    "RadiusLoss": "radii",
    "ScaleAdapterConfig": "adapters.scale",
    "attach": "attachment",
    "attachment_points": "structure",
    "exterior_angle": "radial",
    "handle_of": "attachment",
    "hierarchy_report": "report",
    "load_encoder": "encoders",
    "radius": "radii",
    "reference_mobius": "adapters.scale",
}

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
    "RadialTrainer",
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

__getattr__, __dir__ = lazy(__name__, _HOMES)
