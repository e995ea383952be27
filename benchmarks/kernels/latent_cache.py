"""Decoding in ``hyptree bench kernels``: 8 sequences of 8192 tokens in the latent cache of HELM-MICE."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.cases import BF16, FP32, C, Draw, Job, Outputs, Work
from hyptree.ops import latent_decode
from hyptree.ops.heads import Heads
from hyptree.ops.latent_decode import reference

EPS, VALUE_SCALE = 1e-6, 0.4
SIZES = {"120m": (6, 62, 16), "1B": (14, 254, 32)}
"""Heads, components of the latent, and of the shared key; queries, keys and values have 63."""


def latent_steps(draw: Draw) -> Iterator[Job]:
    B, M, dtype = (2, 40, FP32) if draw.quick else (8, 8256, BF16)
    for name, (num_heads, rank, rope) in {"tiny": (3, 9, 4)}.items() if draw.quick else SIZES.items():
        heads = Heads(num_heads, 64, 63, 63, 1.0, VALUE_SCALE, C, True, rope)
        make = functools.partial(_attending, draw, B, M, rank, heads, dtype)
        yield Job("latent_decode", f"attend {name}", f"({B},{M},{rank + 2 + rope})", dtype, make)
        make = functools.partial(_absorbing, draw, B, rank, heads, dtype)
        yield Job("latent_decode", f"absorb {name}", f"({B},{num_heads},64)", dtype, make)


def _joined(times: Tensor, num_heads: int) -> Tensor:
    """Times (..., 2H) of one number each, where two were kept."""
    if times.shape[-1] == 2 * num_heads:
        return times
    return times[..., : 2 * num_heads].to(torch.float64) + times[..., 2 * num_heads :].to(torch.float64)


def _attending(draw: Draw, B: int, M: int, rank: int, heads: Heads, dtype: torch.dtype) -> Work:
    H, D, L = heads.num_heads, heads.value_dim, rank + 2
    W = L + heads.shared_dim
    keys, up_value = draw.normal(B, M, W, dtype=dtype), draw.normal(H, D, L, dtype=dtype, scale=1 / math.sqrt(L))
    values = VALUE_SCALE * torch.einsum("hdl,bml->bmhd", up_value.float(), keys[..., :L].float())
    excess = torch.sqrt(values.square().sum(-1) + 1 / C) - C**-0.5
    times = torch.cat([draw.uniform(B, M, H, high=2.0), excess], -1)
    if dtype in reference.HALF:
        times = torch.cat([times, times - times.to(dtype).float()], -1)
    inputs = (
        draw.normal(B, H, W, dtype=dtype, scale=0.3),
        draw.uniform(B, H, low=1.0, high=3.0),
        keys,
        times.to(dtype),
        up_value,
    )

    def definition(q: Tensor, time: Tensor, keys: Tensor, times: Tensor, up: Tensor) -> Outputs:
        times = times if keys.dtype in reference.HALF else _joined(times, H).to(keys.dtype)
        return (reference.latent_decode(q, time, keys, times, up, None, VALUE_SCALE, D + 1, C),)

    def kernel(*x: Tensor) -> Outputs:
        settings = {"value_scale": VALUE_SCALE, "width": D + 1, "c": C}
        return (latent_decode.latent_decode(*x, **settings, backend="triton"),)  # type: ignore[arg-type]

    return Work(inputs, definition, kernel, flops=2 * B * H * (M * (W + L) + L * D))


def _absorbing(draw: Draw, B: int, rank: int, heads: Heads, dtype: torch.dtype) -> Work:
    H, L, rope = heads.num_heads, rank + 2, heads.shared_dim
    up = draw.normal(2, H, heads.width, L, dtype=dtype, scale=1 / math.sqrt(L))
    if draw.generator is not None:
        up[0, :, :rope] = up[:, :, heads.key_dim :] = 0.0
    angle = draw.uniform(B, rope, high=6.0)
    inputs = (
        draw.normal(B, H, heads.width, dtype=dtype),
        draw.normal(B, rank, dtype=dtype),
        draw.normal(B, rope, dtype=dtype),
        angle.cos(),
        angle.sin(),
        draw.uniform(1, low=0.5, high=1.0),
        draw.uniform(rank, low=0.5, high=1.5, dtype=dtype),
        up.flatten(0, 2),
    )
    return Work(
        inputs,
        functools.partial(reference.absorb_token, heads=heads, eps=EPS, bias=True),
        functools.partial(latent_decode.absorb_token, heads=heads, eps=EPS, bias=True, backend="triton"),
        flops=2 * B * H * 3 * heads.width * L,
        seen=lambda outputs: (*outputs[:3], _joined(outputs[3], H)),
    )
