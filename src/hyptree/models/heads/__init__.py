"""Heads for dense prediction: a feature pyramid over any timm backbone, and Semantic FPN on it."""

from hyptree.models.heads.pyramid import Pyramid, adopt_backbone, pyramid_backbone
from hyptree.models.heads.semantic_fpn import Segmenter, SemanticFPN

__all__ = ["Pyramid", "Segmenter", "SemanticFPN", "adopt_backbone", "pyramid_backbone"]
