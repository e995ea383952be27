"""How well a language model predicts text: perplexity per token, bits per byte.

Both come from one number, the negative log-likelihood of the text in nats. Perplexity is its exponential per predicted
token, and so depends on the tokenizer; bits per byte divide it by the bytes of the predicted text, and do not: models
with different tokenizers are compared by those.

Two ways to cut a text that is longer than the model's context:

* in blocks (:func:`score`, as the task ``language`` does in training and ``hyptree eval``): quick, every token once
  through the model. The first tokens of a block have little or nothing before them, which costs some perplexity;
* by a sliding window (:func:`sliding`): windows overlap, and a token is predicted in the first window in which at least
  ``context - stride`` tokens lie before it. ``context / stride`` times the work, and the fairer number for a text that
  is one document.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.errors import UserError

IGNORE = -100
"""Label of a token that is not to be predicted."""


@dataclass(frozen=True)
class Score:
    """Negative log-likelihood in nats of so many predicted tokens, which stand for so many bytes of text."""

    nll: float
    num_tokens: int
    num_bytes: int = 0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Number of equally likely tokens that would be as hard to guess."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text; NaN where the bytes are not known."""
        return self.nll / math.log(2) / self.num_bytes if self.num_bytes else math.nan

    def __add__(self, other: Score) -> Score:
        return Score(self.nll + other.nll, self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes)


def batch_sums(model: nn.Module, batch: dict[str, Tensor], token_bytes: Tensor | None = None, **options: Any) -> Tensor:
    """(3,) float64 of one batch: nats, predicted tokens, their bytes.

    Args:
        model: a causal language model of transformers' kind: ``model(**batch).loss`` is the mean over labels that are
            not ``IGNORE``, each predicted from the tokens before it.
        batch: ``input_ids`` and ``labels`` (B, N), and what else the model takes (``position_ids``, ...).
        token_bytes: (V,) bytes that each token stands for.
        options: passed on to the model, e.g. ``logits_to_keep=1`` for models whose loss needs no logits.
    """
    labels = batch["labels"][:, 1:]
    wanted = labels != IGNORE
    count = wanted.sum()
    loss = model(**batch, **options).loss.double()
    nll = torch.where(count > 0, loss * count, 0.0)  # a batch without anything to predict may give 0/0
    num_bytes = (
        (token_bytes[labels.clamp_min(0)] * wanted).sum() if token_bytes is not None else torch.zeros_like(count)
    )
    return torch.stack([nll, count.double(), num_bytes.double()])


def as_score(sums: Tensor) -> Score:
    """From summed (3,) of :func:`batch_sums`."""
    nll, count, num_bytes = sums.tolist()
    if count == 0:
        raise UserError("the text has no token to predict; give a longer one")
    return Score(nll, round(count), round(num_bytes))


@torch.no_grad()
def score(model: nn.Module, batches: Iterable[dict[str, Tensor]], token_bytes: Tensor | None = None) -> Score:
    """The score over all batches."""
    total = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        total += batch_sums(model, batch, token_bytes).cpu()
    return as_score(total)


def sliding(
    model: nn.Module,
    tokens: Sequence[int] | Tensor,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 8,
    token_bytes: Tensor | None = None,
) -> Score:
    """The score of one text by a sliding window; every token but the first is predicted exactly once.

    Args:
        tokens: (T,) the whole text.
        context: tokens of a window, at most what the model was made for.
        stride: tokens that are predicted per window, at most ``context - 1``; half of the context by default.
        batch_size: windows at once.
    """
    device = next(model.parameters()).device
    ids = torch.as_tensor(tokens, dtype=torch.long, device=device)
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride < context:
        raise ValueError(f"stride must be from 1 to context - 1 = {context - 1}, got {stride}")
    if len(ids) < 2:
        raise UserError(f"perplexity needs a text of at least 2 tokens, got {len(ids)}")
    windows = _windows(ids, context, stride)
    groups: list[list[dict[str, Tensor]]] = []
    for window in windows:  # the last one may be shorter: windows of one length go together
        if not groups or len(groups[-1]) == batch_size or len(groups[-1][0]["labels"]) != len(window["labels"]):
            groups.append([])
        groups[-1].append(window)
    batches = ({key: torch.stack([window[key] for window in group]) for key in group[0]} for group in groups)
    return score(model, batches, token_bytes)


def _windows(ids: Tensor, context: int, stride: int) -> Iterable[dict[str, Tensor]]:
    """Windows of at most ``context`` tokens, whose labels hide what an earlier one predicted."""
    end, scored = min(context, len(ids)), 1  # the first token has nothing before it
    while scored < len(ids):
        start = max(0, end - context)
        labels = ids[start:end].clone()
        labels[: scored - start] = IGNORE
        yield {"input_ids": ids[start:end], "labels": labels}
        scored, end = end, min(end + stride, len(ids))


def byte_lengths(tokenizer: Any) -> Tensor:
    """(V,) bytes of text that each token stands for; special tokens stand for none.

    Args:
        tokenizer: a fast tokenizer of transformers, or one of ``tokenizers``.
    """
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    vocab: dict[str, int] = inner.get_vocab(with_added_tokens=True)
    added: dict[int, Any] = inner.get_added_tokens_decoder()
    byte_level = "ByteLevel" in str(inner.decoder) or "ByteLevel" in str(inner.pre_tokenizer)
    lengths = torch.zeros(max(vocab.values()) + 1, dtype=torch.long)
    for token, index in vocab.items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(token.encode())
        elif byte_level:  # one character of the token is one byte
            lengths[index] = len(token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            lengths[index] = 1
        else:  # SentencePiece writes a space as U+2581
            lengths[index] = len(token.replace("\u2581", " ").encode())
    return lengths
