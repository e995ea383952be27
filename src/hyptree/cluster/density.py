"""Density peaks: centres are tokens that lie dense and far from any denser one; the others join the nearest centre."""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.cluster.centres import nearest_centre, require_distances
from hyptree.cluster.labels import clip_k, number_by_first_member
from hyptree.cluster.select import top_k


@torch.no_grad()
def density_peaks(D: Tensor, k: int, neighbours: int = 5) -> Tensor:
    """Clusters around density peaks: distances (B, N, N) -> labels (B, N) in 0..k-1, numbered by their first member.

    Density of a token is ``exp(-mean squared distance to its nearest neighbours)``, its separation the distance to the
    nearest denser token (the largest distance in the image for the densest one); centres are the ``k`` tokens whose
    product of the two is largest. [ours] Where densities, products or distances are equal the smaller index counts as
    denser, better, nearer: no noise is added, the result repeats. Does not wait for the device.

    Args:
        D: symmetric distances with zero diagonal. k: number of clusters; more than N is N.
        neighbours: how many nearest tokens make the density (at most N - 1 are used).
    """
    require_distances(D, "density_peaks")
    num_tokens = D.shape[-1]
    k = clip_k(k, num_tokens, "density_peaks")
    if neighbours < 1:
        raise ValueError(f"density_peaks: neighbours must be at least 1, got {neighbours}")
    if k == num_tokens:
        return torch.arange(num_tokens, device=D.device).repeat(len(D), 1)
    itself = torch.eye(num_tokens, dtype=torch.bool, device=D.device)
    nearest = D.masked_fill(itself, float("inf")).topk(min(neighbours, num_tokens - 1), -1, largest=False).values
    sparseness = nearest.square().mean(-1)  # (B, N): small is dense; compared before exp can make unequal equal
    index = torch.arange(num_tokens, device=D.device)
    mine, other = sparseness.unsqueeze(-1), sparseness.unsqueeze(-2)  # (B, N, 1), (B, 1, N)
    is_denser = (other < mine) | ((other == mine) & (index < index.unsqueeze(-1)))  # (B, N, N): column than row
    separation = D.masked_fill(~is_denser, float("inf")).amin(-1)
    separation = torch.where(separation.isinf(), D.amax((-2, -1)).unsqueeze(-1), separation)
    centres = top_k(torch.exp(-sparseness) * separation, k)  # (B, K)
    return number_by_first_member(nearest_centre(D, centres), k)
