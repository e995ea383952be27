"""HELM as a Hugging Face model: numbers, counts, files, training, bad input."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hyptree.errors import UserError
from hyptree.geometry import lorentz
from hyptree.geometry.core.parameter import manifold_of
from hyptree.lm import HelmConfig, HelmForCausalLM, HelmModel, preset, presets
from hyptree.lm.twins import euclidean_twin
from hyptree.train.model import checkpoint_activations
from tests.lm.make import DENSE, SHAPES, VOCAB, small, tokens

VARIANTS = list(SHAPES)


def _ambient_linear(x: Tensor, layer: Any, c: float) -> Tensor:
    whole = torch.cat([layer.weight_time[:, None], layer.weight], 1)
    return F.linear(lorentz.to_ambient(x, c), whole, layer.bias)


def naive_logits(model: HelmForCausalLM, ids: Tensor) -> Tensor:
    """HELM-D of one sequence, from the formulas: every point by its ambient coordinates, every pair of tokens."""
    config, stack = model.config, model.model
    c, d, heads = config.curvature, config.head_dim, config.num_attention_heads
    n, length = config.hidden_size, ids.shape[0]
    half = config.rotary_dim // 2
    angle = torch.arange(length, dtype=torch.float64)[:, None] * stack.rotary.inv_freq.double()

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def turn(x: Tensor) -> Tensor:  # (N, d)
        out = x.clone()
        for l in range(half):
            a, b = (2 * l, 2 * l + 1) if config.rope_pairing == "interleaved" else (l, l + half)
            cos, sin = angle[:, l].cos(), angle[:, l].sin()
            out[:, a], out[:, b] = cos * x[:, a] - sin * x[:, b], sin * x[:, a] + cos * x[:, b]
        return out

    def join(x: Tensor, y: Tensor, raw: Tensor) -> Tensor:
        return config.residual_gain * lorentz.residual(x, y, F.softplus(raw), c)

    x = stack.embed_tokens.weight[ids]
    for layer in stack.layers:
        attention, outputs = layer.attention, []
        qkv = _ambient_linear(norm(x, layer.attention_norm), attention.qkv_proj, c).view(length, 3, heads, d)
        for h in range(heads):
            q, k, v = turn(qkv[:, 0, h]), turn(qkv[:, 1, h]), config.value_scale * qkv[:, 2, h]
            scores = torch.stack([2 / c + 2 * lorentz.minkowski(q[i], k, c) for i in range(length)])
            scores = scores / attention.log_tau.exp() + torch.full((length, length), -torch.inf).triu(1)
            weights = scores.softmax(-1)
            points = torch.stack([lorentz.centroid(v, weights[i], c) for i in range(length)])
            outputs.append(points)
        y = attention.o_proj.bias + sum(
            F.linear(outputs[h], attention.o_proj.weight[:, h * d : (h + 1) * d])
            + lorentz.time(outputs[h], c)[:, None] * attention.o_proj.weight_time[:, h]
            for h in range(heads)
        )
        x = join(x, y, layer.attention_weight)
        both = _ambient_linear(norm(x, layer.ffn_norm), layer.ffn.gate_up_proj, c)
        gate, up = both.chunk(2, -1)
        x = join(x, _ambient_linear(F.silu(gate) * up, layer.ffn.down_proj, c), layer.ffn_weight)
    if stack.final_proj is not None:
        x = _ambient_linear(x, stack.final_proj, c)
    x = norm(x, stack.norm)
    if config.head == "lorentz":
        points = model.lm_head.weight
        gram = torch.stack([lorentz.minkowski(x[i], points, c) for i in range(length)])
        return (2 / c + 2 * gram) / model.log_head_tau.exp()
    ambient = torch.cat([x, lorentz.time(x, c)[:, None]], -1)
    assert ambient.shape[-1] == n + 1
    return ambient @ model.lm_head.weight.T


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"curvature": 0.1, "time_columns": "split"},
        {"curvature": 2.0, "rope_pairing": "half", "head_dim": 8, "final_proj": False, "value_scale": 1.0},
        {"curvature": 2.0, "head": "lorentz", "tie_word_embeddings": True},
    ],
)
def test_logits_follow_from_the_formulas(attn_implementation: str, changes: dict[str, Any]) -> None:
    model = small(attn_implementation=attn_implementation, **changes)
    ids = tokens(1, 9)
    with torch.no_grad():
        expected = naive_logits(model, ids[0])
        logits = model(ids).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_gradients_follow_from_the_formulas() -> None:
    model, ids = small(), tokens(1, 7)
    labels = ids.clone()
    expected = F.cross_entropy(naive_logits(model, ids[0])[:-1], labels[0, 1:])
    loss = model.train()(ids, labels=labels).loss
    parameters = dict(model.named_parameters())
    theirs = torch.autograd.grad(expected, list(parameters.values()))
    ours = torch.autograd.grad(loss, list(parameters.values()))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_and_evaluation_give_the_same_logits(variant: str) -> None:
    model, ids = small(variant), tokens(2, 11)
    with torch.no_grad():
        first = model(ids).logits
        second = model.train()(ids).logits
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_is_the_cross_entropy_of_the_logits(variant: str) -> None:
    model, ids = small(variant), tokens(2, 11)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-12)
    assert out.past_key_values is None and model(ids).past_key_values is not None
    halved = model(ids, labels=labels, num_items_in_batch=2 * int((labels[:, 1:] != -100).sum())).loss
    torch.testing.assert_close(halved, expected / 2, rtol=1e-12, atol=1e-12)
    trained = model.train()(ids, labels=labels)
    assert trained.logits is None
    assert (trained.aux_loss is None) == (variant == "dense")
    aux = 0.0 if trained.aux_loss is None else trained.aux_loss
    torch.testing.assert_close(trained.loss - aux, expected, rtol=1e-12, atol=1e-12)
    model.config.output_logits = True
    assert model(ids, labels=labels).logits.shape == (2, 11, VOCAB)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["dense", "mice", "twin"])
def test_labels_that_are_shifted_already_are_not_shifted_again(kind: str, training: bool) -> None:
    """Sequence parallelism cuts texts into pieces: the label of a piece's last token stands in the next piece."""
    model = euclidean_twin(HelmConfig(**DENSE)).double() if kind == "twin" else small(kind)
    model.train(training)
    ids, shifted = tokens(2, 12), tokens(2, 12)
    shifted[0, 3] = -100
    loss = model(ids, shift_labels=shifted, labels=tokens(2, 12)).loss
    logits = copy.deepcopy(model).eval()(ids).logits
    expected = F.cross_entropy(logits.flatten(0, 1), shifted.flatten())
    aux = model(ids, shift_labels=shifted).aux_loss
    torch.testing.assert_close(loss, expected if aux is None else expected + aux)
    half = model(ids[:, :6], shift_labels=shifted[:, :6], num_items_in_batch=23).loss
    rest = F.cross_entropy(logits[:, :6].flatten(0, 1), shifted[:, :6].flatten(), reduction="sum") / 23
    if aux is None:
        torch.testing.assert_close(half, rest)


