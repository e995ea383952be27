"""A feature for every patch from the image tower of a CLIP, in the space of its texts, at any picture size.

CLIP is trained to put one vector per picture beside its caption. Its last block mixes all patches into the class token;
for a vector per patch that mixing is left out: the values of the last attention go straight to its output projection,

    y = out_proj(W_v ln_1(x)) + x_cls,        z = y + mlp(ln_2(y)),        feature = project(ln_post(z))

with the class token ``x_cls`` as the residual of every patch. A tower that pools by attention instead of a class token
(SigLIP) gives what its pooling says of each patch alone.

The towers are run as they are, with hooks on their blocks, so attached adapters act here as everywhere.
The last block is given its class token only: its mixing would be thrown away.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import UserError


@dataclass(frozen=True)
class DenseFeatures:
    """What an image tower says of every patch."""

    features: Tensor
    """(B, d, h, w) in the space of the text embeddings, not normalised."""
    blocks: tuple[Tensor, ...]
    """(B, width, h, w) after each of the blocks that were asked for."""


class DenseTower(ABC):
    """An image tower that is asked for patches; ``dense_tower`` finds the right one. No module: it owns no weights.

    Attributes:
        blocks: blocks whose outputs are given too, counted from 1; not the last.
        layers, depth: all blocks, and how many they are.
        block_width: width of these outputs.
        width: d, of the features.
        patch: edge of a patch in pixels; pictures are a multiple of it.
    """

    block_width: int
    width: int
    patch: int

    def __init__(self, layers: Sequence[nn.Module], blocks: Sequence[int] | None):
        self.layers, self.depth = layers, len(layers)
        # A third and two thirds of the depth: 4 and 8 of 12 blocks, 8 and 16 of 24.
        usual = tuple(max(1, round(self.depth * k / 3)) for k in (1, 2))
        self.blocks = usual if blocks is None else tuple(blocks)
        for block in self.blocks:
            if not 1 <= block < self.depth:
                raise ValueError(f"blocks must be from 1 to {self.depth - 1} (the last but one), got {block}")

    def __call__(self, pixels: Tensor) -> DenseFeatures:
        """Features of pictures (B, 3, H, W), normalised as the tower wants them."""
        height, width = pixels.shape[-2:]
        if height % self.patch or width % self.patch:
            raise ValueError(f"pictures must be a multiple of {self.patch} pixels, got {height}x{width}")
        grid = (height // self.patch, width // self.patch)
        seen: dict[int, Tensor] = {}
        with self._watched(seen) as last:
            self._run(pixels, grid)
        dense = self._project(self._finish(last[0]))  # (B, h w, d)
        if torch.is_grad_enabled() and seen[self.depth].requires_grad:
            # Queries and keys of the last block do nothing here. They get a gradient of zero rather than none, because
            # training with several processes waits for every parameter.
            dense = dense + 0.0 * seen[self.depth].float().sum().to(dense.dtype)
        blocks = tuple(_as_map(seen[i][:, self._prefix :], grid) for i in self.blocks)
        return DenseFeatures(_as_map(dense, grid), blocks)

    @contextlib.contextmanager
    def _watched(self, seen: dict[int, Tensor]) -> Iterator[list[Tensor]]:
        """Inside, outputs of the blocks that matter go to ``seen``, the last block's input to the list given."""
        last: list[Tensor] = []

        def keep(i: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                seen[i] = output[0] if isinstance(output, tuple) else output

            return hook

        def shorten(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
            if not args:  # called by keyword
                last.append(options["hidden_states"])
                return args, options | {"hidden_states": last[0][:, :1]}
            last.append(args[0])
            return (last[0][:, :1], *args[1:]), options

        handles = [self.layers[i - 1].register_forward_hook(keep(i)) for i in sorted({*self.blocks, self.depth})]
        if self._shortens:
            handles.append(self.layers[-1].register_forward_pre_hook(shorten, with_kwargs=True))
        try:
            yield last
            if not self._shortens:
                last.append(seen[self.depth])
        finally:
            for handle in handles:
                handle.remove()

    _shortens = True
    """Whether the last block is run on the class token alone."""
    _prefix = 1
    """Tokens before those of the patches."""

    @abstractmethod
    def _run(self, pixels: Tensor, grid: tuple[int, int]) -> None: ...

    @abstractmethod
    def _finish(self, x: Tensor) -> Tensor:
        """From the last block's input (B, 1 + h w, width) to patches (B, h w, width), normed."""

    @abstractmethod
    def _project(self, x: Tensor) -> Tensor: ...


class OpenClipTower(DenseTower):
    """The ``visual`` of an open_clip model: a VisionTransformer with class token and learned positions."""

    def __init__(self, visual: Any, blocks: Sequence[int] | None = None):
        super().__init__(visual.transformer.resblocks, blocks)
        self.tower, self.width = visual, visual.proj.shape[1]
        self.block_width, self.patch = visual.conv1.out_channels, visual.conv1.kernel_size[0]

    def _run(self, pixels: Tensor, grid: tuple[int, int]) -> None:
        positions: Tensor = self.tower.positional_embedding
        if tuple(self.tower.grid_size) == grid:
            self.tower(pixels)
            return
        from timm.layers import resample_abs_pos_embed

        resized = resample_abs_pos_embed(in_memory(positions)[None], list(grid), self.tower.grid_size, antialias=False)
        torch.func.functional_call(self.tower, {"positional_embedding": resized[0]}, (pixels,))

    def _finish(self, x: Tensor) -> Tensor:
        block: Any = self.layers[-1]
        attn, width = block.attn, x.shape[-1]
        weight, bias = in_memory(attn.in_proj_weight)[2 * width :], attn.in_proj_bias
        value = F.linear(block.ln_1(x), weight, None if bias is None else bias[2 * width :])
        y = x[:, :1] + block.ls_1(attn.out_proj(value[:, 1:]))
        y = y + block.ls_2(block.mlp(block.ln_2(y)))
        return self.tower.ln_post(y)

    def _project(self, x: Tensor) -> Tensor:
        return x @ in_memory(self.tower.proj)


class TransformersTower(DenseTower):
    """The vision model of transformers' CLIPModel (class token) or SiglipModel (attention pooling)."""

    def __init__(self, model: Any, blocks: Sequence[int] | None = None):
        super().__init__(model.vision_model.encoder.layers, blocks)
        self.tower = model.vision_model
        self.projection: Any = getattr(model, "visual_projection", None)
        self._shortens = hasattr(self.tower.embeddings, "class_embedding")
        self._prefix = int(self._shortens)
        patching = self.tower.embeddings.patch_embedding
        self.block_width, self.patch = patching.out_channels, patching.kernel_size[0]
        self.width = self.block_width if self.projection is None else self.projection.out_features

    def _run(self, pixels: Tensor, grid: tuple[int, int]) -> None:
        self.tower(pixel_values=pixels, interpolate_pos_encoding=True)

    def _finish(self, x: Tensor) -> Tensor:
        if not self._shortens:
            tokens = self.tower.post_layernorm(x)
            return self.tower.head(tokens.reshape(-1, 1, tokens.shape[-1])).reshape(tokens.shape)  # each patch alone
        block: Any = self.layers[-1]
        attn = block.self_attn
        y = x[:, :1] + attn.out_proj(attn.v_proj(block.layer_norm1(x[:, 1:])))
        y = y + block.mlp(block.layer_norm2(y))
        return self.tower.post_layernorm(y)

    def _project(self, x: Tensor) -> Tensor:
        return x if self.projection is None else self.projection(x)


def dense_tower(model: Any, blocks: Sequence[int] | None = None) -> DenseTower:
    """The dense reading of an Encoder, or of a bare model of open_clip or transformers.

    Outputs of ``blocks`` are given too, counted from 1; by default those at a third and two thirds.
    """
    bare: Any = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    visual: Any = getattr(bare, "visual", None)
    resblocks = getattr(getattr(visual, "transformer", None), "resblocks", None)
    if resblocks is not None:
        plain = hasattr(visual, "positional_embedding") and hasattr(visual, "conv1")
        attends = isinstance(getattr(resblocks[-1], "attn", None), nn.MultiheadAttention)
        pools = getattr(visual, "attn_pool", None) is None and getattr(visual, "proj", None) is not None
        if plain and attends and pools and getattr(resblocks[-1].attn, "in_proj_weight", None) is not None:
            return OpenClipTower(visual, blocks)
    vision: Any = getattr(bare, "vision_model", None)
    if hasattr(getattr(vision, "encoder", None), "layers") and hasattr(
        getattr(vision, "embeddings", None), "patch_embedding"
    ):
        conv = isinstance(vision.embeddings.patch_embedding, nn.Conv2d)
        if conv and (hasattr(vision.embeddings, "class_embedding") or hasattr(vision, "head")):
            return TransformersTower(bare, blocks)
    raise UserError(
        f"{type(bare).__name__} has no image tower whose patches can be read; take a ViT of open_clip, or CLIPModel or "
        "SiglipModel of transformers"
    )


def in_memory(weight: Tensor) -> Tensor:
    """A weight that is read where its module does not run; an offloaded one would give any numbers without a word."""
    if weight.is_meta:
        raise UserError(
            "patches cannot be read from an offloaded tower of open_clip; bring model.visual into memory, or take the "
            "model from transformers"
        )
    return weight


def _as_map(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, h w, C) -> (B, C, h, w)."""
    return tokens.transpose(1, 2).unflatten(2, grid)
