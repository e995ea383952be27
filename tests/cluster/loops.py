"""The rival clusterings as plain Python loops over one image in float64: slow, and easy to check by reading."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def numbered(groups: Sequence[int]) -> list[int]:
    """Labels in the order in which groups first appear."""
    seen: dict[int, int] = {}
    return [seen.setdefault(group, len(seen)) for group in groups]


def cosine(a: list[float], b: list[float]) -> float:
    product = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return product / (math.hypot(*a) * math.hypot(*b))


def match_once(rows: list[list[float]], num_merges: int) -> list[int]:
    """Group of every token after one matching: even tokens propose, the best are accepted; those left come first."""
    proposals = []
    for i in range(0, len(rows), 2):
        likeness = [(cosine(rows[i], rows[j]), -j) for j in range(1, len(rows), 2)]
        if likeness:
            best, partner = max(likeness)
            proposals.append((-best, i, -partner))
    group = list(range(len(rows)))
    for _, i, partner in sorted(proposals)[:num_merges]:
        group[i] = partner
    order = [i for i in range(0, len(rows), 2) if group[i] == i] + list(range(1, len(rows), 2))
    return [order.index(at) for at in group]


def bipartite(features: Tensor, k: int) -> list[int]:
    rows, sizes = features.double().tolist(), [1] * len(features)
    labels = list(range(len(rows)))
    while len(rows) > k:
        step = match_once(rows, min(len(rows) - k, len(rows) // 2))
        num, width = max(step) + 1, len(rows[0])
        new_sizes = [sum(s for s, to in zip(sizes, step, strict=True) if to == c) for c in range(num)]
        rows = [
            [
                sum(s * r[d] for s, r, to in zip(sizes, rows, step, strict=True) if to == c) / new_sizes[c]
                for d in range(width)
            ]
            for c in range(num)
        ]
        sizes, labels = new_sizes, [step[label] for label in labels]
    return labels


def start_tokens(n: int, k: int, scores: Tensor | None) -> list[int]:
    if scores is None:
        return [c * n // k for c in range(k)]
    value = scores.tolist()
    return sorted(sorted(range(n), key=lambda i: (-value[i], i))[:k])


def nearest(costs: list[list[float]], own: list[int]) -> list[int]:
    """Cheapest centre of each token, where every centre keeps its own token."""
    labels = [min(range(len(row)), key=lambda c: (row[c], c)) for row in costs]
    for c, i in enumerate(own):
        labels[i] = c
    return labels


def kmeans(points: Tensor, k: int, iterations: int, scores: Tensor | None) -> list[int]:
    rows = points.double()
    start = start_tokens(len(rows), k, scores)
    labels = nearest([[float((p - rows[i]).square().sum()) for i in start] for p in rows], start)
    for _ in range(iterations):
        before = labels
        members = [[i for i, label in enumerate(before) if label == c] for c in range(k)]
        centres = [rows[m].mean(0) for m in members]
        costs = [[float((p - c).square().sum()) for c in centres] for p in rows]
        labels = nearest(costs, [])
        for c in range(k):
            if all(labels[i] != c for i in members[c]):  # everybody left: who gains least by it stays
                labels[min(members[c], key=lambda i: (costs[i][before[i]] - min(costs[i]), i))] = c
    return numbered(labels)


def kmedoids(D: Tensor, k: int, iterations: int, scores: Tensor | None) -> list[int]:
    d = D.double().tolist()
    medoids = start_tokens(len(d), k, scores)
    for iteration in range(iterations + 1):
        labels = nearest([[row[m] for m in medoids] for row in d], medoids)
        if iteration < iterations:
            members = [[i for i, label in enumerate(labels) if label == c] for c in range(k)]
            medoids = [min(m, key=lambda i: (math.fsum(d[i][j] for j in m), i)) for m in members]
    return numbered(labels)


def density_peaks(D: Tensor, k: int, neighbours: int) -> list[int]:
    d, n = D.double().tolist(), len(D)
    sparse = []
    for i in range(n):
        near = sorted(d[i][j] for j in range(n) if j != i)[:neighbours]
        sparse.append(math.fsum(x * x for x in near) / len(near))
    largest = max(max(row) for row in d)
    score = []
    for i in range(n):
        to_denser = [d[i][j] for j in range(n) if (sparse[j], j) < (sparse[i], i)]
        score.append(math.exp(-sparse[i]) * min(to_denser, default=largest))
    centres = sorted(sorted(range(n), key=lambda i: (-score[i], i))[:k])
    return numbered(nearest([[row[c] for c in centres] for row in d], centres))
