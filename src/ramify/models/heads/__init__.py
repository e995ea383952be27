"""Heads for dense prediction: a feature pyramid over any timm backbone, and Semantic FPN on it."""

from ramify.models.heads.pyramid import Pyramid, adopt_backbone, pyramid_backbone
from ramify.models.heads.semantic_fpn import Segmenter, SemanticFPN

__all__ = ["Pyramid", "Segmenter", "SemanticFPN", "adopt_backbone", "pyramid_backbone"]
