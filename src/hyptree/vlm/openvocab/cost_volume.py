"""The cost volume: how similar every patch is to every class, made smooth and large by a few attention layers.

In the manner of CAT-Seg (Cho et al. 2024). The input of the head is the cosine of patches and class texts, nothing else
says which class is where; features of the picture and of the texts only guide where information flows. So the head
knows no class by name or number: it takes any list of classes, and permuting the list permutes the maps.

Shapes: B pictures, T classes, P prompts per class, h x w patches, d the width of CLIP, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.data.sample import IGNORE
from hyptree.ops.windows import cover, cut, join, plan

PRIOR = 0.05
"""Probability of every class everywhere that a fresh head gives, roughly."""


def cosine_volume(features: Tensor, text: Tensor) -> Tensor:
    """Cosines of patches (B, d, h, w) and class texts (T, d) or (T, P, d): (B, T, P, h, w), float32."""
    text = text[:, None] if text.dim() == 2 else text
    # Classes differ in the third digit of their cosines, which bfloat16 does not have.
    with torch.autocast(features.device.type, enabled=False):
        patches, words = F.normalize(features.float(), dim=1), F.normalize(text.float(), dim=-1)
        return torch.einsum("bdhw,tpd->btphw", patches, words)


class _GuidedAttention(nn.Module):
    """The layers of both attentions: queries and keys also see a guide."""

    def __init__(self, channels: int, guide: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.guide_norm, self.mlp_norm = nn.LayerNorm(channels), nn.LayerNorm(guide), nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.guide_qk = nn.Linear(guide, 2 * channels, bias=False)
        self.out = nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def _hint(self, guide: Tensor) -> Tensor:
        """What the guide adds to queries, keys and values, of which the last see none of it."""
        return F.pad(self.guide_qk(self.guide_norm(guide)), (0, self.out.in_features))

    def _behind(self, x: Tensor) -> Tensor:
        """The part behind the attention."""
        return x + self.mlp(self.mlp_norm(x))


class SpatialAttention(_GuidedAttention):
    """Attention of patches among their window, for each class alone; queries and keys also see the picture.

    A linear map of the map and its guide side by side is the sum of two maps; so the guide's part is computed once per
    picture and not once per class.

    Shape:
        x (B, T, h, w, C), guide (B, h, w, G) -> (B, T, h, w, C).
    """

    def __init__(self, channels: int, guide: int, num_heads: int, window: int, shifted: bool):
        super().__init__(channels, guide, num_heads)
        self.window, self.shifted = window, shifted

    def forward(self, x: Tensor, guide: Tensor) -> Tensor:
        num_classes, (height, width) = x.shape[1], x.shape[2:4]
        windows = plan((height, width), window=(self.window, self.window), shifted=self.shifted)
        qkv = (self.qkv(self.norm(x)) + self._hint(guide)[:, None]).flatten(0, 1)  # (B T, h, w, 3 C)
        parts = cut(qkv, windows, 3, self.num_heads).flatten(1, 2)  # (3, B T windows, heads, N, C / heads)
        mask = None
        if windows.is_padded:
            inside = cover(windows, x.device)  # (windows, N)
            mask = inside.repeat(len(qkv), 1)[:, None, None]
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=mask)
        mixed = join(mixed.unflatten(0, (len(qkv), -1)), windows).unflatten(0, (-1, num_classes))
        return self._behind(x + self.out(mixed))


class ClassAttention(_GuidedAttention):
    """Linear attention among the classes at every place; queries and keys also see the texts.

    ``softmax`` is replaced by ``elu + 1`` of queries and keys (Katharopoulos et al. 2020), so the cost is linear in the
    number of classes. It runs on a map that is ``pooling`` times smaller: which classes go together changes slowly.

    Shape:
        x (B, T, h, w, C), guide (T, G) -> (B, T, h, w, C).
    """

    def __init__(self, channels: int, guide: int, num_heads: int, pooling: int):
        super().__init__(channels, guide, num_heads)
        self.pooling = pooling

    def forward(self, x: Tensor, guide: Tensor) -> Tensor:
        size = x.shape[2:4]
        small = self._shrink(x)  # (B, T, h', w', C)
        qkv = (self.qkv(self.norm(small)) + self._hint(guide)[:, None, None]).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.permute(4, 0, 2, 3, 5, 1, 6)  # each (B, h', w', heads, T, e)
        mixed = linear_attention(query, key, value)  # (B, h', w', heads, T, e)
        update = self.out(mixed.permute(0, 4, 1, 2, 3, 5).flatten(4))  # (B, T, h', w', C)
        return self._behind(x + self._enlarge(update, (size[0], size[1])))

    def _shrink(self, x: Tensor) -> Tensor:
        if self.pooling == 1:
            return x
        flat = x.flatten(0, 1).permute(0, 3, 1, 2)
        small = F.avg_pool2d(flat, self.pooling, ceil_mode=True, count_include_pad=False)
        return small.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])

    def _enlarge(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        if x.shape[2:4] == size:
            return x
        flat = F.interpolate(x.flatten(0, 1).permute(0, 3, 1, 2), size=size, mode="bilinear", align_corners=False)
        return flat.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weights ``phi(q) phi(k)`` with ``phi = elu + 1``, normalised over keys: (..., N, e) each -> (..., N, e).

    In float32: the normaliser is a sum over all keys.
    """
    with torch.autocast(value.device.type, enabled=False):
        query, key = F.elu(query.float()) + 1, F.elu(key.float()) + 1
        context = key.transpose(-1, -2) @ value.float()  # (..., e, e)
        total = query @ key.sum(-2).unsqueeze(-1)  # (..., N, 1), positive
        return ((query @ context) / total).to(value.dtype)


