"""Choose tokens instead of clustering them: the most attended ones, or random ones."""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.cluster.labels import clip_k


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
