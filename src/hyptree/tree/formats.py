"""Trees in files and in other programs: JSON, networkx, files by their ending, Newick (``((a:1,b:1)ab:2,c:3);``)."""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.errors import require
from hyptree.files import write_atomic
from hyptree.tree.arrays import sum_to_root
from hyptree.tree.build import from_edges

if TYPE_CHECKING:
    from hyptree.tree.core import Tree


JSON_FORMAT = "hyptree.tree"


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
    data = text.encode()
    data = gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
    write_atomic(path, lambda temporary: temporary.write_bytes(data))
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

    Branch lengths are the height of the parent less the node's own. Newick keeps no absolute heights.
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
