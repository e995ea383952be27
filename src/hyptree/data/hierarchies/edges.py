"""Hierarchies as (child, ancestor) pairs: reading edge lists, finding cycles, closing them under transitivity.

Needs numpy alone.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from hyptree.data.npz import open_npz, take
from hyptree.errors import UserError, shown
from hyptree.files import open_packed

MAX_PAIRS = 200_000_000
"""A closure with more pairs is refused: it would not fit into an ordinary memory."""

_TITLES = (
    "child parent ancestor descendant hyponym hypernym specific general subclass superclass "
    "source target from to head tail src dst u v id1 id2 node1 node2"
)
_HEADER_WORDS = frozenset(_TITLES.split())


@dataclass(frozen=True)
class Hierarchy:
    """A directed acyclic graph of named nodes as pairs (child, ancestor).

    Attributes:
        names: one per node.
        pairs: (P, 2) int64 node indices, child first; sorted, each pair once, none from a node to itself.
        is_closed: whether the ancestor of an ancestor always counts as one.
        num_dropped: lines that repeated a pair or led from a node to itself.
    """

    names: list[str]
    pairs: np.ndarray
    is_closed: bool
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.names)

    @cached_property
    def offsets(self) -> np.ndarray:
        """(N + 1,): the ancestors of node ``u`` are ``pairs[offsets[u]:offsets[u + 1], 1]``."""
        return _offsets(self.pairs, self.num_nodes)

    @cached_property
    def num_ancestors(self) -> np.ndarray:
        """(N,) ancestors of each node."""
        return np.diff(self.offsets)

    @cached_property
    def num_descendants(self) -> np.ndarray:
        """(N,) nodes that have this one as an ancestor."""
        return np.bincount(self.pairs[:, 1], minlength=self.num_nodes)

    def digest(self) -> str:
        """A short fingerprint of names and pairs, to tell whether two hierarchies are the same one."""
        hashed = hashlib.sha256("\n".join(self.names).encode())
        hashed.update(np.ascontiguousarray(self.pairs).tobytes())
        return hashed.hexdigest()[:16]


def read_hierarchy(
    path: Path | str,
    *,
    closure: Literal["auto", "given", "compute"] = "auto",
    header: Literal["auto", "yes", "no"] = "auto",
) -> Hierarchy:
    """The hierarchy in a file of (child, parent) or (child, ancestor) rows; further columns are ignored.

    Text files (.tsv, .csv, .txt, each also with .gz) hold names or whole numbers; blank lines and lines that start with
    ``#`` are skipped. A .npz file holds whole numbers under the key ``pairs`` and, if it likes, ``names``. Numbers are
    ordered by value, names alphabetically, so the order of the lines does not matter.

    Args:
        closure: "auto" and "compute" complete the pairs to their transitive closure, "given" takes them as they are.
        header: whether the first row names the columns; "auto" looks at it.

    Raises:
        UserError: unreadable or empty file, malformed line, missing name, or a cycle, which is spelled out.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a file of (child, parent) rows")
    if not path.exists():
        raise UserError(f"cannot read {path}: no such file")
    names, pairs = _read_npz(path) if path.suffix == ".npz" else _read_text(path, header)
    if len(pairs) == 0:
        raise UserError(f"{path}: no edges in it; expected one (child, parent) row per edge")
    try:
        return make_hierarchy(names, pairs, closure=closure)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def make_hierarchy(
    names: list[str], pairs: np.ndarray, *, closure: Literal["auto", "given", "compute"] = "auto"
) -> Hierarchy:
    """The hierarchy of (P, 2) node indices: sorted, each pair once, no cycles, closed unless ``closure="given"``."""
    n = len(names)
    pairs = np.asarray(pairs, np.int64).reshape(-1, 2)
    num_rows = len(pairs)
    pairs = _sorted_unique(pairs[pairs[:, 0] != pairs[:, 1]], n)
    if len(pairs) == 0:
        raise UserError(
            "every edge leads from a node to itself; expected (child, parent) rows with two different nodes"
        )
    closed = transitive_closure(pairs, n, names=names)
    is_closed = len(closed) == len(pairs)
    if closure == "given":
        return Hierarchy(names, pairs, is_closed, num_rows - len(pairs))
    return Hierarchy(names, closed, True, num_rows - len(pairs))


def transitive_closure(
    pairs: np.ndarray, num_nodes: int, *, names: list[str] | None = None, max_pairs: int = MAX_PAIRS
) -> np.ndarray:
    """All (node, ancestor) pairs of a DAG given by (node, parent) edges: (E, 2) -> (P, 2), sorted, each once.

    Time and memory are proportional to the edges times their parents' ancestors, which for a tree is the size of the
    answer.

    Raises:
        UserError: there is a cycle (it is spelled out), or more than ``max_pairs`` pairs would come out.
    """
    pairs = _sorted_unique(np.asarray(pairs, np.int64).reshape(-1, 2), num_nodes)
    offsets, parents = _offsets(pairs, num_nodes), pairs[:, 1]
    ancestors: list[np.ndarray] = [np.empty(0, np.int64)] * num_nodes
    total = 0
    graph: TopologicalSorter[int] = TopologicalSorter()
    for u, (start, stop) in enumerate(pairwise(offsets.tolist())):
        graph.add(u, *parents[start:stop].tolist())
    try:
        parents_first = [*graph.static_order()]
    except CycleError as error:
        shown = [names[i] if names else str(i) for i in reversed(error.args[1])]
        if len(shown) > 8:
            shown = [*shown[:4], f"({len(shown) - 7} more)", *shown[-3:]]
        raise UserError(f"there is a cycle: {' -> '.join(shown)}; a hierarchy has none") from error
    for u in parents_first:
        above = parents[offsets[u] : offsets[u + 1]]
        if len(above) == 0:
            continue
        own = np.concatenate([above, *(ancestors[p] for p in above)])
        ancestors[u] = own if len(above) == 1 else np.unique(own)
        total += len(ancestors[u])
        if total > max_pairs:
            raise UserError(
                f"the transitive closure has more than {max_pairs:,} pairs; embed the edges themselves (closure: given)"
            )
    children = np.repeat(np.arange(num_nodes), [len(a) for a in ancestors])
    above_all = np.concatenate(ancestors) if num_nodes else np.empty(0, np.int64)
    return _sorted_unique(np.stack([children, above_all], 1), num_nodes)


