"""How two nodes of a tree are related: lowest common ancestor, path, distance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hyptree.tree.core import Tree


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
    """Lowest common ancestor of i and j, O(1) per pair; -1 where they are in different trees.

    Args:
        i, j: nodes, or arrays of nodes that broadcast. Plain integers give an integer.
    """
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
    """Length of the path between i and j; infinite between different trees.

    Args:
        i, j: nodes, or arrays of nodes that broadcast. Plain integers give a float.
        metric: "edges" counts edges, "height" adds the absolute height differences along the path.
    """
    if metric not in ("edges", "height"):
        raise ValueError(f'metric must be "edges" or "height", got {metric!r}')
    run = tree.depth.astype(np.float64) if metric == "edges" else tree._root_distance
    top = tree.lca(i, j)
    length = np.where(np.less(top, 0), np.inf, run[tree._node(i)] + run[tree._node(j)] - 2 * run[top])
    return float(length) if length.ndim == 0 else length
