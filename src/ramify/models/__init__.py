"""Models that find hierarchies in pictures. Importing this package registers HCFormer with timm.

``timm.create_model("hcformer_nano")`` works after ``import ramify.models``.
"""

from .hcformer import ClusterAssignment, HCFormer

__all__ = ["ClusterAssignment", "HCFormer"]
