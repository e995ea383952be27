"""Vision towers of transformers for token reduction: ViT, DeiT, DINOv2 (with registers), CLIP.

What is patched is the tower: of a ``CLIPModel`` its ``vision_model``, of a classifier the model under its head. After
a patch

- ``last_hidden_state`` and ``hidden_states[i]`` of merged blocks are shorter: prefix tokens first, then the clusters;
  ``handle.sources[-1]`` (trace=True) says which patch is in which;
- ``attentions`` (eager attention only, as always in transformers) have the rows and columns of the tokens that the
  block received, with the log sizes inside the softmax;
- heads that average the patch tokens (DINOv2, CLIP for classification) weight them by size; ``pool="plain"`` does not;
- backbones and masked image modelling, which lay the tokens out as a grid, get every patch back from its cluster, in
  ``hidden_states`` too.

Attention must be "sdpa" or "eager": the flash and flex kernels of transformers take no bias, so with them only
``prop_attn=False`` works. Nothing of transformers is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyptree.errors import UserError
from hyptree.tokens.families.adapter import (
    BlockParts,
    FamilyAdapter,
    Override,
    UnsupportedModel,
    join_masks,
    unwrapped,
)
from hyptree.tokens.families.timm import _full_map
from hyptree.tokens.handle import MODEL_ATTRIBUTE, Handle
from hyptree.tokens.patch import handle_of


@dataclass(frozen=True)
class _Layout:
    """Where the parts of a block are, as paths below it."""

    attention: str
    query: str
    key: str
    norm: str
    branch_end: str


# Tried in this order; a block has the first layout whose five modules are all there.
LAYOUTS = (
    # ViT and DeiT: one dropout for both branches.
    _Layout("attention", "attention.q_proj", "attention.k_proj", "layernorm_after", "dropout"),
    # DINOv2: one drop path for both branches, after the layer scale.
    _Layout("attention", "attention.q_proj", "attention.k_proj", "norm2", "drop_path"),
    # DINOv2 of transformers up to 5.17: an attention without mask inside an attention.
    _Layout("attention.attention", "attention.attention.query", "attention.attention.key", "norm2", "drop_path"),
    _Layout("self_attn", "self_attn.q_proj", "self_attn.k_proj", "layer_norm2", "mlp"),  # CLIP
)

# Class of the tower -> how many tokens stand in front of the patches; registers come on top.
NUM_PREFIX = {
    "ViTModel": 1,
    "DeiTModel": 2,  # class and distillation
    "Dinov2Model": 1,
    "Dinov2Backbone": 1,
    "Dinov2WithRegistersModel": 1,
    "Dinov2WithRegistersBackbone": 1,
    "CLIPVisionModel": 1,
    "CLIPVisionTransformer": 1,  # the tower inside a CLIPVisionModel of older versions
}
# Models around a tower that read nothing but its class token (and that of distillation).
CLASS_HEADS = (
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "CLIPModel",
    "CLIPVisionModelWithProjection",
)
# Models that give their classifier the mean of the patches, and whether the class token stands before it.
MEAN_HEADS = {
    "Dinov2ForImageClassification": True,
    "Dinov2WithRegistersForImageClassification": True,
    "CLIPForImageClassification": False,
}
# Models that lay the tokens out as a grid -> the module below them whose output they take.
GRID_HEADS = {
    "ViTForMaskedImageModeling": "vit",
    "DeiTForMaskedImageModeling": "deit",
    "Dinov2Backbone": "encoder",
    "Dinov2WithRegistersBackbone": "encoder",
}
KNOWN = {*NUM_PREFIX, *CLASS_HEADS, *MEAN_HEADS, *GRID_HEADS}
KERNELS_WITH_BIAS = ("sdpa", "eager")


def sites(model: nn.Module) -> FamilyAdapter:
    """What hooks must know of a vision model of transformers.

    Raises:
        UnsupportedModel: another model, one around a tower that is not known, or blocks of an unknown layout.
    """
    if not any(cls.__module__.partition(".")[0] == "transformers" for cls in type(model).__mro__):
        raise UnsupportedModel(f"{type(model).__name__} is not a model of transformers")
    name, tower = _tower(model)
    blocks = [_parts(path, block) for path, block in _blocks(name, tower)]
    num_prefix = NUM_PREFIX[_kind(tower)] + getattr(tower.config, "num_register_tokens", 0)
    return TransformersAdapter(model, tower, blocks, num_prefix)


class TransformersAdapter(FamilyAdapter):
    """Keys from ``k_proj``, log sizes through ``attention_mask``, heads that count patches and see the whole grid."""

    handle: Handle

    def __init__(self, model: nn.Module, tower: nn.Module, blocks: list[BlockParts], num_prefix: int):
        super().__init__(model, blocks, num_prefix, has_class_token=True)
        self.tower = tower
        self._last: dict[torch.device, Tensor] = {}  # what the tower gave, until the classifier has read it
        self._dense = ExitStack()
        self._needs_grid = False  # True while a head runs that lays the tokens out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": {}, "_dense": ExitStack(), "_needs_grid": False}

    def with_bias(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], bias: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _require_bias(self.blocks[index])
        if len(args) > 1:  # ViT and DeiT hand the mask over by position
            return (args[0], join_masks(args[1], bias), *args[2:]), kwargs
        return args, {**kwargs, "attention_mask": join_masks(kwargs.get("attention_mask"), bias)}

    def overrides(self, handle: Handle) -> Iterator[Override]:
        if self.tower is not self.model:  # who patches the tower alone afterwards finds this patch, and replaces it
            yield Override(self.tower, MODEL_ATTRIBUTE, handle)  # type: ignore[arg-type]

    def hooks(self, handle: Handle) -> list[RemovableHandle]:
        self.handle = handle
        if handle.attention_way is not None:
            for parts in self.blocks:
                _require_bias(parts)
        earlier = handle_of(self.tower)
        if earlier is not None and earlier is not handle:
            earlier.unpatch()
        hooks = [self.tower.register_forward_pre_hook(self._refuse_mask, with_kwargs=True)]
        kind = _kind(self.model)
        if kind in MEAN_HEADS:
            hooks.append(self.tower.register_forward_hook(self._keep_last))
            hooks.append(self.model.get_submodule("classifier").register_forward_pre_hook(self._pool))
        if kind in GRID_HEADS:
            hooks.append(self.model.register_forward_pre_hook(self._start_dense))
            hooks.append(self.model.register_forward_hook(self._stop_dense, always_call=True))
            hooks.append(self.model.get_submodule(GRID_HEADS[kind]).register_forward_hook(self._unmerge))
        return hooks

    def _refuse_mask(self, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.handle.enabled and kwargs.get("attention_mask") is not None:
            raise UserError(
                f"{type(tower).__name__}: attention_mask hides single patches, and merged ones cannot be told apart; "
                "leave it out, or set handle.enabled = False"
            )

    # ------------------------------------------------------------------ heads that take the mean of the patches
    def _keep_last(self, tower: nn.Module, args: Any, output: Any) -> None:
        tokens: Tensor = output[0]  # last_hidden_state
        self._last[tokens.device] = tokens

    def _pool(self, classifier: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """What the classifier is given, with the mean over patches in the place of the mean over tokens."""
        tokens = self._last.pop(args[0].device, None)
        weights = None if tokens is None else self.handle.token_weights(tokens)
        if tokens is None or weights is None:
            return None
        weights = weights[:, self.num_prefix :, None]  # (B, K, 1)
        pooled = ((tokens[:, self.num_prefix :] * weights).sum(1) / weights.sum(1)).to(tokens.dtype)
        return (torch.cat([tokens[:, 0], pooled], 1) if MEAN_HEADS[_kind(self.model)] else pooled,)

    # ------------------------------------------------------------------ heads that need the grid
    def _start_dense(self, model: nn.Module, args: Any) -> None:
        self._dense.enter_context(self.handle.dense())
        self._needs_grid = True

    def _stop_dense(self, model: nn.Module, args: Any, output: Any) -> None:
        self._dense.close()
        self._needs_grid = False

    def _unmerge(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Every patch gets the token it was merged into, in the states after each block and in the last."""
        if not (self._needs_grid and self.handle.enabled):
            return None
        states = getattr(output, "hidden_states", None)
        if states is not None:  # the input of the first block, then what each block gave
            output.hidden_states = tuple(self._full(x, index - 1) for index, x in enumerate(states))
        output.last_hidden_state = self._full(output.last_hidden_state, len(self.blocks) - 1)
        return output

    def _full(self, x: Tensor, layer: int) -> Tensor:
        source = self.handle.source_after(layer)
        return torch.cat([x[:, : self.num_prefix], _full_map(x[:, self.num_prefix :], source, None)], 1)


