"""Noun phrases of captions without a model: closed classes of words mark where phrases end, WordNet knows the nouns."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hyptree.data.hierarchies.wordnet import Nouns

_BEFORE = (
    "a an the this that these those some any several many few each every both all another his her their its our my "
    "your there is are one two three four five six seven eight nine ten lots bunch lot couple group pair of"
)
DETERMINERS = frozenset(_BEFORE.split())
"""Words that may stand before a phrase and say nothing of what it is."""

_AFTER = (
    "in on at by with without of from to into onto over under near beside behind between through across along around "
    "above below against among inside outside next off up down towards toward during after before while as and or but "
    "that which who whose where when is are was were be being been has have had do does did can could will would may "
    "holds stands sits opens looks walks rides plays lies eats flies hangs wears for"
)
BOUNDARIES = frozenset(_AFTER.split())
"""Words before which a phrase has ended."""

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*|[^\sA-Za-z]+")


@dataclass(frozen=True)
class Phrase:
    """The first noun phrase of a caption.

    Attributes:
        head: what it is about, as written (``fire hydrant``).
        synset: what the head means.
        noun_phrase: the head with what stands before it, without determiners (``old red fire hydrant``).
        longer: the noun phrase with what follows it, up to the end of the next noun phrase; itself if nothing does.
        start, stop: where the head stands in the caption.
    """

    head: str
    synset: int
    noun_phrase: str
    longer: str
    start: int
    stop: int


def first_phrase(caption: str, nouns: Nouns) -> Phrase | None:
    """The first noun phrase whose head is a thing that WordNet knows, or None."""
    matches = list(_WORD.finditer(caption))
    words = [word.group() for word in matches]
    chunks = _chunks(words, nouns)
    for place, (begin, end) in enumerate(chunks):
        count = _head(words[begin:end], nouns)
        if count is None:
            continue
        first, start, stop = matches[begin].start(), matches[end - count].start(), matches[end - 1].end()
        last = chunks[place + 1][1] if place + 1 < len(chunks) else end
        synset = nouns.synset(caption[start:stop])
        assert synset is not None
        longer = caption[first : matches[last - 1].end()]
        return Phrase(caption[start:stop], synset, caption[first:stop], longer, start, stop)
    return None


def _chunks(words: list[str], nouns: Nouns) -> list[tuple[int, int]]:
    """Ranges of words that may be noun phrases: no determiner before, no boundary inside, ending with a noun."""
    chunks: list[tuple[int, int]] = []
    begin: int | None = None
    last_noun: int | None = None
    for i, word in enumerate([*words, "."]):
        small = word.lower()
        is_word = small[:1].isalpha()
        # "parked", "sitting": before a noun they describe it, after one a new phrase begins.
        participle = last_noun is not None and small.endswith(("ing", "ed"))
        if not is_word or small in BOUNDARIES or participle or (small in DETERMINERS and begin is not None):
            if begin is not None and last_noun is not None:
                chunks.append((begin, last_noun + 1))
            begin = last_noun = None
        elif small not in DETERMINERS:
            begin = i if begin is None else begin
            if _is_thing(small, nouns):
                last_noun = i
    return chunks


def _head(words: list[str], nouns: Nouns) -> int | None:
    """How many of the last words are the head: two where WordNet lists them together (``living room``)."""
    return next((n for n in (3, 2, 1) if n <= len(words) and _is_thing(" ".join(words[-n:]), nouns)), None)


def _is_thing(word: str, nouns: Nouns) -> bool:
    synset = nouns.synset(word)
    return synset is not None and nouns.is_thing(synset)
