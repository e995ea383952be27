"""Adapters as files: ``adapter.safetensors`` with the tensors, ``adapter.json`` with what they are and belong to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from hyptree.errors import UserError
from hyptree.files import load_tensors, read_json, save_tensors, write_text
from hyptree.vlm.adapters import adapter_config
from hyptree.vlm.adapters.base import samples, warn_of_another_base
from hyptree.vlm.adapters.container import AdapterSet
from hyptree.vlm.adapters.handle import AdapterHandle, bare_model, put_on

VERSION = 1
TENSORS, ABOUT = "adapter.safetensors", "adapter.json"


def save_adapter(handle: AdapterHandle, folder: Path | str, dtype: torch.dtype | None = None) -> Path:
    """Write an adapter; gives the folder."""
    adapter = handle._set
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = adapter.adapted_shapes()
    with handle.disable_adapter():  # a merged one is not in the base
        base = samples(handle.model)
    about = {
        "format": "hyptree adapter",
        "version": VERSION,
        "name": handle.name,
        "method": adapter.config.method,
        "config": adapter.config.as_dict(),
        "parameters": sum(parameter.numel() for parameter in adapter.parameters()),
        "fingerprint": fingerprint(shapes),
        "adapted": shapes,
        "base": getattr(handle.encoder, "name", None),
        "base_weights": base,
    }
    tensors = {key: value.to(dtype or value.dtype) for key, value in adapter.state_dict().items()}
    # The fingerprint lies in both files, so that two halves of different adapters are found out.
    save_tensors(folder / TENSORS, tensors, {"fingerprint": about["fingerprint"], "method": about["method"]})
    write_text(folder / ABOUT, json.dumps(about, indent=2) + "\n")
    return folder


def load_adapter(model: Any, folder: Path | str, name: str | None = None) -> AdapterHandle:
    """Attach a saved adapter to a model that has the weights it was made for; before it is, everything is compared."""
    about = read_about(folder)
    new = AdapterSet(bare_model(model), adapter_config(about["method"], about["config"]))
    actual, expected = new.adapted_shapes(), [(weight, list(shape)) for weight, shape in about["adapted"]]
    if fingerprint(actual) != about["fingerprint"]:
        raise UserError(f"the adapter in {folder} is for another model: {_difference(expected, actual)}")
    tensors, state = load_tensors(Path(folder) / TENSORS)
    if state.get("fingerprint") != about["fingerprint"] or state.get("method") != about["method"]:
        raise UserError(f"{Path(folder) / TENSORS} and {ABOUT} beside it belong to different adapters; save it again")
    made_on = about.get("base") or "the weights it was trained on"
    warn_of_another_base(bare_model(model), about.get("base_weights"), f"the adapter in {folder}", made_on)
    if {k: v.shape for k, v in new.state_dict().items()} != {k: v.shape for k, v in tensors.items()}:
        raise UserError(f"{Path(folder) / TENSORS} does not hold the tensors that {ABOUT} describes; save it again")
    new.load_state_dict(tensors)
    return put_on(model, name or about["name"], lambda: new)


def read_about(folder: Path | str) -> dict[str, Any]:
    """What ``adapter.json`` says."""
    path = Path(folder) / ABOUT
    if not path.is_file():
        raise UserError(f"no adapter in {folder}: it has no {ABOUT}; expected a folder that handle.save() wrote")
    about = read_json(path, "name", "method", "config", "fingerprint", "adapted")
    if about.get("version", 0) > VERSION:
        raise UserError(f"{path} has version {about['version']}, this hyptree reads up to {VERSION}; upgrade hyptree")
    return about


def fingerprint(shapes: list[tuple[str, list[int]]]) -> str:
    """sha256 over the sorted names and shapes of the adapted weights."""
    return hashlib.sha256(json.dumps([[name, list(shape)] for name, shape in sorted(shapes)]).encode()).hexdigest()


def _difference(expected: list[tuple[str, list[int]]], actual: list[tuple[str, list[int]]]) -> str:
    wanted, there = dict(expected), dict(actual)
    for name, shape in expected:
        if name not in there:
            return f"it adapts {name} {tuple(shape)}, and the model has no such weight"
        if there[name] != shape:
            return f"it adapts {name} of shape {tuple(shape)}, and the model's is {tuple(there[name])}"
    extra = next(name for name in there if name not in wanted)
    return f"the model has {len(there)} fitting weights where it has {len(wanted)}, among them {extra}"
