"""Models that find hierarchies in pictures. Importing this package registers HCFormer with timm.

``timm.create_model("hcformer_nano")`` works after ``import hyptree.models``; ``HiMapper(backbone)`` wraps any backbone.
"""

from .hcformer import ClusterAssignment, HCFormer
from .himapper import HiMapper, HiMapperOutput

__all__ = ["ClusterAssignment", "HCFormer", "HiMapper", "HiMapperOutput"]
