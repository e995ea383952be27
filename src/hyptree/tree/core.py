"""The Tree itself: validated storage, structure and queries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hyptree.errors import suggest
from hyptree.tree import build, derive, drawing, formats, layout, measure
from hyptree.tree.arrays import as_array, frozen, jumps, max_below, sum_below, sum_to_root


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
    from_linkage = classmethod(build.from_linkage)
    from_assignments = classmethod(build.from_assignments)
    from_edges = classmethod(build.from_edges)
    from_newick = classmethod(formats.from_newick)
    from_json = classmethod(formats.from_json)
    from_networkx = classmethod(formats.from_networkx)
    load = classmethod(formats.load)
    to_linkage = build.to_linkage
    to_newick = formats.to_newick
    to_json = formats.to_json
    to_networkx = formats.to_networkx
    save = formats.save

    # ------------------------------------------------------------------ pairs of nodes, clusters, new trees
    _lca_table = cached_property(derive.lca_table)
    lca = derive.lca
    path = derive.path
    distance = derive.distance
    cut = derive.cut
    replace = derive.replace
    relabel = derive.relabel
    take = derive.take
    subtree = derive.subtree
    prune = derive.prune

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
        ancestors, at = [], int(self.parent[self._node(i)])
        while at >= 0:
            ancestors.append(at)
            at = int(self.parent[at])
        return np.array(ancestors, np.int64)

    @cached_property
    def length(self) -> np.ndarray:
        """Length of the edge above each node, height of the parent less its own, (n,); 0 at roots."""
        return frozen(np.where(self.parent < 0, 0.0, self.height[self.parent] - self.height))

    @cached_property
    def _root_distance(self) -> np.ndarray:
        return sum_to_root(self.parent, np.abs(self.length))

    def find(self, label: str) -> int:
        """The first node of that name."""
        if self.label is None:
            raise ValueError("this tree has no labels; pass label= or use relabel")
        if label not in self._by_label:
            hint = suggest(str(label), self._by_label)
            raise ValueError(f"no node is called {label!r}" + (f"; {hint}" if hint else ""))
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
    array = as_array(parent)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"parent has shape {array.shape}, expected (n,) with at least one node")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"parent must hold integers (-1 at roots), got {array.dtype}")
    checked = np.array(array, np.int64)
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


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))
