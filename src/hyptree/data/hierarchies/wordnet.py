"""WordNet's nouns from its two tables: what a word means, what is more general, what is beside it.

The folder holds ``noun_synsets.tsv.gz`` (wnid, name, lemmas, gloss) and ``noun_hypernyms.tsv.gz`` (child, parent).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from hyptree.data.hierarchies.edges import Hierarchy, read_hierarchy
from hyptree.errors import UserError
from hyptree.files import find_file, open_packed

SYNSETS, HYPERNYMS = "noun_synsets.tsv", "noun_hypernyms.tsv"

THINGS = ("object.n.01", "matter.n.03", "thing.n.12")
"""Above everything that can be seen in a picture."""

_IRREGULAR = {
    "men": "man",
    "women": "woman",
    "people": "person",
    "children": "child",
    "feet": "foot",
    "teeth": "tooth",
    "mice": "mouse",
    "geese": "goose",
}
_ENDINGS = (("ies", "y"), ("ves", "f"), ("ves", "fe"), ("es", ""), ("s", ""))


class Nouns:
    """Nouns as a graph of synsets.

    Args:
        names: of the synsets, such as ``dog.n.01``.
        lemmas: words of each, spaces as underscores.
        hierarchy: direct (child, parent) pairs over the places in ``names``.
    """

    def __init__(self, names: Sequence[str], lemmas: Sequence[Sequence[str]], hierarchy: Hierarchy):
        self.names, self.lemmas, self.hierarchy = list(names), [tuple(words) for words in lemmas], hierarchy
        self._place = {name: i for i, name in enumerate(self.names)}
        self._meanings: dict[str, list[int]] = defaultdict(list)
        for i, words in enumerate(self.lemmas):
            for word in words:
                self._meanings[word.lower()].append(i)
        self._children: dict[int, list[int]] = defaultdict(list)
        for child, parent in hierarchy.pairs.tolist():
            self._children[parent].append(child)
        self._above: dict[int, list[list[int]]] = {}
        self._things = {self._place[name] for name in THINGS if name in self._place}

    @classmethod
    def read(cls, folder: Path | str) -> Nouns:
        """The nouns of a folder of WordNet; a ``UserError`` where a table is missing or not one."""
        path = find_table(folder, HYPERNYMS)
        rows = {row[0]: row for row in read_table(find_table(folder, SYNSETS), "wnid", "name", "lemmas")}
        edges = read_hierarchy(path, closure="given")
        missing = [wnid for wnid in edges.names if wnid not in rows]
        if missing:
            raise UserError(f"{path}: {missing[0]} is not in {SYNSETS}; both must be of one WordNet")
        known = [rows[wnid] for wnid in edges.names]
        return cls([row[1] for row in known], [row[2].split(",") for row in known], edges)

    def __len__(self) -> int:
        return len(self.names)

    def lemma(self, word: str) -> str | None:
        """The word as WordNet lists it (``Fire hydrants`` -> ``fire_hydrant``), or None where it is no noun there."""
        word = "_".join(word.lower().split())
        start, underscore, last = word.rpartition("_")
        forms = [last, *([_IRREGULAR[last]] if last in _IRREGULAR else [])]
        # A plural that is listed itself ("glasses") is still what people mean by the singular.
        forms += [
            last[: -len(end)] + other for end, other in _ENDINGS if last.endswith(end) and len(last) > len(end) + 1
        ]
        if last in _IRREGULAR or (last.endswith("s") and not last.endswith(("ss", "us", "is"))):
            forms = [*forms[1:], last]
        return next((start + underscore + form for form in forms if start + underscore + form in self._meanings), None)

    def synset(self, word: str) -> int | None:
        """What a word most likely means in the caption of a picture: its first sense that is a thing.

        Names tell the number of a sense (``table.n.02``); synsets that are listed under another word fill the gaps.
        """
        lemma = self.lemma(word)
        if lemma is None:
            return None
        numbered: dict[int, int] = {}
        others = []
        for i in self._meanings[lemma]:
            name, _, number = self.names[i].rpartition(".n.")
            if name.lower() == lemma and number.isdecimal():
                numbered[int(number)] = i
            else:
                others.append(i)
        free = (k for k in range(1, len(numbered) + len(others) + 99) if k not in numbered)
        senses = [i for _, i in sorted([*numbered.items(), *zip(free, others, strict=False)])]
        return next((i for i in senses if self.is_thing(i)), senses[0])

    def find(self, name: str) -> int:
        """The synset of this name."""
        if name not in self._place:
            raise UserError(f"WordNet has no noun synset {name!r}; names look like dog.n.01")
        return self._place[name]

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def parents(self, i: int) -> list[int]:
        """The synsets right above."""
        start, stop = self.hierarchy.offsets[i : i + 2]
        parents: list[int] = self.hierarchy.pairs[start:stop, 1].tolist()
        return parents

    def levels_above(self, i: int) -> list[list[int]]:
        """More general synsets, those one step up first, each once."""
        if i not in self._above:
            level, seen = [i], {i}
            self._above[i] = []
            while level := [
                p for p in dict.fromkeys(p for child in level for p in self.parents(child)) if p not in seen
            ]:
                seen.update(level)
                self._above[i].append(level)
        return self._above[i]

    def ancestors(self, i: int) -> Iterator[int]:
        """All more general synsets, the nearest first."""
        return chain.from_iterable(self.levels_above(i))

    def sisters(self, i: int) -> list[int]:
        """Other children of the parents, in order."""
        return [s for s in dict.fromkeys(s for p in self.parents(i) for s in self._children[p]) if s != i]

    def word(self, i: int) -> str:
        """The first word of a synset, readable."""
        return self.lemmas[i][0].replace("_", " ")

    def is_a(self, word: str, general: str) -> bool:
        """Whether what a word means is a kind of something that another one can mean, or the same."""
        mine, lemma = self.synset(word), self.lemma(general)
        if mine is None or lemma is None:
            return False
        meanings = self._meanings[lemma]
        return mine in meanings or any(i in meanings for i in self.ancestors(mine))

    def num_meanings(self, word: str) -> int:
        """How many synsets list a word: common words have many, rare ones have one."""
        return len(self._meanings.get("_".join(word.lower().split()), ()))

    def is_thing(self, i: int) -> bool:
        """Whether a synset is an object, a part of one, or matter; in a table without these three everything is."""
        return not self._things or i in self._things or not self._things.isdisjoint(self.ancestors(i))


def find_table(folder: Path | str, name: str) -> Path:
    """The file of a table in the folder of WordNet, or in the one above."""
    return find_file(folder, "wordnet", (f"{name}.gz", name), "WordNet's tables")


def read_table(path: Path, *columns: str) -> list[list[str]]:
    """The rows of a table that begins with these columns."""
    with open_packed(path) as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if not rows or rows[0][: len(columns)] != [*columns] or any(len(row) < len(columns) for row in rows):
        raise UserError(f"{path}: expected a table with the columns {', '.join(columns)}")
    return rows[1:]
