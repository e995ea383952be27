"""``hyptree vlm``: adapters on CLIP-like models, radial embeddings. One file per group of sub-verbs."""

from __future__ import annotations

from hyptree.cli.vlm.attach import attach_info, merge
from hyptree.cli.vlm.chains import build_chains
from hyptree.cli.vlm.radial import eval_hierarchy, train_radial
from hyptree.cli.vlm.scale import eval_openvocab, train_scale

SUBVERBS = {
    "attach-info": attach_info,
    "merge": merge,
    "train-scale": train_scale,
    "eval-openvocab": eval_openvocab,
    "train-radial": train_radial,
    "eval-hierarchy": eval_hierarchy,
    "build-chains": build_chains,
}
