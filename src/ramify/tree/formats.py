"""Ways into and out of a Tree: linkage, assignments, edges, Newick, JSON, networkx, files."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ramify.errors import require
from ramify.tree.arrays import as_array, sum_below, sum_to_root

if TYPE_CHECKING:
    from ramify.tree.core import Tree

JSON_FORMAT = "ramify.tree"


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
    by_parent = np.argsort(parent, kind="stable")
    start = np.searchsorted(parent[by_parent], np.arange(n + 1)).tolist()
    target = child[by_parent].tolist()
    waiting = np.bincount(child, minlength=n)
    ready = np.flatnonzero(waiting == 0).tolist()
    waiting = waiting.tolist()
    longest, shortest = [0] * n, [n if w else 0 for w in waiting]
    # Plain lists: a node at a time is what makes this linear for a deep graph, and numpy scalars are slow.
    for node in ready:
        down, up = longest[node] + 1, shortest[node] + 1
        for at in target[start[node] : start[node + 1]]:
            longest[at] = max(longest[at], down)
            shortest[at] = min(shortest[at], up)
            waiting[at] -= 1
            if not waiting[at]:
                ready.append(at)
    if len(ready) < n:
        # Whoever still waits has a waiting parent: climb until a node comes back.
        above = {c: p for c, p in zip(child.tolist(), parent.tolist(), strict=True) if waiting[c] and waiting[p]}
        seen: set[int] = set()
        at = next(iter(above))
        while at not in seen:
            seen.add(at)
            at = above[at]
        raise ValueError(f"node {label[at] if label else at} is its own ancestor; the edges must not form a cycle")
    return np.array(longest), np.array(shortest)


# ---------------------------------------------------------------------- Newick
_NEWICK_TOKEN = re.compile(r"\s+|\[[^\]]*\]|'(?:[^']|'')*'|[(),:;]|[^\s()\[\],:;']+")


def from_newick(cls: type[Tree], text: str) -> Tree:
    """The tree, or forest, of a Newick string; nodes are numbered in the order they open (preorder).

    Quoted names, branch lengths and [comments] are read. Underscores stay underscores. Branch lengths become heights:
    the leaf farthest from a root is at 0 and each node sits its branch length below its parent (a missing length is
    0 where others are given). Without any lengths, and without any names, height and label are the defaults.
    """
    parent: list[int] = [-1]
    name: dict[int, str] = {}
    length: dict[int, float] = {}
    stack: list[int] = []
    current, closed, want_number, done, at = 0, False, False, False, 0

    def fail(problem: str) -> ValueError:
        return ValueError(f"Newick text, character {at}: {problem}")

    while at < len(text):
        match = _NEWICK_TOKEN.match(text, at)
        if match is None:
            raise fail(f"{text[at]!r} has no closing partner")
        token = match.group()
        if token.isspace() or token[0] == "[":
            at = match.end()
            continue
        if done:  # another tree of a forest begins
            current, closed, done = len(parent), False, False
            parent.append(-1)
        if want_number:
            try:
                length[current] = float(token)
            except ValueError:
                raise fail(f"expected a branch length, got {token!r}") from None
            want_number = False
        elif token == "(":
            if closed or current in name or current in length:
                raise fail("'(' must come before the name")
            stack.append(current)
            current = len(parent)
            parent.append(stack[-1])
        elif token in (",", ")"):
            if not stack:
                raise fail(f"{token!r} without '('")
            if token == ")":
                current, closed = stack.pop(), True
            else:
                current, closed = len(parent), False
                parent.append(stack[-1])
        elif token == ":":
            if current in length:
                raise fail("a node has two branch lengths")
            want_number = True
        elif token == ";":
            if stack:
                raise fail(f"';' with {len(stack)} open '('")
            done = True
        else:
            if current in name or current in length:
                raise fail(f"did not expect the name {token!r} here")
            name[current] = token[1:-1].replace("''", "'") if token[0] == "'" else token
        at = match.end()
    if not done:
        raise fail("the text ends without ';'")

    above = np.array(parent)
    height = None
    if length:
        edge = np.zeros(len(above))
        edge[list(length)] = list(length.values())
        edge[above < 0] = 0.0  # the length of a root's edge leads nowhere
        run = sum_to_root(above, edge)
        component = np.cumsum(above < 0) - 1  # preorder: a tree's nodes follow its root
        deepest = np.full(component[-1] + 1, -np.inf)
        np.maximum.at(deepest, component, run)
        height = deepest[component] - run
    label = [name.get(i, "") for i in range(len(above))] if name else None
    return cls(above, height, label=label)


def to_newick(tree: Tree, *, lengths: bool = True) -> str:
    """The tree in Newick format, one ``;`` per root; names are quoted where they must be.

    Args:
        lengths: writes branch lengths, the height of the parent less the node's own. Newick keeps no absolute heights.
    """
    tail = [""] * tree.num_nodes if tree.label is None else [_quote(name) for name in tree.label]
    if tree.label is not None and not any(tree.label):
        tail = ["''"] * tree.num_nodes  # names that are all empty still differ from no names
    if lengths:
        edges = tree.length.tolist()
        is_root = (tree.parent < 0).tolist()
        tail = [t if r else f"{t}:{e!r}" for t, e, r in zip(tail, edges, is_root, strict=True)]
    is_leaf, is_root, leaving = tree.is_leaf.tolist(), (tree.parent < 0).tolist(), [False] * tree.num_nodes
    parts: list[str] = []
    for node, following in pairwise([*tree.order("euler").tolist(), -1]):
        if not leaving[node]:
            leaving[node] = True
            if not is_leaf[node]:
                parts.append("(")
            continue
        parts.append(tail[node] if is_leaf[node] else ")" + tail[node])
        if is_root[node]:
            parts.append(";\n")
        elif not leaving[following]:  # the tour goes on into a sibling
            parts.append(",")
    return "".join(parts).rstrip("\n")


def _quote(name: str) -> str:
    if not re.search(r"[\s()\[\]{}:;,']", name):
        return name
    return "'" + name.replace("'", "''") + "'"


# ---------------------------------------------------------------------- JSON
def to_json(tree: Tree) -> str:
    """The tree as JSON text; numbers come back bit for bit, a manifold by its name and curvature."""
    content: dict[str, Any] = {"format": JSON_FORMAT, "version": 1}
    content["parent"] = tree.parent.tolist()
    content["height"] = tree.height.tolist()
    if tree.label is not None:
        content["label"] = tree.label
    for name in ("embedding", "support"):
        values = getattr(tree, name)
        if values is not None:
            if not np.isfinite(values).all():
                row = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))[0]
                raise ValueError(f"{name} of node {row} is not finite; JSON has no way to write it")
            content[name] = {"dtype": str(values.dtype), "shape": values.shape, "values": values.ravel().tolist()}
    if tree.manifold is not None:
        content["manifold"] = manifold_name(tree.manifold)
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def from_json(cls: type[Tree], text: str) -> Tree:
    """The tree that ``to_json`` wrote."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(content, dict) or "parent" not in content:
        raise ValueError('this JSON is no tree: expected an object with "parent" (integers, -1 at roots)')
    if content.get("format", JSON_FORMAT) != JSON_FORMAT or content.get("version", 1) != 1:
        raise ValueError(
            f"this JSON is {content.get('format')!r} version {content.get('version')!r}, "
            f"expected {JSON_FORMAT!r} version 1"
        )
    fields = {name: content.get(name) for name in ("height", "label", "manifold")}
    for name in ("embedding", "support"):
        stored = content.get(name)
        if isinstance(stored, dict):
            stored = np.array(stored["values"], stored["dtype"]).reshape(stored["shape"])
        fields[name] = stored
    return cls(np.array(content["parent"]), **fields)