def _sorted_unique(pairs: np.ndarray, n: int) -> np.ndarray:
    keys = np.unique(pairs[:, 0] * max(n, 1) + pairs[:, 1])
    return np.stack(np.divmod(keys, max(n, 1)), 1)


def _offsets(pairs: np.ndarray, n: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.bincount(pairs[:, 0], minlength=n))])


# -------------------------------------------------------------------------------------------------------------- files


def _read_npz(path: Path) -> tuple[list[str], np.ndarray]:
    with open_npz(path) as archive:
        pairs = take(archive, "pairs", path)
        names = take(archive, "names", path) if "names" in archive else None
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise UserError(f"{path}: 'pairs' must have the shape (E, 2), got {pairs.shape}")
    if pairs.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(pairs).all(1) | (pairs != np.round(pairs)).any(1))
        if len(bad):
            raise UserError(f"{path}: row {bad[0]} of 'pairs' is {pairs[bad[0]].tolist()}, expected whole numbers")
    elif pairs.dtype.kind not in "iu":
        raise UserError(f"{path}: 'pairs' must hold whole numbers, got {pairs.dtype}")
    pairs = pairs.astype(np.int64)
    if names is not None:
        if names.ndim != 1 or (len(pairs) and (pairs.min() < 0 or pairs.max() >= len(names))):
            raise UserError(f"{path}: 'pairs' must index the {len(names)} 'names', got {pairs.min()} to {pairs.max()}")
        return [str(name) for name in names.tolist()], pairs
    values, index = np.unique(pairs, return_inverse=True)
    return [str(value) for value in values.tolist()], index.reshape(-1, 2)


def _read_text(path: Path, header: str) -> tuple[list[str], np.ndarray]:
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if kind not in (".tsv", ".csv", ".txt", ""):
        raise UserError(f"{path}: unknown kind of file {kind!r}; expected .tsv, .csv or .txt (also .gz), or .npz")
    with open_packed(path) as file:
        rows = [
            (number, row[0].strip(), row[1].strip() if len(row) > 1 else None)
            for number, row in _split_lines(file, kind, path)
        ]
    for number, child, parent in rows:
        if parent is None:
            raise UserError(
                f"{path}, line {number}: expected a child and its parent separated by "
                f"{ {'.tsv': 'a tab', '.csv': 'a comma'}.get(kind, 'a tab, a comma or spaces') }, got {shown(child)}"
            )
        if not child or not parent:
            raise UserError(f"{path}, line {number}: the {'parent' if child else 'child'} has no name")
    if rows and (header == "yes" or (header == "auto" and _looks_like_header(rows))):
        rows = rows[1:]
    return _number([(n, child, parent or "") for n, child, parent in rows], path)


def _split_lines(file: Iterable[str], kind: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every line that says something."""
    if kind == ".csv":
        reader = csv.reader(file)
        try:
            for row in reader:
                if any(cell.strip() for cell in row) and not row[0].lstrip().startswith("#"):
                    yield reader.line_num, row
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: {error}") from error
        return
    for number, line in enumerate(file, 1):
        line = line.rstrip("\r\n")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if kind == ".tsv" or "\t" in line:
            yield number, line.split("\t")
        else:
            yield number, line.split("," if "," in line else None)


def _looks_like_header(rows: list[tuple[int, str, str | None]]) -> bool:
    _, child, parent = rows[0]
    if child.lower() in _HEADER_WORDS and (parent or "").lower() in _HEADER_WORDS:
        # A column title that other rows use as a name is a name.
        return not any(child in row[1:] or parent in row[1:] for row in rows[1:])
    is_number = _is_whole(child) or _is_whole(parent or "")
    return not is_number and len(rows) > 1 and all(_is_whole(c) and _is_whole(p or "") for _, c, p in rows[1:])


def _number(rows: list[tuple[int, str, str]], path: Path) -> tuple[list[str], np.ndarray]:
    """Names of the nodes and (E, 2) indices into them."""
    cells = {cell for _, child, parent in rows for cell in (child, parent)}
    words = {cell for cell in cells if not _is_whole(cell)}
    if 0 < len(words) < len(cells) and {word.lower() for word in words} <= {"nan", "inf", "-inf", "none", "null"}:
        bad = next(number for number, child, parent in rows if child in words or parent in words)
        raise UserError(
            f"{path}, line {bad}: expected whole numbers as in the other lines, got {shown(sorted(words)[0])}"
        )
    if words:
        names = sorted(cells)
        index = {name: i for i, name in enumerate(names)}
    else:  # 7 and 07 are the same node
        values = sorted({int(cell) for cell in cells})
        position = {value: i for i, value in enumerate(values)}
        names = [str(value) for value in values]
        index = {cell: position[int(cell)] for cell in cells}
    pairs = np.array([(index[child], index[parent]) for _, child, parent in rows], np.int64).reshape(-1, 2)
    return names, pairs


def _is_whole(cell: str) -> bool:
    return cell.lstrip("-").isdecimal() and cell.isascii() and cell.count("-") <= 1
