"""``ramify models [FILTER]``: the models that a recipe can name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from ramify.errors import UserError, suggest

MAX_COUNTED = 40
"""Models whose parameters are counted: each has to be built for it, without memory, but not without time."""


@dataclass
class ModelsConfig:
    """``ramify models``."""

    filter: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILTER")] = None
    """Part of a name, or a pattern such as 'swin_*tiny*'; by default the models of ramify."""
    json: bool = False
    """Print one JSON object per model."""


def run(config: ModelsConfig) -> int:
    """List the models that a recipe can name: ramify's own, and timm's that match FILTER."""
    import json

    names, own = find(config.filter)
    count = len(names) <= MAX_COUNTED
    width = max(map(len, names)) + 2
    for name in names:
        source = "ramify" if name in own else "timm"
        params = num_params(name) if count else None
        if config.json:
            print(json.dumps({"name": name, "from": source} | ({"params": params} if count else {})))
        else:
            print(f"{name:<{width}}{source:<8}" + (f"{params / 1e6:8.2f} M" if params is not None else ""))
    if config.json:
        return 0
    if config.filter is None:
        print("any model of timm by a filter, e.g. ramify models swin_tiny")
    elif not count:
        print(f"{len(names)} models; a narrower filter also counts their parameters")
    return 0


def find(filter: str | None) -> tuple[list[str], set[str]]:
    """Names that match the filter, ours first, and which of them are ours."""
    import timm

    import ramify.models  # noqa: F401  (registers our models)

    everything = timm.list_models()
    own = {name for name in everything if timm.model_entrypoint(name).__module__.startswith("ramify.")}
    if filter is None:
        if not own:
            raise UserError("ramify has registered no models; give a FILTER to see timm's")
        return sorted(own), own
    pattern = filter if "*" in filter else f"*{filter}*"
    names = timm.list_models(pattern)
    if not names:
        hint = suggest(filter, everything) or "try a shorter one"
        raise UserError(f"no model matches {filter!r}; {hint}")
    return sorted(names, key=lambda name: (name not in own, name)), own


def num_params(name: str) -> int:
    """Number of parameters, counted without memory for them where the model can be built that way."""
    import timm
    import torch

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(name).parameters())
    except Exception:  # a model that computes with its weights while it is built
        return sum(p.numel() for p in timm.create_model(name).parameters())