def manifold_name(manifold: Any) -> str:
    """A manifold in words, such as ``Lorentz(c=0.5)``."""
    if isinstance(manifold, str):
        return manifold
    c = getattr(manifold, "c", None)
    return type(manifold).__name__ + ("" if c is None else f"(c={float(c)!r})")


# ---------------------------------------------------------------------- networkx
def to_networkx(tree: Tree) -> Any:
    """A networkx DiGraph with edges from parent to child; nodes carry height and label, edges their length."""
    networkx = require("networkx")
    graph = networkx.DiGraph()
    for i, height in enumerate(tree.height.tolist()):
        graph.add_node(i, height=height)
        if tree.label is not None:
            graph.nodes[i]["label"] = tree.label[i]
    child = np.flatnonzero(tree.parent >= 0)
    for c, p, length in zip(child.tolist(), tree.parent[child].tolist(), tree.length[child].tolist(), strict=True):
        graph.add_edge(p, c, length=length)
    return graph


def from_networkx(cls: type[Tree], graph: Any, *, root: Any = None) -> Tree:
    """The tree of a networkx graph.

    Nodes that are the integers 0 to n-1 keep their numbers, others are numbered in the graph's order and named after
    themselves. Node attributes ``height`` and ``label`` are used where every node has them.

    Args:
        graph: a DiGraph with edges from parent to child, or an undirected tree.
        root: of an undirected tree, the node to hang it from.
    """
    networkx = require("networkx")
    if not graph.is_directed():
        if root is None:
            raise ValueError("an undirected graph has no top; pass root=, the node to hang it from")
        if not networkx.is_tree(graph):
            raise ValueError("this undirected graph is not a tree (it has a cycle or several parts)")
        directed = networkx.bfs_tree(graph, root)
        for node in directed:
            directed.nodes[node].update(graph.nodes[node])
        graph = directed
    nodes = list(graph.nodes)
    own_numbers = all(isinstance(v, int) for v in nodes) and set(nodes) == set(range(len(nodes)))
    if own_numbers:
        nodes.sort()
    index = {node: i for i, node in enumerate(nodes)}
    parent = np.full(len(nodes), -1)
    for up, down in graph.edges():
        if parent[index[down]] >= 0:
            raise ValueError(f"node {down!r} has several parents; use Tree.from_edges, which keeps one")
        parent[index[down]] = index[up]
    heights = [graph.nodes[v].get("height") for v in nodes]
    labels = [graph.nodes[v].get("label") for v in nodes]
    label = labels if all(v is not None for v in labels) else None
    if label is None and not own_numbers:
        label = [str(v) for v in nodes]
    return cls(parent, heights if all(h is not None for h in heights) else None, label=label)


