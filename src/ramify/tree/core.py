"""The Tree itself: validated storage, structure and queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ramify.tree import drawing, formats, layout, measure
from ramify.tree.arrays import as_array, frozen, jumps, max_below, sum_below, sum_to_root

__all__ = ["Tree"]


class Tree:
    """A rooted forest: who is whose parent, how high each node sits, and what may hang on the nodes.

    Immutable: the arrays are read-only copies, every change gives a new Tree. "Leaf order" always means ascending
    node index; arrays "over leaves" follow it. All queries are O(n log n) or better, also on a path of 100,000 nodes.

    Args:
        parent: (n,) integers, the parent of each node, -1 at roots. Children may come before or after parents.
        height: (n,) how far up a node sits; parents usually lie above their children, but inversions are allowed.
            By default the number of edges down to the deepest leaf below, so leaves are at 0.
        embedding: (n, ...) a point per node, with the ``manifold`` it lives on (an object with ``dist`` or a name
            such as ``"poincare"`` or ``"Lorentz(c=0.5)"``).
        support: (n, ...) soft mask of each node on the input, values in [0, 1].
        label: n names.
    """

    def __init__(
        self,
        parent: Any,
        height: Any = None,
        *,
        embedding: Any = None,
        manifold: Any = None,
        support: Any = None,
        label: Sequence[str] | None = None,
    ):
        self.parent = _check_parent(parent)
        self.num_nodes = len(self.parent)
        self.depth = frozen(_depth(self.parent))
        if height is None:
            height = max_below(self.parent, self.depth) - self.depth
        self.height = self._check_height(height)
        self.embedding = self._check_rows("embedding", embedding)
        self.manifold = manifold
        self.support = self._check_rows("support", support)
        self.label = None if label is None else [str(name) for name in label]
        if self.label is not None and len(self.label) != self.num_nodes:
            raise ValueError(f"label has {len(self.label)} names, expected one for each of {self.num_nodes} nodes")
        self.num_dropped_edges = 0  # set by from_edges when a DAG loses edges on its way to a tree

    # ------------------------------------------------------------------ other ways in and out
    from_linkage = classmethod(formats.from_linkage)
    from_assignments = classmethod(formats.from_assignments)
    from_edges = classmethod(formats.from_edges)
    from_newick = classmethod(formats.from_newick)
    from_json = classmethod(formats.from_json)
    from_networkx = classmethod(formats.from_networkx)
    load = classmethod(formats.load)
    to_linkage = formats.to_linkage
    to_newick = formats.to_newick
    to_json = formats.to_json
    to_networkx = formats.to_networkx
    save = formats.save

    # ------------------------------------------------------------------ measures and pictures
    distortion = measure.distortion
    dasgupta_cost = measure.dasgupta_cost
    purity = measure.purity
    mask_agreement = measure.mask_agreement
    largest_tau = layout.largest_tau
    sarkar = layout.sarkar
    draw = drawing.draw
    text = drawing.text
    show = drawing.show

    # ------------------------------------------------------------------ validation
    def _check_height(self, height: Any) -> np.ndarray:
        values = as_array(height)
        if values.shape != (self.num_nodes,):
            raise ValueError(f"height has shape {values.shape}, expected ({self.num_nodes},), one per node")
        values = values.astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise ValueError(f"height of node {bad[0]} is {values[bad[0]]}, expected a finite number")
        return frozen(values)

    def _check_rows(self, name: str, values: Any) -> np.ndarray | None:
        if values is None:
            return None
        rows = np.array(as_array(values))
        if rows.ndim < 2 or len(rows) != self.num_nodes:
            raise ValueError(f"{name} has shape {rows.shape}, expected ({self.num_nodes}, ...), one row per node")
        return frozen(rows)

    def _node(self, i: Any) -> np.ndarray:
        """Node indices as int64, checked."""
        index = as_array(i)
        if not np.issubdtype(index.dtype, np.integer) and index.size:
            raise ValueError(f"a node is an integer index, got {index.dtype}; use find(label) to look up a name")
        index = index.astype(np.int64)
        bad = (index < 0) | (index >= self.num_nodes)
        if bad.any():
            raise ValueError(
                f"node {index[bad][0]} does not exist in a tree of {self.num_nodes} nodes (0 to {self.num_nodes - 1})"
            )
        return index

    # ------------------------------------------------------------------ structure, computed once
    @cached_property
    def _by_parent(self) -> tuple[np.ndarray, np.ndarray]:
        """Nodes sorted by parent (roots first) and where each node's children start, (n,) and (n + 1,)."""
        order = np.argsort(self.parent, kind="stable")
        start = np.cumsum(np.bincount(self.parent + 1, minlength=self.num_nodes + 1))
        return order, start

    @cached_property
    def roots(self) -> np.ndarray:
        """Nodes without a parent, (R,)."""
        return frozen(np.flatnonzero(self.parent < 0))

    @cached_property
    def num_children(self) -> np.ndarray:
        """Number of children of each node, (n,)."""
        return frozen(np.diff(self._by_parent[1], append=self.num_nodes)[: self.num_nodes])

    @cached_property
    def is_leaf(self) -> np.ndarray:
        """Whether each node has no children, (n,) bool."""
        return frozen(self.num_children == 0)

    @property
    def num_leaves(self) -> int:
        """How many nodes have no children."""
        return len(self._leaf_index)

    @cached_property
    def _leaf_index(self) -> np.ndarray:
        return frozen(np.flatnonzero(self.is_leaf))

    @cached_property
    def subtree_sizes(self) -> np.ndarray:
        """Number of nodes in each node's subtree, itself included, (n,)."""
        return frozen(sum_below(self.parent, np.ones(self.num_nodes, np.int64)))

    @cached_property
    def num_leaves_below(self) -> np.ndarray:
        """Number of leaves in each node's subtree, (n,); 1 at a leaf."""
        return frozen(sum_below(self.parent, self.is_leaf.astype(np.int64)))

    @cached_property
    def _position(self) -> np.ndarray:
        """Place of each node in preorder, (n,): a subtree is the slice ``position .. position + size``."""
        order, start = self._by_parent
        size = self.subtree_sizes[order]
        before = np.cumsum(size) - size  # nodes of earlier siblings, plus a constant per family
        first = np.where(self.parent[order] < 0, 0, start[self.parent[order]])
        step = np.empty(self.num_nodes, np.int64)
        step[order] = before - before[first]
        return frozen(sum_to_root(self.parent, step + (self.parent >= 0)))

    @cached_property
    def _preorder(self) -> np.ndarray:
        order = np.empty(self.num_nodes, np.int64)
        order[self._position] = np.arange(self.num_nodes)
        return frozen(order)

    @cached_property
    def _merge_rank(self) -> np.ndarray:
        """Ties between equal heights: children come before parents, and a linkage keeps its own order, (n,)."""
        if (self.parent[self.parent >= 0] > np.flatnonzero(self.parent >= 0)).all():
            return np.arange(self.num_nodes)
        return -self._position

    @cached_property
    def is_monotone(self) -> bool:
        """Whether no node sits above its parent."""
        child = np.flatnonzero(self.parent >= 0)
        return bool((self.height[self.parent[child]] >= self.height[child]).all())

    @cached_property
    def is_binary(self) -> bool:
        """Whether every node has no child or two."""
        return bool(np.isin(self.num_children, (0, 2)).all())

    # ------------------------------------------------------------------ queries
    def children(self, i: int) -> np.ndarray:
        """The children of node i in ascending order."""
        order, start = self._by_parent
        i = int(self._node(i))
        return order[start[i] : start[i] + self.num_children[i]]

    def leaves(self, i: int | None = None) -> np.ndarray:
        """All leaves, or those below node i (a leaf is below itself), in ascending order."""
        if i is None:
            return self._leaf_index
        below = self.descendants(i)
        return below[self.is_leaf[below]]

    def descendants(self, i: int) -> np.ndarray:
        """The nodes of the subtree at i, i included, in ascending order."""
        i = int(self._node(i))
        start = self._position[i]
        return np.sort(self._preorder[start : start + self.subtree_sizes[i]])

    def ancestors(self, i: int) -> np.ndarray:
        """The nodes from the parent of i up to its root; empty at a root."""
        found, at = [], int(self.parent[self._node(i)])
        while at >= 0:
            found.append(at)
            at = int(self.parent[at])
        return np.array(found, np.int64)

    def path(self, i: int, j: int) -> np.ndarray:
        """The nodes from i to j, both included."""
        top = self.lca(i, j)
        if top < 0:
            raise ValueError(f"nodes {i} and {j} are in different trees of the forest, no path joins them")
        up = np.append(i, self.ancestors(i))
        down = np.append(j, self.ancestors(j))
        rise, fall = self.depth[i] - self.depth[top], self.depth[j] - self.depth[top]
        return np.append(up[: rise + 1], down[:fall][::-1])

    @cached_property
    def _lca_table(self) -> tuple[np.ndarray, np.ndarray]:
        """Range minima of the parent's preorder place (levels, n), and floor(log2) of each length.

        Between two places of the preorder lie only nodes strictly below the lowest common ancestor, among them one of
        its children: the smallest place of a parent there is the place of the ancestor. Roots hold -1, so nodes of
        different trees answer -1 without a special case.
        """
        n = self.num_nodes
        above = self.parent[self._preorder]
        row = np.where(above < 0, -1, self._position[above]).astype(np.int32)
        table, width = [row], 1
        while 2 * width <= n:
            last, row = row, row.copy()
            np.minimum(last[: n - width], last[width:], out=row[: n - width])
            table.append(row)
            width *= 2
        return np.stack(table), np.frexp(np.arange(n + 1))[1].astype(np.int8) - 1

    def lca(self, i: Any, j: Any) -> Any:
        """Lowest common ancestor of i and j, O(1) per pair; -1 where they are in different trees.

        Args:
            i, j: nodes, or arrays of nodes that broadcast. Plain integers give an integer.
        """
        i, j = np.broadcast_arrays(self._node(i), self._node(j))
        table, log2 = self._lca_table
        a, b = self._position[i], self._position[j]
        left, right = np.minimum(a, b) + 1, np.maximum(a, b) + 1  # the places to search: left .. right - 1
        same = left == right
        k = log2[np.where(same, 1, right - left)]
        left = np.where(same, 0, left)
        right = np.where(same, 1, right)
        place = np.minimum(table[k, left], table[k, right - (1 << k.astype(np.int64))])
        found = np.where(same, i, np.where(place < 0, -1, self._preorder[place]))
        return int(found) if found.ndim == 0 else found

    @cached_property
    def length(self) -> np.ndarray:
        """Length of the edge above each node, height of the parent less its own, (n,); 0 at roots."""
        return frozen(np.where(self.parent < 0, 0.0, self.height[self.parent] - self.height))

    @cached_property
    def _root_distance(self) -> np.ndarray:
        return sum_to_root(self.parent, np.abs(self.length))

    def distance(self, i: Any, j: Any, metric: str = "edges") -> Any:
        """Length of the path between i and j; infinite between different trees.

        Args:
            i, j: nodes, or arrays of nodes that broadcast. Plain integers give a float.
            metric: "edges" counts edges, "height" adds the absolute height differences along the path.
        """
        if metric not in ("edges", "height"):
            raise ValueError(f'metric must be "edges" or "height", got {metric!r}')
        run = self.depth.astype(np.float64) if metric == "edges" else self._root_distance
        top = self.lca(i, j)
        found = np.where(np.less(top, 0), np.inf, run[self._node(i)] + run[self._node(j)] - 2 * run[top])
        return float(found) if found.ndim == 0 else found

    def find(self, label: str) -> int:
        """The first node of that name."""
        if self.label is None:
            raise ValueError("this tree has no labels; pass label= or use relabel")
        if label not in self._by_label:
            import difflib

            near = difflib.get_close_matches(str(label), self._by_label, n=1)
            raise ValueError(f"no node is called {label!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return self._by_label[label]

    @cached_property
    def _by_label(self) -> dict[str, int]:
        return {name: i for i, name in reversed(list(enumerate(self.label or [])))}

    def order(self, kind: str = "preorder") -> np.ndarray:
        """The nodes in a useful order; siblings always ascend.

        Args:
            kind: "preorder" (parents first, subtrees together), "postorder" (children first, subtrees together),
                "level" (by depth), or "euler" (2n long: each node when its subtree is entered and when it is left).
        """
        if kind == "preorder":
            return self._preorder
        if kind == "level":
            return self._preorder[np.argsort(self.depth[self._preorder], kind="stable")]
        if kind == "postorder":  # finished before v: all that started before it, less its ancestors, plus its subtree
            place = self._position - self.depth + self.subtree_sizes - 1
            return np.argsort(place)
        if kind == "euler":
            enter = 2 * self._position - self.depth
            tour = np.empty(2 * self.num_nodes, np.int64)
            tour[enter] = tour[enter + 2 * self.subtree_sizes - 1] = np.arange(self.num_nodes)
            return tour
        raise ValueError(f'kind must be "preorder", "postorder", "level" or "euler", got {kind!r}')

    def cut(self, k: int | None = None, *, height: float | None = None, exact: bool = True) -> np.ndarray:
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
        reach = max_below(self.parent, np.where(self.is_leaf, -np.inf, self.height))
        split = np.zeros(self.num_nodes, bool)  # nodes that the cut takes apart
        loose = np.empty(0, np.int64)  # children cut off a node that is taken apart in part
        if k is None:
            split = reach > height
        else:
            low, high = len(self.roots), self.num_leaves
            if not low <= k <= high:
                raise ValueError(f"k must be from {low} (roots) to {high} (leaves), got {k}")
            nodes = np.flatnonzero(self.num_children > 1)
            nodes = nodes[np.lexsort((self._merge_rank[nodes], reach[nodes]))[::-1]]  # last merge first
            done = np.cumsum(self.num_children[nodes] - 1)  # clusters gained once a node is apart
            gain = k - low
            count = int(np.searchsorted(done, gain, side="right"))
            if not exact and count < len(nodes):  # step back to where the height really drops
                while count and reach[nodes[count - 1]] == reach[nodes[count]]:
                    count -= 1
            split[nodes[:count]] = True
            rest = gain - (done[count - 1] if count else 0)
            if exact and rest:
                loose = self.children(nodes[count])[-rest:]
        top = (self.parent < 0) | split[self.parent]
        top[loose] = True
        # The tops cover the leaves in runs of the preorder, each run beginning at its top.
        owner = np.maximum.accumulate(np.where(top[self._preorder], np.arange(self.num_nodes), 0))
        return _by_first_seen(owner[self._position[self._leaf_index]])

    # ------------------------------------------------------------------ new trees from this one
    def replace(self, **fields: Any) -> Tree:
        """A copy with some of height, embedding, manifold, support and label replaced."""
        own = {name: getattr(self, name) for name in ("height", "embedding", "manifold", "support", "label")}
        unknown = sorted(set(fields) - set(own))
        if unknown:
            raise ValueError(f"replace has no field {unknown[0]!r}, expected one of {', '.join(own)}")
        return type(self)(self.parent, **(own | fields))

    def relabel(self, names: Sequence[str] | Mapping[str, str] | Callable[[int], str]) -> Tree:
        """A copy with other names: n of them, a mapping from old to new ones, or a function of the node index."""
        if callable(names):
            return self.replace(label=[names(i) for i in range(self.num_nodes)])
        if isinstance(names, Mapping):
            if self.label is None:
                raise ValueError("a mapping renames labels, and this tree has none; pass a list or a function")
            return self.replace(label=[names.get(name, name) for name in self.label])
        return self.replace(label=names)

    def take(self, keep: Any) -> Tree:
        """The tree on the kept nodes (mask or indices): each hangs under its nearest kept ancestor, order is kept."""
        mask = np.zeros(self.num_nodes, bool)
        index = as_array(keep)
        if index.dtype == bool and index.shape != mask.shape:
            raise ValueError(f"the mask of kept nodes has shape {index.shape}, expected ({self.num_nodes},)")
        mask[index if index.dtype == bool else self._node(index)] = True
        if not mask.any():
            raise ValueError("no node would be left; keep at least one")
        up = np.append(np.where(self.parent < 0, self.num_nodes, self.parent), self.num_nodes)
        kept = np.append(mask, True)  # the sentinel above the roots is always there
        while not kept[up].all():  # leap over dropped ancestors, twice as far each round
            up = np.where(kept[up], up, up[up])
        index = np.flatnonzero(mask)
        number = np.append(np.cumsum(mask) - 1, -1)
        return type(self)(
            number[up[index]],
            self.height[index],
            embedding=None if self.embedding is None else self.embedding[index],
            manifold=self.manifold,
            support=None if self.support is None else self.support[index],
            label=None if self.label is None else [self.label[i] for i in index],
        )

    def subtree(self, i: int) -> Tree:
        """The tree below and including node i, its nodes in the same relative order."""
        return self.take(self.descendants(i))

    def prune(
        self,
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
        keep = np.ones(self.num_nodes, bool)
        if max_depth is not None:
            keep &= self.depth <= max_depth
        if min_leaves is not None:
            keep &= self.num_leaves_below >= min_leaves
        if leaves is not None:
            wanted = self._node(leaves)
            inner = wanted[~self.is_leaf[wanted]]
            if len(inner):
                raise ValueError(f"node {inner[0]} is not a leaf; prune keeps leaves, take keeps any nodes")
            chosen = np.zeros(self.num_nodes, np.int64)
            chosen[wanted] = 1
            keep &= sum_below(self.parent, chosen) > 0
        tree = self.take(keep)
        return tree.take(tree.num_children != 1) if unary else tree

    # ------------------------------------------------------------------ python
    def __len__(self) -> int:
        return self.num_nodes

    def __repr__(self) -> str:
        extra = [name for name in ("embedding", "support", "label") if getattr(self, name) is not None]
        forest = f", {len(self.roots)} roots" if len(self.roots) > 1 else ""
        return (
            f"Tree({self.num_nodes} nodes, {self.num_leaves} leaves{forest}, depth {self.depth.max()}"
            + (f", with {', '.join(extra)}" if extra else "")
            + ")"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        arrays = ("parent", "height", "embedding", "support")
        return self.label == other.label and all(_same(getattr(self, a), getattr(other, a)) for a in arrays)

    __hash__ = None  # type: ignore[assignment]


def _check_parent(parent: Any) -> np.ndarray:
    given = as_array(parent)
    if given.ndim != 1 or not len(given):
        raise ValueError(f"parent has shape {given.shape}, expected (n,) with at least one node")
    if not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"parent must hold integers (-1 at roots), got {given.dtype}")
    checked = np.array(given, np.int64)
    bad = np.flatnonzero((checked < -1) | (checked >= len(checked)))
    if len(bad):
        raise ValueError(
            f"parent of node {bad[0]} is {checked[bad[0]]}, expected -1 (a root) or a node from 0 to {len(checked) - 1}"
        )
    return frozen(checked)


def _depth(parent: np.ndarray) -> np.ndarray:
    """Edges from each node up to its root, (n,); finds cycles on the way."""
    n = len(parent)
    depth = np.append((parent >= 0).astype(np.int64), 0)
    for k, up in enumerate(jumps(parent)):
        if 2**k >= n:  # nobody has n ancestors: who is still climbing walks in a circle
            node = up[up != n].min()
            raise ValueError(f"node {node} is its own ancestor; every node must reach a root (parent -1)")
        depth = depth + depth[up]
    return depth[:-1]


def _by_first_seen(values: np.ndarray) -> np.ndarray:
    """The same grouping, numbered from 0 in order of first appearance."""
    _, first, number = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[number]


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))
