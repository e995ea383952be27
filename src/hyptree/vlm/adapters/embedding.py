"""Adapters on what a tower gives in the end (``space="embedding"``): where it comes out, and how to change it there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.vlm.adapters.adapter import AdapterConfig, SlotStack
from hyptree.vlm.adapters.base import device_of
from hyptree.vlm.adapters.structure import warn_of_towers_without


@dataclass(eq=False)
class EmbeddingPoint:
    """Where the embeddings of a tower, ``width`` numbers each, come out."""

    tower: str
    name: str
    """Of the module whose output they are; empty for ``model.encode_text`` itself."""
    module: nn.Module
    width: int
    device: torch.device
    projection: tuple[nn.Module, str] | None
    """``(module, attribute)`` of the last linear map, into which an adapter can be merged, where there is one."""

    @property
    def weight(self) -> nn.Parameter:
        """The last linear map."""
        if self.projection is None:
            raise UserError(
                f"the {self.tower} tower does not end in a linear projection, so an adapter of its embeddings cannot "
                "be merged; keep it attached"
            )
        return getattr(*self.projection)


def embedding_points(model: nn.Module, towers: Sequence[str]) -> list[EmbeddingPoint]:
    """Where the embeddings of these towers come out, in models of open_clip and transformers."""
    points = [point for tower in towers for point in _find(model, tower)]
    if not points:
        raise UserError(
            f"found no place where {type(model).__name__} gives embeddings of {' or '.join(towers)}; "
            'use space="weight" for this model'
        )
    warn_of_towers_without(model, "end", towers, [point.tower for point in points])
    return points


def _find(model: Any, tower: str) -> Iterator[EmbeddingPoint]:
    is_text = tower == "text"
    inner, end = ("text_model", "text_projection") if is_text else ("vision_model", "visual_projection")
    projected: tuple[nn.Module, str] | None
    if hasattr(model, inner) and isinstance(getattr(model, end, None), nn.Linear):  # CLIP of transformers
        name, projected = end, (getattr(model, end), "weight")
    elif isinstance(head := getattr(getattr(model, inner, None), "head", None), nn.Module):  # SigLIP
        name, projected = f"{inner}.head", (head, "weight") if isinstance(head, nn.Linear) else None
    elif not (hasattr(model, "encode_image") and hasattr(model, "encode_text")):
        return
    else:  # open_clip
        name = "text" if is_text else "visual"
        if not isinstance(getattr(model, name, None), nn.Module):
            name = ""
        projected = _projection(model.get_submodule(name))
        if not name and not (is_text and projected):
            return
    module = model.get_submodule(name)
    width: Any = getattr(module, "output_dim", None)
    if width is None and projected and not isinstance(projected[0], nn.Linear):
        width = getattr(*projected).shape[1]
    elif not width:
        linear = projected[0] if projected else [m for m in module.modules() if isinstance(m, nn.Linear)][-1]
        width = linear.out_features
    first = next(inside for inside, _ in module.named_parameters())
    device = device_of(model, f"{name}.{first}".lstrip("."))
    yield EmbeddingPoint(tower, name, module, int(width), device, projected)


def _projection(part: Any) -> tuple[nn.Module, str] | None:
    for name in ("text_projection", "proj"):
        value = getattr(part, name, None)
        if isinstance(value, nn.Parameter):
            return part, name
        if isinstance(value, nn.Linear):
            return value, "weight"
    for name in ("head", "attnpool.c_proj"):
        try:
            head = part.get_submodule(name)
        except AttributeError:
            continue
        linears = [module for module in head.modules() if isinstance(module, nn.Linear)]
        if linears:
            return linears[-1], "weight"
    return None


class AdaptedEmbedding(nn.Module):
    """The parameters of an adapter for the embeddings of one tower."""

    def __init__(self, point: EmbeddingPoint, config: AdapterConfig):
        super().__init__()
        weight = next(point.module.parameters())
        self.point = point
        self.stack: SlotStack = SlotStack(
            names=(f"{point.tower} embedding",),
            targets=("embedding",),
            layers=(0,),
            shape=(1, point.width),
            tower=point.tower,
            dtype=torch.promote_types(weight.dtype, torch.float32),
            device=point.device,
        )
        self.adapter = config.build(self.stack)

    def forward(self, embeddings: Tensor) -> Tensor:
        """The adapted embeddings (..., d), computed in float32 or better."""
        wide = torch.promote_types(embeddings.dtype, torch.float32)
        rows = embeddings.to(wide).reshape(1, -1, embeddings.shape[-1])
        with torch.autocast(embeddings.device.type, enabled=False):
            adapted = self.adapter(rows)
        return adapted.view(embeddings.shape).to(embeddings.dtype)

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """The last projection, and its bias, with the adapter inside; by attribute of ``point.projection[0]``."""
        if getattr(self.adapter, "cap", None) is not None:
            raise UserError(
                'an adapter of embeddings with cap="paper" cuts each one by its own length and cannot be merged into a '
                'weight; keep it attached, or use cap="none"'
            )
        weight = self.point.weight
        assert self.point.projection is not None
        module, attribute = self.point.projection
        if not isinstance(module, nn.Linear):  # a parameter (width, d)
            return {attribute: self(weight)}
        tensors = {attribute: self(weight.mT).mT.contiguous()}
        if (bias := module._parameters.get("bias")) is not None:
            tensors["bias"] = self(bias)
        return tensors
