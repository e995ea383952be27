"""Latent attention against its formulas: values, gradients, masks, precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers import DynamicCache

from hyptree.lm.config import HelmConfig
from hyptree.lm.latent.attention import LatentAttention, visible_keys
from hyptree.lm.plain import Attention, rotary_frequencies
from hyptree.lm.rotary import HelmRotary
from hyptree.ops.heads import Heads, lift_heads

SMALL: dict[str, Any] = {
    "variant": "mice",
    "vocab_size": 64,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "head_dim": 6,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "intermediate_size": 22,
    "moe_intermediate_size": 14,
    "max_position_embeddings": 128,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flat": {"curvature": 0.1, "rope_pairing": "half"},
    "curved": {"curvature": 2.0, "q_lora_rank": 8},
    "no bias": {"attention_bias": False, "value_scale": 1.0},
    "wide values": {"v_head_dim": 19, "time_columns": "split"},
    "odd rotary": {"qk_rope_head_dim": 5, "qk_nope_head_dim": 12, "v_head_dim": 3},
}


def make(dtype: torch.dtype = torch.float64, layer_idx: int = 0, **changes: Any) -> LatentAttention:
    """A layer in which nothing is zero or one: biases, gains and temperature are drawn too."""
    layer = LatentAttention(HelmConfig(**{**SMALL, **changes}), layer_idx).to(torch.float64)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.normal_(0.0, 0.5)
            elif "gain" in name:
                parameter.uniform_(0.5, 1.5)
            elif name == "log_tau":
                parameter.fill_(0.8)
    return layer.to(dtype)


def tables(layer: LatentAttention, positions: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions (B, N)."""
    device = positions.device
    cos, sin = HelmRotary(layer.config).to(device)(torch.zeros((), dtype=dtype, device=device), positions)
    return cos, sin


def run(
    layer: LatentAttention, s: Tensor, positions: Tensor | None = None, mask: Any = None, cache: Any = None
) -> Tensor:
    """The layer on points s (B, N, n), by default at positions 0..N-1."""
    if positions is None:
        positions = torch.arange(s.shape[1]).expand(s.shape[:2])
    out: Tensor = layer(layer.down(s), tables(layer, positions, s.dtype), mask, cache)[0]
    return out


def definition(layer: LatentAttention, s: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
    """What plain torch gives for the same weights; ``allowed[b, i, j]``: query i sees key j."""
    frequency, scale = rotary_frequencies(layer.config, s.shape[1])
    angle = positions.to(s)[..., None, None] * frequency.to(s)
    plain = Attention(layer.config)
    return torch.func.functional_call(plain, dict(layer.named_parameters()), (s, angle, scale, allowed[:, None]))


def causal(batch: int, length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril().expand(batch, -1, -1)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_definition_with_gradients(name: str) -> None:
    layer = make(**VARIANTS[name])
    s = torch.randn(2, 7, 20, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(7).expand(2, -1) + torch.tensor([[0], [11]])
    reference = definition(layer, s, positions, causal(2, 7))
    inputs = run(layer, s, positions)
    assert torch.allclose(inputs, reference, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(reference)
    leaves = {"s": s, **dict(layer.named_parameters())}
    expected = torch.autograd.grad((reference * direction).sum(), list(leaves.values()))
    gradients = torch.autograd.grad((inputs * direction).sum(), list(leaves.values()))
    for leaf, gradient, right in zip(leaves, gradients, expected, strict=True):
        assert right.abs().max() > 1e-6, f"{leaf} has no gradient to compare"
        assert (gradient - right).abs().max() <= 1e-12 * (1 + right.abs().max()), leaf


@pytest.mark.parametrize("c", [0.1, 1.0, 2.0])
def test_equals_the_definition_in_float32(c: float) -> None:
    layer = make(curvature=c)
    s = torch.randn(2, 33, 20, dtype=torch.float64)
    expected = definition(layer, s, torch.arange(33).expand(2, -1), causal(2, 33))
    inputs = run(layer.float(), s.float()).double()
    assert (inputs - expected).abs().max() <= 1e-5 * (1 + expected.abs().max())


@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_packed_documents_and_padding_by_masks(kind: str) -> None:
    layer = make()
    s = torch.randn(2, 8, 20, dtype=torch.float64)
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [-1, -1, 0, 0, 0, 0, 0, 0]])  # -1: padding on the left
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 0, 1, 2, 3, 4, 5]])
    allowed = causal(2, 8) & (document[:, :, None] == document[:, None]) & (document >= 0)[:, None]
    mask = allowed[:, None]
    if kind == "added":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    inputs = run(layer, s, positions, mask)
    expected = definition(layer, s, positions, allowed)
    real = document >= 0
    assert torch.isfinite(inputs).all(), "rows that see nothing"
    assert torch.allclose(inputs[real], expected[real], rtol=1e-12, atol=1e-12)


def test_later_tokens_change_nothing_before_them() -> None:
    layer = make(torch.float32)
    s = torch.randn(2, 12, 20)
    changed = s.clone()
    changed[:, 5:] = torch.randn(2, 7, 20) * 3
    first, second = run(layer, s), run(layer, changed)
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.allclose(first[:, 5:], second[:, 5:])


def test_only_differences_of_positions_matter() -> None:
    layer = make()
    s = torch.randn(1, 9, 20, dtype=torch.float64)
    at_zero = run(layer, s)
    far = run(layer, s, torch.arange(9)[None] + 1000)
    stretched = run(layer, s, torch.arange(9)[None] * 3)
    assert torch.allclose(at_zero, far, rtol=1e-9, atol=1e-9)
    assert (at_zero - stretched).abs().max() > 1e-3