def test_what_a_model_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="HelmForCausalLM takes no cu_seq_lens_q, mask; leave it out"):
        small()(tokens(1, 4), cu_seq_lens_q=tokens(2), mask=True, return_dict=True, max_length_q=None)
    with pytest.raises(TypeError, match="HelmModel takes no mask; leave it out"):
        small().model(tokens(1, 4), mask=True, return_dict=True, cache_position=tokens(4))


def test_kept_logits_are_the_last_ones() -> None:
    model, ids = small(), tokens(2, 11)
    with torch.no_grad():
        everything = model(ids).logits
        torch.testing.assert_close(model(ids, logits_to_keep=1).logits, everything[:, -1:], rtol=1e-12, atol=1e-12)
        places = torch.tensor([0, 5])
        torch.testing.assert_close(model(ids, logits_to_keep=places).logits, everything[:, places], rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_future_is_not_seen(variant: str) -> None:
    model, ids = small(variant), tokens(2, 12)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    with torch.no_grad():
        first, second = model(ids).logits, model(changed).logits
    assert torch.equal(first[:, :7], second[:, :7])
    assert not torch.equal(first[:, 7:], second[:, 7:])


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_do_not_see_each_other(variant: str, attn_implementation: str) -> None:
    model = small(variant, attn_implementation=attn_implementation)
    first, second = tokens(1, 5), tokens(1, 6)
    positions = torch.cat([torch.arange(5), torch.arange(6)])[None]
    with torch.no_grad():
        packed = model(torch.cat([first, second], 1), position_ids=positions).logits
        apart = torch.cat([model(first).logits, model(second).logits], 1)
    torch.testing.assert_close(packed, apart, rtol=1e-10, atol=1e-10)
    mask = torch.block_diag(torch.ones(5, 5), torch.ones(6, 6)).tril().bool()[None, None]
    if attn_implementation == "sdpa":
        with torch.no_grad():
            by_hand = model(torch.cat([first, second], 1), position_ids=positions, attention_mask=mask).logits
        torch.testing.assert_close(by_hand, apart, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_changes_nothing(variant: str, side: str) -> None:
    model, ids = small(variant), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.int64)
    pad = slice(0, 4) if side == "left" else slice(5, 9)
    mask[1, pad] = 0
    real = slice(4, 9) if side == "left" else slice(0, 5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, position_ids=positions).logits
        alone = model(ids[1:, real]).logits
        torch.testing.assert_close(padded[1:, real], alone, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(padded[:1], model(ids[:1]).logits, rtol=1e-10, atol=1e-10)
    labels = ids.masked_fill(mask == 0, -100)
    loss = model.train()(ids, attention_mask=mask, position_ids=positions, labels=labels).loss
    loss.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_matter_only_relative_to_each_other(variant: str) -> None:
    model, ids = small(variant, max_position_embeddings=2048), tokens(1, 10)
    with torch.no_grad():
        here = model(ids, position_ids=torch.arange(10)[None]).logits
        there = model(ids, position_ids=torch.arange(1000, 1010)[None]).logits
    torch.testing.assert_close(here, there, rtol=0, atol=1e-9)


# ---------------------------------------------------------------------------------------------------- parameter counts

# Section 8 of the specification, and what of it is dropped on purpose: one score bias per layer, the biases of gates
# (a buffer), frozen scalars (of the embedding, of curvatures, two per layer of experts, which are merged in one go).
# A point's time is derived, so a table of points has one column less.
PAPER = {
    "helm-d-115m-paper": (114_770_253, 6, 0, 5, 128_256),
    "helm-mice-120m-paper": (126_357_123, 6, 5 * 4, 5 + 5 * 2, 128_256),
    "helm-mice-1b-paper": (966_829_461, 16, 15 * 8, 3 + 15 * 2, 0),
}


def count(name: str) -> int:
    with torch.device("meta"):
        model = HelmForCausalLM(preset(name))
    assert all(p.is_meta for p in model.parameters())
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", list(PAPER))
def test_parameters_are_those_of_the_paper(name: str) -> None:
    table, *dropped = PAPER[name]
    assert count(name) == table - sum(dropped)


def test_dense_blocks_have_the_published_formula() -> None:
    with torch.device("meta"):
        model = HelmModel(preset("helm-d-115m-paper"))
    block = 3 * (390 * 384 + 384) + (390 * 389 + 389) + 2 * (390 * 1559 + 1559) + (1560 * 389 + 389) + 2 * 389 + 2 + 1
    assert {sum(p.numel() for p in layer.parameters()) for layer in model.layers} == {block}


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("helm-d-115m-aligned", 110e6, 120e6),
        ("helm-mice-120m-aligned", 115e6, 130e6),
        ("helm-d-1b-aligned", 0.9e9, 1.1e9),
        ("helm-mice-1b-aligned", 0.85e9, 1.0e9),
        ("helm-d-pico", 0.5e6, 1e6),
        ("helm-mice-pico", 0.5e6, 1e6),
    ],
)
def test_other_presets_have_the_size_in_their_name(name: str, low: float, high: float) -> None:
    assert low < count(name) < high


