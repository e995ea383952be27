"""Agglomerative clustering of a batch of distance matrices in plain torch: the definition the kernels are held to.

Clusters are merged greedily, always the two closest. Which of several equally close pairs comes first is fixed by the
order (distance, smaller end, larger end), where the ends are

- **complete, average, ward**: the representatives of the two clusters. A cluster's representative is its smallest
  token. :func:`cut` at k clusters is exactly this greedy run after N - k merges.
- **single**: the two tokens of the edge. The links are the minimum spanning tree under this order, which is unique;
  :func:`cut` at k clusters keeps its N - k smallest edges under the same order.

So labels are a function of the distances alone: the algorithm (greedy steps, rounds of reciprocal neighbours, Prim,
Boruvka), the device, the batch around an image and the number of threads do not matter.

Why rounds give the greedy run (complete, average, ward): merging I and J never brings the result closer to a third
cluster M than the nearer of the two was, and where it ends up at the same distance, both were at that distance and the
representative of the merged cluster is the smaller of the two. So under the order above a reciprocal pair of nearest
neighbours stays one until it is merged, and all of them can be merged at once. Links of one height h form groups whose
clusters all lie at distance h from each other; the greedy run joins such a group to its smallest representative, one by
one, so sorting by (height, up, absorbed token) is the order of the greedy run.

Arithmetic: complete and single compare the given distances themselves. Average keeps sums in float64 and divides once
for comparison. Float32 cosine distances are multiples of 2^-24 in [0, 2], so the sums are exact (N <= 2^14) and the one
division, correctly rounded, keeps order and ties. Other distances (float64, other metrics) have sums that are right up
to the last bits of float64, so ties of sums may then be seen or missed there.

Ward takes **squared** Euclidean distances (cosine distances of features are half the squared distances of their
directions and fit as they are) and gives squared heights, those of ``linkage(sqrt(D), "ward") ** 2`` in scipy. It is
reducible for every symmetric D, and its numerator consists of sums of distances times integers, divided once: exact for
cosine distances while |I| |J| <= 2^14, so always for N <= 256. Two larger clusters see a relative error of 2^-50, which
can only decide between candidates that are nearer to each other than that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hyptree.ops.agglomerate.forest import Forest, Links, cut, cut_at, follow

__all__ = ["LINKAGES", "Forest", "build_forest", "cut", "cut_at"]

LINKAGES = ("average", "complete", "single", "ward")

_INF = math.inf
# A batch is clustered in slices with matrices of this size. On the CPU larger ones are taken from the system and given
# back in every round, and leave the caches: average linkage of 32 images of 196 tokens spent 14 of 37 ms on that. On a
# GPU the limit only keeps memory within bounds (some four matrices are alive at a time).
_SLICE_BYTES = 5 * 2**20
_DEVICE_SLICE_BYTES = 2**30


@torch.no_grad()
def build_forest(D: Tensor, linkage: str, num_merges: int | None = None, threshold: float | None = None) -> Forest:
    """The links of each image, as many as asked for: the first ``num_merges``, or all up to ``threshold``, or all.

    The host waits for the device once per round, to see which images need it (again only where distances are tied).
    Where that is not allowed, as in CUDA graphs, use the triton backend.

    Args:
        D: (B, N, N) symmetric finite distances, float32 or float64; the diagonal is not read.
        linkage: one of ``LINKAGES``.
        num_merges: stop once the ``num_merges`` smallest links are certain.
        threshold: stop once all links of height ``<= threshold`` are there.
    """
    num_tokens = D.shape[-1]
    height_type = torch.float64 if linkage in ("average", "ward") else D.dtype
    wanted = num_tokens - 1 if num_merges is None else min(num_merges, num_tokens - 1)
    if wanted <= 0 or len(D) == 0:
        nothing = Links(D, height_type).in_order()
        return nothing if linkage == "single" else nothing._replace(edge=None)
    limit = _SLICE_BYTES if D.device.type == "cpu" else _DEVICE_SLICE_BYTES
    num_slices = math.ceil(len(D) / max(1, limit // (num_tokens**2 * height_type.itemsize)))
    forests = []
    for part in D.chunk(num_slices):
        W, links = part.clone(memory_format=torch.contiguous_format), Links(part, height_type)
        W.diagonal(dim1=1, dim2=2).fill_(_INF)  # nobody is its own nearest
        if linkage == "single":
            forests.append(_boruvka(W, links, wanted, threshold))
        else:
            forests.append(_reciprocal_rounds(W, links, linkage, wanted, threshold))
    up, height, edge = zip(*forests, strict=True)
    return Forest(torch.cat(up), torch.cat(height), torch.cat(edge) if linkage == "single" else None)


# ---------------------------------------------------------------------- complete, average, ward
def _reciprocal_rounds(W: Tensor, links: Links, linkage: str, wanted: int, threshold: float | None) -> Forest:
    """Merges all reciprocal nearest pairs of clusters at once, round after round.

    W holds the distances (complete) or the sums of distances (average, ward) between the clusters of the images at
    work, in ascending order of their representatives; it shrinks every round. The diagonal is inf and stays so:
    combining rows and columns brings the entries of the old diagonal only to the new one.

    Clusters that are too far away to matter are left out (``Links.limit``), so the last rounds are small.

    Images with fewer clusters than others are padded with copies of one. A copy of the first cluster lies at distance
    inf from it and as far from others as that one, which comes first, so nobody has a copy as its nearest. A copy of
    one that was left out is farther from everybody than the limit. Either way copies are in no link that counts.
    """
    num_images, num_tokens = W.shape[:2]
    device = W.device
    image = torch.arange(num_images, device=device)  # (A,) the images at work
    size = torch.full_like(image, num_tokens)  # (A,) clusters of each
    rep = torch.arange(num_tokens, device=device).repeat(num_images, 1)  # (A, n) smallest token of each cluster
    count = torch.ones(num_images, num_tokens, dtype=torch.float64, device=device)  # (A, n) tokens of each cluster
    within = torch.zeros_like(count)  # (A, n) sum of the distances inside each cluster, for ward
    for r in range(1, num_tokens):
        n = W.shape[1]
        if r == 1 or linkage == "complete":
            Q = W
        elif linkage == "average":  # rounded once, so equal means are equal numbers
            Q = count[:, :, None] * count[:, None, :]
            torch.div(W, Q, out=Q)
        else:
            Q = _ward(W, count, within)
        value, nearest = _row_minimum(Q)  # (A, n)
        slot = torch.arange(n, device=device)
        is_real = slot < size[:, None]
        is_pair = is_real & (nearest.gather(1, nearest) == slot)
        is_leader = is_pair & (slot < nearest)
        is_gone = is_pair & (slot > nearest)
        links.add(image, torch.where(is_gone, rep, num_tokens), rep.gather(1, nearest), value)
        limit = links.limit(image, wanted, threshold)[:, None]
        is_left = is_real & ~is_gone & (value <= limit) & (value < _INF)
        # Others as near to a leader as the one it takes in; greedy steps would turn to them next.
        is_tied = is_left & ~is_pair & is_leader.gather(1, nearest) & (value == value.gather(1, nearest))
        size = is_left.sum(1)
        sizes, tied = torch.stack([size, is_tied.any(1)]).tolist()  # the one synchronisation of the round
        work = torch.tensor([i for i, left in enumerate(sizes) if left], device=device)
        if not len(work):
            break
        longest = max(sizes)
        if any(tied):
            is_taken = _is_taken_too(Q, value, nearest, is_tied)
            target = torch.where(is_taken, nearest.gather(1, nearest), slot)  # the one the leader takes in anyway
            W, count, within = _absorbed(linkage, W, count, within, target)
            links.add(image, torch.where(is_taken, rep, num_tokens), rep.gather(1, nearest), value)
            is_left &= ~is_taken
            size = is_left.sum(1)
            longest = int(size[work].max())
        if len(work) < len(sizes):  # leave the images that are done
            image, size, rep, count, within = image[work], size[work], rep[work], count[work], within[work]
            nearest, is_leader, is_left = nearest[work], is_leader[work], is_left[work]

        # Who is left, in ascending order, and whom it takes in: itself where it takes in nobody.
        position = torch.where(is_left, is_left.cumsum(1) - 1, longest)
        a = position.new_zeros(len(work), longest + 1).scatter_(1, position, slot.expand_as(position))[:, :longest]
        is_leader = is_leader.gather(1, a)
        b = torch.where(is_leader, nearest.gather(1, a), a)
        if linkage == "ward":
            between = W[work[:, None], a, b]
            inside = within.gather(1, a)
            within = torch.where(is_leader, inside + within.gather(1, b) + between, inside)
        W = _combined(W, work, a, b, None if linkage == "complete" else is_leader)
        own = count.gather(1, a)
        count = torch.where(is_leader, own + count.gather(1, b), own)
        rep = rep.gather(1, a)
    limit = links.limit(slice(None), wanted, threshold)[:, None]
    height = links.height[:, :num_tokens]
    is_counted = height <= limit  # the others depend on when which image was done
    up = torch.where(is_counted, links.up[:, :num_tokens], torch.arange(num_tokens, device=device))
    return Forest(up, height.masked_fill(~is_counted, _INF))


def _absorbed(linkage: str, W: Tensor, count: Tensor, within: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W, count and within after each cluster was put together with the one at ``target``, any number at once.

    What is left at the slots of those put elsewhere means nothing any more.
    """
    slot = torch.arange(W.shape[1], device=W.device)
    if linkage != "complete":
        W = W.double()
    if linkage == "ward":
        is_same = (target[:, :, None] == target[:, None, :]) & (slot != slot[:, None])
        within = within + torch.where(is_same, W, 0).sum(2) / 2  # every pair is seen from both sides
        within = torch.zeros_like(within).scatter_add_(1, target, within)
    count = torch.zeros_like(count).scatter_add_(1, target, count)
    for dim in (1, 2):
        index = target.unsqueeze(3 - dim).expand_as(W)
        if linkage == "complete":
            W = W.scatter_reduce(dim, index, W, "amax")
        else:
            W = torch.zeros_like(W).scatter_add_(dim, index, W)
    return W, count, within