@pytest.mark.parametrize("columns", ["single", "split"])
def test_bfloat16_stays_close_to_float32(columns: str) -> None:
    layer = make(torch.float32, time_columns=columns)
    s = torch.randn(2, 24, 20)
    exact = run(layer, s)
    half = run(layer.bfloat16(), s.bfloat16())
    assert half.dtype == torch.bfloat16
    error = (half.float() - exact).norm() / exact.norm()
    assert 1e-4 < error < 2e-2


def test_split_times_carry_scores_that_one_column_loses() -> None:
    """The columns in bfloat16 against the scores of the same rounded points, products and sums in float64."""
    errors, cos, sin = {}, torch.ones(1, 30, 4), torch.zeros(1, 30, 4)
    query, key = ((8 * torch.randn(1, 30, 3, 16)).bfloat16() for _ in range(2))  # times near 24
    key[..., :4] = key[:, :, :1, :4]  # what all heads share
    left, right = (x[..., :9].double().transpose(1, 2) for x in (query, key))
    time, excess = (left.square().sum(-1, keepdim=True) + 1).sqrt(), (right.square().sum(-1) + 1).sqrt() - 1
    exact = left @ right.mT - time * excess[:, :, None]
    rows = torch.stack([key, key], 2).flatten(2)
    for split in (False, True):
        heads = Heads(3, 16, 9, 7, shared_dim=4, split=split)
        log_tau = torch.tensor([2.0]).log()  # so that queries are multiplied by 1
        q, k, _ = lift_heads(rows, cos, sin, log_tau, heads, queries=query, shared=key[:, :, 0])
        q, k = (x.double().transpose(1, 2) for x in (q, k))
        errors[split] = (q @ k.mT - exact).abs().max().item()
    assert errors[False] > 0.1
    assert errors[True] < errors[False] / 100, errors


def test_starts_as_published() -> None:
    layer = LatentAttention(HelmConfig(**SMALL), 0)
    assert layer.log_tau.exp().item() == pytest.approx((3 * (5 + 4 + 1)) ** 0.5)
    assert (layer.kv_gain == 1).all()
    pieces = [*layer.down.weight.split((3 * 9, 9 + 4)), layer.kv_up.weight, layer.o_proj.weight]
    inputs = [21, 21, 10, 24]  # with the times
    for rows, num_inputs in zip(pieces, inputs, strict=True):
        bound = (2 * 6 / (rows.shape[0] + num_inputs)) ** 0.5
        assert rows.abs().max() <= bound
        assert rows.abs().mean().item() == pytest.approx(bound / 2, rel=0.15)
    assert (layer.down.bias == 0).all()


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
@torch.no_grad()
def test_other_implementations_agree(implementation: str) -> None:
    layer = make(time_columns="split")
    s = torch.randn(2, 9, 20, dtype=torch.float64)
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 2, 2, 2]])

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (document[b, i] == document[b, j])

    dense = create_mask(visible, 2, 1, 9, 9, "cpu")
    expected = run(layer, s, None, dense)
    layer.config._attn_implementation = implementation
    mask = dense if implementation == "eager" else create_block_mask(visible, 2, None, 9, 9, "cpu")
    assert torch.allclose(run(layer, s, None, mask), expected, rtol=1e-12, atol=1e-12)


def test_compiles_whole_for_training() -> None:
    layer, plain = make(), make()
    plain.load_state_dict(layer.state_dict())
    s = torch.randn(2, 6, 20, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    inputs = compiled(layer, s)
    expected = run(plain, s)
    assert torch.allclose(inputs, expected, rtol=1e-12, atol=1e-12)
    for out in (inputs, expected):
        out.square().sum().backward()
    for (name, one), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-10, atol=1e-10), name
    torch._dynamo.reset()


def test_weights_come_with_the_eager_implementation() -> None:
    layer = make()
    layer.config._attn_implementation = "eager"
    s = torch.randn(2, 5, 20, dtype=torch.float64)
    positions = tables(layer, torch.arange(5).expand(2, -1))
    out, weights = layer(layer.down(s), positions, output_attentions=True)
    assert torch.equal(out, run(layer, s))
    assert weights.shape == (2, 3, 5, 5)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
    assert (weights.triu(1) == 0).all()
    cache = DynamicCache()
    run(layer, s[:, :4], None, None, cache)
    _, last = layer(layer.down(s[:, 4:]), tables(layer, torch.full((2, 1), 4)), None, cache, output_attentions=True)
    assert torch.allclose(last, weights[:, :, 4:], rtol=1e-12, atol=1e-12)  # absorbed


def test_keys_that_a_query_may_see() -> None:
    device = torch.device("cpu")
    assert visible_keys(None, 0, 5, 5, device) is None
    assert visible_keys(None, 4, 1, 5, device) is None
    mask = visible_keys(None, 2, 2, 4, device)
    assert mask is not None and torch.equal(mask[0, 0], torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool())
    mask = visible_keys(None, torch.tensor(2), 1, 6, device)
    assert mask is not None and mask.flatten().tolist() == [True, True, True, False, False, False]
    inputs = torch.rand(1, 1, 2, 9) > 0.5
    mask = visible_keys(inputs, 0, 2, 4, device)
    assert mask is not None and torch.equal(mask, inputs[..., :4])
