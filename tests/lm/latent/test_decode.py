"""One new token by the kernels over cached latents: what one pass of the same layer in float64 gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, StaticCache

from hyptree.ops import backend as backends
from hyptree.ops import latent_decode
from tests.lm.latent.test_attention import make, run, tables

pytest.importorskip("triton")

LENGTH = 11
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not backends.interpreted():
        pytest.skip("kernels run on the GPU here, TRITON_INTERPRET=1 would run them on the CPU")
    return str(request.param)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each call of the kernels had."""
    calls: list[int] = []

    def counted(queries: Tensor, *args: Any) -> Tensor:
        calls.append(queries.shape[0])
        return decode(queries, *args)

    decode = latent_decode._forward
    monkeypatch.setattr(latent_decode, "_forward", counted)
    return calls


def new_cache(kind: str, layer: Any) -> Any:
    return DynamicCache() if kind == "dynamic" else StaticCache(layer.config, max_cache_len=LENGTH + 4)


def step(layer: Any, s: Tensor, start: int, stop: int, cache: Any, mask: Tensor | None, **options: Any) -> Any:
    """The layer on tokens ``start`` to ``stop``, which stand at the places of those numbers."""
    place = torch.arange(start, stop, device=s.device).expand(s.shape[0], -1)
    rows = None
    if mask is not None:
        rows = mask[:, :, start:stop, : stop if isinstance(cache, DynamicCache) else None]
    out, weights = layer(layer.down(s[:, start:stop]), tables(layer, place, torch.float32), rows, cache, **options)
    return (out, weights) if options else out


def padded_on_the_left(device: str) -> Tensor:
    """Causal order of three sequences of 11, 8 and 4 tokens in a cache with four places too many."""
    first = LENGTH - torch.tensor([LENGTH, 8, 4])[:, None, None]
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH + 4)
    return ((key <= query) & (key >= first))[:, None].to(device)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("dtype", "changes"), [
    (torch.bfloat16, {}), (torch.float16, {"attention_bias": False, "curvature": 0.5}),
    (torch.float32, {"q_lora_rank": 6, "value_scale": 0.4}),
])  # fmt: skip
@torch.no_grad()
def test_steps_equal_one_pass(
    changes: dict[str, Any], kind: str, dtype: torch.dtype, device: str, count: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    layer = make(**changes).eval()
    s = 0.7 * torch.randn(3, LENGTH, 20, dtype=torch.float64).to(dtype).double()
    expected = run(layer, s)
    layer = layer.to(device, dtype)
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    cache, x = new_cache(kind, layer), s.to(device, dtype)
    step(layer, x, 0, LENGTH - 2, cache, None)
    actual = torch.cat([step(layer, x, i, i + 1, cache, None) for i in (LENGTH - 2, LENGTH - 1)], 1)
    assert count == [3, 3]
    assert actual.dtype == dtype
    assert (actual.double().cpu() - expected[:, -2:]).norm() <= CLOSE[dtype] * expected[:, -2:].norm()


@pytest.mark.parametrize(("kind", "dtype"), [("dynamic", torch.float32), ("static", torch.bfloat16)])
@torch.no_grad()
def test_padding_on_the_left_is_not_seen(
    kind: str, dtype: torch.dtype, device: str, count: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make().eval()
    s = 0.7 * torch.randn(3, LENGTH, 20, dtype=torch.float64).to(dtype).double()
    alone = [run(layer, s[i : i + 1, LENGTH - n :])[0, -2:] for i, n in enumerate((LENGTH, 8, 4))]
    layer, mask = layer.to(device, dtype), padded_on_the_left(device)
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    cache, x = new_cache(kind, layer), s.to(device, dtype)
    step(layer, x, 0, LENGTH - 2, cache, mask)
    actual = torch.cat([step(layer, x, i, i + 1, cache, mask) for i in (LENGTH - 2, LENGTH - 1)], 1)
    assert count == [3, 3]
    for sequence, expected in zip(actual.double().cpu(), alone, strict=True):
        assert (sequence - expected).norm() <= CLOSE[dtype] * expected.norm()


def test_who_asks_for_weights_or_gradients_gets_them(
    device: str, count: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    layer = make(torch.float32).eval().to(device)
    s = torch.randn(2, LENGTH, 20, device=device)
    cache = new_cache("dynamic", layer)
    with torch.no_grad():
        step(layer, s, 0, 7, cache, None)
        plain, weights = step(layer, s, 7, 8, copy.deepcopy(cache), None, output_attentions=True)
        assert weights.shape == (2, 3, 1, 8)
        assert not count
        quick = step(layer, s, 7, 8, copy.deepcopy(cache), None)
    assert count == [2]
    torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-5)
    step(layer, s, 7, 8, copy.deepcopy(cache), None).square().sum().backward()
    assert count == [2]
    assert layer.kv_up.weight.grad.abs().max() > 0


@pytest.mark.parametrize("mask", [None, "left"])
@torch.no_grad()
def test_a_step_is_one_graph_with_a_static_cache(
    mask: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    layer = make(torch.float32).eval().to(device)
    s = torch.randn(3, LENGTH, 20, device=device)
    rows = padded_on_the_left(device) if mask else None
    cache = new_cache("static", layer)
    step(layer, s, 0, 7, cache, rows)
    other, counter = copy.deepcopy(cache), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda s, cos, sin, seen: layer(layer.down(s), (cos, sin), seen, other)[0], backend=counter, fullgraph=True
    )
    for place in (7, 8, 9):
        expected = step(layer, s, place, place + 1, cache, rows)
        cos, sin = tables(layer, torch.full((3, 1), place, device=device), torch.float32)
        seen = None if rows is None else rows[:, :, place : place + 1].contiguous()
        actual = compiled(s[:, place : place + 1], cos, sin, seen)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    assert counter.frame_count == 1