def _is_taken_too(Q: Tensor, value: Tensor, nearest: Tensor, is_tied: Tensor) -> Tensor:
    """Which of the tied clusters join their leader in this round, (A, n): greedy steps would take them one by one.

    After its nearest a leader takes in, in ascending order, those whose distance from the growing cluster stays what it
    was. That is certain for a cluster which has this distance also from everybody who comes before it and is as near to
    the leader, no matter whom of them the leader gets. Flat regions of a picture are such groups.
    """
    image, slot = is_tied.nonzero(as_tuple=True)
    leader = nearest[image, slot]
    distance = value[image, slot, None]
    others = torch.arange(Q.shape[1], device=Q.device)
    is_before = (Q[image, leader] == distance) & (others < slot[:, None])  # the leader itself is at inf
    is_taken = ~(is_before & (Q[image, slot] != distance)).any(1)
    return is_tied.index_put((image, slot), is_taken)


def _combined(W: Tensor, work: Tensor, a: Tensor, b: Tensor, is_leader: Tensor | None) -> Tensor:
    """Rows and columns a and b of W taken together for the images ``work``, (A, n, n) to (A', n', n').

    The maximum, or with ``is_leader`` the sum where two different ones come together. Who stays alone is added to
    itself and halved, which is exact, keeps inf and needs no mask over the matrix.
    """
    n = W.shape[1]
    rows = W.view(-1, n)
    start = work[:, None] * n
    first = rows.index_select(0, (start + a).flatten())  # contiguous rows: fast copies
    second = rows.index_select(0, (start + b).flatten())
    if is_leader is None:
        both = torch.maximum(first, second, out=first).view(*a.shape, n)
    else:
        half = torch.where(is_leader, 1.0, 0.5).double()
        both = first.double().add_(second).view(*a.shape, n).mul_(half[:, :, None])
    first = both.gather(2, a[:, None, :].expand(-1, a.shape[1], -1))
    second = both.gather(2, b[:, None, :].expand(-1, a.shape[1], -1))
    if is_leader is None:
        return torch.maximum(first, second, out=first)
    return first.add_(second).mul_(half[:, None, :])


