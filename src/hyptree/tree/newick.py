"""Newick, the bracket notation of trees in biology: ``((a:1,b:1)ab:2,c:3);``."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hyptree.tree.arrays import sum_to_root

if TYPE_CHECKING:
    from hyptree.tree.core import Tree

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
