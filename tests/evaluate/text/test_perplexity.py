"""Perplexity: every token is predicted once, from what it may see, and bytes are those of the text."""

from __future__ import annotations

import math

import pytest
import torch

from hyptree.errors import UserError
from hyptree.evaluate.text.perplexity import IGNORE, Score, batch_sums, byte_lengths, score, sliding

transformers = pytest.importorskip("transformers")

FLOAT32 = 2e-7
"""transformers makes logits float32 for the loss, whatever the model is."""


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return transformers.LlamaForCausalLM(config).double().eval()


def one_by_one(model, tokens, first_seen) -> float:
    """Nats of tokens 1, 2, ..., each from those between ``first_seen(i)`` and itself."""
    total = 0.0
    for i in range(1, len(tokens)):
        with torch.no_grad():
            logits = model(tokens[None, first_seen(i) : i]).logits[0, -1]
        total -= logits.log_softmax(-1)[tokens[i]].item()
    return total


def test_sliding_window_predicts_every_token_once_from_the_widest_view(model):
    tokens = torch.randint(50, (41,))
    for context, stride in ((8, 1), (8, 3), (10, 9), (16, None), (64, 32)):
        actual = sliding(model, tokens, context=context, stride=stride, batch_size=3)

        def first_seen(i: int, context: int = context, stride: int = stride or context // 2) -> int:
            if i < context:
                return 0
            end = context + math.ceil((i + 1 - context) / stride) * stride  # of the first window that holds token i
            return min(end, len(tokens)) - context

        assert actual.num_tokens == 40
        assert actual.nll == pytest.approx(one_by_one(model, tokens, first_seen), rel=FLOAT32), (context, stride)


def test_windows_see_at_least_what_they_promise(model):
    """A token is predicted from context - stride tokens at least; with stride 1 the view is never shorter than that."""
    tokens = torch.randint(50, (30,))
    wide = sliding(model, tokens, context=8, stride=1).nll
    assert wide == pytest.approx(one_by_one(model, tokens, lambda i: max(0, i - 7)), rel=FLOAT32)
    assert wide != pytest.approx(sliding(model, tokens, context=8, stride=7).nll, rel=1e-6)


def test_sums_of_a_batch_leave_out_ignored_labels(model):
    ids = torch.randint(50, (3, 9))
    labels = ids.clone()
    labels[0, 4:] = IGNORE
    labels[1] = IGNORE
    sizes = torch.randint(1, 5, (50,))
    nll, count, num_bytes = batch_sums(model, {"input_ids": ids, "labels": labels}, sizes).tolist()
    with torch.no_grad():
        logs = model(ids).logits.log_softmax(-1)
    expected = [(b, i) for b in range(3) for i in range(1, 9) if labels[b, i] != IGNORE]
    assert count == len(expected) == 11
    assert nll == pytest.approx(-sum(logs[b, i - 1, ids[b, i]].item() for b, i in expected), rel=1e-6)
    assert num_bytes == sum(sizes[ids[b, i]].item() for b, i in expected)


def test_score_adds_up():
    both = Score(6.0, 3, 4) + Score(2.0, 1, 4)
    assert both == Score(8.0, 4, 8)
    assert (both.loss, both.perplexity) == (2.0, pytest.approx(math.exp(2)))
    assert both.bits_per_byte == pytest.approx(1 / math.log(2))
    assert math.isnan(Score(1.0, 1).bits_per_byte)


def test_nothing_to_predict_is_one_line(model):
    with pytest.raises(UserError, match="at least 2 tokens, got 1"):
        sliding(model, [3], context=8)
    with pytest.raises(ValueError, match="stride must be from 1 to context - 1 = 7, got 8"):
        sliding(model, [3, 4], context=8, stride=8)
    ids = torch.randint(50, (1, 4))
    with pytest.raises(UserError, match="no token to predict"):
        score(model, [{"input_ids": ids, "labels": torch.full_like(ids, IGNORE)}])


def test_bytes_of_tokens_are_those_of_the_text():
    from hyptree.data.text import train_tokenizer

    text = "Der naïve Käse 🙂 kostet 3 €; ein\n\tZeichen zuviel."
    tokenizer = train_tokenizer([text * 3, "other words " * 20], 300)
    sizes = byte_lengths(tokenizer)
    assert len(sizes) == 300
    ids = torch.tensor(tokenizer(text)["input_ids"])
    assert ids[0] == tokenizer.bos_token_id and sizes[ids[0]] == 0
    assert sizes[ids].sum() == len(text.encode())