def _kind(module: nn.Module) -> str:
    """The name by which the tables above know a module; subclasses are what they are made from."""
    names = [cls.__name__ for cls in type(module).__mro__]
    return next((name for name in names if name in KNOWN), names[0])


def _tower(model: nn.Module) -> tuple[str, nn.Module]:
    """Where the vision tower is in the model, and the tower."""
    towers = {
        name: module for name, module in model.named_modules() if _kind(module) in NUM_PREFIX and _block_list(module)
    }
    if "" in towers:
        return "", model
    kind = _kind(model)
    if not towers:
        raise UnsupportedModel(
            f"{kind} of transformers has no vision tower whose tokens can be merged; "
            "there are ViT, DeiT, DINOv2 (with registers) and CLIP"
        )
    name = next(iter(towers))
    if kind not in KNOWN:
        raise UnsupportedModel(
            f"{kind} reads the whole grid of tokens, or is not known here; patch its tower alone, model.{name}, "
            "where shorter outputs are fine"
        )
    return name, towers[name]


def _block_list(tower: nn.Module) -> str:
    """Path of the list of blocks below a tower; empty if there is none."""
    for path in ("layers", "encoder.layer", "encoder.layers"):
        if isinstance(_submodule(tower, path), nn.ModuleList):
            return path
    return ""


