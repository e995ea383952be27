"""On a CUDA device: the same bits as torch.optim, the same points as on the CPU, a step inside a CUDA graph."""

import pytest
import torch
from torch import nn

from hyptree.geometry import Lorentz, Poincare, mark_manifold
from hyptree.optim import RiemannianAdam, RiemannianAdamW, RiemannianSGD

pytestmark = pytest.mark.gpu


def point(value, manifold, device="cuda"):
    return mark_manifold(nn.Parameter(value.to(device, copy=True)), manifold)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}])
def test_ordinary_parameters_have_the_bits_of_torch(options):
    values = [torch.randn(33, 7, device="cuda"), torch.randn(5, device="cuda")]
    results = []
    for kind in (RiemannianAdamW, torch.optim.AdamW):
        params = [nn.Parameter(v.clone()) for v in values]
        optimizer = kind(params, lr=0.01, **options)
        generator = torch.Generator("cuda").manual_seed(1)
        for _ in range(50):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, device="cuda")
            optimizer.step()
        results.append(params)
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)


def test_nesterov_leaves_gradients_alone_where_torch_does_not():
    p = nn.Parameter(torch.randn(4, 3, device="cuda"))
    p.grad = torch.randn(4, 3, device="cuda")
    before = p.grad.clone()
    RiemannianSGD([p], lr=0.1, momentum=0.9, nesterov=True).step()
    assert torch.equal(p.grad, before)


@pytest.mark.parametrize("manifold", [Lorentz(2.0), Poincare(0.5)])
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"capturable": True}])
def test_points_move_as_on_the_cpu(manifold, options):
    values = [manifold.random(20, 5, std=0.5, dtype=torch.float64) for _ in range(3)]
    here, there = [point(v, manifold, "cpu") for v in values], [point(v, manifold) for v in values]
    first = RiemannianAdam(here, lr=0.1, weight_decay=0.1)
    second = RiemannianAdam(there, lr=0.1, weight_decay=0.1, **options)
    for i in range(10):
        for j, (p, q) in enumerate(zip(here, there, strict=True)):
            g = torch.randn(20, 5, dtype=torch.float64)
            p.grad, q.grad = (None, None) if i < j else (g, g.cuda())
        first.step()
        second.step()
    for p, q in zip(here, there, strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-10, atol=1e-12)


def test_a_step_can_be_recorded_in_a_cuda_graph():
    manifold = Lorentz(1.0, learnable=True).cuda()
    value = Lorentz().random(50, 8, std=0.5)
    runs = []
    for capture in (False, True):
        p, w = point(value, manifold), nn.Parameter(torch.ones(8, 8, device="cuda"))
        optimizer = RiemannianAdam([p, w], lr=0.05, capturable=True, weight_decay=0.1)
        p.grad, w.grad = torch.ones_like(p), torch.ones_like(w)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if capture:
            with torch.cuda.graph(graph):
                optimizer.step()
        for _ in range(5):
            graph.replay() if capture else optimizer.step()
        torch.cuda.synchronize()
        runs.append((p.detach().clone(), w.detach().clone(), optimizer.state[p]["step"].item()))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1]) and runs[0][2] == runs[1][2] == 8
