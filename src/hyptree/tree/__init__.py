"""The Tree: one type for every hierarchy that hyptree finds, learns or reads.

Needs numpy alone; torch, scipy, networkx and matplotlib are imported inside the methods that use them.
"""

from hyptree.tree.core import Tree
from hyptree.tree.measure import Distortion, GromovDelta, MaskAgreement, gromov_delta

__all__ = ["Distortion", "GromovDelta", "MaskAgreement", "Tree", "gromov_delta"]