def _blocks(name: str, tower: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    path = _block_list(tower)
    for number, block in tower.get_submodule(path).named_children():
        yield ".".join(part for part in (name, path, number) if part), unwrapped(block)


def _parts(name: str, block: nn.Module) -> BlockParts:
    for layout in LAYOUTS:
        parts = [part for path in astuple(layout) if (part := _submodule(block, path)) is not None]
        if len(parts) == len(astuple(layout)):
            attention, query, key, norm, branch_end = parts
            takes = inspect.signature(block.forward).parameters.values()
            hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes)
            config: Any = attention.config
            scale, num_heads = _scale(attention), config.num_attention_heads
            return BlockParts(name, block, attention, query, key, norm, branch_end, scale, num_heads, hands_on)
    raise UnsupportedModel(
        f"{name} ({type(block).__name__}) has no known layout in the installed transformers; "
        "this was written for the versions 5.10 to 5.23"
    )


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, or None."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _scale(attention: nn.Module) -> float:
    """What this attention multiplies its logits by."""
    scale: Any = attention.scaling if hasattr(attention, "scaling") else attention.scale  # CLIP says scale
    return float(scale)


def _require_bias(parts: BlockParts) -> None:
    """Raise unless log sizes can be handed to the attention of a block."""
    attention: Any = parts.attention
    kernel = attention.config._attn_implementation
    if kernel not in KERNELS_WITH_BIAS:
        raise UnsupportedModel(
            f"{parts.name}: attention {kernel!r} takes no bias for the sizes of tokens; "
            "load the model with attn_implementation='sdpa', or patch with prop_attn=False"
        )
    if "attention_mask" not in inspect.signature(attention.forward).parameters:
        raise UnsupportedModel(
            f"{parts.name}: {type(attention).__name__} of the installed transformers takes no attention_mask for the "
            "sizes of tokens; install a newer transformers, or patch with prop_attn=False"
        )
