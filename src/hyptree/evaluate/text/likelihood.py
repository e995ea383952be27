"""How likely a language model finds a text after another one: what multiple-choice evaluation is made of.

Context and continuation are tokenised together, since tokens may begin with the space between them; a space at the end
of the context belongs to the continuation. Those tokens are scored that come after the context's own. Where a token
spans the boundary, so that the context alone is tokenised otherwise, that token is scored too, because it holds a part
of the continuation. These are the rules of EleutherAI's lm-evaluation-harness but for the last, where it counts tokens.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyptree.errors import UserError

MIN_SHARED = 8
"""A context of fewer tokens is not worth a cache of its own."""


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether every token of it was the likeliest one."""

    value: float
    is_greedy: bool


@dataclass(frozen=True)
class Pair:
    """Tokens of a context and a continuation, of which the last ``num_scored`` are to be predicted."""

    tokens: tuple[int, ...]
    num_scored: int
    spans: bool = False
    """Whether the first scored token holds a part of the context, too."""


class PairEncoder:
    """Texts to tokens by the rules above, with ``<bos>`` in front where the tokenizer puts one there."""

    def __init__(self, tokenizer: Any):
        from hyptree.data.text.tokenizer import Encoder

        self._encode = Encoder(tokenizer, bos=False, eos=False)
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.begin = (bos,) if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else ()
        self._first = bos if bos is not None else eos

    def __call__(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """One pair of each (context, continuation)."""
        moved = [(context.rstrip(), context[len(context.rstrip()) :] + text) for context, text in texts]
        contexts = list(dict.fromkeys(context for context, _ in moved))
        known = dict(zip(contexts, (ids.tolist() for ids in self._encode(contexts)), strict=True))
        wholes = (ids.tolist() for ids in self._encode([context + text for context, text in moved]))
        return [self._pair(known[context], whole) for (context, _), whole in zip(moved, wholes, strict=True)]

    def prompt(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that is to be continued."""
        ids = self._encode([text])[0].tolist()
        return (*self.begin, *ids) if ids else self._pair([], ids).tokens

    def text(self, text: str) -> Pair:
        """A text from its first token, to be predicted whole."""
        return self._pair([], self._encode([text])[0].tolist())

    def _pair(self, context: list[int], whole: list[int]) -> Pair:
        shared = 0
        while shared < min(len(context), len(whole)) and context[shared] == whole[shared]:
            shared += 1
        begin = self.begin
        if not begin and shared == 0:  # nothing to predict the first token from
            if self._first is None:
                raise UserError(
                    "a text without context needs a token to begin with, and this tokenizer has neither bos nor eos; "
                    "give every query some text"
                )
            begin = (self._first,)
        return Pair((*begin, *whole), len(whole) - shared, shared < len(context))


def context_length(model: Any, context: int | None = None) -> int:
    """Tokens that a model can see at once: what was asked for, at most what it was made for."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    model_length = next((int(value) for name in names if (value := getattr(model.config, name, None))), None)
    if model_length is None and context is None:
        raise UserError("the model's configuration does not say how long its context is; give context=")
    if context is not None and (context < 1 or (model_length is not None and context > model_length)):
        raise UserError(f"context must be from 1 to {model_length or 'the context of the model'}, got {context}")
    return context if context is not None else int(model_length or 0)


def is_too_long(pair: Pair, context: int) -> bool:
    """Whether tokens on the left are dropped before a model of this context reads the pair."""
    return len(pair.tokens) - 1 > context


@torch.no_grad()
def log_likelihoods(
    model: Any,
    pairs: Sequence[Pair],
    *,
    context: int | None = None,
    batch_size: int = 16,
    advance: Callable[[int], None] | None = None,
) -> list[Likelihood]:
    """The likelihood of each pair's last tokens, in the order of the pairs.

    Pairs whose input begins another one's are read off the same row: choices of one token cost one row together. A
    context that several rows have goes through the model once, and its cache is shared. Rows are sorted by length and
    padded on the right, where causal models do not look. What is longer than the context loses tokens on the left.

    Args:
        model: any causal language model of transformers' kind, in eval mode.
        context: tokens that the model sees at once, by default as many as it can.
        advance: called with the number of pairs that were done.
    """
    context = context_length(model, context)
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
    likelihoods: list[Likelihood] = [Likelihood(0.0, True)] * len(pairs)  # what stays where nothing is to be predicted
    alone, sharing = _split(_rows(pairs, context), model)
    if advance is not None:
        advance(len(pairs) - sum(len(row.wanted) for row in (*alone, *sharing)))
    for rows, run in ((alone, _run_alone), (sharing, _run_sharing)):
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            logits, first = run(model, batch)
            index, values = [], []
            for k, row in enumerate(batch):
                for i, end, targets in row.wanted:
                    places = slice(end - len(targets) - first[k], end - first[k])
                    values.append(_sum_and_greedy(logits[k, places], torch.tensor(targets, device=logits.device)))
                    index.append(i)
            for i, (value, greedy) in zip(index, torch.stack(values).tolist(), strict=True):
                likelihoods[i] = Likelihood(value, greedy == 1)
            if advance is not None:
                advance(len(index))
    return likelihoods


@dataclass
class _Row:
    """Input of a model, and the pairs that are read off it."""

    tokens: tuple[int, ...]
    wanted: list[tuple[int, int, tuple[int, ...]]]
    """Number of a pair, place after the last logits that it needs, tokens that those should predict."""

    @property
    def first(self) -> int:
        """Place of the first logits that are needed."""
        return min(end - len(targets) for _, end, targets in self.wanted)

    @property
    def shared(self) -> tuple[int, ...]:
        """What needs no logits: the context but for its last token."""
        return self.tokens[: self.first]


def _split(rows: list[_Row], model: Any) -> tuple[list[_Row], list[_Row]]:
    """Rows that go through a model whole, and those with a context that others have too, next to these."""
    takes = inspect.signature(model.forward).parameters
    counts = Counter(row.shared for row in rows)
    if not {"past_key_values", "attention_mask", "position_ids"} <= set(takes):
        counts.clear()
    sharing = [row for row in rows if counts[row.shared] > 1 and len(row.shared) >= MIN_SHARED]
    sharing.sort(key=lambda row: (-len(row.shared), row.shared, -len(row.tokens), row.wanted[0][0]))
    return [row for row in rows if counts[row.shared] < 2 or len(row.shared) < MIN_SHARED], sharing


def _run_alone(model: Any, batch: Sequence[_Row]) -> tuple[Tensor, list[int]]:
    """Logits (B, K, V) of whole rows, and the place of the first one in each row."""
    ids, device = _padded([row.tokens for row in batch]), next(model.parameters()).device
    first = min(row.first for row in batch)
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": ids.shape[1] - first} if takes else {}  # the last so many
    logits = model(input_ids=ids.to(device), use_cache=False, **options).logits
    return logits, [first if takes else 0] * len(batch)


def _run_sharing(model: Any, batch: Sequence[_Row]) -> tuple[Tensor, list[int]]:
    """The same for rows of which several have the same context: its keys and values are made once."""
    device = next(model.parameters()).device
    contexts = list(dict.fromkeys(row.shared for row in batch))
    rests = [row.tokens[row.first :] for row in batch]
    ids = _padded([context[::-1] for context in contexts]).flip(1)  # padded on the left
    lengths = torch.tensor([len(context) for context in contexts])
    mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    inputs = {name: value.to(device) for name, value in inputs.items()}
    cache = model(**inputs, use_cache=True, **options).past_key_values
    owner = torch.tensor([contexts.index(row.shared) for row in batch])
    cache.batch_select_indices(owner.to(device))
    ids = _padded(rests)
    ends = torch.tensor([len(row.tokens) for row in batch])
    positions = torch.minimum(lengths[owner][:, None] + torch.arange(ids.shape[1]), ends[:, None] - 1)
    mask = torch.cat([mask[owner], torch.ones_like(ids)], 1)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    inputs = {name: value.to(device) for name, value in inputs.items()}
    return model(**inputs, past_key_values=cache, use_cache=True).logits, [row.first for row in batch]


def _padded(rows: Sequence[tuple[int, ...]]) -> Tensor:
    """(B, N) tokens, zeros on the right of shorter rows."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for k, row in enumerate(rows):
        ids[k, : len(row)] = torch.tensor(row)
    return ids


def _rows(pairs: Sequence[Pair], context: int) -> list[_Row]:
    """Inputs that hold all pairs, longest first."""
    inputs = []
    for i, pair in enumerate(pairs):
        if pair.num_scored > context:
            raise UserError(
                f"a continuation of {pair.num_scored} tokens does not fit into the context of {context}; "
                "shorten it, or take a model that sees more"
            )
        if pair.num_scored:
            inputs.append((pair.tokens[:-1][-context:], i))
    rows: list[_Row] = []
    # In alphabetical order what begins with x follows x at once: backwards, the newest row is the only one to look at.
    for tokens, i in sorted(inputs, reverse=True):
        if not rows or rows[-1].tokens[: len(tokens)] != tokens:
            rows.append(_Row(tokens, []))
        rows[-1].wanted.append((i, len(tokens), pairs[i].tokens[-pairs[i].num_scored :]))
    return sorted(rows, key=lambda row: (-len(row.tokens), row.wanted[0][0]))


def _sum_and_greedy(logits: Tensor, targets: Tensor) -> Tensor:
    """(2,) float64: summed log-probability of targets (T,) under logits (T, V), and whether all were the likeliest."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    value = wide.log_softmax(-1).gather(1, targets[:, None]).double().sum()
    return torch.stack([value, (wide.argmax(-1) == targets).all().double()])
