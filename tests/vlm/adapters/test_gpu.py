"""Adapters on a GPU: what holds on the CPU holds there, with models of transformers alone."""

from __future__ import annotations

import copy

import pytest
import torch

from hyptree.vlm import (
    AdapterConfig,
    AdapterHandle,
    DiagonalConfig,
    LoraConfig,
    OrthogonalConfig,
    ScaleAdapterConfig,
    attach,
)
from tests.vlm.adapters.small_clips import CLIPS, encode, pixels, shake, tokens

pytestmark = pytest.mark.gpu

METHODS: list[AdapterConfig] = [
    ScaleAdapterConfig(16),
    ScaleAdapterConfig(16, share="layers", cap="paper", curvature=25.0),
    DiagonalConfig(),
    LoraConfig(4),
    OrthogonalConfig(8),
]


def gradients(handle: AdapterHandle) -> list[torch.Tensor]:
    return [parameter.grad.cpu() for parameter in handle.parameters()]


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.method)
@pytest.mark.parametrize("small", CLIPS[:2], ids=lambda small: small.name)
def test_values_and_gradients_are_those_of_the_cpu(small, config: AdapterConfig):
    model, words, pictures = small().double(), tokens(), pixels().double()
    handle = attach(model, config)
    shake(handle)
    on_cpu = encode(model, words, pictures)
    on_cpu.square().sum().backward()
    expected = gradients(handle)
    model.zero_grad()
    model.cuda()
    on_gpu = encode(model, words.cuda(), pictures.cuda())
    on_gpu.square().sum().backward()
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-8, atol=1e-9)
    for mine, plain in zip(gradients(handle), expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.method)
@torch.no_grad()
def test_merge_is_exact(config: AdapterConfig, dtype: torch.dtype):
    model, words, pictures = CLIPS[0]().to("cuda", dtype), tokens().cuda(), pixels().to("cuda", dtype)
    handle = attach(model, config)
    shake(handle)
    adapted = encode(model, words, pictures)
    handle.merge()
    assert torch.equal(encode(model, words, pictures), adapted)


def test_training_is_the_same_twice_and_leaves_the_base():
    torch.manual_seed(0)
    model, words, pictures = CLIPS[0]().cuda(), tokens().cuda(), pixels().cuda()
    state = copy.deepcopy(model.state_dict())
    curves = []
    for _ in range(2):
        handle = attach(model, ScaleAdapterConfig(16, share="layers"))
        optimizer = torch.optim.AdamW(handle.parameters(), lr=1e-2, fused=True)
        losses = []
        for _ in range(5):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = encode(model, words, pictures).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        handle.detach()
        curves.append(losses)
    assert curves[0] == curves[1] and curves[0][-1] < curves[0][0]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_fused_optimizer_steps_are_seen():
    model, words, pictures = CLIPS[0]().cuda(), tokens().cuda(), pixels().cuda()
    handle = attach(model, ScaleAdapterConfig(16))
    optimizer = torch.optim.AdamW(handle.parameters(), lr=1e-2, fused=True)
    before = encode(model, words, pictures)
    before.square().sum().backward()
    optimizer.step()
    weight = model.text_model.encoder.layers[0].self_attn.q_proj.weight  # asked for outside of any pass
    assert not torch.equal(weight, handle._set.group_of["text_model.encoder.layers.0.self_attn.q_proj.weight"][1].base)
    assert not torch.equal(encode(model, words, pictures), before)
