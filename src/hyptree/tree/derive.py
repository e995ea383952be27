"""What is made from a tree: clusters by a cut, smaller or renamed trees; how two of its nodes are related."""

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


def path(tree: Tree, i: int, j: int) -> np.ndarray:
    """The nodes from i to j, both included."""
    top = tree.lca(i, j)
    if top < 0:
        raise ValueError(f"nodes {i} and {j} are in different trees of the forest, no path joins them")
    up = np.append(i, tree.ancestors(i))
    down = np.append(j, tree.ancestors(j))
    rise, fall = tree.depth[i] - tree.depth[top], tree.depth[j] - tree.depth[top]
    return np.append(up[: rise + 1], down[:fall][::-1])


def lca_table(tree: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Range minima of the parent's preorder place (levels, n), and floor(log2) of each length.

    Between two places of the preorder lie only nodes strictly below the lowest common ancestor, among them one of
    its children: the smallest place of a parent there is the place of the ancestor. Roots hold -1, so nodes of
    different trees answer -1 without a special case.
    """
    n = tree.num_nodes
    above = tree.parent[tree._preorder]
    row = np.where(above < 0, -1, tree._position[above]).astype(np.int32)
    table, width = [row], 1
    while 2 * width <= n:
        last, row = row, row.copy()
        np.minimum(last[: n - width], last[width:], out=row[: n - width])
        table.append(row)
        width *= 2
    return np.stack(table), np.frexp(np.arange(n + 1))[1].astype(np.int8) - 1


def lca(tree: Tree, i: Any, j: Any) -> Any:
    """Lowest common ancestor of i and j, or of arrays that broadcast; -1 in different trees. O(1) per pair."""
    i, j = np.broadcast_arrays(tree._node(i), tree._node(j))
    table, log2 = tree._lca_table
    a, b = tree._position[i], tree._position[j]
    left, right = np.minimum(a, b) + 1, np.maximum(a, b) + 1  # the places to search: left .. right - 1
    same = left == right
    k = log2[np.where(same, 1, right - left)]
    left = np.where(same, 0, left)
    right = np.where(same, 1, right)
    place = np.minimum(table[k, left], table[k, right - (1 << k.astype(np.int64))])
    meet = np.where(same, i, np.where(place < 0, -1, tree._preorder[place]))
    return int(meet) if meet.ndim == 0 else meet


def distance(tree: Tree, i: Any, j: Any, metric: str = "edges") -> Any:
    """Length of the path between i and j, or of arrays that broadcast; infinite between different trees.

    The metric "edges" counts edges, "height" adds the absolute height differences along the path.
    """
    if metric not in ("edges", "height"):
        raise ValueError(f'metric must be "edges" or "height", got {metric!r}')
    run = tree.depth.astype(np.float64) if metric == "edges" else tree._root_distance
    top = tree.lca(i, j)
    length = np.where(np.less(top, 0), np.inf, run[tree._node(i)] + run[tree._node(j)] - 2 * run[top])
    return float(length) if length.ndim == 0 else length
