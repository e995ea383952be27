"""Agglomerative clustering by its definition, one pair at a time, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

Merge = tuple[Fraction, int, int]  # height, smaller end, larger end


def exact(D: Sequence[Sequence[float]]) -> list[list[Fraction]]:
    """The distances as fractions: floating-point numbers are, so nothing is lost."""
    return [[Fraction(value) for value in row] for row in D]


def between(D: list[list[Fraction]], linkage: str, I: list[int], J: list[int]) -> Fraction:
    """Distance of two clusters, from all pairs of their tokens."""
    values = [D[i][j] for i in I for j in J]
    if linkage == "single":
        return min(values)
    if linkage == "complete":
        return max(values)
    mean = sum(values, Fraction(0)) / len(values)
    if linkage == "average":
        return mean
    # Squared distance of two centres from squared distances of the points.
    for C in (I, J):
        mean -= sum((D[i][j] for i in C for j in C if i < j), Fraction(0)) / len(C) ** 2
    return 2 * mean * len(I) * len(J) / (len(I) + len(J))


def greedy(D: Sequence[Sequence[float]], linkage: str) -> list[Merge]:
    """All N - 1 merges: always the smallest pair by (distance, smaller representative, larger representative)."""
    exact_D = exact(D)
    clusters = {i: [i] for i in range(len(exact_D))}
    merges = []
    while len(clusters) > 1:
        height, i, j = min(
            (between(exact_D, linkage, I, J), i, j) for i, I in clusters.items() for j, J in clusters.items() if i < j
        )
        clusters[i] = clusters[i] + clusters.pop(j)
        merges.append((height, i, j))
    return merges


def spanning_tree(D: Sequence[Sequence[float]]) -> list[Merge]:
    """All N - 1 edges of the minimum spanning tree by (distance, smaller token, larger token), by Kruskal."""
    exact_D = exact(D)
    n = len(exact_D)
    name = list(range(n))
    edges = []
    for edge in sorted((exact_D[i][j], i, j) for i in range(n) for j in range(i + 1, n)):
        _, i, j = edge
        if name[i] != name[j]:
            edges.append(edge)
            name = [name[i] if x == name[j] else x for x in name]
    return edges


def labels_of(merges: Sequence[Merge], num_tokens: int) -> list[int]:
    """Clusters that the merges form, numbered by their smallest token."""
    name = list(range(num_tokens))
    for _, i, j in merges:
        name = [name[i] if x == name[j] else x for x in name]
    return renumbered(name)


def labels(D: Sequence[Sequence[float]], linkage: str, k: int) -> list[int]:
    """What every backend has to answer for k clusters."""
    merges = spanning_tree(D) if linkage == "single" else greedy(D, linkage)
    return labels_of(merges[: len(D) - k], len(D))


def renumbered(names: Sequence[int]) -> list[int]:
    """The same partition with clusters numbered in the order in which they first appear."""
    first: dict[int, int] = {}
    return [first.setdefault(int(name), len(first)) for name in names]


def is_valid_partition(D: Sequence[Sequence[float]], linkage: str, partition: Sequence[int]) -> bool:
    """Whether some greedy run, with ties decided in any way, passes through this partition. Exponential: N <= 9."""
    exact_D = exact(D)
    expected = [frozenset(i for i, x in enumerate(partition) if x == name) for name in set(partition)]
    fits: Callable[[frozenset[int]], bool] = lambda C: any(C <= W for W in expected)  # noqa: E731
    seen = set()
    todo = [frozenset(frozenset([i]) for i in range(len(exact_D)))]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        if len(state) == len(expected):
            if state == frozenset(expected):
                return True
            continue
        pairs = [(I, J) for I in state for J in state if min(I) < min(J)]
        distance = {(I, J): between(exact_D, linkage, sorted(I), sorted(J)) for I, J in pairs}
        least = min(distance.values())
        todo += [(state - {I, J}) | {I | J} for (I, J), d in distance.items() if d == least and fits(I | J)]
    return False
