"""Distance matrices to cluster: features that vary smoothly over a grid, noise, and matrices full of ties."""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.cluster import cosine_distance


def features(kind: str, num_images: int, num_tokens: int, seed: int, dim: int = 32) -> Tensor:
    """(B, N, dim): "smooth" like the keys of neighbouring patches, or "noise"."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_images, num_tokens, dim, generator=generator)
    if kind == "noise":
        return noise
    side = max(2, round(num_tokens**0.5))
    coarse = torch.randn(num_images, dim, max(2, side // 2), max(2, side // 2), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(side + 1, side + 1), mode="bilinear")
    return smooth.flatten(2).mT[:, :num_tokens] + 0.3 * noise


def distances(kind: str, num_images: int, num_tokens: int, seed: int) -> Tensor:
    return cosine_distance(features(kind, num_images, num_tokens, seed))


def tied(kind: str, num_images: int, num_tokens: int, seed: int) -> Tensor:
    """(B, N, N) cosine distances in which many are equal."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "equal":
        return torch.full((num_images, num_tokens, num_tokens), 0.5)
    rounded = (distances("noise", num_images, num_tokens, seed) * 128).round() / 128
    if kind == "rounded":
        return rounded
    if kind == "coarse":
        return (rounded * 8).round() / 8
    x = features("noise", num_images, num_tokens, seed)
    if kind == "duplicates":
        source = torch.randint(num_tokens, (num_tokens,), generator=generator)
    else:
        assert kind == "half flat"
        source = torch.arange(num_tokens)
        source[num_tokens // 2 :] = num_tokens - 1
    D = cosine_distance(x)
    D = D[:, source][:, :, source]  # by distances: equal tokens then have exactly equal rows
    same = source[:, None] == source[None, :]
    return D.masked_fill(same, 0)


TIES = ("equal", "rounded", "coarse", "duplicates", "half flat")
