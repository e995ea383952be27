"""Models that find hierarchies in pictures. Importing this package registers HCFormer with timm.

``timm.create_model("hcformer_nano")`` works after ``import hyptree.models``; ``HiMapper(backbone)`` wraps any backbone.
"""

from hyptree.models.hcformer.model import ClusterAssignment, HCFormer
from hyptree.models.himapper import HiMapper, HiMapperOutput

__all__ = ["ClusterAssignment", "HCFormer", "HiMapper", "HiMapperOutput"]