class UpStage(nn.Module):
    """Twice the size by a transposed convolution, then two convolutions that also see a map of the picture.

    Shape:
        x (B T, C, h, w), guide (B, G, 2 h, 2 w) -> (B T, out, 2 h, 2 w).
    """

    def __init__(self, channels: int, guide: int, out: int):
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels - guide, 2, 2)
        self.mix = nn.Sequential(*_conv(channels, out), *_conv(out, out))

    def forward(self, x: Tensor, guide: Tensor) -> Tensor:
        guide = guide.repeat_interleave(len(x) // len(guide), 0)
        return self.mix(torch.cat([self.up(x), guide], 1))


class CostVolumeHead(nn.Module):
    """From patches and class texts to one map of logits per class, four times as fine as the patches.

    Args:
        width: d, of the joint space of CLIP.
        block_width: of the intermediate features, the first of which guides the doubling to 2 h, the second to 4 h.
        channels: C, of the volume once it is embedded; ``guide`` are those of the guides.
        num_layers: aggregator layers; each is spatial attention twice (plain and shifted windows), then classes.
        window: edge of the windows in patches; smaller maps are one window.
        decoder: channels after each doubling.
        pooling: of the attention among classes.
        gain: factor of the fresh weights that embed the cosines. Those of a CLIP differ by hundredths; its own scale of
            logits, which makes them differ by ones, saves the head hundreds of steps.

    Shape:
        features (B, d, h, w), text (T, d) or (T, P, d), two blocks (B, block_width, h, w) -> logits (B, T, 4 h, 4 w).
    """

    def __init__(
        self,
        width: int,
        block_width: int,
        *,
        channels: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        window: int = 12,
        guide: int = 128,
        decoder: Sequence[int] = (64, 32),
        pooling: int = 2,
        num_prompts: int = 1,
        gain: float = 1.0,
    ):
        super().__init__()
        if channels % num_heads:
            raise ValueError(f"channels {channels} must be a multiple of num_heads {num_heads}")
        if len(decoder) != 2:
            raise ValueError(f"decoder must be two numbers of channels, one per doubling, got {list(decoder)}")
        for name, value in (("window", window), ("pooling", pooling), ("num_prompts", num_prompts)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_prompts = num_prompts
        self.embed = nn.Conv2d(num_prompts, channels, 7, padding=3)
        with torch.no_grad():
            self.embed.weight.mul_(gain)
        self.image_guide = nn.Sequential(nn.Conv2d(width, guide, 3, padding=1), nn.ReLU())
        self.text_guide = nn.Sequential(nn.Linear(width, guide), nn.ReLU())
        self.spatial = nn.ModuleList(
            SpatialAttention(channels, guide, num_heads, window, shifted)
            for _ in range(num_layers)
            for shifted in (False, True)
        )
        self.classes = nn.ModuleList(ClassAttention(channels, guide, num_heads, pooling) for _ in range(num_layers))
        inputs, self.lifts, self.ups = channels, nn.ModuleList(), nn.ModuleList()
        for stage, out in enumerate(decoder):
            hint, stride = max(1, inputs // 4), 2 ** (stage + 1)
            lift = nn.ConvTranspose2d(block_width, 2 * hint, stride, stride)
            self.lifts.append(nn.Sequential(lift, nn.ReLU(), nn.Conv2d(2 * hint, hint, 3, padding=1), nn.ReLU()))
            self.ups.append(UpStage(inputs, hint, out))
            inputs = out
        self.out = nn.Conv2d(inputs, 1, 3, padding=1)
        # A class is rarely where one looks: without this the first steps learn nothing else.
        nn.init.constant_(self.out.bias, math.log(PRIOR / (1 - PRIOR)))  # type: ignore[arg-type]

    def forward(self, features: Tensor, text: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        text = text[:, None] if text.dim() == 2 else text
        if text.shape[1] != self.num_prompts:
            raise ValueError(f"the head takes {self.num_prompts} prompts per class, got {text.shape[1]}")
        if len(blocks) != len(self.lifts):
            raise ValueError(f"the head takes the features of {len(self.lifts)} blocks, got {len(blocks)}")
        volume = cosine_volume(features, text).to(self.embed.weight.dtype)  # (B, T, P, h, w)
        shape = volume.shape[:2]
        x = self.embed(volume.flatten(0, 1)).permute(0, 2, 3, 1).unflatten(0, shape)  # (B, T, h, w, C)
        # Guides are normalised as the volume is: the length of an embedding says nothing about a place.
        image = self.image_guide(F.normalize(features, dim=1)).permute(0, 2, 3, 1)  # (B, h, w, G)
        words = self.text_guide(F.normalize(text.mean(1), dim=-1))  # (T, G)
        for i, layer in enumerate(self.classes):
            x = self.spatial[2 * i](x, image)
            x = self.spatial[2 * i + 1](x, image)
            x = layer(x, words)
        y = x.flatten(0, 1).permute(0, 3, 1, 2)  # (B T, C, h, w)
        for lift, up, block in zip(self.lifts, self.ups, blocks, strict=True):
            y = up(y, lift(block))
        return self.out(y).squeeze(1).unflatten(0, shape)


def _conv(inputs: int, outputs: int) -> list[nn.Module]:
    groups = max(g for g in range(1, max(1, outputs // 16) + 1) if outputs % g == 0)
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(groups, outputs), nn.ReLU()]


def pixel_loss(logits: Tensor, truth: Tensor, count: Tensor | None = None) -> Tensor:
    """Binary cross entropy of every class at every pixel, mean over those that count; 0 (with gradient) without any.

    Args:
        logits: (B, T, H, W). truth: (B, H, W) classes from 0 to T - 1, or ``IGNORE``.
        count: how many pixels the mean is over, by default those that count here.
    """
    logits, truth = logits.float(), truth.long()
    counts = truth != IGNORE
    # One-hot by comparison: no scatter, whose order of sums is free on a GPU.
    target = truth[:, None] == torch.arange(logits.shape[1], device=logits.device).view(1, -1, 1, 1)
    loss = F.binary_cross_entropy_with_logits(logits, target.float(), reduction="none").sum(1)
    count = counts.sum() if count is None else count
    return (loss * counts).sum() / ((count + (count == 0)) * logits.shape[1])
