"""Proportional attention: two ways to the numbers of the definition, and what they mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.errors import UserError
from hyptree.tokens import attention
from hyptree.tokens.attention import SizeMask, channel_attention, log_size_mask, proportional_attention
from hyptree.tokens.families.adapter import join_masks


def masked_attention(q: Tensor, k: Tensor, v: Tensor, size: Tensor, scale: float | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, log_size_mask(size, q.dtype), scale=scale)


WAYS = [masked_attention, channel_attention]


def queries_keys_values(d: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, 3, length, d, dtype=dtype) for length in (5, 9, 9))  # type: ignore[return-value]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("d", [16, 20, 64])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_ways_agree(way: Any, d: int, scale: float | None) -> None:
    q, k, v = queries_keys_values(d)
    size = torch.randint(1, 40, (2, 9)).float()
    expected = proportional_attention(q, k, v, size, scale)
    plain = proportional_attention(q, k, v, torch.ones(2, 9), scale)
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(way(q, k, v, size, scale), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", [*WAYS, proportional_attention])
def test_one_token_of_size_m_is_m_equal_tokens(way: Any) -> None:
    q, k, v = queries_keys_values()
    size = torch.tensor([[1, 4, 1, 2, 1, 7, 1, 1, 3]]).expand(2, -1)
    copies = torch.arange(9).repeat_interleave(size[0])
    expected = F.scaled_dot_product_attention(q, k[:, :, copies], v[:, :, copies])
    torch.testing.assert_close(way(q, k, v, size.float()), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_the_ways_agree(way: Any) -> None:
    inputs = queries_keys_values(dtype=torch.float64)
    size = torch.randint(1, 9, (2, 9)).double()
    gradients = []
    for each in (way, proportional_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = each(*leaves, size)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)


def test_channels_lose_no_digits_of_the_sizes_in_half_precision() -> None:
    q, k, v = (x.bfloat16() for x in queries_keys_values(64))
    size = torch.randint(1, 200, (2, 9)).float()
    expected = proportional_attention(q.double(), k.double(), v.double(), size.double())
    # What half precision costs without any sizes is the measure of what it may cost with them.
    floor = (
        masked_attention(q, k, v, torch.ones(2, 9))
        .double()
        .sub(proportional_attention(q.double(), k.double(), v.double(), torch.ones(2, 9).double()))
    )
    error = channel_attention(q, k, v, size).double() - expected
    assert error.abs().max() < 3 * floor.abs().max()


def test_padding_is_hidden_by_the_mask() -> None:
    q, k, v = queries_keys_values()
    size = torch.randint(1, 5, (2, 9)).float()
    size[:, 6:] = 0
    expected = proportional_attention(q, k[:, :, :6], v[:, :, :6], size[:, :6])
    torch.testing.assert_close(masked_attention(q, k, v, size), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 197])
def test_mask_rows_are_aligned_for_fused_kernels(num_tokens: int) -> None:
    size = torch.randint(1, 9, (3, num_tokens)).float()
    mask = log_size_mask(size, torch.bfloat16)
    assert mask.shape == (3, 1, 1, num_tokens) and mask.dtype == torch.bfloat16
    assert mask.stride(0) % 16 == 0
    torch.testing.assert_close(mask[:, 0, 0], size.log().bfloat16(), atol=0, rtol=0)


def test_size_mask_is_a_mask_for_every_other_operation() -> None:
    size = torch.randint(1, 9, (2, 9)).float()
    logits = torch.randn(2, 3, 5, 9)
    assert torch.equal(logits + SizeMask(size, torch.float32), logits + size.log()[:, None, None])


def test_size_mask_makes_fused_attention_use_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = queries_keys_values()
    size = torch.randint(1, 9, (2, 9)).float()
    calls: list[float] = []
    channels = attention.channel_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, size: Tensor, scale: float, dropout: float) -> Tensor:
        calls.append(scale)
        return channels(q, k, v, size, scale, dropout)

    monkeypatch.setattr(attention, "channel_attention", spy)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=SizeMask(size, q.dtype), scale=0.2)  # type: ignore[arg-type]
    assert calls == [0.2]
    torch.testing.assert_close(out, proportional_attention(q, k, v, size, 0.2), atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="no causal"):
        F.scaled_dot_product_attention(q, k, v, SizeMask(size, q.dtype), 0.0, True)  # type: ignore[arg-type]


def test_masks_join() -> None:
    bias = torch.randn(2, 1, 1, 9)
    mask = torch.rand(9, 9) < 0.5
    joined = join_masks(mask, bias)
    assert torch.equal(joined, torch.where(mask, bias.expand(2, 1, 9, 9), float("-inf")))
    additive = torch.randn(9, 9)
    assert torch.equal(join_masks(additive, bias), additive + bias)
    assert join_masks(None, bias) is bias