# ------------------------------------------------------------------------------------------------------------ in use


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("embedding", ["lifted", "manifold"])
def test_files_give_back_the_same_bits(variant: str, embedding: str, tmp_path: Path) -> None:
    model = small(variant, torch.float32, embedding=embedding)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is HelmForCausalLM
    assert isinstance(AutoConfig.from_pretrained(tmp_path), HelmConfig)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded.eval()(ids).logits)
    assert isinstance(AutoModel.from_pretrained(tmp_path), HelmModel)
    if embedding == "manifold":
        assert manifold_of(loaded.model.embed_tokens.weight) is not None


@pytest.mark.parametrize("variant", VARIANTS)
def test_loading_in_bfloat16_keeps_the_angles(variant: str, tmp_path: Path) -> None:
    model, ids = small(variant, torch.float32), tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.rotary.inv_freq, model.model.rotary.inv_freq)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.bfloat16()(ids).logits)


def test_points_of_a_manifold_table_start_at_distance_one() -> None:
    table = small(dtype=torch.float32, embedding="manifold", curvature=0.5).model.embed_tokens.weight
    assert manifold_of(table) is not None
    torch.testing.assert_close(lorentz.dist0(table.detach(), 0.5), torch.ones(VOCAB), rtol=1e-5, atol=0)
    plain = HelmForCausalLM(HelmConfig(**{**DENSE, "vocab_size": 4000})).model.embed_tokens.weight
    assert abs(float(plain.detach().norm(dim=-1).mean()) - 1) < 0.02


