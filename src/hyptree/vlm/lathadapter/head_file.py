"""A trained ``LatentHierarchyHead`` as one safetensors file, with what its host learned beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hyptree.errors import UserError
from hyptree.files import load_tensors, save_tensors
from hyptree.vlm.adapters.base import samples, warn_of_another_base
from hyptree.vlm.encoders.encoder import Encoder
from hyptree.vlm.lathadapter.head import LatentHierarchyHead


def save_head(
    head: LatentHierarchyHead,
    path: Path | str,
    host: Mapping[str, Tensor] | None = None,
    about: Mapping[str, Any] | None = None,
    encoder: Encoder | None = None,
) -> None:
    """Write a head, atomically.

    Args:
        encoder: whose features it is for; ``load_head`` warns of another one.
        host: tensors of the host it was trained with (``host.state_dict()``).
        about: anything that JSON can hold, to be read by people.
    """
    tensors = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    tensors |= {f"host.{name}": tensor for name, tensor in (host or {}).items()}
    state: dict[str, Any] = {
        "head": head.settings(),
        "attribute_names": list(head.attribute_names),
        "about": dict(about or {}),
    }
    if encoder is not None:
        state |= {"base": encoder.name, "base_weights": samples(encoder.model)}
    save_tensors(path, tensors, state)


def load_head(
    path: Path | str, encoder: Encoder | None = None
) -> tuple[LatentHierarchyHead, dict[str, Tensor], dict[str, Any]]:
    """The head in eval mode, the tensors of its host, and what was said about it.

    Args:
        encoder: that is to give its features.

    Raises:
        UserError: the file holds no head, or one for features of another width.
    """
    tensors, state = load_tensors(path)
    if "head" not in state:
        raise UserError(f"{path} holds no head; expected a file of heads/ in the folder of hyptree vlm train-fewshot")
    head = LatentHierarchyHead(**state["head"])
    if encoder is not None:
        if head.d != encoder.width:
            raise UserError(f"{path} is for features of {head.d} numbers, {encoder.name} gives {encoder.width}")
        warn_of_another_base(encoder.model, state.get("base_weights"), f"the head in {path}", state.get("base", ""))
    head.load_state_dict(
        {name.removeprefix("head."): value for name, value in tensors.items() if name.startswith("head.")}
    )
    head.attribute_names = tuple(state["attribute_names"])
    host = {name.removeprefix("host."): value for name, value in tensors.items() if name.startswith("host.")}
    return head.eval(), host, state["about"]
