"""Decoders for dense prediction: a feature pyramid over any timm backbone, and Semantic FPN on it."""

from hyptree.models.decoders.pyramid import Pyramid, adopt_backbone, pyramid_backbone
from hyptree.models.decoders.semantic_fpn import Segmenter, SemanticFPN

__all__ = ["Pyramid", "Segmenter", "SemanticFPN", "adopt_backbone", "pyramid_backbone"]
