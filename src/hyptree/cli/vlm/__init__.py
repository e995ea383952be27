"""``hyptree vlm``: adapters on CLIP-like models, few-shot heads, radial embeddings. One file per group of sub-verbs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# A sub-verb is one line: its name, the file in this folder, the function. A file that is not there is not offered.
_HOMES = {
    "attach-info": ("attach", "attach_info"),
    "merge": ("attach", "merge"),
    "train-scale": ("scale", "train_scale"),
    "eval-openvocab": ("scale", "eval_openvocab"),
    "train-fewshot": ("fewshot", "train_fewshot"),
    "train-radial": ("radial", "train_radial"),
    "eval-hierarchy": ("radial", "eval_hierarchy"),
    "build-chains": ("chains", "build_chains"),
}

SUBVERBS: dict[str, Callable[[Any], int | None]] = {
    name: getattr(import_module(f"hyptree.cli.vlm.{module}"), function)
    for name, (module, function) in _HOMES.items()
    if find_spec(f"hyptree.cli.vlm.{module}") is not None
}
