"""The fast model beside its definition: logits, loss and every gradient, over all settings that change numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hyptree.lm import HelmConfig, HelmForCausalLM
from hyptree.lm.plain import PlainHelm
from tests.lm.make import SHAPES, VOCAB, small, tokens

CASES: list[dict[str, Any]] = [
    {"variant": "dense"},
    {"variant": "dense", "curvature": 0.1, "time_columns": "split"},
    {"variant": "dense", "curvature": 2.0, "rope_pairing": "half", "final_proj": False, "value_scale": 1.0},
    {"variant": "dense", "head": "lorentz", "tie_word_embeddings": True, "embedding": "manifold", "pad_token_id": 3},
    {"variant": "dense", "attention_bias": False, "ffn_bias": False, "hidden_size": 33, "residual_gain": 2.0},
    {"variant": "dense", "num_attention_heads": 1, "attention_bias": False, "attn_implementation": "eager"},
    {"variant": "mice"},
    {"variant": "mice", "q_lora_rank": 10, "rope_pairing": "half", "curvature": 0.1},
    {"variant": "mice", "num_dense_layers": 0, "n_shared_experts": 2, "shared_curvature": True, "curvature": 2.0},
    {"variant": "mice", "num_dense_layers": 3, "attention_bias": False, "num_attention_heads": 1},
    {"variant": "mice", "gate": "softmax", "expert_norm": True, "route_scale": 2.5, "balance_loss": 0.3},
    {"variant": "mice", "gate": "softmax_raw", "n_shared_experts": 0, "num_experts_per_tok": 3, "ffn_bias": False},
    {"variant": "mice", "expert_curvature": "const", "shared_curvature": True, "curvature": 0.5, "head": "lorentz"},
    {"variant": "mice", "num_experts_per_tok": 1, "qk_rope_head_dim": 5, "v_head_dim": 17, "time_columns": "split"},
]
ROPE: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
CHOICES: dict[str, list[Any]] = {
    "curvature": [0.1, 0.7, 1.0, 2.0],
    "rope_pairing": ["interleaved", "half"],
    "time_columns": ["single", "split"],
    "head": ["linear", "lorentz"],
    "embedding": ["lifted", "manifold"],
    "initializer": ["small", "xavier"],
    "final_proj": [True, False],
    "attention_bias": [True, False],
    "ffn_bias": [True, False],
    "value_scale": [None, 1.0, 0.2],
    "residual_gain": [None, 1.5],
    "hidden_size": [15, 32, 33],
    "num_attention_heads": [3, 4],
    "pad_token_id": [None, 0],
    "rms_norm_eps": [1e-6, 1e-2],
    "head_dim": [None, 5, 8],
    "intermediate_size": [23, 40],
    "q_lora_rank": [0, 7],
    "kv_lora_rank": [9, 14],
    "qk_nope_head_dim": [3, 7],
    "qk_rope_head_dim": [2, 5, 8],
    "v_head_dim": [4, 9],
    "num_dense_layers": [0, 1, 2],
    "n_routed_experts": [3, 5],
    "num_experts_per_tok": [1, 2, 3],
    "n_shared_experts": [0, 1, 2],
    "moe_intermediate_size": [11, 22],
    "gate": ["sigmoid", "softmax", "softmax_raw"],
    "route_scale": [1.0, 2.5],
    "expert_curvature": ["learned", "const"],
    "shared_curvature": [True, False],
    "expert_norm": [True, False],
    "balance_loss": [0.0, 0.5],
    "attn_implementation": ["sdpa", "eager"],
}


def drawn(seed: int) -> dict[str, Any]:
    """Settings of a model, each drawn on its own."""
    generator = random.Random(seed)
    changes = {name: generator.choice(values) for name, values in CHOICES.items()}
    changes["tie_word_embeddings"] = changes["head"] == "lorentz" and generator.random() < 0.5
    return {
        "variant": generator.choice(["dense", "mice"]),
        "rope_parameters": ROPE[generator.choice([*ROPE])],
        **changes,
    }


def pair(changes: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[HelmForCausalLM, PlainHelm]:
    """A fast model and the plain one with its weights; gates with biases, curvatures apart."""
    fast = small(**changes)
    for name, buffer in fast.named_buffers():
        if name.endswith("balance_bias"):
            buffer.copy_(0.1 * torch.randn_like(buffer))
    fast = fast.to(dtype)
    plain = PlainHelm(fast.config).to(dtype)
    plain.load_state_dict(fast.state_dict(), strict=True)
    return fast.train(), plain.train()


def padding(side: str | None, ids: Tensor) -> tuple[Tensor | None, Tensor]:
    """A mask that leaves 3 tokens of the second sequence out, and labels without them and what they would predict."""
    mask, labels = torch.ones_like(ids), ids.clone()
    if side is None:
        return None, labels
    mask[1, slice(3) if side == "left" else slice(-3, None)] = 0
    labels[1, slice(4) if side == "left" else slice(-3, None)] = -100
    return mask, labels


def compare(fast: HelmForCausalLM, plain: PlainHelm, side: str | None = None, tolerance: float = 1e-9) -> None:
    """Assert that logits of real tokens, the loss and the gradient of every parameter agree."""
    ids = tokens(2, 9)
    mask, labels = padding(side, ids)
    expected, expected_loss = plain(ids, mask, labels)
    loss = fast(ids, attention_mask=mask, labels=labels).loss
    logits = fast.eval()(ids, attention_mask=mask).logits
    fast.train()
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert logits.shape == expected.shape == (2, 9, VOCAB)
    torch.testing.assert_close(logits[real], expected[real], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(plain(ids, mask), expected, rtol=0, atol=0)
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    parameters = dict(fast.named_parameters(remove_duplicate=False))
    others = dict(plain.named_parameters(remove_duplicate=False))
    assert parameters.keys() == others.keys()
    ours = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    theirs = torch.autograd.grad(expected_loss, [others[name] for name in parameters], allow_unused=True)
    largest = max(float(b.abs().max()) for b in theirs if b is not None)
    assert largest > 1e-3, "there is something to compare"
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        a, b = (torch.zeros_like(parameters[name]) if g is None else g for g in (a, b))
        size = max(float(b.abs().max()), 1.0 if tolerance < 1e-8 else largest)
        torch.testing.assert_close(
            a / size, b / size, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_fast_model_is_its_definition(changes: dict[str, Any]) -> None:
    compare(*pair(changes))


@pytest.mark.parametrize("variant", SHAPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_too(variant: str, side: str) -> None:
    compare(*pair({"variant": variant, "balance_loss": 0.5}), side)


@pytest.mark.parametrize("variant", SHAPES)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [6, 9])
def test_rotary_that_depends_on_the_length(variant: str, kind: str, length: int) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0}
    if kind == "longrope":
        short, long = ([scale] * 4 for scale in (1.0, 2.0))
        rope |= {"short_factor": short, "long_factor": long, "original_max_position_embeddings": 7}
    changes = {"variant": variant, "rope_parameters": rope, "max_position_embeddings": 14 if kind == "longrope" else 7}
    fast, plain = pair({**changes, "head_dim": 8})
    ids = tokens(1, length)
    torch.testing.assert_close(fast(ids).logits, plain(ids), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(24))
def test_any_settings(seed: int) -> None:
    torch.manual_seed(seed)
    changes, side = drawn(seed), random.Random(seed).choice([None, "left", "right"])
    if side == "left":  # what sees nothing is the origin, in "eager" a mean of all: the balance of experts notices
        changes["attn_implementation"] = "sdpa"
    compare(*pair(changes), side)


@pytest.mark.parametrize("variant", SHAPES)
def test_float32_to_rounding(variant: str) -> None:
    compare(*pair({"variant": variant}, torch.float32), tolerance=5e-5)


@pytest.mark.parametrize("variant", SHAPES)
def test_needs_nothing_of_ours_but_a_configuration(variant: str) -> None:
    import ast
    from pathlib import Path

    import hyptree.lm.plain as module

    source = Path(str(module.__file__)).read_text()
    tree = ast.parse(source)
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not [name for name in names if str(name).startswith("hyptree")]
    assert len(source.splitlines()) <= 250
    assert PlainHelm(HelmConfig(**SHAPES[variant]))(tokens(1, 4)).shape == (1, 4, VOCAB)
