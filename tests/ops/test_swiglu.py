"""SwiGLU with its lift: the kernels against the definition, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyptree.ops.swiglu import swiglu_grad, swiglu_lift

pytest.importorskip("triton")


def test_the_definition_is_a_point_with_its_time() -> None:
    both = torch.randn(5, 2 * 16, dtype=torch.float64)
    both[:, 13:16] = both[:, 29:] = 0.0
    out = swiglu_lift(both, 13, c=0.5)
    gate, up = both.chunk(2, -1)
    h = (F.silu(gate) * up)[:, :13]
    torch.testing.assert_close(out[:, :13], h)
    torch.testing.assert_close(out[:, 13], torch.sqrt((h * h).sum(-1) + 2.0))
    assert torch.equal(out[:, 14:], torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(5, 2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "hidden"), [(3, 8, 6), (4, 40, 33), (0, 16, 14), (2, 4104, 4100)])
def test_kernels_equal_the_definition(
    rows: int, width: int, hidden: int, dtype: torch.dtype, bias: bool, device: str
) -> None:
    both = torch.randn(rows, 2, width, device=device, dtype=dtype) * 2
    both[..., hidden:] = 0.0
    both = both.flatten(1)
    grad = torch.randn(rows, width, device=device, dtype=dtype)
    lifted = swiglu_lift(both, hidden, 0.7, bias, backend="triton")
    actual, again = swiglu_grad(both, grad, hidden, 0.7, bias)
    leaf = both.double().requires_grad_()
    exact = swiglu_lift(leaf, hidden, 0.7, bias)
    (expected,) = torch.autograd.grad(exact, leaf, grad.double())
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert torch.equal(lifted, again)
    torch.testing.assert_close(lifted.double(), exact.detach(), **close)
    torch.testing.assert_close(actual.double(), expected, **close)
    if dtype == torch.bfloat16:  # the definition in the same precision rounds as the kernel does; the interpreter cuts
        unit = 2.0**-6 if device == "cpu" else 2.0**-8
        plain = swiglu_lift(both, hidden, 0.7, bias, backend="torch")
        torch.testing.assert_close(lifted, plain, rtol=unit, atol=1e-3)
        leaf = both.detach().requires_grad_()
        (plain,) = torch.autograd.grad(swiglu_lift(leaf, hidden, 0.7, bias, backend="torch"), leaf, grad)
        torch.testing.assert_close(actual, plain, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "width", "hidden"), [((3,), 8, 6), ((2, 3), 40, 33), ((0,), 16, 14), ((2,), 2064, 2059)]
)
def test_every_row_may_have_a_factor(
    shape: tuple[int, ...], width: int, hidden: int, dtype: torch.dtype, bias: bool, device: str
) -> None:
    both = torch.randn(*shape, 2, width, device=device, dtype=dtype)
    both[..., hidden:] = 0.0
    both, a = both.flatten(-2), 0.3 + 2 * torch.rand(shape, device=device)
    grad = torch.randn(*shape, width, device=device, dtype=dtype)
    actual = swiglu_lift(both, hidden, 0.7, bias, a, backend="triton")
    to_both, again, to_a = swiglu_grad(both, grad, hidden, 0.7, bias, a)
    leaf, factor = both.double().requires_grad_(), a.double().requires_grad_()
    gate, up = leaf.unflatten(-1, (2, width))[..., :hidden].unbind(-2)
    h = F.silu(factor[..., None] * gate) * up
    tail = [torch.sqrt(h.square().sum(-1) + 1 / 0.7), *([1 / factor] if bias else [])]
    exact = torch.cat([h, torch.stack(tail, -1)], -1)
    expected = torch.autograd.grad(exact, (leaf, factor), grad[..., : exact.shape[-1]].double())
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert torch.equal(actual, again) and to_a.dtype == torch.float32
    torch.testing.assert_close(actual[..., : exact.shape[-1]].double(), exact.detach(), **close)
    assert actual[..., exact.shape[-1] :].count_nonzero() == 0
    torch.testing.assert_close(to_both.double(), expected[0], **close)
    torch.testing.assert_close(to_a.double(), expected[1], **close)
    plain = swiglu_lift(both.double(), hidden, 0.7, bias, a.double())
    torch.testing.assert_close(plain[..., : exact.shape[-1]], exact.detach(), rtol=1e-12, atol=1e-12)
    low, low_a = both.detach().requires_grad_(), a.detach().requires_grad_()
    lifted = swiglu_lift(low, hidden, 0.7, bias, low_a, backend="torch")
    plain_grads = torch.autograd.grad(lifted, (low, low_a), grad)
    for one, other in zip((*plain_grads, lifted), (to_both, to_a, again), strict=True):
        torch.testing.assert_close(one, other, rtol=close["rtol"], atol=3 * close["atol"])


def test_the_time_belongs_to_the_rounded_point(device: str) -> None:
    both = torch.randn(6, 2, 64, device=device).bfloat16() * 3
    both[..., 62:] = 0.0
    lifted = swiglu_lift(both.flatten(1), 62, 1.0, True, backend="triton")
    time = torch.sqrt(lifted[:, :62].double().square().sum(-1) + 1)
    unit = 2.0**-7 if device == "cpu" else 2.0**-8  # Triton's interpreter cuts where a GPU rounds
    assert ((lifted[:, 62].double() - time).abs() <= unit * time).all()


def test_a_bad_row_stays_alone(device: str) -> None:
    both = torch.randn(4, 2 * 16, device=device)
    both[1, 3] = torch.nan
    grad = torch.randn(4, 16, device=device)
    for actual in (swiglu_lift(both, 14, backend="triton"), *swiglu_grad(both, grad, 14)):
        assert actual[1].isnan().any()
        assert actual[[0, 2, 3]].isfinite().all()
