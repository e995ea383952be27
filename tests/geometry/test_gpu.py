"""The geometry on CUDA: every function equals float64 on the CPU, compiled code equals eager, TF32 changes nothing."""

import pytest
import torch

from hyptree.geometry import lorentz, poincare
from tests.geometry.test_contract import SMOOTH, gradients, make_args

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("f", SMOOTH)
def test_float32_on_cuda_equals_float64_on_cpu(f):
    args = [a.float().requires_grad_() for a in make_args(f)]
    exact = [a.detach().double().requires_grad_() for a in args]
    on_gpu = [a.detach().cuda().requires_grad_() for a in args]
    out, expected = f.fn(*on_gpu), f.fn(*exact)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-5, atol=2e-5)
    grads = [g.cpu().double() for g in gradients(out, on_gpu)]
    torch.testing.assert_close(grads, list(gradients(expected, exact)), rtol=1e-3, atol=1e-3)


def hot_functions(x, y):
    close = lorentz.pairwise_dist(x, y, 0.5, mode="matmul").mean() + lorentz.pairwise_dist(x, y, 0.5).mean()
    single = lorentz.dist(x[:30], y[:30], 0.5).mean() + lorentz.exterior_angle(x[:30], y[:30], 0.5).mean()
    ball = poincare.dist(lorentz.to_poincare(x[:30], 0.5), lorentz.to_poincare(y[:30], 0.5), 0.5).mean()
    return close + single + ball + lorentz.centroid(x, None, 0.5).sum()


def test_compiled_equals_eager():
    torch._dynamo.reset()
    x, y = (
        torch.randn(63, 17, device="cuda", requires_grad=True),
        torch.randn(1000, 17, device="cuda", requires_grad=True),
    )
    expected = hot_functions(x, y)
    out = torch.compile(hot_functions, fullgraph=True)(x, y)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, [x, y]), torch.autograd.grad(expected, [x, y]), rtol=1e-4, atol=1e-6
    )


def test_tf32_does_not_reach_the_geometry():
    x, y = torch.randn(256, 64, device="cuda"), torch.randn(256, 64, device="cuda")
    exact = lorentz.pairwise_dist(x.double(), y.double())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        strict = lorentz.pairwise_dist(x, y, mode="matmul")
        rough = lorentz.pairwise_dist(x, y, mode="matmul", allow_low_precision=True)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, y: lorentz.pairwise_dist(x, y, mode="matmul"), fullgraph=True)(x, y)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (strict - exact).abs().max() < 1e-5
    assert (compiled - exact).abs().max() < 1e-5
    assert (rough - exact).abs().max() > 1e-5  # what strictness buys


def test_autocast_on_cuda():
    x, y = torch.randn(64, 32, device="cuda"), torch.randn(48, 32, device="cuda")
    expected = lorentz.pairwise_dist(x, y, mode="matmul"), lorentz.dist(x[:48], y)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = lorentz.pairwise_dist(x, y, mode="matmul"), lorentz.dist(x[:48], y)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
