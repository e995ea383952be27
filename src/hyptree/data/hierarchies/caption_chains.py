"""Caption hierarchies from plain captions, as HierarCaps was built: generalise, keep what is entailed, contradict.

Three parts, each a function that anybody can replace:

* a **generator** gives more general captions of a caption,
* an **entailment** scores whether one text follows from another,
* a **contradictor** gives texts like a caption that are wrong for the picture.

The defaults need no model: noun phrases and WordNet. ``hyptree.data.hierarchies.caption_models`` has adapters for
language models and for models of natural language inference.

    nouns = Nouns.read("data/wordnet")
    build_chain("A blue bird sitting on the top of a branch", default_parts(nouns))
    # animal => bird => blue bird => A blue bird sitting on the top of a branch
"""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyptree.data.hierarchies.hierarcaps import NUM_LEVELS, Chain
from hyptree.data.hierarchies.wordnet import Nouns
from hyptree.errors import UserError
from hyptree.files import write_text

_NAMED_IN_GENERAL = (
    "person.n.01 animal.n.01 plant.n.02 food.n.01 food.n.02 vehicle.n.01 furniture.n.01 building.n.01 clothing.n.01 "
    "home_appliance.n.01 container.n.01 machine.n.01 tool.n.01 musical_instrument.n.01 room.n.01 body_of_water.n.01 "
    "plaything.n.01 sports_equipment.n.01 way.n.06 geological_formation.n.01 body_part.n.01 fabric.n.01 tableware.n.01 "
    "electronic_equipment.n.01 structure.n.01 device.n.01 equipment.n.01 location.n.01"
)
GENERAL = tuple(_NAMED_IN_GENERAL.split())
"""Synsets that people name when they speak in general; the nearest one above a noun is its most general caption."""

PEOPLE = {"man": "woman", "woman": "man", "boy": "girl", "girl": "boy"}
"""People are many things at once (a man, a surfer, a visitor): of their kinds only these exclude each other."""

ANIMALS = ("dog", "cat", "horse", "elephant", "bird", "sheep")
"""What takes the place of other people in a contradiction."""


Generator = Callable[[str], list[str]]
"""More general captions of a caption, any number of them, the most general first; they are checked afterwards."""

Entailment = Callable[[Sequence[tuple[str, str]]], list[float]]
"""Probability, for each (premise, hypothesis), that the hypothesis follows."""

Contradictor = Callable[[str, str], list[str]]
"""Candidates, the best first, like one text of the chain of a caption (``text, caption``) but wrong for the picture."""


@dataclass(frozen=True)
class Parts:
    """What builds chains.

    Attributes:
        threshold: a caption is entailed from this probability on.
        reject: a contradiction is accepted below this one.
    """

    generator: Generator
    entailment: Entailment
    contradictor: Contradictor
    threshold: float = 0.5
    reject: float = 0.5


def default_parts(nouns: Nouns, seed: int = 0) -> Parts:
    """The parts that need no model."""
    return Parts(NounGenerator(nouns), NounEntailment(nouns), SisterContradictor(nouns, seed))


def build_chain(caption: str, parts: Parts, *, num_levels: int = NUM_LEVELS, image: str = "") -> Chain | None:
    """The chain of a caption with its contradictions, or None where there are not enough levels or no contradiction.

    Every level is entailed by the caption and by the level below it; no text appears twice. With more candidates than
    levels the most general one, the next and the most specific ones stay.

    Raises:
        UserError: an empty caption.
    """
    caption = " ".join(caption.split())
    if not caption:
        raise UserError("the caption is empty; write it or drop the row")
    if "=>" in caption:
        raise UserError(f"the caption {caption[:60]!r} holds '=>', which separates levels; drop the row")
    texts = [text for text in _distinct(parts.generator(caption)) if _content(text) != _content(caption)]
    scores = parts.entailment([(caption, text) for text in texts])
    texts = [text for text, score in zip(texts, scores, strict=True) if score >= parts.threshold]
    levels = [caption]
    for text in reversed(texts):
        if parts.entailment([(levels[0], text)])[0] >= parts.threshold:
            levels.insert(0, text)
    if len(levels) < num_levels:
        return None
    levels = [*levels[:2], *levels[len(levels) - num_levels + 2 :]] if num_levels > 2 else [levels[0], levels[-1]]
    negatives = []
    for level in levels:
        wrong = [text for text in _distinct(parts.contradictor(level, caption)) if _content(text) != _content(level)]
        scores = parts.entailment([(caption, text) for text in wrong])
        fitting = [text for text, score in zip(wrong, scores, strict=True) if score < parts.reject]
        if not fitting:
            return None
        negatives.append(fitting[0])
    return Chain(tuple(levels), tuple(negatives), image)


