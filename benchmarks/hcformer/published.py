"""HCFormer as its authors' code computes it, from the description alone: what our mixer is measured against.

The order of operations is theirs, the code is ours: channels first, two projections, windows cut by copies, and
products of patches, centres and channels broadcast against each other before they are summed. With ``pads`` a map that
already divides by the fold grows by one whole fold, as theirs does; without, the values are those of
:class:`hyptree.models.HCFormer` with ``mixer_norm=False`` (the code leaves that norm out).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerScale
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.geometry import lorentz
from hyptree.geometry.core.numerics import cap_norm
from hyptree.models.convs import Downsample, Stem
from hyptree.models.hcformer.model import Block, HCFormer
from hyptree.nn.cluster.level import ClusterLevel
from hyptree.ops.map_norm import MapNorm


class PublishedMixer(nn.Module):
    """Both levels of clustering of one block: (B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, block: Block, pads: bool):
        super().__init__()
        ours = block.mixer
        plain = (ours.norm, block.norm1, block.drop_path)
        if ours.patch.c is not None or ours.patch.is_hard or not all(isinstance(m, nn.Identity) for m in plain):
            raise UserError(
                "the published order of operations has soft assignment, Euclidean patches, no norm around the mixer; "
                "use mixer_norm=False and otherwise the defaults"
            )
        self.heads, self.fold, self.pads = ours.num_heads, ours.fold, pads
        points, values = ours.points_and_values.weight.chunk(2)
        offsets = ours.points_and_values.bias.chunk(2)
        self.f, self.v = _as_conv(points, offsets[0]), _as_conv(values, offsets[1])
        self.proj = _as_conv(ours.proj.weight, ours.proj.bias)
        self.patch_centres, self.window_centres = ours.max_patch_centres, ours.max_window_centres
        self.alpha = None if ours.patch.alpha is None else nn.Parameter(ours.patch.alpha.detach().clone())
        self.bias = _bias_map(ours.patch)
        window = ours.window
        self.window_alpha = self.window_bias = None
        self.clip = 1.0 if window is None else window.clip
        self.c = 1.0
        if window is not None and window.alpha is not None:
            assert window.c is not None and window.manifold is None
            self.c = window.c
            self.window_alpha = nn.Parameter(window.alpha.detach().clone())
            self.window_bias = _bias_map(window)

    def forward(self, x: Tensor) -> Tensor:
        points, values = self._heads(self.f(x)), self._heads(self.v(x))  # (B heads, d, H, W)
        height, width = points.shape[-2:]
        own = self._patch_level(points, values)[..., :height, :width]
        own = own.reshape(x.shape[0], -1, height, width)
        if not self.window_centres:
            return self.proj(own)
        shared = self._window_level(points, values)
        shared = shared.reshape(x.shape[0], -1, *shared.shape[-2:])
        return self.proj(torch.cat([F.interpolate(shared, (height, width), mode="nearest"), own], 1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] * self.heads, -1, *x.shape[2:])

    def _patch_level(self, points: Tensor, values: Tensor) -> Tensor:
        height, width = points.shape[-2:]
        if self.pads:
            margin = (0, self.fold - width % self.fold, 0, self.fold - height % self.fold)
            points, values = F.pad(points, margin), F.pad(values, margin)
        size = (points.shape[-2], points.shape[-1])
        bias = None
        if self.bias is not None:
            resized = self.bias.unsqueeze(0)  # (1, heads M, H, W)
            if size != (height, width):
                resized = F.interpolate(resized, size, mode="bilinear", align_corners=False)
            bias = self._cut(resized.unflatten(1, (self.heads, -1)).squeeze(0)).flatten(2)  # (heads S, M, N)
        x, v = self._cut(points), self._cut(values)  # (B heads S, d, h, w)
        centres = F.adaptive_avg_pool2d(x, min(self.patch_centres, x.shape[-1])).flatten(2).mT
        value_centres = F.adaptive_avg_pool2d(v, min(self.patch_centres, x.shape[-1])).flatten(2).mT
        similar = F.normalize(centres, dim=-1) @ F.normalize(x.flatten(2).mT, dim=-1).mT  # (B heads S, M, N)
        logits = similar if self.alpha is None else self.alpha * similar
        if bias is not None:
            logits = (logits.unflatten(0, (-1, bias.shape[0])) + bias).flatten(0, 1)
        mixed = _broadcast_mix(logits.softmax(1), v.flatten(2).mT, value_centres)
        return self._join(mixed.mT.unflatten(2, x.shape[-2:]), size)

    def _window_level(self, points: Tensor, values: Tensor) -> Tensor:
        """(B heads, d, fold, fold)."""
        x, v = (F.adaptive_avg_pool2d(y, self.fold) for y in (points, values))
        centres, value_centres = (F.adaptive_avg_pool2d(y, self.window_centres).flatten(2).mT for y in (points, values))
        flat, assign = x.flatten(2).mT, None
        if self.window_alpha is not None:
            on_c, on_x = (lorentz.expmap0(cap_norm(y.float(), self.clip), self.c) for y in (centres, flat))
            logits = -self.window_alpha * lorentz.pairwise_dist(on_c, on_x, self.c, mode="matmul")
            if self.window_bias is not None:
                bias = self.window_bias.unflatten(0, (self.heads, -1)).flatten(2)  # (heads, M, S)
                logits = (logits.unflatten(0, (-1, self.heads)) + bias).flatten(0, 1)
            assign = logits.softmax(1)
        else:
            assign = flat.new_ones(flat.shape[0], centres.shape[1], flat.shape[1])
        return _broadcast_mix(assign, v.flatten(2).mT, value_centres).mT.unflatten(2, x.shape[-2:])

    def _cut(self, x: Tensor) -> Tensor:
        """(A, C, H, W) -> (A fold fold, C, h, w)."""
        x = x.unflatten(3, (self.fold, -1)).unflatten(2, (self.fold, -1))
        return x.permute(0, 2, 4, 1, 3, 5).flatten(0, 2).contiguous()

    def _join(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """(A fold fold, C, h, w) -> (A, C, H, W)."""
        x = x.unflatten(0, (-1, self.fold, self.fold)).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(x.shape[0], x.shape[1], *size)


def _broadcast_mix(assign: Tensor, values: Tensor, value_centres: Tensor) -> Tensor:
    """(..., M, N), (..., N, d), (..., M, d) -> (..., N, d) by two products of M x N x d numbers each."""
    weight = assign.unsqueeze(-1)
    gathered = (values.unsqueeze(1) * weight).sum(2) + value_centres
    gathered = gathered / (assign.sum(2, keepdim=True) + 1)
    return (gathered.unsqueeze(2) * weight).sum(1)


class PublishedBlock(nn.Module):
    def __init__(self, block: Block, pads: bool):
        super().__init__()
        self.mixer = PublishedMixer(block, pads)
        assert isinstance(block.norm2, MapNorm)
        self.norm = nn.GroupNorm(1, block.norm2.dim)
        self.norm.load_state_dict(block.norm2.state_dict())
        self.fc1 = _as_conv(block.mlp.fc1.weight, block.mlp.fc1.bias)
        self.fc2 = _as_conv(block.mlp.fc2.weight, block.mlp.fc2.bias)
        self.scale1, self.scale2 = _factor(block.scale1), _factor(block.scale2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1 * self.mixer(x)
        return x + self.scale2 * self.fc2(F.gelu(self.fc1(self.norm(x))))


class PublishedHCFormer(nn.Module):
    """The network with the weights of ``model``, which needs ``mixer_norm=False`` and else the paper's settings."""

    def __init__(self, model: HCFormer, pads: bool = True):
        super().__init__()
        self.stages = nn.ModuleList()
        for stage in model.stages:
            conv = stage.downsample
            if not isinstance(conv, Stem | Downsample) or not isinstance(model.norm, MapNorm):
                raise UserError("the published order of operations needs convs='plain' and norm='group'")
            sizes: Any = (conv.kernel_size, conv.stride, conv.padding)
            first = nn.Conv2d(conv.in_channels, conv.out_channels, *sizes)
            first.load_state_dict(conv.state_dict())
            blocks = [PublishedBlock(block, pads) for block in stage.blocks]  # type: ignore[union-attr]
            self.stages.append(nn.Sequential(first, *blocks))
        self.norm = nn.GroupNorm(1, model.num_features)
        self.norm.load_state_dict(model.norm.state_dict())
        self.head = nn.Linear(model.num_features, model.num_classes)
        self.head.load_state_dict(model.head.fc.state_dict())
        self.to(next(model.parameters()).device)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x).mean((2, 3)))


def _as_conv(weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    assert bias is not None
    conv = nn.Conv2d(weight.shape[1], weight.shape[0], 1)
    with torch.no_grad():
        conv.weight.copy_(weight[..., None, None])
        conv.bias.copy_(bias)  # type: ignore[union-attr]
    return conv


def _factor(scale: nn.Module) -> nn.Parameter:
    assert isinstance(scale, LayerScale)
    return nn.Parameter(scale.gamma.detach().view(1, -1, 1, 1).clone())


def _bias_map(level: ClusterLevel) -> nn.Parameter | None:
    """The position bias of a level laid out over the map: (heads M, H, W)."""
    if level.position is None:
        return None
    (ny, nx), (wy, wx), _ = level.position.shape
    full = level.position.bias.detach().unflatten(-1, (wy, wx)).unflatten(0, (ny, nx))  # (ny, nx, heads, M, wy, wx)
    return nn.Parameter(full.permute(2, 3, 0, 4, 1, 5).reshape(-1, ny * wy, nx * wx).clone())