@pytest.mark.parametrize("embedding", ["lifted", "manifold"])
def test_resized_vocabulary_keeps_the_old_logits(embedding: str) -> None:
    model, ids = small(dtype=torch.float32, embedding=embedding), tokens(2, 9)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
        after = model(ids).logits
    assert after.shape[-1] == VOCAB + 8 == model.config.vocab_size
    assert torch.equal(after[..., :VOCAB], before)
    assert (manifold_of(model.model.embed_tokens.weight) is not None) == (embedding == "manifold")
    labels = torch.full((1, 5), VOCAB + 7)
    assert bool(torch.isfinite(model.train()(labels, labels=labels).loss.detach()))


def test_tied_weights_are_one(tmp_path: Path) -> None:
    model = small(dtype=torch.float32, head="lorentz", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = HelmForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ids = tokens(1, 6)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    assert model.lm_head.weight.shape == (VOCAB + 3, 32) and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_no_gradient(variant: str, use_reentrant: bool) -> None:
    model, ids = small(variant).train(), tokens(2, 9)
    twin = copy.deepcopy(model)
    checkpoint_activations(twin, "twin", use_reentrant)
    for one in (model, twin):
        one(ids, labels=ids).loss.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(
            a.grad, b.grad, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_repeated_sequence_is_learned(variant: str) -> None:
    torch.manual_seed(3)
    model = HelmForCausalLM(HelmConfig(**SHAPES[variant]))
    ids = tokens(1, 12).repeat(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.post_step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(4.3, abs=0.6) and losses[-1] < 0.1


@pytest.mark.parametrize(
    ("num_steps", "start"),
    [(25, 0), *(pytest.param(200, start, marks=pytest.mark.slow) for start in (1, 2, 3))],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_training_stays_finite_and_close(variant: str, num_steps: int, start: int) -> None:
    torch.manual_seed(100 + start)
    model = HelmForCausalLM(HelmConfig(**{**SHAPES[variant], "num_hidden_layers": 2}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.01)
    text = tokens(4, 200)
    for step in range(num_steps):
        ids = text[:, step % 150 : step % 150 + 12]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None), step
        optimizer.step()
    model.eval()
    with torch.no_grad():
        exact = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            low = model(ids).logits
    assert low.dtype == torch.float32
    assert float((low - exact).norm() / exact.norm()) < 0.02


def test_a_bfloat16_model_runs() -> None:
    model, ids = small(dtype=torch.float32), tokens(2, 9)
    with torch.no_grad():
        exact = model(ids).logits
        low = model.bfloat16()(ids).logits
    assert float((low - exact).norm() / exact.norm()) < 0.05


def test_states_and_weights_are_given_when_asked_for() -> None:
    model, ids = small(attn_implementation="eager"), tokens(2, 9)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, output_attentions=True)
    assert [tuple(state.shape) for state in out.hidden_states] == [(2, 9, 32)] * 3
    for weights in out.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9, dtype=torch.float64), rtol=0, atol=1e-12)
        assert not weights.triu(1).any()
    first, *_ = model(ids, return_dict=False)
    torch.testing.assert_close(first, out.logits, rtol=0, atol=0)


def test_scalars_are_spared_by_decay() -> None:
    spared = small("mice").no_weight_decay()
    assert "model.layers.0.attention_weight" in spared and "model.norm" in spared
    assert any(name.endswith("tau") for name in spared) and any(name.endswith("log_curvature") for name in spared)
    assert not any(name.endswith((".weight", "weight_time", "weight_in", "weight_out")) for name in spared)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.tensor([[VOCAB]])), rf"between 0 and {VOCAB - 1}, got {VOCAB}; does the tokenizer"),
        (lambda m: m(torch.tensor([[-1]])), r"between 0 and 60, got -1"),
        (lambda m: m(tokens(5)), r"input_ids must be \(B, N\), got \(5,\)"),
        (lambda m: m(tokens(2, 0)), r"\(2, 0\) holds no token; give at least one"),
        (lambda m: m(tokens(1, 65)), "65 tokens do not fit into max_position_embeddings 64"),
        (lambda m: m(tokens(1, 2), position_ids=torch.tensor([[63, 64]])), "65 tokens do not fit"),
        (
            lambda m: m(tokens(2, 5), attention_mask=torch.ones(2, 4)),
            r"attention_mask must be .*\(2, 5\).*; got \(2, 4\)",
        ),
        (lambda m: m(tokens(2, 5), attention_mask=torch.ones(5)), r"attention_mask must be .*; got \(5,\)"),
        (lambda m: m(tokens(2, 5), attention_mask="yes"), "must be a tensor, got str"),
        (lambda m: m(tokens(2, 5), labels=tokens(2, 4)), r"labels must be \(2, 5\) as the tokens, got \(2, 4\)"),
        (lambda m: m(tokens(2, 5), position_ids=tokens(2, 4)), r"position_ids must be \(2, 5\) as the tokens"),
        (lambda m: m(), "give either input_ids or inputs_embeds, got none"),
        (lambda m: m(inputs_embeds=torch.zeros(1, 2, 31)), r"inputs_embeds must be \(B, N, 32\), got \(1, 2, 31\)"),
    ],
)
def test_bad_input_gets_one_line(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call(small(dtype=torch.float32))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("head", ["linear", "lorentz"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_evaluation_sees_what_a_fused_optimiser_did(variant: str, head: str) -> None:
    """It changes weights without raising their versions, so what is kept of them must be forgotten by itself."""
    model, ids = small(variant, dtype=torch.float32, head=head), tokens(2, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    def logits(one: Any) -> torch.Tensor:
        with torch.no_grad():
            return one(ids).logits

    for mode in (True, False):  # training in evaluation mode, too
        logits(model.eval())
        for _ in range(2):
            model.train(mode)(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if mode:
            model.eval()
        actual = logits(model)
        assert torch.equal(actual, logits(copy.deepcopy(model)))  # a copy keeps nothing
        assert (actual - logits(small(variant, dtype=torch.float32, head=head).eval())).abs().max() > 0.01


@pytest.mark.parametrize("variant", VARIANTS)
def test_unknown_attention_gets_one_line(variant: str) -> None:
    with pytest.raises(UserError, match="a HELM has attn_implementation sdpa, eager, flex_attention, got 'flush'"):
        HelmForCausalLM(HelmConfig(**SHAPES[variant], attn_implementation="flush"))


def test_all_presets_are_covered() -> None:
    assert len(presets()) == 9


@pytest.mark.parametrize("name", ["helm-d-pico", "helm-mice-pico"])
def test_the_small_start_is_a_quarter_of_xavier_without_times(name: str) -> None:
    small, xavier = (HelmForCausalLM(preset(name, initializer=kind)) for kind in ("small", "xavier"))
    checked = 0
    for key, weight in small.named_parameters():
        other = xavier.get_parameter(key)
        if key.endswith(("weight_time", "time_in", "time_out")):
            assert torch.equal(weight, torch.zeros_like(weight))
            assert other.std() > 0
            checked += 1
        elif ("proj.weight" in key or "weight_in" in key) and "layers" in key:
            assert 0.2 < weight.std() / other.std() < 0.3
            checked += 1
    assert checked >= 8


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_weights_come_where_they_are_asked_for(variant: str) -> None:
    """The fused kernels build none, so another implementation gives them, and the same logits."""
    model, ids = small(variant), tokens(2, 7)
    with torch.no_grad():
        out = model(ids, output_attentions=True)
        assert [weights.shape for weights in out.attentions] == [(2, 4, 7, 7)] * model.config.num_hidden_layers
        torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 4, 7, dtype=torch.float64))
        torch.testing.assert_close(out.logits, model(ids).logits, rtol=1e-10, atol=1e-10)
