"""Trees from arrays: a scipy linkage and back, nested assignments, edges of a tree or of a DAG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.tree.arrays import as_array, sum_below

if TYPE_CHECKING:
    from hyptree.tree.core import Tree


# ---------------------------------------------------------------------- linkage
def from_linkage(cls: type[Tree], Z: Any, label: Sequence[str] | None = None) -> Tree:
    """The tree of a scipy linkage matrix: leaves are nodes 0 to N-1 at height 0, merge k is node N + k.

    Args:
        Z: (N - 1, 4) or (N - 1, 3) rows (cluster, cluster, distance, size).
        label: names of the N leaves (merges get the empty name), or of all 2N - 1 nodes.
    """
    Z = as_array(Z)
    if Z.ndim != 2 or Z.shape[1] not in (3, 4):
        raise ValueError(f"a linkage has shape (N - 1, 4), got {Z.shape}")
    num_merges = len(Z)
    n = num_merges + 1
    pair = Z[:, :2].astype(np.int64)
    merge = n + np.arange(num_merges)
    bad = np.flatnonzero(((pair < 0) | (pair >= merge[:, None])).any(1) | (pair != Z[:, :2]).any(1))
    if len(bad):
        raise ValueError(
            f"merge {bad[0]} of the linkage joins {Z[bad[0], :2].tolist()}, expected clusters 0 to {merge[bad[0]] - 1}"
        )
    used, count = np.unique(pair, return_counts=True)
    if (count > 1).any():
        raise ValueError(f"the linkage merges cluster {used[count > 1][0]} more than once")
    parent = np.full(n + num_merges, -1)
    parent[pair] = merge[:, None]
    if label is not None and len(label) == n:
        label = list(label) + [""] * num_merges
    return cls(parent, np.append(np.zeros(n), Z[:, 2]), label=label)


def to_linkage(tree: Tree) -> np.ndarray:
    """The scipy linkage matrix of the tree, (N - 1, 4), its leaves numbered in leaf order.

    Nodes with more than two children become several merges at one height (first children first); nodes with one
    child vanish; heights of leaves are not kept, a linkage has them at 0.
    """
    if len(tree.roots) > 1:
        raise ValueError(f"a linkage has one root, this forest has {len(tree.roots)}; use subtree on one of them")
    inner = np.flatnonzero((tree.parent >= 0) & ~tree.is_leaf)
    bad = inner[tree.height[inner] > tree.height[tree.parent[inner]]]
    if len(bad):
        raise ValueError(f"node {bad[0]} sits above its parent; a linkage needs heights that grow towards the root")
    tree = tree.prune(unary=True)
    n = tree.num_leaves
    nodes = np.flatnonzero(~tree.is_leaf)
    nodes = nodes[np.lexsort((tree._merge_rank[nodes], tree.height[nodes]))]
    num_merges = tree.num_children[nodes] - 1
    last = np.cumsum(num_merges)
    cluster = np.empty(tree.num_nodes, np.int64)  # name of each node's full cluster in the linkage
    cluster[tree.leaves()] = np.arange(n)
    cluster[nodes] = n + last - 1

    by_parent, start = tree._by_parent
    row = np.arange(n - 1)
    owner = np.repeat(nodes, num_merges)  # the node that row comes from
    step = row - np.repeat(last - num_merges, num_merges)
    first_child = start[owner]
    left = np.where(step == 0, cluster[by_parent[first_child]], n + row - 1)
    right = cluster[by_parent[first_child + step + 1]]
    leaves = np.append(0, np.cumsum(tree.num_leaves_below[by_parent]))
    size = leaves[first_child + step + 2] - leaves[first_child]
    return np.stack([np.minimum(left, right), np.maximum(left, right), tree.height[owner], size], 1)


# ---------------------------------------------------------------------- assignments
def from_assignments(cls: type[Tree], levels: Sequence[Any], *, root: bool = False, keep_empty: bool = False) -> Tree:
    """The tree of nested assignments from fine to coarse.

    Nodes are numbered leaves first, then the clusters of each level; a node's height is its level (0 at leaves).

    Args:
        levels: level 0 assigns each of the N leaves to a cluster, level i each cluster of level i - 1. Each is either
            (N,) integers, -1 for "to none" (the node becomes a root), or a soft (N, K) matrix that counts by argmax.
        root: adds one root above everything that has no parent.
        keep_empty: keeps clusters nobody was assigned to; by default they are dropped, so all leaves are inputs.
    """
    if not len(levels):
        raise ValueError("levels is empty, expected at least one assignment")
    parents, heights = [], []
    arrays = [as_array(level) for level in levels]
    start = 0
    for i, level in enumerate(arrays):
        if level.ndim == 2:
            num_clusters = level.shape[1]
            if not num_clusters or not np.isfinite(level).all():
                raise ValueError(f"the soft assignment of level {i} has shape {level.shape} or is not finite")
            level = level.argmax(1)
        elif level.ndim == 1 and np.issubdtype(level.dtype, np.integer):
            num_clusters = int(level.max(initial=-1)) + 1
            if i + 1 < len(arrays):  # the next level knows how many there are
                num_clusters = max(num_clusters, len(arrays[i + 1]))
        else:
            raise ValueError(
                f"level {i} has shape {level.shape} and type {level.dtype}, expected (N,) integers or (N, K) weights"
            )
        if (level < -1).any():
            raise ValueError(f"level {i} assigns node {np.flatnonzero(level < -1)[0]} to cluster {level.min()}")
        if i + 1 < len(arrays) and num_clusters != len(arrays[i + 1]):
            raise ValueError(
                f"level {i} has {num_clusters} clusters, but level {i + 1} assigns {len(arrays[i + 1])}; "
                "both numbers must be the same"
            )
        parents.append(np.where(level < 0, -1, level + start + len(level)))
        heights.append(np.full(len(level), float(i)))
        start += len(level)
    parents.append(np.full(num_clusters, -1))
    heights.append(np.full(num_clusters, float(len(arrays))))
    parent, height = np.concatenate(parents), np.concatenate(heights)
    tree = cls(parent, height)
    if not keep_empty:
        chosen = np.arange(len(parent)) < len(arrays[0])
        tree = tree.take(sum_below(tree.parent, chosen.astype(np.int64)) > 0)
    if root:
        top = tree.num_nodes
        parent = np.append(np.where(tree.parent < 0, top, tree.parent), -1)
        tree = cls(parent, np.append(tree.height, len(arrays) + 1.0))
    return tree


# ---------------------------------------------------------------------- edges
def from_edges(cls: type[Tree], edges: Iterable[Any], *, keep: str = "longest") -> Tree:
    """The tree of (child, parent) edges; of a DAG such as WordNet, one parent per node is kept.

    Names are numbered in order of appearance and become labels. Integers are numbered by value; where they are
    exactly 0 to n-1 they are the nodes. ``num_dropped_edges`` of the result says how many distinct edges were left out.

    Args:
        edges: (child, parent, ...) rows; only the first two entries are read.
        keep: which parent survives. "longest" is the one farthest from a root, the most specific (so a transitive
            closure gives back its tree); "shortest" the one nearest to a root; "first" the first in the list.
    """
    if keep not in ("longest", "shortest", "first"):
        raise ValueError(f'keep must be "longest", "shortest" or "first", got {keep!r}')
    child, parent, label, n = _number_nodes(edges)
    if (child == parent).any():
        node = child[child == parent][0]
        raise ValueError(f"node {label[node] if label else node} is its own parent; drop that edge")
    _, first = np.unique(child * n + parent, return_index=True)
    first.sort()
    child, parent = child[first], parent[first]
    longest, shortest = _dag_depth(child, parent, n, label)
    rank = {"longest": -longest[parent], "shortest": shortest[parent], "first": np.zeros(len(child))}[keep]
    best = np.lexsort((np.arange(len(child)), rank, child))
    best = best[np.diff(child[best], prepend=-1) > 0]  # the first of each child
    chosen = np.full(n, -1)
    chosen[child[best]] = parent[best]
    tree = cls(chosen, label=label)
    tree.num_dropped_edges = len(child) - len(best)
    return tree


def _number_nodes(edges: Iterable[Any]) -> tuple[np.ndarray, np.ndarray, list[str] | None, int]:
    """Children, parents, names if there are any, and the number of nodes."""
    table = as_array(edges) if hasattr(edges, "dtype") else None
    if table is None:
        rows = list(edges)
        for k, row in enumerate(rows):
            if isinstance(row, str) or len(row) < 2:
                raise ValueError(f"edge {k} is {row!r}, expected (child, parent)")
        if all(isinstance(end, (int, np.integer)) for row in rows for end in row[:2]):
            table = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2)
    if table is not None and (table.ndim != 2 or table.shape[1] < 2):
        raise ValueError(f"edges have shape {table.shape}, expected (E, 2): child, parent")
    if (len(table) if table is not None else len(rows)) == 0:
        raise ValueError("there are no edges; a tree of one node is Tree([-1])")
    if table is not None and np.issubdtype(table.dtype, np.integer):
        values, number = np.unique(table[:, :2], return_inverse=True)
        number = number.reshape(-1, 2)
        label = None if np.array_equal(values, np.arange(len(values))) else [str(v) for v in values]
        return number[:, 0], number[:, 1], label, len(values)
    index: dict[Any, int] = {}
    ends = rows if table is None else table.tolist()
    number = np.array([[index.setdefault(end, len(index)) for end in row[:2]] for row in ends], np.int64)
    return number[:, 0], number[:, 1], [str(name) for name in index], len(index)


def _dag_depth(child: np.ndarray, parent: np.ndarray, n: int, label: list[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """Longest and shortest number of edges from a root to each node of a DAG, (n,) each. O(nodes + edges)."""
    above: dict[int, list[int]] = {node: [] for node in range(n)}
    for node, up in zip(child.tolist(), parent.tolist(), strict=True):
        above[node].append(up)
    # Plain lists: a node at a time is what makes this linear for a deep graph, and numpy scalars are slow.
    longest, shortest = [0] * n, [0] * n
    try:
        for node in TopologicalSorter(above).static_order():
            if ups := above[node]:
                longest[node] = 1 + max([longest[up] for up in ups])
                shortest[node] = 1 + min([shortest[up] for up in ups])
    except CycleError as error:
        at = error.args[1][0]
        raise ValueError(
            f"node {label[at] if label else at} is its own ancestor; the edges must not form a cycle"
        ) from error
    return np.array(longest), np.array(shortest)
