"""Caches, generation, compilation, the Trainer: what transformers does with a HELM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache, Trainer, TrainingArguments

from hyptree.lm import BalanceCallback, HelmForCausalLM
from hyptree.lm.ambient import AmbientLinear, constant_weights
from hyptree.lm.experts.routing import gates_of
from tests.lm.make import VOCAB, lift, small, tokens

CASES: dict[str, dict[str, Any]] = {
    "dense": {"variant": "dense"},
    "split": {"variant": "dense", "time_columns": "split", "head_dim": 8},
    "latent": {"variant": "mice", "cache_mode": "latent"},
    "full": {"variant": "mice", "cache_mode": "full"},
}


def caches(model: HelmForCausalLM) -> dict[str, Any]:
    return {
        "dynamic": DynamicCache(config=model.config),
        "static": StaticCache(config=model.config, max_cache_len=20),
    }


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("prefill", [1, 7, 11])
@pytest.mark.parametrize("case", CASES)
def test_steps_with_a_cache_give_the_logits_of_one_pass(case: str, prefill: int, kind: str) -> None:
    model, ids = small(**CASES[case]), tokens(2, 12)
    cache = caches(model)[kind]
    with torch.no_grad():
        expected = model(ids).logits
        parts = [model(ids[:, :prefill], past_key_values=cache).logits]
        parts += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(prefill, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("case", CASES)
def test_several_tokens_on_a_filled_cache_stay_causal(case: str, kind: str) -> None:
    model, ids = small(**CASES[case]), tokens(2, 12)
    cache = caches(model)[kind]
    with torch.no_grad():
        expected = model(ids).logits
        parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 4), (4, 9), (9, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_mixed_lengths_with_left_padding(case: str) -> None:
    model, ids = small(**CASES[case], pad_token_id=0), tokens(3, 10)
    lengths = [10, 6, 3]
    mask = torch.stack([(torch.arange(10) >= 10 - length).long() for length in lengths])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, step = DynamicCache(config=model.config), tokens(3, 1)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        together = model(step, attention_mask=longer, position_ids=positions[:, -1:] + 1, past_key_values=cache).logits[
            :, -1
        ]
        for row, length in enumerate(lengths):
            alone = model(torch.cat([ids[row : row + 1, 10 - length :], step[row : row + 1]], 1)).logits[0, -1]
            torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_does_not_depend_on_the_cache(case: str) -> None:
    model, ids = small(**CASES[case], pad_token_id=0, embedding="lifted"), tokens(2, 6).clamp(min=1)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    ids[1, :2] = 0

    def write(**settings: Any) -> Tensor:
        text = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, **settings)
        assert isinstance(text, Tensor)
        return text

    expected = write(use_cache=False)
    assert expected.shape == (2, 16)
    assert torch.equal(write(), expected)
    assert torch.equal(write(cache_implementation="static", disable_compile=True), expected)


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_may_come_in_pieces(case: str) -> None:
    model, ids = small(**CASES[case], pad_token_id=0), tokens(2, 9)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    for cache in ("dynamic", "static"):
        pieces = model.generate(
            ids,
            max_new_tokens=4,
            do_sample=False,
            prefill_chunk_size=4,
            cache_implementation=cache,
            disable_compile=True,
        )
        assert torch.equal(pieces, expected)


@pytest.mark.parametrize("case", CASES)
def test_beams_and_samples_run(case: str) -> None:
    model, ids = small(**CASES[case], pad_token_id=0), tokens(2, 5)
    beams = model.generate(ids, num_beams=2, max_new_tokens=6, do_sample=False)
    assert beams.shape == (2, 11) and torch.equal(beams[:, :5], ids)
    without = model.generate(ids, num_beams=2, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(beams, without)
    torch.manual_seed(0)
    first = model.generate(ids, max_new_tokens=6, do_sample=True, top_k=10)
    torch.manual_seed(0)
    assert torch.equal(first, model.generate(ids, max_new_tokens=6, do_sample=True, top_k=10))


def test_generation_beyond_the_context_gets_one_line() -> None:
    with pytest.raises(ValueError, match="65 tokens do not fit into max_position_embeddings 64"):
        small().generate(tokens(1, 60), max_new_tokens=10, do_sample=False)


def test_dense_training_is_one_graph() -> None:
    model, ids = small(dtype=torch.float32, num_hidden_layers=1).train(), tokens(2, 8)
    expected = model(ids, labels=ids).loss
    expected.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip((p.grad for p in model.parameters() if p.grad is not None), grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_compiled_steps_take_what_an_uncompiled_pass_inside_has_made() -> None:
    layer = AmbientLinear(9, 4).eval()
    lifted = lift(torch.randn(2, 9))

    def product(rows: Tensor) -> Tensor:
        return rows @ layer.matrix(rows.dtype).mT

    step = torch.compile(product, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = product(lifted)
        torch.testing.assert_close(step(lifted), expected, rtol=1e-5, atol=1e-6)
        with constant_weights(layer):
            torch.testing.assert_close(step(lifted), expected, rtol=1e-5, atol=1e-6)
            layer.matrix(torch.float32).zero_()  # what is kept can be told from what is made anew
            assert not step(lifted).any()
        torch.testing.assert_close(step(lifted), expected, rtol=1e-5, atol=1e-6)
        with constant_weights(layer):
            torch.testing.assert_close(step(lifted), expected, rtol=1e-5, atol=1e-6)
    with constant_weights(layer):  # and never where there are gradients
        torch.testing.assert_close(step(lifted).detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "backend"), [("dense", "inductor"), ("mice", "aot_eager")])
def test_compiled_training_agrees(variant: str, backend: str) -> None:
    model, ids = small(variant, dtype=torch.float32).train(), tokens(2, 8)
    expected = model(ids, labels=ids).loss.detach()
    step = torch.compile(model, backend=backend, fullgraph=variant == "dense")
    torch.testing.assert_close(step(ids, labels=ids).loss.detach(), expected, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        low = step(ids, labels=ids).loss
    low.backward()
    torch.testing.assert_close(low.detach(), expected, rtol=0.03, atol=0.03)
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("variant", ["dense", "mice"])
def test_trainer_trains(variant: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = small(variant, dtype=torch.float32)
    text = torch.arange(64).remainder(VOCAB)
    rows = [{"input_ids": text[i : i + 12], "labels": text[i : i + 12]} for i in range(24)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=12,
        learning_rate=5e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[BalanceCallback()])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]
    biases = [gate.balance_bias for gate in gates_of(model)]
    assert bool(biases) == (variant == "mice")
    assert all(float(bias.abs().sum()) > 0 for bias in biases)
