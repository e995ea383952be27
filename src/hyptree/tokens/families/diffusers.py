"""Token merging for the U-Nets of diffusers: self-attention over clusters, everything else at full length.

Unlike in a ViT nothing stays merged: a U-Net needs its grid back. At each patched transformer block the tokens of the
block's *input* are clustered, self-attention sees the plain mean of every cluster (no sizes, no proportional
attention), and its output is copied back to all tokens of the cluster before the residual is added. So one step costs
attention over ``K`` instead of ``N`` tokens, and with one token per cluster the model is the old one bit for bit.

    handle = patch_unet(pipeline.unet, keep=0.5)
    image = pipeline("a dog").images[0]
    handle.keep = 0.25            # at run time; handle.enabled = False switches it off
    handle.unpatch()              # or: with patch_unet(unet, keep=0.5) as handle: ...

Only hooks are used: no block of diffusers is replaced, weights and ``state_dict`` stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyptree.cluster.distance import Metric, check_finite
from hyptree.errors import UserError, require, require_known, require_one_of
from hyptree.ops.agglomerate import LINKAGES
from hyptree.tokens.merge import MERGING, merge_weighted, unmerge
from hyptree.tokens.methods import METHODS, Site, check_metric

_ATTRIBUTE = "_hyptree_unet_handle"


class UnetHandle:
    """What `patch_unet` gives: switches that act on the next forward, counts of the last one, `unpatch`.

    Attributes:
        keep: share of the tokens that self-attention sees, in (0, 1].
        enabled: False runs the plain model without removing the hooks.
        num_tokens: name of block -> (tokens of the block, tokens that were attended) in the last forward.
        labels: name of block -> (B, N) cluster of every token in the last forward (none where nothing was merged).
    """

    def __init__(self, unet: nn.Module, keep: float, method: str, linkage: str, metric: Metric, check: bool):
        self.keep = keep
        self.method = method
        self.linkage = linkage
        self.metric = metric
        self.check = check
        self.enabled = True
        self.num_tokens: dict[str, tuple[int, int]] = {}
        self.labels: dict[str, Tensor] = {}
        self._unet = unet
        self._hooks: list[RemovableHandle] = []

    @property
    def keep(self) -> float:
        return self._keep

    @keep.setter
    def keep(self, value: float) -> None:
        if not 0 < value <= 1:
            raise UserError(f"keep={value}: expected a share of the tokens in (0, 1], 1 for the plain model")
        self._keep = float(value)

    def unpatch(self) -> None:
        """Removes every hook; the model is what it was before. Doing it twice is fine."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if getattr(self._unet, _ATTRIBUTE, None) is self:
            delattr(self._unet, _ATTRIBUTE)

    def __enter__(self) -> UnetHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpatch()


