"""Token reduction for vision transformers: patch a model, read what was merged, take the patch away again.

from hyptree import tokens

handle = tokens.patch(model, keep=0.5)      # any ViT of timm or transformers
logits = model(images)
handle.num_tokens                           # [98, 49, 24]
handle.unpatch()
"""

from __future__ import annotations

from hyptree.cluster import agglomerate
from hyptree.tokens.draw import draw
from hyptree.tokens.families.adapter import UnsupportedModel
from hyptree.tokens.handle import Handle
from hyptree.tokens.merge import compose, matcher, merge_weighted, unmerge
from hyptree.tokens.methods import METHODS
from hyptree.tokens.patch import handle_of, patch, patched

__all__ = [
    "METHODS",
    "Handle",
    "UnsupportedModel",
    "agglomerate",
    "compose",
    "draw",
    "handle_of",
    "matcher",
    "merge_weighted",
    "patch",
    "patched",
    "unmerge",
]
