"""HyperLex: 2,616 pairs of words with people's answers to "to what degree is X a type of Y?". Read, never packaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyptree.errors import UserError
from hyptree.files import find_file, open_packed

FILE = "hyperlex-all.txt"
_HEADER = ("WORD1", "WORD2", "POS", "TYPE")


@dataclass(frozen=True)
class WordPair:
    """One pair: is ``word`` a type of ``general``?

    Attributes:
        pos: "N" for nouns, "V" for verbs.
        relation: what WordNet says, e.g. "hyp-1", "syn", "no-rel".
        score: mean answer from 0 (not at all) to 10.
    """

    word: str
    general: str
    pos: str
    relation: str
    score: float


def read_hyperlex(path: Path | str) -> list[WordPair]:
    """The pairs of HyperLex, all 2,616 of its folder or those of one of its files.

    Raises:
        UserError: no such file, or not HyperLex.
    """
    path = Path(path)
    if path.is_dir():
        path = find_file(path, "hyperlex", [FILE], "HyperLex")
    with open_packed(path, hint="expected HyperLex") as file:
        lines = file.read().splitlines()
    if not lines or tuple(lines[0].split()[:4]) != _HEADER:
        raise UserError(f"{path}: expected HyperLex, whose first line begins with {' '.join(_HEADER)}")
    pairs = []
    for number, line in enumerate(lines[1:], 2):
        cells = line.split()
        if not cells:
            continue
        try:
            word, general, pos, relation, _, score = cells[:6]
            pairs.append(WordPair(word, general, pos, relation, float(score)))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number}: expected two words, N or V, a relation and two scores, got {line[:60]!r}"
            ) from error
    return pairs
