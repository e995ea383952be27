"""``hyptree models [FILTER]``: the models that a recipe can name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hyptree.cli.config import AsJson
from hyptree.errors import UserError, suggest

MAX_COUNTED = 40
"""Models whose parameters are counted: each has to be built for it, without memory, but not without time."""


@dataclass
class ModelsConfig(AsJson):
    """``hyptree models``; as JSON one object per model."""

    filter: Annotated[str | None, "[FILTER]"] = None
    """Part of a name, or a pattern such as 'swin_*tiny*'; by default all of hyptree, language models included."""


def run(config: ModelsConfig) -> int:
    """List the models that a recipe can name: hyptree's own, and timm's that match FILTER."""
    import json

    names, own = find(config.filter)
    language = language_models(config.filter)
    if not names and not language:
        import timm

        hint = suggest(config.filter or "", [*timm.list_models(), *language_models(None)]) or "try a shorter one"
        raise UserError(f"no model matches {config.filter!r}; {hint}")
    count = len(names) + len(language) <= MAX_COUNTED
    width = max(map(len, (*names, *language))) + 2
    for name in (*names, *language):
        source = "hyptree" if name in own or name in language else "timm"
        params = num_params(name, name in language) if count else None
        if config.json:
            print(json.dumps({"name": name, "from": source} | ({"params": params} if count else {})))
        else:
            print(f"{name:<{width}}{source:<8}" + (f"{params / 1e6:8.2f} M" if params is not None else ""))
    if config.json:
        return 0
    if config.filter is None:
        print("any model of timm by a filter, e.g. hyptree models swin_tiny")
    elif not count:
        print(f"{len(names) + len(language)} models; a narrower filter also counts their parameters")
    return 0


def find(filter: str | None) -> tuple[list[str], set[str]]:
    """Names that match the filter, ours first, and which of them are ours."""
    import timm

    import hyptree.models  # noqa: F401  (registers our models)

    everything = timm.list_models()
    own = {name for name in everything if timm.model_entrypoint(name).__module__.startswith("hyptree.")}
    if filter is None:
        if not own:
            raise UserError("hyptree has registered no models; give a FILTER to see timm's")
        return sorted(own), own
    pattern = filter if "*" in filter else f"*{filter}*"
    names = timm.list_models(pattern)
    return sorted(names, key=lambda name: (name not in own, name)), own


def language_models(filter: str | None) -> list[str]:
    """Presets of language models that match the filter; none where transformers is not installed."""
    from fnmatch import fnmatch
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        return []
    from hyptree.lm.presets import presets

    pattern = filter if filter is not None and "*" in filter else f"*{filter or ''}*"
    return [name for name in sorted(presets()) if fnmatch(name, pattern)]


def num_params(name: str, is_language: bool = False) -> int:
    """Number of parameters, counted without memory for them where the model can be built that way."""
    import timm
    import torch

    def build() -> torch.nn.Module:
        if not is_language:
            return timm.create_model(name)
        from hyptree.lm import HelmForCausalLM
        from hyptree.lm.presets import preset

        return HelmForCausalLM(preset(name))

    try:
        with torch.device("meta"):
            model = build()
    except Exception:  # a model that computes with its weights while it is built
        model = build()
    return sum(p.numel() for p in model.parameters())
