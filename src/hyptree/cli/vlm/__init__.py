"""``hyptree vlm``: adapters on CLIP-like models, few-shot heads, radial embeddings. One file per group of sub-verbs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# A sub-verb is one line: its name, the file in this folder, the function. A file that is not there is not offered.
_HOMES = {
    "attach-info": ("vlm_attach", "attach_info"),
    "merge": ("vlm_attach", "merge"),
    "train-scale": ("vlm_scale", "train_scale"),
    "eval-openvocab": ("vlm_scale", "eval_openvocab"),
    "train-fewshot": ("vlm_fewshot", "train_fewshot"),
    "train-radial": ("vlm_radial", "train_radial"),
    "eval-hierarchy": ("vlm_radial", "eval_hierarchy"),
    "build-chains": ("vlm_chains", "build_chains"),
}

SUBVERBS: dict[str, Callable[[Any], int | None]] = {
    name: getattr(import_module(f"hyptree.cli.{module}"), function)
    for name, (module, function) in _HOMES.items()
    if find_spec(f"hyptree.cli.{module}") is not None
}
