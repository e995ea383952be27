"""Token reduction written out for timm's ViT, image by image, with scipy as the clustering: the slow definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor


def cosine_labels(features: Tensor, k: int, method: str = "average") -> Tensor:
    """(N, D) -> (N,) labels by scipy."""
    unit = torch.nn.functional.normalize(features.double(), dim=-1)
    distance = (1 - unit @ unit.T).clamp(0, 2).numpy()
    np.fill_diagonal(distance, 0)
    if method == "ward":  # cosine distances are half the squared distances of directions
        distance = np.sqrt(distance)
    tree = linkage(squareform((distance + distance.T) / 2, checks=False), method)
    return torch.from_numpy(fcluster(tree, k, "maxclust")).long()


def merge_one(x: Tensor, size: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(N, C), (N,) -> clusters in the order of their first members."""
    order = list(dict.fromkeys(labels.tolist()))
    members = [labels == label for label in order]
    means = [(x[m] * size[m, None]).sum(0) / size[m].sum() for m in members]
    return torch.stack(means), torch.stack([size[m].sum() for m in members])


def reduced_forward(
    model: Any, image: Tensor, counts: Mapping[int, int], num_prefix: int, method: str = "average", prop: bool = True
) -> tuple[Tensor, Tensor]:
    """Logits (1, classes) of one image (3, H, W) and the sizes of the patch tokens at the end."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))
    size = torch.ones(x.shape[1], dtype=x.dtype)
    for index, block in enumerate(model.blocks):
        attn = block.attn
        q, k, v = attn.qkv(block.norm1(x)).reshape(x.shape[1], 3, attn.num_heads, -1).permute(1, 2, 0, 3)
        q, k = attn.q_norm(q), attn.k_norm(k)
        logits = attn.scale * q @ k.mT + (size.log() if prop else 0)
        mixed = (logits.softmax(-1) @ v).transpose(0, 1).reshape(1, x.shape[1], -1)
        x = x + block.ls1(attn.proj(mixed))
        if index in counts:
            labels = cosine_labels(k.mean(0)[num_prefix:], counts[index], method)
            patches, sizes = merge_one(x[0, num_prefix:], size[num_prefix:], labels)
            x = torch.cat([x[:, :num_prefix], patches[None]], 1)
            size = torch.cat([size[:num_prefix], sizes])
        x = x + block.ls2(block.mlp(block.norm2(x)))
    x = model.norm(x)
    weight = size[None, num_prefix:, None]
    if model.attn_pool is None and model.global_pool == "avg":
        pooled = (x[:, num_prefix:] * weight).sum(1) / weight.sum(1)
        return model.head(model.fc_norm(pooled)), size[num_prefix:]
    if model.attn_pool is not None:  # as many copies of a token as it has patches
        copies = torch.arange(num_prefix, x.shape[1]).repeat_interleave(size[num_prefix:].long())
        return model.head(model.fc_norm(model.attn_pool(x[:, copies]))), size[num_prefix:]
    return model.forward_head(x), size[num_prefix:]
