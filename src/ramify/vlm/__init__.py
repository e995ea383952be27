"""Hierarchy in CLIP: adapters that attach to open_clip and transformers models, few-shot heads, radial embeddings.

from ramify import vlm

encoder = vlm.load_encoder("open_clip:ViT-B-16:openai")
handle = vlm.attach(encoder, vlm.ScaleAdapterConfig(block_size=128))
handle.print_trainable_parameters()

Nothing is imported until it is asked for. The function ``attach`` lives in ``attachment.py``: a module of its own name
would hide it here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.lazy import lazy

if TYPE_CHECKING:
    from ramify.vlm.adapters.base import AdapterConfig
    from ramify.vlm.adapters.diagonal import DiagonalConfig
    from ramify.vlm.adapters.full import FullConfig
    from ramify.vlm.adapters.lora import LoraConfig
    from ramify.vlm.adapters.orthogonal import OrthogonalConfig
    from ramify.vlm.adapters.scale import ScaleAdapterConfig, reference_mobius
    from ramify.vlm.attachment import attach, handle_of
    from ramify.vlm.encoders import Encoder, load_encoder
    from ramify.vlm.handle import AdapterHandle
    from ramify.vlm.lathadapter import LatentHierarchyHead
    from ramify.vlm.radial import RadialLoss, exterior_angle
    from ramify.vlm.radial_trainer import RadialTrainer
    from ramify.vlm.radii import RadiusLoss, radius
    from ramify.vlm.report import hierarchy_report
    from ramify.vlm.structure import attachment_points

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
