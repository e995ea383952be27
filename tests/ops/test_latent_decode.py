"""One token against cached latents: the kernels against the definition in float64; the definition against geometry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.ops.heads import Heads
from hyptree.ops.latent_decode import absorb_token, latent_decode

pytest.importorskip("triton")
from hyptree.ops.latent_decode import triton as kernels

C = 0.7
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def drawn(
    B: int, M: int, H: int, D: int, L: int, R: int, dtype: torch.dtype, device: str = "cpu", far: float = 1.0
) -> tuple[Tensor, ...]:
    """Queries, their times, keys, times, and a map, rounded to ``dtype``; the excess is that of the values."""
    queries = 0.3 * torch.randn(B, H, L + R)
    time = queries.norm(dim=-1) + torch.rand(B, H)
    keys = far * torch.randn(B, M, L + R)
    up_value = torch.randn(H, D, L) / math.sqrt(L)
    queries, keys, up_value = (x.to(device, dtype) for x in (queries, keys, up_value))
    values = 0.6 * torch.einsum("hdl,bml->bmhd", up_value.double(), keys[..., :L].double())
    excess = torch.sqrt(values.square().sum(-1) + 1 / C) - 1 / math.sqrt(C)
    both = torch.cat([far * torch.rand(B, M, H, dtype=torch.float64, device=device), excess], -1)
    if dtype in (torch.bfloat16, torch.float16):
        high = both.to(dtype)
        both = torch.cat([high, (both - high).to(dtype)], -1)
    return queries, time.to(device), keys, both.to(dtype), up_value


def exact(inputs: tuple[Tensor, ...], mask: Tensor | None, width: int) -> Tensor:
    """The definition in float64; times of two numbers are joined before."""
    queries, time, keys, times, up_value = (x.double() for x in inputs)
    H = queries.shape[1]
    if times.shape[-1] == 4 * H:
        times = times[..., : 2 * H] + times[..., 2 * H :]
    return latent_decode(queries, time, keys, times, up_value, mask, value_scale=0.6, width=width, c=C, backend="torch")


def test_the_definition_is_softmax_and_centroid() -> None:
    """Values of all tokens and heads, their Lorentz centroid with weights from explicit scores."""
    queries, time, keys, times, up_value = inputs = drawn(2, 9, 3, 5, 6, 4, torch.float64)
    mask = torch.rand(2, 11) < 0.6
    mask[:, 4] = True
    out = exact(inputs, mask, 8)
    for b in range(2):
        for h in range(3):
            scores = keys[b] @ queries[b, h] - time[b, h] * times[b, :, h]
            weights = scores.masked_fill(~mask[b, :9], -math.inf).softmax(-1)
            expected = lorentz.centroid(0.6 * keys[b, :, :6] @ up_value[h].T, weights, C)
            torch.testing.assert_close(out[b, h, :5], expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(out[b, h, 5], lorentz.time(expected, C), rtol=1e-12, atol=1e-12)
    assert torch.equal(out[..., 6:], torch.zeros(2, 3, 2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("sizes", "width"), [
    ((2, 300, 6, 63, 64, 16), 64), ((1, 1, 3, 7, 11, 4), 8), ((3, 63, 4, 9, 67, 16), 16), ((1, 130, 17, 15, 16, 0), 16),
])  # fmt: skip
def test_kernels_equal_the_definition(sizes: tuple[int, ...], width: int, dtype: torch.dtype, device: str) -> None:
    inputs = drawn(*sizes, dtype, device)
    out = latent_decode(*inputs, value_scale=0.6, width=width, c=C, backend="triton")
    assert out.dtype == dtype
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), exact(inputs, None, width), **close)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("programs", [1, 4, 528])
def test_mixed_lengths_padding_and_unused_places(
    programs: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of different lengths, padded on either side, in several pieces; what may not be seen may be NaN."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    kernels._cut.cache_clear()
    B, M = 4, 700
    inputs = drawn(B, M, 5, 15, 14, 6, dtype, device)
    place = torch.arange(M + 3)
    first, last = torch.tensor([0, 650, 130, 0])[:, None], torch.tensor([M, 700, 131, 300])[:, None]
    mask = ((place >= first) & (place < last)).to(device)
    expected = exact(inputs, mask, 16)
    for x in (inputs[2], inputs[3]):
        x[~mask[:, :M]] = math.nan
    out = latent_decode(*inputs, mask, value_scale=0.6, width=16, c=C, backend="triton")
    kernels._cut.cache_clear()
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_one_mask_for_all_and_none_for_one(device: str) -> None:
    """A mask of one row counts for all sequences; a sequence that sees nothing gets the origin."""
    inputs = drawn(3, 40, 2, 7, 8, 4, torch.float32, device)
    mask = torch.arange(40, device=device)[None] < 33
    out = latent_decode(*inputs, mask, value_scale=0.6, width=8, c=C, backend="triton")
    torch.testing.assert_close(out.double(), exact(inputs, mask, 8), rtol=1e-5, atol=1e-5)
    mask = mask.repeat(3, 1)
    mask[1] = False
    again = latent_decode(*inputs, mask, value_scale=0.6, width=8, c=C, backend="triton")
    assert torch.equal(again[[0, 2]], out[[0, 2]])
    origin = torch.tensor([0.0] * 7 + [1 / math.sqrt(C)], device=device)
    torch.testing.assert_close(again[1], origin.expand(2, 8))


def test_caches_and_maps_are_read_where_they_lie(device: str) -> None:
    """Part of a longer static cache, and a map inside of a wider matrix: views, as the model gives them."""
    inputs = list(drawn(2, 50, 3, 7, 10, 6, torch.float32, device))
    expected = latent_decode(*inputs, value_scale=0.6, width=8, c=C, backend="triton")
    for place in (2, 3):
        longer = torch.full((2, 1, 64, inputs[place].shape[-1]), math.nan, device=device)
        longer[:, 0, :50] = inputs[place]
        inputs[place] = longer[:, 0, :50]
    wider = torch.full((3, 9, 16), math.nan, device=device)
    wider[:, :7, :10] = inputs[4]
    inputs[4] = wider[:, :7, :10]
    assert torch.equal(latent_decode(*inputs, value_scale=0.6, width=8, c=C, backend="triton"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_far_values_stay_on_the_hyperboloid(dtype: torch.dtype, device: str) -> None:
    """Means of far values: weights are rounded before they are summed, so the centroid is one of other weights."""
    inputs = drawn(2, 200, 4, 15, 16, 0, dtype, device, far=6.0)
    inputs = (0 * inputs[0], 0 * inputs[1], *inputs[2:])  # all weights are equal
    out = latent_decode(*inputs, value_scale=0.6, width=16, c=C, backend="triton").double()
    torch.testing.assert_close(out, exact(inputs, None, 16), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


TOKENS = {
    "aligned": (Heads(6, 64, 63, 63, 1.1, 0.4, C, True, 16), 62, True),
    "no bias, half": (Heads(3, 16, 9, 7, 1.0, 1.0, C, False, 4), 9, False),
    "odd rotary": (Heads(2, 24, 17, 3, 1.0, 0.7, C, True, 5), 30, True),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TOKENS)
def test_a_token_is_absorbed_as_defined(name: str, dtype: torch.dtype, device: str) -> None:
    heads, rank, bias = TOKENS[name]
    B, H, columns, turned = 3, heads.num_heads, rank + 1 + int(bias) + 3, heads.shared_dim // 2 * 2
    product = torch.randn(B, H * heads.width + columns + heads.shared_dim + 2)  # as one product gives the three
    product[:, : H * heads.width].unflatten(-1, (H, heads.width))[..., heads.key_dim :] = 0
    up = torch.randn(2, H, heads.width, columns) / math.sqrt(columns)
    up[0, :, : heads.shared_dim] = 0
    up[0, :, heads.key_dim :] = 0
    up[1, :, heads.value_dim :] = 0
    product, up = product.to(device, dtype), up.flatten(0, 2).to(device, dtype)
    q, latent, shared = product.split([H * heads.width, columns, heads.shared_dim + 2], -1)
    cos, sin = torch.randn(2, B, turned, device=device).unbind(0)
    log_tau, gain = torch.full((1,), 0.8).to(device, dtype), (torch.rand(rank) + 0.5).to(device, dtype)
    inputs = (q.unflatten(-1, (H, heads.width)), latent, shared, cos, sin, log_tau, gain, up)
    actual = absorb_token(*inputs, heads, eps=1e-6, bias=bias, backend="triton")
    expected = absorb_token(*(x.double() for x in inputs), heads, eps=1e-6, bias=bias, backend="torch")
    shapes = [(B, H, rank + 1 + bias + heads.shared_dim), (B, H), (B, rank + 1 + bias + heads.shared_dim)]
    assert [tuple(x.shape) for x in actual[:3]] == shapes
    assert [x.dtype for x in actual] == [dtype, torch.float32, dtype, dtype]
    for one, other in zip(actual[:3], expected[:3], strict=True):
        assert (one.double() - other).norm() <= TOLERANCE[dtype] * other.norm()
    times = actual[3].double()
    if dtype != torch.float32:
        assert times.shape == (B, 4 * H)
        times = times[:, : 2 * H] + times[:, 2 * H :]
        again = absorb_token(*inputs, heads, eps=1e-6, bias=bias, backend="torch")[3].double()
        again = again[:, : 2 * H] + again[:, 2 * H :]
        # Of the same rounded points the times have more digits than the dtype, though some point rounds another way.
        if device == "cuda" or dtype == torch.float16:  # Triton's interpreter cuts bfloat16 in place of rounding it
            assert ((times - again).abs() / again).median() < 0.1 * torch.finfo(dtype).eps
    assert (times - expected[3]).norm() <= TOLERANCE[dtype] * expected[3].norm()


def test_what_does_not_fit_is_said(device: str) -> None:
    inputs: Any = drawn(2, 5, 3, 7, 8, 4, torch.float64, device)
    with pytest.raises(ValueError, match="float64"):
        latent_decode(*inputs, width=8, backend="triton")
    inputs = drawn(2, 5, 3, 7, 8, 4, torch.float32, device)
    with pytest.raises(ValueError, match="boolean"):
        latent_decode(*inputs, torch.zeros(2, 5, device=device), width=8, backend="triton")


def test_it_is_one_node_of_a_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    settings = drawn(2, 20, 3, 7, 8, 4, torch.float32, device)
    mask = torch.rand(2, 20, device=device) < 0.8
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    def run(*x: Tensor) -> Tensor:
        return latent_decode(*x, width=8, c=C)

    actual = torch.compile(run, backend=keep, fullgraph=True)(*settings, mask)
    assert torch.equal(actual, run(*settings, mask))
    assert [str(node.target) for node in graphs[0].graph.nodes].count("hyptree.latent_decode.default") == 1
