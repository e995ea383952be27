"""A dense model of the published shape gives the numbers of the published code, from the same weights.

The values below are what the authors' release (Graph-and-Geometric-Learning/helm, commit 83ac8ff,
``LTransformerDecoder`` with architecture L2W18A2, float32) answered to these weights and tokens. Weights follow from a
formula, so that nothing else need be kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hyptree.lm import HelmForCausalLM, preset

VOCABULARY, WIDTH, HEADS, LAYERS = 23, 18, 2, 2
SHOWN = (0, 1, 11, 22)
"""Tokens whose logits are held below."""
LOGITS = [
    [
        [0.839375, -0.35566, 1.385881, -0.210554],
        [0.856103, -0.685899, 0.5776, -0.181875],
        [0.642502, -0.341318, 1.122491, -0.022244],
        [0.144218, 0.166178, 0.662118, -0.619606],
        [0.414701, 0.002108, 1.19986, -0.532691],
        [0.88095, 0.110789, 1.386, -0.197629],
        [0.738672, -0.162376, 1.431778, -0.533302],
    ],
    [
        [0.562099, 0.041627, 1.342962, -0.377777],
        [0.754058, -0.422774, 1.121615, -0.751466],
        [0.734388, -0.278891, 1.550726, 0.017912],
        [0.821257, -0.756279, 1.551513, 0.03411],
        [1.326905, -0.567914, 0.632447, -0.457915],
        [0.313508, -0.645662, 0.574597, 0.016349],
        [0.864053, -0.698319, 1.316764, -0.477258],
    ],
]  # (sequences, positions, tokens)


def draw(*shape: int, phase: float, size: float = 0.2) -> Tensor:
    """Numbers that look random and are the same everywhere."""
    x = 43758.5453 * torch.sin(12.9898 * torch.arange(math.prod(shape), dtype=torch.float64) + phase)
    return (size * (2 * (x - x.floor()) - 1)).reshape(shape).float()


def linear(rows: int, columns: int, phase: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weight of the space components, of the time, which the release puts first, and bias."""
    matrix = draw(rows, columns, phase=phase)
    return matrix[:, 1:], matrix[:, 0], draw(rows, phase=phase + 0.5, size=0.1)


def as_raw(weight: float) -> Tensor:
    """What softplus makes the weight of a residual."""
    return torch.tensor([weight]).expm1().log()


def published_weights() -> dict[str, Tensor]:
    """The weights in our layout."""
    n, per_head, hidden = WIDTH - 1, WIDTH // HEADS, 4 * WIDTH
    state: dict[str, Tensor] = {"model.embed_tokens.weight": draw(VOCABULARY, n, phase=0.3, size=1.0)}

    def put(name: str, *maps: tuple[Tensor, Tensor, Tensor]) -> None:
        for part, tensors in zip(("weight", "weight_time", "bias"), zip(*maps, strict=True), strict=True):
            state[f"{name}.{part}"] = torch.cat(tensors)

    for i in range(LAYERS):
        layer, phase = f"model.layers.{i}", 10.0 * i
        put(f"{layer}.attention.qkv_proj", *(linear(WIDTH - HEADS, WIDTH, phase + 1 + j) for j in range(3)))
        heads = draw(n, WIDTH, phase=phase + 4).unflatten(1, (HEADS, per_head))
        state[f"{layer}.attention.o_proj.weight"] = heads[:, :, 1:].flatten(1)
        state[f"{layer}.attention.o_proj.weight_time"] = heads[:, :, 0]
        state[f"{layer}.attention.o_proj.bias"] = draw(n, phase=phase + 4.5, size=0.1)
        state[f"{layer}.attention.log_tau"] = torch.tensor([3.0 + i]).log()
        state[f"{layer}.attention_norm"] = 1 + draw(n, phase=phase + 5)
        state[f"{layer}.ffn_norm"] = 1 + draw(n, phase=phase + 6)
        put(f"{layer}.ffn.gate_up_proj", linear(hidden - 1, WIDTH, phase + 7), linear(hidden - 1, WIDTH, phase + 8))
        put(f"{layer}.ffn.down_proj", linear(n, hidden, phase + 9))
        state[f"{layer}.attention_weight"] = as_raw(0.8 + 0.1 * i)
        state[f"{layer}.ffn_weight"] = as_raw(1.2 + 0.1 * i)
    state["model.norm"] = 1 + draw(n, phase=30)
    put("model.final_proj", linear(n, WIDTH, 31))
    head = draw(VOCABULARY, WIDTH, phase=32)
    state["lm_head.weight"] = torch.cat([head[:, 1:], head[:, :1]], 1)
    return state


def test_the_published_code_and_ours_agree() -> None:
    config = preset(
        "helm-d-115m-paper", vocab_size=VOCABULARY, hidden_size=WIDTH - 1, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, head_dim=WIDTH // HEADS - 1, intermediate_size=4 * WIDTH - 1,
        residual_gain=4 * math.sqrt(WIDTH), rms_norm_eps=1e-8,
    )  # fmt: skip
    model = HelmForCausalLM(config).eval()
    model.load_state_dict(published_weights())
    ids = torch.arange(14).reshape(2, 7) * 5 % VOCABULARY
    with torch.no_grad():
        actual = model(ids).logits[:, :, SHOWN]
    torch.testing.assert_close(actual, torch.tensor(LOGITS), rtol=0, atol=3e-6)  # they are written to 1e-6
