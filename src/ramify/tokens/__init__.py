"""Token reduction for vision transformers: patch a model, read what was merged, take the patch away again.

from ramify import tokens

handle = tokens.patch(model, keep=0.5)      # any ViT of timm or transformers
logits = model(images)
handle.num_tokens                           # [98, 49, 24]
handle.unpatch()
"""

from __future__ import annotations

from ramify.cluster import agglomerate
from ramify.tokens.draw import draw
from ramify.tokens.family import UnsupportedModel
from ramify.tokens.handle import Handle
from ramify.tokens.merge import compose, matcher, merge_weighted, unmerge
from ramify.tokens.methods import METHODS
from ramify.tokens.patch import handle_of, patch, patched

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