# ---------------------------------------------------------------------- files
_NEWICK_ENDINGS = (".nwk", ".newick", ".tree")


def save(tree: Tree, path: str | Path) -> Path:
    """Writes the tree to a file: .json, .nwk / .newick / .tree, or .tsv edges; a further .gz compresses.

    The file is written aside and renamed, so a crash leaves the old one.
    """
    path = Path(path)
    ending = _ending(path)
    if ending == ".json":
        text = to_json(tree)
    elif ending in _NEWICK_ENDINGS:
        text = to_newick(tree) + "\n"
    elif ending == ".tsv":
        if len(tree.roots) == tree.num_nodes:
            raise ValueError("a tree without edges cannot be written as .tsv edges; use .json")
        name = tree.label if tree.label is not None else [str(i) for i in range(tree.num_nodes)]
        rows = [f"{name[c]}\t{name[p]}\n" for c, p in enumerate(tree.parent.tolist()) if p >= 0]
        text = "child\tparent\n" + "".join(rows)
    else:
        raise ValueError(f"cannot tell a format from {path.name!r}; use .json, .nwk, .newick, .tree or .tsv (and .gz)")
    aside = path.with_name(path.name + ".part")
    data = text.encode()
    with open(aside, "wb") as file:
        file.write(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    return path


def load(cls: type[Tree], path: str | Path) -> Tree:
    """The tree in a file that ``save`` wrote, or in a .tsv / .csv list of (child, parent) edges."""
    path = Path(path)
    ending = _ending(path)
    if ending not in (".json", ".tsv", ".csv", *_NEWICK_ENDINGS):
        raise ValueError(
            f"cannot tell a format from {path.name!r}; use .json, .nwk, .newick, .tree, .tsv or .csv (and .gz)"
        )
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    if ending == ".json":
        return from_json(cls, text)
    if ending in _NEWICK_ENDINGS:
        return from_newick(cls, text)
    separator = "\t" if ending == ".tsv" else ","
    rows = [line.split(separator) for line in text.splitlines() if line.strip()]
    if rows and [cell.strip().lower() for cell in rows[0][:2]] == ["child", "parent"]:
        rows = rows[1:]
    if rows and all(len(row) > 1 for row in rows) and all(cell.isdecimal() for row in rows for cell in row[:2]):
        return from_edges(cls, [(int(row[0]), int(row[1])) for row in rows])
    return from_edges(cls, rows)


def _ending(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()
