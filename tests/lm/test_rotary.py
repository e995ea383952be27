"""HOPE: an isometry that knows relative positions only, in all variants that transformers scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hyptree.geometry import lorentz
from hyptree.lm.config import HelmConfig
from hyptree.lm.rotary import PAIRINGS, HelmRotary, score_scale
from hyptree.ops.heads.reference import rotate

SCALED: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0] * 16,
        "long_factor": [3.0] * 16,
        "original_max_position_embeddings": 64,
    },
]


def config(head_dim: int = 64, **changes: Any) -> HelmConfig:
    return HelmConfig(hidden_size=128, num_attention_heads=2, head_dim=head_dim, **changes)


def tables(settings: HelmConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    return HelmRotary(settings)(torch.zeros(1, dtype=torch.float64), positions)


def turn(x: Tensor, position: int, settings: HelmConfig) -> Tensor:
    return rotate(x, *tables(settings, torch.tensor([position])), settings.rope_pairing == "interleaved")


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("head_dim", [64, 63, 7])
def test_only_relative_positions_matter(pairing: str, head_dim: int) -> None:
    settings = config(head_dim, rope_pairing=pairing)
    q, k = torch.randn(2, 5, head_dim, dtype=torch.float64)
    near = lorentz.minkowski(turn(q, 3, settings), turn(k, 10, settings))
    far = lorentz.minkowski(turn(q, 1003, settings), turn(k, 1010, settings))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-11)
    assert float((near - lorentz.minkowski(q, k)).abs().max()) > 0.1  # and they do matter
    torch.testing.assert_close(lorentz.time(turn(q, 77, settings)), lorentz.time(q), rtol=1e-14, atol=0)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_pairs_turn_by_their_angle(pairing: str) -> None:
    settings = config(7, rope_pairing=pairing)
    x, position = torch.randn(7, dtype=torch.float64), 5
    out, frequency = turn(x[None], position, settings)[0], HelmRotary(settings).inv_freq.double()
    pairs = [(0, 1), (2, 3), (4, 5)] if pairing == "interleaved" else [(0, 3), (1, 4), (2, 5)]
    for l, (a, b) in enumerate(pairs):
        assert float(frequency[l]) == pytest.approx(10000 ** (-2 * l / 6), rel=1e-6)
        angle = position * frequency[l]
        expected = torch.stack([x[a] * angle.cos() - x[b] * angle.sin(), x[b] * angle.cos() + x[a] * angle.sin()])
        torch.testing.assert_close(out[[a, b]], expected, rtol=0, atol=1e-14)
    assert float(out[6]) == float(x[6])


def test_attention_decays_with_distance() -> None:
    settings, x = config(64), torch.ones(64, dtype=torch.float64)
    distances = [0, 1, 8, 64, 512, 4096]
    scores = [float(-lorentz.lorentz_sqdist(turn(x, d, settings), x[None])) / 2 for d in distances]
    assert [round(score, 2) for score in scores[:2]] == [0.0, -2.17]
    assert [round(score, 1) for score in scores[2:]] == [-19.2, -36.2, -52.1, -63.8]


def test_any_distance_can_be_the_favourite() -> None:
    settings, q = config(64), torch.randn(64, dtype=torch.float64)
    for favourite in (0, 5, 40):
        k = turn(q, -favourite, settings)[0]  # so that the key `favourite` positions back meets the query
        scores = [float(lorentz.minkowski(turn(q, 50, settings), turn(k, 50 + d, settings))) for d in range(60)]
        assert max(range(60), key=scores.__getitem__) == favourite


@pytest.mark.parametrize("parameters", SCALED, ids=lambda p: p["rope_type"])
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    settings = config(32, rope_parameters=dict(parameters), max_position_embeddings=256)
    twin = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=2,
            head_dim=32,
            rope_parameters={"rope_theta": 10000.0, **parameters},
            max_position_embeddings=256,
        )
    )
    rotary = HelmRotary(settings)
    for length in (10, 200, 400):
        positions = torch.arange(length)[None]
        cos, sin = rotary(torch.zeros(1), positions)
        their_cos, their_sin = twin(torch.zeros(1), positions)
        scaling = score_scale(settings) ** 0.5
        torch.testing.assert_close(cos[..., ::2] * scaling, their_cos[..., :16], rtol=0, atol=1e-5)
        torch.testing.assert_close(sin[..., 1::2] * scaling, their_sin[..., :16], rtol=0, atol=1e-5)
        torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos), rtol=0, atol=1e-6)
    assert (score_scale(settings) > 1.1) == (parameters["rope_type"] in ("yarn", "longrope"))


def test_angles_keep_their_digits_in_a_bfloat16_model() -> None:
    rotary = HelmRotary(config(64))
    expected = rotary(torch.zeros(1), torch.arange(2048)[None])
    low = rotary.to(torch.bfloat16)
    cos, sin = low(torch.zeros(1, dtype=torch.bfloat16), torch.arange(2048)[None])
    assert cos.dtype == torch.float32
    torch.testing.assert_close((cos, sin), expected, rtol=0, atol=0)


def test_frequencies_are_made_where_they_are_needed() -> None:
    with torch.device("meta"):
        rotary = HelmRotary(config(64))
    assert rotary.inv_freq.is_meta
    rotary.to_empty(device="cpu")
    rotary.reset_parameters()
    torch.testing.assert_close(rotary.inv_freq, HelmRotary(config(64)).inv_freq, rtol=0, atol=0)
