"""Vision transformers of timm: ViT, DeiT (also distilled), AugReg, DINOv2 with and without registers, CLIP towers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyptree.errors import UserError
from hyptree.tokens.families.adapter import BlockParts, FamilyAdapter, Override, UnsupportedModel, unwrapped

if TYPE_CHECKING:
    from hyptree.tokens.handle import Handle


def sites(model: nn.Module) -> FamilyAdapter:
    """The adapter of a timm model whose blocks are pre-norm and whose attention sees all tokens."""
    from timm.models.vision_transformer import VisionTransformer

    kind = type(model).__name__
    if not isinstance(model, VisionTransformer):
        raise UnsupportedModel(f"{kind} cannot be reduced: {_why_not(model)}")
    blocks = [_parts(f"blocks.{i}", unwrapped(block), kind) for i, block in enumerate(model.blocks)]
    has_class = model.cls_token is not None
    # Some classes add tokens without counting them.
    num_counted = (
        int(has_class)
        + int(getattr(model, "dist_token", None) is not None)
        + (getattr(model, "num_reg_tokens", 0) or 0)
    )
    return TimmAdapter(model, blocks, max(model.num_prefix_tokens, num_counted), has_class)


class TimmAdapter(FamilyAdapter):
    """Adds to the default: pooling that knows sizes and padding, and intermediates at full resolution."""

    handle: Handle

    def check_call(self, index: int, kwargs: dict[str, Any]) -> None:
        for name, what in (("attn_mask", "an attention mask"), ("is_causal", "causal attention")):
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise UserError(
                    f"{self.blocks[index].name}: {what} has no meaning for merged tokens: leave out {name}, "
                    "or set handle.enabled = False"
                )

    def overrides(self, handle: Handle) -> Iterator[Override]:
        self.handle = handle
        if getattr(self.model, "attn_pool", None) is None and hasattr(self.model, "pool"):
            yield Override(self.model, "pool", self.pool)
        yield Override(self.model, "forward_intermediates", self.forward_intermediates)

    def hooks(self, handle: Handle) -> list[RemovableHandle]:
        self.handle = handle
        norm = self.model.get_submodule("norm")
        hooks = [norm.register_forward_hook(handle.carry)]
        pooling = getattr(self.model, "attn_pool", None)
        if isinstance(pooling, nn.Module):
            hooks.append(pooling.register_forward_pre_hook(self._add_sizes, with_kwargs=True))
        return hooks

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """timm's pooling, with tokens weighted by their sizes and padding left out."""
        model: Any = self.model
        kind = model.global_pool if pool_type is None else pool_type
        weights = self.handle.token_weights(x) if kind in ("avg", "avgmax", "max") else None
        if weights is None:
            return type(model).pool(model, x, pool_type)
        first = 0 if getattr(model, "pool_include_prefix", False) else self.num_prefix
        x, weights = x[:, first:], weights[:, first:, None]  # (B, N, C), (B, N, 1)
        mean = (x * weights).sum(1) / weights.sum(1)
        if kind == "avg":
            return mean.to(x.dtype)
        largest = x.masked_fill(weights == 0, float("-inf")).amax(1)
        return largest if kind == "max" else 0.5 * (largest + mean).to(x.dtype)

    def _add_sizes(self, pooling: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Attention pooling counts patches, not tokens, and does not see padding; without a mask it counts tokens."""
        x = args[0]
        model: Any = self.model
        first = 0 if getattr(model, "pool_include_prefix", False) else self.num_prefix
        flow = self.handle.flow_of(x, num_cut=first)
        mask: Any = None if flow is None else flow.mask("mask" if self.handle.attention_way else None, x)
        if flow is None or mask is None:
            return None
        if "attn_mask" not in inspect.signature(type(pooling).forward).parameters:
            if flow.num is None:
                return None
            raise UserError(
                f"attn_pool ({type(pooling).__name__}) takes no mask, so padding cannot be hidden from it: "
                "use keep, r or counts instead of a threshold"
            )
        return args, {**kwargs, "attn_mask": mask[..., first:]}

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """timm's method, with every intermediate at full resolution: patches get the token they were merged into."""
        model: Any = self.model
        original = type(model).forward_intermediates
        call = inspect.signature(original).bind(model, x, *args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        if not self.handle.enabled:
            return original(*call.args, **call.kwargs)
        grid = model.patch_embed.dynamic_feat_size(x.shape[-2:]) if arguments["output_fmt"] == "NCHW" else None
        arguments["output_fmt"] = "NLC"
        with self.handle.dense():
            result = original(*call.args, **call.kwargs)

            from timm.models._features import feature_take_indices

            taken, _ = feature_take_indices(len(model.blocks), arguments["indices"])
            sources = [self.handle.source_after(layer) for layer in sorted(taken)]

        def full(maps: list[Any]) -> list[Any]:
            return [_full_map(y, source, grid) for y, source in zip(maps, sources, strict=True)]

        if isinstance(result, dict):
            return {**result, "image_intermediates": full(result["image_intermediates"])}
        if isinstance(result, tuple):
            return result[0], full(result[1])
        return full(result)


def _full_map(y: Any, source: Tensor | None, grid: tuple[int, int] | None) -> Any:
    """Tokens (B, K, C) as patches (B, P, C) or, with a grid, (B, C, H, W); dropped patches are zero."""
    if isinstance(y, tuple):  # with its prefix tokens
        return _full_map(y[0], source, grid), *y[1:]
    if source is not None:
        index = source.clamp_min(0).unsqueeze(-1).expand(-1, -1, y.shape[2])
        y = y.gather(1, index).masked_fill((source < 0).unsqueeze(-1), 0)
    if grid is None:
        return y
    return y.reshape(len(y), *grid, -1).permute(0, 3, 1, 2).contiguous()


def _parts(name: str, block: nn.Module, kind: str) -> BlockParts:
    """The parts of one block, or why it cannot be reduced."""
    from timm.layers import Attention
    from timm.models import vision_transformer as vit

    if type(block).forward is not vit.Block.forward:
        names = {
            "ResPostBlock": "is post-norm: what is merged before its MLP would not be what the MLP sees",
            "ParallelScalingBlock": "runs attention and MLP in parallel: nothing lies between them",
            "DiffParallelScalingBlock": "runs attention and MLP in parallel: nothing lies between them",
            "ParallelThingsBlock": "runs several attentions and MLPs in parallel",
        }
        reason = names.get(type(block).__name__, "computes something else than timm's pre-norm Block")
        raise UnsupportedModel(f"{kind} cannot be reduced: {name} ({type(block).__name__}) {reason}")
    attention: Any = block.attn
    if type(attention).forward is not Attention.forward:
        raise UnsupportedModel(
            f"{kind} cannot be reduced: {name}.attn ({type(attention).__name__}) is not timm's plain self-attention"
        )
    if "attn_mask" not in inspect.signature(Attention.forward).parameters:
        raise UnsupportedModel("the attention of this timm takes no mask: pip install -U timm")
    return BlockParts(
        name=name,
        block=block,
        attention=attention,
        query=attention.q_norm,
        key=attention.k_norm,
        norm=block.get_submodule("norm2"),
        branch_end=block.get_submodule("drop_path2"),
        scale=attention.scale,
    )


def _why_not(model: nn.Module) -> str:
    """Names the first layer that makes a model something else than a plain ViT."""
    from timm.models.vision_transformer import VisionTransformer

    for name, module in model.named_children():
        if isinstance(module, VisionTransformer):
            return f"it wraps a VisionTransformer, patch model.{name}"
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "WindowAttention" in kind:
            return f"{name} ({kind}) uses window attention, whose windows need every patch"
        if "Rope" in kind or "RotaryEmbedding" in kind:
            return f"{name} ({kind}) has rotary positions, and a merged token has no position"
        if name and ("RelPos" in kind or "RelativePosition" in kind):
            return f"{name} ({kind}) has relative positions, and a merged token has no position"
    return "it is not timm's VisionTransformer"