def write_chains(path: Path | str, chains: Iterable[Chain]) -> None:
    """Write chains as a CSV that ``read_hierarcaps`` reads."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["positive", "negative", "image_url"])
    for chain in chains:
        writer.writerow([" => ".join(chain.captions), " => ".join(chain.negatives), chain.image])
    write_text(path, stream.getvalue())


# ------------------------------------------------------------------------------------------------------ without a model


class NounGenerator:
    """General noun, noun, noun phrase, and that with what follows, of the first noun phrase of a caption."""

    def __init__(self, nouns: Nouns):
        self.nouns = nouns
        self._general = [nouns.find(name) for name in GENERAL if name in nouns]

    def __call__(self, caption: str) -> list[str]:
        """The most general first; empty where no noun is known."""
        phrase = first_phrase(caption, self.nouns)
        if phrase is None:
            return []
        general = self._general_of(phrase.synset)
        levels = [] if general is None else [self.nouns.word(general)]
        return [*levels, str(self.nouns.lemma(phrase.head)).replace("_", " "), phrase.noun_phrase, phrase.longer]

    def _general_of(self, synset: int) -> int | None:
        """The nearest general synset above, else the one right above."""
        levels = self.nouns.levels_above(synset)
        for level in levels:
            if known := [i for i in self._general if i in level]:
                return known[0]
        return levels[0][0] if levels else None


class NounEntailment:
    """1 where every content word of the hypothesis is in the premise, or is more general than a word of it; else 0."""

    def __init__(self, nouns: Nouns):
        self.nouns = nouns

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """For each (premise, hypothesis)."""
        return [float(self._follows(premise, hypothesis)) for premise, hypothesis in pairs]

    def _follows(self, premise: str, hypothesis: str) -> bool:
        if _normal(hypothesis) in _normal(premise):
            return True
        known, asked = self._terms(premise), self._terms(hypothesis)
        return bool(asked) and all(any(self._covers(have, want) for have in known) for want in asked)

    def _covers(self, have: str, want: str) -> bool:
        return have == want or self.nouns.is_a(have, want)

    def _terms(self, text: str) -> list[str]:
        """Content words, two that WordNet lists together as one, plurals as singulars."""
        words = re.findall(r"[a-z][a-z'-]*", text.lower())
        terms: list[str] = []
        while words:
            joined = " ".join(words[:2])
            if len(words) > 1 and self.nouns.lemma(joined) is not None:
                terms.append(str(self.nouns.lemma(joined)))
                words = words[2:]
                continue
            word = words.pop(0)
            if word not in DETERMINERS and word not in BOUNDARIES:
                terms.append(self.nouns.lemma(word) or word)
        return terms


class SisterContradictor:
    """Puts a sister of the noun (WordNet: another kind of the same thing) in its place.

    The most general nouns are exchanged with each other, men with women, other people with animals. Sisters that
    are common words come first; the choice among them follows from the seed and the text.
    """

    def __init__(self, nouns: Nouns, seed: int = 0):
        self.nouns, self.seed = nouns, seed
        self._general = [nouns.find(name) for name in GENERAL if name in nouns]

    def __call__(self, text: str, caption: str) -> list[str]:
        """Candidates, the best first; none of them is related to the noun by is-a."""
        phrase = first_phrase(text, self.nouns)
        if phrase is None:
            return []
        lemma = str(self.nouns.lemma(phrase.head))
        words = self._others(phrase.synset, lemma, alone=phrase.head == text)
        key = zlib.crc32(f"{self.seed} {text}".encode())
        words.sort(key=lambda word: zlib.crc32(f"{key} {word}".encode()))
        if phrase.head.lower() != lemma.replace("_", " "):
            words = [_plural(word) for word in words]
        return [_replaced(text, phrase.start, phrase.stop, word) for word in words]

    def _others(self, mine: int, lemma: str, alone: bool) -> list[str]:
        if mine in self._general and alone:
            return self._unrelated(mine, self._general)
        if lemma in PEOPLE:
            return [PEOPLE[lemma]]
        if self.nouns.is_a(lemma, "person"):
            return list(ANIMALS)
        return self._unrelated(mine, self._sisters(mine))[:8]

    def _unrelated(self, mine: int, others: Sequence[int]) -> list[str]:
        """Words of other synsets that are neither above nor below, common ones first."""
        above = {mine, *self.nouns.ancestors(mine)}
        free = [i for i in others if i not in above and mine not in self.nouns.ancestors(i)]
        words = [word for word in dict.fromkeys(map(self.nouns.word, free)) if re.fullmatch("[a-z ]+", word)]
        return sorted(words, key=lambda word: -self.nouns.num_meanings(word))

    def _sisters(self, i: int) -> list[int]:
        """Sisters, and where they are few the sisters of what is above, up to the general noun."""
        sisters = self.nouns.sisters(i)
        for above in self.nouns.ancestors(i):
            if len(sisters) >= 4 or above in self._general:
                break
            sisters += self.nouns.sisters(above)
        return sisters


def _replaced(text: str, start: int, stop: int, word: str) -> str:
    """The text with another word in a place, and the article before it as English wants it."""
    before = text[:start]
    if match := re.search(r"\b([Aa])n? $", before):
        before = before[: match.start()] + match[1] + ("n " if word[0] in "aeiou" else " ")
    return before + word + text[stop:]


def _plural(word: str) -> str:
    known = {"man": "men", "woman": "women", "child": "children", "person": "people", "sheep": "sheep"}
    first, space, last = word.rpartition(" ")
    if last in known:
        return first + space + known[last]
    if last.endswith("y") and last[-2:-1] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if last.endswith(("s", "x", "z", "ch", "sh")) else "s")


def _distinct(texts: Iterable[str]) -> list[str]:
    """Stripped, without empty ones; of those that say the same, the first."""
    seen: dict[tuple[str, ...], str] = {}
    for text in texts:
        text = " ".join(text.split())
        if text and "=>" not in text:
            seen.setdefault(_content(text), text)
    return list(seen.values())


def _content(text: str) -> tuple[str, ...]:
    """The words without case, punctuation and articles: another article makes no other level."""
    return tuple(word for word in _normal(text).split() if word not in ("a", "an", "the"))


def _normal(text: str) -> str:
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


# ------------------------------------------------------------------------------------------------------- noun phrases
# Closed classes of words mark where phrases end, WordNet knows the nouns.

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