class _Site:
    """The hooks of one transformer block; ``labels`` lives from the block's input to its output."""

    def __init__(self, handle: UnetHandle, name: str):
        self.handle = handle
        self.name = name
        self.labels: Tensor | None = None
        self.num_clusters = 0

    def choose(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the block: cluster its input (B, N, C)."""
        handle = self.handle
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        num_tokens = x.shape[1]
        k = max(1, int(num_tokens * handle.keep)) if handle.enabled else num_tokens
        self.labels = None
        handle.labels.pop(self.name, None)
        if k < num_tokens:
            if kwargs.get("attention_mask") is not None:
                raise UserError(
                    f"{self.name}: an attention mask has no meaning for merged tokens; "
                    "run without attention_mask or set handle.enabled = False"
                )
            if handle.check:
                check_finite(x, self.name)
            self.labels = self._labels(x, k)
            self.num_clusters = k
            handle.labels[self.name] = self.labels
        handle.num_tokens[self.name] = (num_tokens, k)

    @torch.no_grad()
    def _labels(self, x: Tensor, k: int) -> Tensor:
        """The cluster (B, N) of every token, 0 to k-1."""
        handle = self.handle
        features = x if x.dtype == torch.float64 else x.float()
        site = Site(features, k, linkage=handle.linkage, metric=handle.metric)
        labels = METHODS[handle.method].reduce(site).labels
        assert labels is not None  # only methods that cluster are let in
        return labels

    def merge(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before a module inside: its input (B, N, C) becomes the clusters' means (B, K, C)."""
        if self.labels is None:
            return None
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        if x.shape[:2] != self.labels.shape:  # set_chunk_feed_forward cuts the input of the feed-forward
            raise UserError(
                f"{self.name}: got tokens {tuple(x.shape[:2])} for clusters of {tuple(self.labels.shape)}; "
                "switch the chunks of the feed-forward off, or patch with mlp=False"
            )
        merged, _ = merge_weighted(x, None, self.labels, self.num_clusters)  # (B, K, C)
        if args:
            return (merged, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": merged}

    def unmerge(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """After it: every token gets the output of its cluster (B, N, C)."""
        return None if self.labels is None else unmerge(output, self.labels)

    def forget(self, block: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.labels = None


def _downsample(name: str, num_levels: int) -> int:
    """How many times smaller than the input the grid is at a module of a U-Net, from its name."""
    part, _, rest = name.partition(".")
    if part == "mid_block":
        return 2 ** (num_levels - 1)
    level = int(rest.partition(".")[0])
    return int(2 ** (level if part == "down_blocks" else num_levels - 1 - level))


def _self_attention_blocks(unet: nn.Module) -> Iterator[tuple[str, int, nn.Module]]:
    """Name, downsampling and module of the transformer blocks whose first attention is self-attention."""
    kind = require("diffusers.models.attention", "diffusion").BasicTransformerBlock
    num_levels = sum(1 for _ in unet.get_submodule("down_blocks").children()) if hasattr(unet, "down_blocks") else 0
    for name, module in unet.named_modules():
        is_inside = name.startswith(("down_blocks.", "mid_block.", "up_blocks."))
        if is_inside and isinstance(module, kind) and not module.only_cross_attention:
            yield name, _downsample(name, num_levels), module


def patch_unet(
    unet: nn.Module,
    keep: float = 0.5,
    method: str = "atc",
    *,
    linkage: str = "average",
    max_downsample: int = 1,
    cross_attention: bool = False,
    mlp: bool = False,
    metric: Metric = "cosine",
    check: bool = True,
) -> UnetHandle:
    """Merges tokens around the self-attention of a diffusers U-Net; returns the handle that undoes it.

    Every image of a batch is clustered for itself, so the two halves of classifier-free guidance get their own
    clusters. Patching a patched model replaces the first patch. ``attention_mask`` on self-attention is refused.

    Args:
        unet: a ``UNet2DConditionModel`` (or another U-Net of diffusers made of ``BasicTransformerBlock``).
        keep: share of the tokens that are attended, ``K = int(N * keep)``, at least 1. 1 is the plain model, bit for
            bit.
        method: "atc" (agglomerative), "tome" (bipartite matching), "kmeans", "kmedoids" or "dpcknn".
        linkage: of "atc": "average", "complete", "single" or "ward".
        max_downsample: merge at grids at most this many times smaller than the input, 1 for the finest level only
            (4096 tokens of a 64 x 64 latent), 8 for all of a four-level U-Net.
        cross_attention: also merge the queries of cross-attention.
        mlp: also merge around the feed-forward.
        metric: "cosine", or a manifold of hyptree.geometry that the features are lifted to (not "tome", "kmeans").
        check: look for NaN and infinity before clustering; waits for the device once per block.

    Raises:
        UserError: no such blocks, none at this resolution, unknown method or linkage. Nothing is patched then.
    """
    require_known("a U-Net cannot use method {!r}", [method], MERGING)
    require_one_of("linkage", linkage, LINKAGES)
    check_metric(metric, method)
    blocks = list(_self_attention_blocks(unet)) if isinstance(unet, nn.Module) else []
    if not blocks:
        raise UserError(
            f"{type(unet).__name__} has no self-attention in diffusers' BasicTransformerBlock: "
            "pass a UNet2DConditionModel, e.g. pipeline.unet"
        )
    chosen = [(name, block) for name, downsample, block in blocks if downsample <= max_downsample]
    if not chosen:
        finest = min(downsample for _, downsample, _ in blocks)
        raise UserError(
            f"max_downsample={max_downsample}: the finest self-attention of this U-Net works at 1/{finest} of the "
            f"input, pass max_downsample={finest}"
        )
    handle = UnetHandle(unet, keep, method, linkage, metric, check)
    previous = getattr(unet, _ATTRIBUTE, None)
    if previous is not None:
        previous.unpatch()
    for name, block in chosen:
        site = _Site(handle, name)
        wanted = {"attn1": True, "attn2": cross_attention, "ff": mlp}
        inner = [module for part, module in block.named_children() if wanted.get(part, False)]
        handle._hooks.append(block.register_forward_pre_hook(site.choose, with_kwargs=True))
        for module in inner:
            handle._hooks.append(module.register_forward_pre_hook(site.merge, with_kwargs=True))
            handle._hooks.append(module.register_forward_hook(site.unmerge))
        handle._hooks.append(block.register_forward_hook(site.forget))
    setattr(unet, _ATTRIBUTE, handle)
    return handle
