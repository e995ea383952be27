"""The Euclidean twins: as large as their HELM, the loss of transformers' own models, balanced experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from hyptree.lm.presets import preset, presets
from hyptree.lm.twins import attend_plainly, euclidean_twin

PICO = ("helm-d-pico", "helm-mice-pico")


def twin(name: str, experts: Any = "hyptree") -> Any:
    return euclidean_twin(preset(name, vocab_size=300, num_hidden_layers=2), experts=experts)


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", list(presets()))
def test_parameter_counts_are_within_three_percent(name: str) -> None:
    modeling = pytest.importorskip("hyptree.lm.modeling")
    for vocabulary in (8192, preset(name).vocab_size):
        config = preset(name, vocab_size=vocabulary)
        with torch.device("meta"):
            ours = num_parameters(modeling.HelmForCausalLM(config))
        theirs = num_parameters(euclidean_twin(config, "meta"))
        assert abs(theirs / ours - 1) < 0.03, (name, vocabulary, ours, theirs)


def test_shapes_are_those_of_the_helm() -> None:
    llama = euclidean_twin(preset("helm-d-115m-aligned"), "meta").config
    assert (llama.hidden_size, llama.head_dim, llama.intermediate_size) == (384, 64, 1536)
    deepseek = euclidean_twin(preset("helm-mice-120m-paper"), "meta").config
    assert (deepseek.hidden_size, deepseek.kv_lora_rank, deepseek.v_head_dim) == (392, 64, 32)
    assert (deepseek.qk_nope_head_dim, deepseek.qk_rope_head_dim) == (32, 16)
    assert (deepseek.n_routed_experts, deepseek.num_experts_per_tok, deepseek.first_k_dense_replace) == (4, 2, 1)
    aligned = euclidean_twin(preset("helm-mice-1b-aligned"), "meta").config
    assert (aligned.kv_lora_rank, aligned.qk_nope_head_dim, aligned.v_head_dim) == (256, 32, 64)
    assert all(config._attn_implementation == "sdpa" for config in (llama, deepseek))


@pytest.mark.parametrize("name", PICO)
def test_loss_is_that_of_the_logits(name: str) -> None:
    model = twin(name).eval()
    ids = torch.randint(300, (2, 17))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    output = model(ids, labels=labels)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    total = model(ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss * 7
    torch.testing.assert_close(total / (labels[:, 1:] != -100).sum(), expected)
    last = model(ids, logits_to_keep=1).logits
    torch.testing.assert_close(last, output.logits[:, -1:])
    model.train()
    trained = model(ids, labels=labels)
    assert trained.logits is None
    torch.testing.assert_close(trained.loss, expected)


@pytest.mark.parametrize("name", PICO)
def test_generate_continues_with_the_likeliest_token(name: str) -> None:
    model = twin(name).eval()
    ids = torch.randint(300, (2, 5))
    actual = model.generate(ids, max_new_tokens=3, do_sample=False)
    for _ in range(3):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(actual, ids)


def test_both_ways_to_run_experts_agree() -> None:
    ours, theirs = twin("helm-mice-pico"), twin("helm-mice-pico", "grouped_mm")
    theirs.load_state_dict(ours.state_dict())
    assert (ours.config._experts_implementation, theirs.config._experts_implementation) == ("hyptree", "grouped_mm")
    ids = torch.randint(300, (2, 33))
    losses = [model(ids, labels=ids).loss for model in (ours, theirs)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_post_step_evens_the_load() -> None:
    model = twin("helm-mice-pico")
    (gate,) = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    ids = torch.randint(300, (2, 40))
    model(ids)
    assert gate.load.sum() == 2 * 40 * 2  # two of the experts for each token
    expected = 1e-3 * torch.sign(gate.load.mean() - gate.load)
    model.post_step()
    torch.testing.assert_close(gate.e_score_correction_bias, expected)
    assert gate.load.eq(0).all()
    model.eval()(ids)
    assert gate.load.eq(0).all()


@pytest.mark.parametrize("name", PICO)
def test_compiled_as_one_graph(name: str) -> None:
    model = twin(name)
    ids = torch.randint(300, (2, 16))
    expected = model(ids, labels=ids).loss
    torch._dynamo.reset()
    actual = torch.compile(model, fullgraph=True, backend="aot_eager")(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(actual, expected)
    actual.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_save_and_load_are_equal(tmp_path) -> None:
    model = twin("helm-mice-pico").eval()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    ids = torch.randint(300, (1, 9))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_no_shared_expert_has_no_twin() -> None:
    with pytest.raises(ValueError, match="always has shared experts"):
        euclidean_twin(preset("helm-mice-pico", n_shared_experts=0))


@pytest.mark.parametrize("name", ["helm-d-pico", "helm-mice-pico"])
def test_plain_attention_is_causal_attention(name: str) -> None:
    model = twin(name).eval()
    ids = torch.randint(0, 300, (2, 17))
    usual = model(ids).logits
    plain = attend_plainly(model)(ids).logits
    torch.testing.assert_close(plain, usual, rtol=1e-5, atol=1e-5)
    ids[:, 9:] = 3
    torch.testing.assert_close(model(ids).logits[:, :9], plain[:, :9], rtol=0.0, atol=1e-6)