def _ward(W: Tensor, count: Tensor, within: Tensor) -> Tensor:
    """Twice the growth of the summed squared distance to the centres when two clusters merge, (A, n, n).

    ``2 |I||J| / (|I|+|J|) |c_I - c_J|^2`` with everything over one denominator: products and sums first, one division.
    """
    pairs = count[:, :, None] * count[:, None, :]
    loss = within[:, :, None] * count.square()[:, None, :]
    top = W * pairs - (loss + loss.transpose(1, 2))
    return 2 * top / (pairs * (count[:, :, None] + count[:, None, :]))


def _row_minimum(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest value of each row of (A, n, n) and the first column it stands in, (A, n) each."""
    if Q.device.type == "cpu":
        index = torch.from_numpy(Q.numpy().argmin(-1))  # four times as fast as torch's
        return Q.gather(2, index[..., None]).squeeze(2), index
    value, index = Q.min(-1)
    return value, index


# ---------------------------------------------------------------------- single
def _boruvka(W: Tensor, links: Links, wanted: int, threshold: float | None) -> Forest:
    """The minimum spanning tree: every component takes its smallest outgoing edge, round after round.

    Distances are never combined, so every edge keeps its original ends.
    """
    num_images, num_tokens = W.shape[:2]
    device = W.device
    image = torch.arange(num_images, device=device)  # (A,) the images at work
    token = torch.arange(num_tokens, device=device)
    component = token.repeat(num_images, 1)  # (A, N) one token of the component names it
    no_code = num_tokens * num_tokens
    for r in range(1, num_tokens):
        if r > 1:
            small = component.int()  # half the bytes to compare
            W.masked_fill_(small[:, :, None] == small[:, None, :], _INF)
        value, nearest = _row_minimum(W)  # (A, N)
        least = value.amin(1)
        is_open = (least <= links.limit(image, wanted, threshold)) & (least < _INF)
        at_work = is_open.nonzero().flatten()  # the one synchronisation of the round
        if not len(at_work):
            break
        if len(at_work) < len(image):
            image, component, W = image[at_work], component[at_work], W[at_work]
            value, nearest = value[at_work], nearest[at_work]
        # The smallest edge of each component: first by distance, then by its ends.
        lowest = torch.full_like(value, _INF).scatter_reduce_(1, component, value, "amin")
        code = torch.minimum(token, nearest) * num_tokens + torch.maximum(token, nearest)
        code = torch.where(value == lowest.gather(1, component), code, no_code)
        code = torch.full_like(code, no_code).scatter_reduce_(1, component, code, "amin")  # (A, N), at component
        has_edge = (component == token) & (lowest < _INF)
        low, high = code // num_tokens, code % num_tokens
        low, high = torch.where(has_edge, low, 0), torch.where(has_edge, high, 0)
        ends = component.gather(1, low), component.gather(1, high)
        target = torch.where(has_edge, torch.where(ends[0] == token, ends[1], ends[0]), token)
        # Two components that chose the same edge: the smaller stays, the larger is absorbed.
        is_root = (target.gather(1, target) == token) & (token < target)
        target = torch.where(is_root, token, target)
        links.add(image, torch.where(target != token, token, num_tokens), low, lowest, high)
        component = follow(target).gather(1, component)
    return links.in_order()
