"""Hi-Mapper: a tree of queries for any pretrained backbone. ``HiMapper(timm.create_model("resnet50"))``."""

from .backbone import Features
from .output import HiMapperOutput
from .tree import ProbabilisticTree, TreeShape
from .wrap import HiMapper

__all__ = ["Features", "HiMapper", "HiMapperOutput", "ProbabilisticTree", "TreeShape"]
