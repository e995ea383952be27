"""Names of encoders: ``open_clip:NAME:PRETRAINED`` and ``hf:FOLDER_OR_ID``. Imports no torch: verbs ask here first."""

from __future__ import annotations

from pathlib import Path

from hyptree.config import recipe_folder
from hyptree.errors import UserError, as_called, suggest

KINDS = {"open_clip": "hyptree.vlm.encoders.open_clip:load", "hf": "hyptree.vlm.encoders.transformers:load"}
"""First word of a spec to the function that loads the rest: ``load(rest, random_init, seed)``."""


def is_encoder(model: str) -> bool:
    """Whether the name is that of an encoder: ``hf:...`` or ``open_clip:...``."""
    return model.partition(":")[0] in KINDS and ":" in model


def check_spec(spec: str) -> tuple[str, str]:
    """The kind and the rest of a spec; the folder of a run needs no ``hf:`` before it."""
    kind, colon, rest = ("hf", ":", spec) if (Path(spec) / "recipe.yaml").is_file() else spec.partition(":")
    if not colon or not rest or kind not in KINDS:
        hint = suggest(kind, KINDS) if colon else ""
        raise UserError(
            f"unknown encoder {spec!r}; " + (hint + " " if hint else "") + "expected open_clip:NAME:PRETRAINED or "
            "hf:FOLDER_OR_ID, e.g. open_clip:ViT-B-32:openai or hf:runs/clip_world/hf"
        )
    if kind == "hf":
        hf_source(rest)
    return kind, rest


def hf_source(rest: str) -> str:
    """The folder with config.json: the given one, or ``hf`` in the run that was given; else the name for the hub.

    The hub is not asked where it can only mean a folder: that takes half a minute without a network.
    """
    path = Path(rest).expanduser()
    if path.is_dir():
        inside = not (path / "config.json").is_file() and (path / "hf" / "config.json").is_file()
        return str(path / "hf" if inside else path)
    is_beside = path.parent != Path() and path.parent.is_dir()
    if is_beside or rest.startswith((".", "/", "~", "runs/")) or rest.count("/") > 1:
        then, own = "give a run of the task contrast or radial, or a folder of save_pretrained", recipe_folder()
        if own is not None and (own / f"{path.name}.yaml").is_file():  # recipes name runs of others, which come first
            then = f"train it first: {as_called('train', path.name, '--out', path)}"
        raise UserError(f"hf:{rest}: no such folder; {then}")
    return rest
