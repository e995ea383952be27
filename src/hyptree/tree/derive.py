"""What is made from a tree: clusters of its leaves by a cut, and smaller or renamed trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.tree.arrays import as_array, max_below, sum_below

if TYPE_CHECKING:
    from hyptree.tree.core import Tree


def cut(tree: Tree, k: int | None = None, *, height: float | None = None, exact: bool = True) -> np.ndarray:
    """Cluster of each leaf when the tree is cut into k parts, or at a height, (num_leaves,).

    Clusters are numbered from 0 by their first leaf. A node counts as high as the highest node below it, so
    inversions never tear a cluster. Cuts are nested: k + 1 clusters refine k.

    Args:
        k: number of clusters, from the number of roots to the number of leaves. Undoes the k - 1 highest merges.
        height: keeps together what joins at or below this height.
        exact: with k, gives exactly k clusters: at equal heights, and where a node has more than two children,
            merges are undone one at a time (last children first). False undoes equal heights together and never
            splits a node in part, so there may be fewer than k (as scipy's fcluster "maxclust").
    """
    if (k is None) == (height is None):
        raise ValueError(f"cut needs k or height, one of them, got k={k}, height={height}")
    reach = max_below(tree.parent, np.where(tree.is_leaf, -np.inf, tree.height))
    split = np.zeros(tree.num_nodes, bool)  # nodes that the cut takes apart
    loose = np.empty(0, np.int64)  # children cut off a node that is taken apart in part
    if k is None:
        split = reach > height
    else:
        low, high = len(tree.roots), tree.num_leaves
        if not low <= k <= high:
            raise ValueError(f"k must be from {low} (roots) to {high} (leaves), got {k}")
        nodes = np.flatnonzero(tree.num_children > 1)
        nodes = nodes[np.lexsort((tree._merge_rank[nodes], reach[nodes]))[::-1]]  # last merge first
        done = np.cumsum(tree.num_children[nodes] - 1)  # clusters gained once a node is apart
        gain = k - low
        count = int(np.searchsorted(done, gain, side="right"))
        if not exact and count < len(nodes):  # step back to where the height really drops
            while count and reach[nodes[count - 1]] == reach[nodes[count]]:
                count -= 1
        split[nodes[:count]] = True
        rest = gain - (done[count - 1] if count else 0)
        if exact and rest:
            loose = tree.children(nodes[count])[-rest:]
    top = (tree.parent < 0) | split[tree.parent]
    top[loose] = True
    # The tops cover the leaves in runs of the preorder, each run beginning at its top.
    owner = np.maximum.accumulate(np.where(top[tree._preorder], np.arange(tree.num_nodes), 0))
    return _by_first_seen(owner[tree._position[tree._leaf_index]])


def _by_first_seen(values: np.ndarray) -> np.ndarray:
    """The same grouping, numbered from 0 in order of first appearance."""
    _, first, number = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[number]


def replace(tree: Tree, **fields: Any) -> Tree:
    """A copy with some of height, embedding, manifold, support and label replaced."""
    own = {name: getattr(tree, name) for name in ("height", "embedding", "manifold", "support", "label")}
    unknown = sorted(set(fields) - set(own))
    if unknown:
        raise ValueError(f"replace has no field {unknown[0]!r}, expected one of {', '.join(own)}")
    return type(tree)(tree.parent, **(own | fields))


def relabel(tree: Tree, names: Sequence[str] | Mapping[str, str] | Callable[[int], str]) -> Tree:
    """A copy with other names: n of them, a mapping from old to new ones, or a function of the node index."""
    if callable(names):
        return tree.replace(label=[names(i) for i in range(tree.num_nodes)])
    if isinstance(names, Mapping):
        if tree.label is None:
            raise ValueError("a mapping renames labels, and this tree has none; pass a list or a function")
        return tree.replace(label=[names.get(name, name) for name in tree.label])
    return tree.replace(label=names)


def take(tree: Tree, keep: Any) -> Tree:
    """The tree on the kept nodes (mask or indices): each hangs under its nearest kept ancestor, order is kept."""
    mask = np.zeros(tree.num_nodes, bool)
    index = as_array(keep)
    if index.dtype == bool and index.shape != mask.shape:
        raise ValueError(f"the mask of kept nodes has shape {index.shape}, expected ({tree.num_nodes},)")
    mask[index if index.dtype == bool else tree._node(index)] = True
    if not mask.any():
        raise ValueError("no node would be left; keep at least one")
    up = np.append(np.where(tree.parent < 0, tree.num_nodes, tree.parent), tree.num_nodes)
    kept = np.append(mask, True)  # the sentinel above the roots is always there
    while not kept[up].all():  # leap over dropped ancestors, twice as far each round
        up = np.where(kept[up], up, up[up])
    index = np.flatnonzero(mask)
    number = np.append(np.cumsum(mask) - 1, -1)
    return type(tree)(
        number[up[index]],
        tree.height[index],
        embedding=None if tree.embedding is None else tree.embedding[index],
        manifold=tree.manifold,
        support=None if tree.support is None else tree.support[index],
        label=None if tree.label is None else [tree.label[i] for i in index],
    )


def subtree(tree: Tree, i: int) -> Tree:
    """The tree below and including node i, its nodes in the same relative order."""
    return tree.take(tree.descendants(i))


def prune(
    tree: Tree,
    *,
    max_depth: int | None = None,
    min_leaves: int | None = None,
    leaves: Any = None,
    unary: bool = False,
) -> Tree:
    """A smaller tree: the nodes that pass all given conditions.

    Args:
        max_depth: drops what is deeper.
        min_leaves: drops nodes with fewer leaves below.
        leaves: indices of the leaves to keep; what has none of them below is dropped.
        unary: then also removes nodes with a single child, joining the child to the grandparent.
    """
    keep = np.ones(tree.num_nodes, bool)
    if max_depth is not None:
        keep &= tree.depth <= max_depth
    if min_leaves is not None:
        keep &= tree.num_leaves_below >= min_leaves
    if leaves is not None:
        wanted = tree._node(leaves)
        inner = wanted[~tree.is_leaf[wanted]]
        if len(inner):
            raise ValueError(f"node {inner[0]} is not a leaf; prune keeps leaves, take keeps any nodes")
        chosen = np.zeros(tree.num_nodes, np.int64)
        chosen[wanted] = 1
        keep &= sum_below(tree.parent, chosen) > 0
    tree = tree.take(keep)
    return tree.take(tree.num_children != 1) if unary else tree
