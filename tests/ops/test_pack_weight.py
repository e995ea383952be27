"""The parts of a linear map as one aligned matrix: kernels against the definition, values and gradients."""

from __future__ import annotations

import pytest
import torch

from hyptree.ops.pack_weight import Layout, pack_weight, reference

pytest.importorskip("triton")


def test_the_definition_puts_every_part_in_its_place() -> None:
    weight, time, bias = torch.arange(6.0).view(2, 3), torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0])
    actual = reference.pack_weight(weight, time, bias, Layout(2, 1, 2, 1, 6), torch.float32)
    zeros = [0.0] * 6
    assert actual.tolist() == [[0, 1, 2, 10, 20, 0], zeros, [3, 4, 5, 11, 21, 0], zeros]
    heads = reference.pack_weight(torch.arange(4.0).view(1, 4), torch.tensor([[7.0, 8.0]]), None, Layout(1, 1, 1, 2, 4),
                           torch.float32)  # fmt: skip
    assert heads.tolist() == [[0, 1, 7, 0, 2, 3, 8, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "size", "bias"),
    [(Layout(1, 5, 5, 1, 16), 13, True), (Layout(3, 7, 8, 1, 8), 7, False), (Layout(1, 9, 9, 4, 8), 7, False)],
)
def test_kernels_equal_the_definition(layout: Layout, size: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    m = layout.groups * layout.rows
    weight = torch.randn(m, layout.points * size, device=device).bfloat16().float().requires_grad_()
    time = (
        torch.randn((m, layout.points) if layout.points > 1 else (m,), device=device)
        .bfloat16()
        .float()
        .requires_grad_()
    )
    shift = torch.randn(m, device=device).bfloat16().float().requires_grad_() if bias else None
    leaves = [leaf for leaf in (weight, time, shift) if leaf is not None]
    actual, expected = (
        pack_weight(weight, time, shift, layout, dtype, backend=backend) for backend in ("triton", "torch")
    )
    assert torch.equal(actual, expected)
    grad = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        assert one.is_contiguous()
        assert torch.equal(one, other)
