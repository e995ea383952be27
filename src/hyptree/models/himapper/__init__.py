"""Hi-Mapper: a tree of queries for any pretrained backbone. ``HiMapper(timm.create_model("resnet50"))``."""

from hyptree.models.himapper.backbone import Features
from hyptree.models.himapper.output import HiMapperOutput
from hyptree.models.himapper.tree import ProbabilisticTree, TreeShape
from hyptree.models.himapper.wrap import HiMapper

__all__ = ["Features", "HiMapper", "HiMapperOutput", "ProbabilisticTree", "TreeShape"]
