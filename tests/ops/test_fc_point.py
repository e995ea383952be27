"""``fc_point`` in blocks of rows beside its definition: values, gradients, second derivatives, limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hyptree import nn as rn
from hyptree.geometry import lorentz
from hyptree.ops import fc_point as door

C = 0.7
NEAR = {torch.float32: 2e-6, torch.float64: 1e-14}


def inputs(dtype: torch.dtype, rows: int = 70, n: int = 9, m: int = 33, far: float = 1.0) -> list[Tensor]:
    x = lorentz.expmap0(torch.randn(rows, n, dtype=torch.float64) * far, C)
    product = (x, torch.randn(m, n, dtype=torch.float64) / n, torch.randn(m, dtype=torch.float64) / n)
    return [t.to(dtype).requires_grad_() for t in (*product, 0.2 + torch.rand(m, dtype=torch.float64))]


def outcome(tensors: list[Tensor], weight: Tensor, **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = door.fc_point(*leaves, C, 1.3, **options)
    return [out, *torch.autograd.grad(out, leaves, weight.to(out.dtype))]


@pytest.mark.parametrize("in_ball", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_give_what_the_definition_gives(
    dtype: torch.dtype, in_ball: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs(dtype)
    tensors[0] = torch.cat([tensors[0], torch.zeros(1, 9, dtype=dtype)]).unflatten(0, (1, 71))
    weight = torch.randn(1, 71, 33)
    monkeypatch.setattr(door, "_BLOCK", 300)  # nine rows, and a last block of eight
    calls: list[Any] = []
    plain = door._plain
    monkeypatch.setattr(door, "_plain", lambda *args: calls.append(args) or plain(*args))
    actual = outcome(tensors, weight, in_ball=in_ball)
    assert not calls
    monkeypatch.setattr(door, "is_eager", lambda: False)
    expected = outcome([t.double() for t in tensors], weight, in_ball=in_ball)
    assert len(calls) == 1
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).abs().max() <= NEAR[dtype] * max(1.0, other.abs().max())


@pytest.mark.parametrize("in_ball", [False, True])
def test_rows_at_the_limit_are_the_definitions(in_ball: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, weight = inputs(torch.float32), torch.randn(70, 33)
    for value in (1e9, 1e30, float("nan")):
        far = [t.detach().clone() for t in tensors]
        far[3][5] = value  # one coordinate of each row, of which some lie almost on its hyperplane
        actual = outcome(far, weight, in_ball=in_ball)
        with monkeypatch.context() as patch:
            patch.setattr(door, "is_eager", lambda: False)
            expected = outcome(far, weight, in_ball=in_ball)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert value != value or actual[0].isfinite().all()


@pytest.mark.parametrize("in_ball", [False, True])
def test_second_derivatives(in_ball: bool) -> None:
    tensors = inputs(torch.float64, rows=3, n=2, m=3)
    run = lambda *leaves: door.fc_point(*leaves, C, 1.3, in_ball=in_ball)  # noqa: E731
    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)


def test_layers_of_a_learned_curvature_still_learn_it() -> None:
    from hyptree.geometry import Poincare

    space = Poincare(C, learnable=True)
    layer = rn.PoincareFC(6, 4, space)
    x = space.expmap0(torch.randn(5, 6)).detach()
    layer(x).sum().backward()
    (raw,) = [p for name, p in layer.named_parameters() if name.endswith("raw")]
    assert raw.grad is not None and raw.grad.abs().max() > 0
    fixed = rn.PoincareFC(6, 4, Poincare(C))
    fixed.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.endswith("raw")})
    torch.testing.assert_close(fixed(x), layer(x), rtol=2e-6, atol=2e-7)
