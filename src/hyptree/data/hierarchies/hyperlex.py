"""HyperLex: 2,616 pairs of words with people's answers to "to what degree is X a type of Y?". Read, never packaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyptree.errors import UserError
from hyptree.files import find_file, open_packed

SUBSETS = {"all": "hyperlex-all.txt", "nouns": "hyperlex-nouns.txt", "verbs": "hyperlex-verbs.txt"}
"""File of each subset: 2616, 2163 and 453 pairs."""

SPLITS = ("random", "lexical")
PORTIONS = ("training", "dev", "test")
"""1831, 130 and 655 pairs of the random split; 1133, 85 and 269 of the lexical one, whose words do not overlap."""

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


def read_hyperlex(
    path: Path | str, subset: str = "all", *, split: str | None = None, portion: str = "test"
) -> list[WordPair]:
    """The pairs of HyperLex.

    Args:
        path: its folder, or one of its files (then the other arguments say nothing).
        subset: "all", "nouns" or "verbs".
        split: "random" or "lexical" for a ``portion`` ("training", "dev", "test") of the pairs.

    Raises:
        UserError: no such file, or not HyperLex.
    """
    path = Path(path)
    if not path.is_dir():
        return _read(path)
    if subset not in SUBSETS:
        raise UserError(f"subset must be one of {', '.join(SUBSETS)}, got {subset!r}")
    name = SUBSETS[subset]
    if split is not None:
        if split not in SPLITS or portion not in PORTIONS:
            raise UserError(
                f"split must be one of {', '.join(SPLITS)} and portion one of {', '.join(PORTIONS)}, "
                f"got {split!r} and {portion!r}"
            )
        name = f"splits/{split}/hyperlex_{portion}_all_{split}.txt"
    wanted = {"all": "NV", "nouns": "N", "verbs": "V"}[subset]
    return [pair for pair in _read(find_file(path, "hyperlex", [name], "HyperLex")) if pair.pos in wanted]


def _read(path: Path) -> list[WordPair]:
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
