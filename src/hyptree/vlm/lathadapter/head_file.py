"""A trained ``LatentHierarchyHead`` as one safetensors file, with what its host learned beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hyptree.errors import UserError
from hyptree.files import load_tensors, save_tensors
from hyptree.vlm.lathadapter.head import LatentHierarchyHead


def save_head(
    head: LatentHierarchyHead,
    path: Path | str,
    host: Mapping[str, Tensor] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a head, atomically.

    Args:
        host: tensors of the host it was trained with (``host.state_dict()``).
        about: anything that JSON can hold, to be read by people.
    """
    tensors = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    tensors |= {f"host.{name}": tensor for name, tensor in (host or {}).items()}
    state = {"head": head.settings(), "attribute_names": list(head.attribute_names), "about": dict(about or {})}
    save_tensors(path, tensors, state)


def load_head(path: Path | str) -> tuple[LatentHierarchyHead, dict[str, Tensor], dict[str, Any]]:
    """The head in eval mode, the tensors of its host, and what was said about it."""
    tensors, state = load_tensors(path)
    if "head" not in state:
        raise UserError(f"{path} holds no head; expected a file of heads/ in the folder of hyptree vlm train-fewshot")
    head = LatentHierarchyHead(**state["head"])
    head.load_state_dict(
        {name.removeprefix("head."): value for name, value in tensors.items() if name.startswith("head.")}
    )
    head.attribute_names = tuple(state["attribute_names"])
    host = {name.removeprefix("host."): value for name, value in tensors.items() if name.startswith("host.")}
    return head.eval(), host, state["about"]
