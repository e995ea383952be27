"""Choose tokens instead of clustering them: the most attended, random ones, and one token for those left out."""

from __future__ import annotations

import torch
from torch import Tensor

from .labels import clip_k


@torch.no_grad()
def top_k(scores: Tensor, k: int) -> Tensor:
    """Index of the ``k`` tokens of highest score, in ascending order: (B, N) -> (B, K); on ties the first ones.

    More than N tokens is N. The order is that of the input, so that what is kept stays in its place.
    """
    if scores.dim() != 2:
        raise ValueError(f"top_k: expected scores (B, N), got shape {tuple(scores.shape)}")
    k = clip_k(k, scores.shape[1], "top_k")
    best_first = scores.sort(dim=-1, descending=True, stable=True).indices
    return best_first[:, :k].sort(-1).values


def random_tokens(
    batch: int, num_tokens: int, k: int, generator: torch.Generator, device: torch.device | str | None = None
) -> Tensor:
    """Index of ``k`` tokens drawn without replacement, in ascending order: (batch, K), a draw of its own per image.

    Args:
        generator: where the randomness comes from; it moves on. The same state on the same kind of device, same tokens.
        device: of the result; that of the generator unless given.
    """
    k = clip_k(k, num_tokens, "random_tokens")
    draw = torch.rand(batch, num_tokens, generator=generator, device=generator.device)
    return top_k(draw, k).to(device or generator.device)


def fuse_dropped(x: Tensor, scores: Tensor, keep_index: Tensor) -> Tensor:
    """One token for all that were not kept, their mean weighted by score (EViT, arXiv 2202.07800): -> (B, 1, C).

    Summed in float32 (float64 for float64), differentiable in ``x``. Zero where every token was kept; the plain mean
    where all scores of the others are zero.

    Args:
        x: (B, N, C) tokens. scores: (B, N) >= 0, attention received. keep_index: (B, K) from :func:`top_k`.
    """
    if x.dim() != 3 or scores.shape != x.shape[:2] or keep_index.dim() != 2 or len(keep_index) != len(x):
        raise ValueError(
            f"fuse_dropped: expected tokens (B, N, C), scores (B, N), index (B, K), got {tuple(x.shape)}, "
            f"{tuple(scores.shape)}, {tuple(keep_index.shape)}"
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    is_dropped = torch.ones(scores.shape, dtype=wide, device=x.device).scatter(1, keep_index, 0.0)
    weight = scores.detach().to(wide) * is_dropped
    weight = torch.where(weight.sum(-1, keepdim=True) > 0, weight, is_dropped)
    total = weight.sum(-1, keepdim=True)
    weight = (weight / torch.where(total > 0, total, 1.0)).unsqueeze(-1)  # (B, N, 1)
    return (x.to(wide) * weight).sum(1, keepdim=True).to(x.dtype)
