"""``hyptree vlm``: adapters on CLIP-like models, radial embeddings. One file per group of sub-verbs."""

from __future__ import annotations

from hyptree.cli.vlm.attach import attach_info, merge
from hyptree.cli.vlm.chains import build_chains
from hyptree.cli.vlm.openvocab import eval_openvocab
from hyptree.cli.vlm.radial import eval_hierarchy

SUBVERBS = {
    "attach-info": attach_info,
    "merge": merge,
    "eval-openvocab": eval_openvocab,
    "eval-hierarchy": eval_hierarchy,
    "build-chains": build_chains,
}
