"""Sparse rows, compiled updates and rows sharded over processes."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hyptree.geometry import Lorentz, Poincare, mark_manifold
from hyptree.optim import RiemannianAdam, RiemannianSGD
from tests.processes import run_in_two

MAKERS = {
    "sgd": lambda p: RiemannianSGD(p, lr=0.1),
    "momentum": lambda p: RiemannianSGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "nesterov": lambda p: RiemannianSGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: RiemannianAdam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
}


def table(manifold, num_rows=12, n=3, **options):
    layer = nn.Embedding(num_rows, n, **options)
    layer.weight = mark_manifold(nn.Parameter(manifold.random(num_rows, n, std=0.5)), manifold)
    return layer


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("manifold", [Lorentz(2.0), Poincare(), Lorentz(1.0, learnable=True)])
def test_sparse_rows_move_as_dense_ones_and_others_rest(name, manifold):
    sparse = table(manifold, sparse=True)
    dense = nn.Embedding(12, 3)
    dense.weight = mark_manifold(nn.Parameter(sparse.weight.detach().clone()), manifold)
    first, second = MAKERS[name]([sparse.weight]), MAKERS[name]([dense.weight])
    start = sparse.weight.detach().clone()
    index = torch.tensor([7, 1, 1, 4, 7])
    rest = [i for i in range(12) if i not in index]
    for _ in range(6):
        target = manifold.random(5, 3).detach()
        for layer, optimizer in ((sparse, first), (dense, second)):
            optimizer.zero_grad()
            manifold.sqdist(layer(index), target).sum().backward()
        assert sparse.weight.grad.is_sparse and not dense.weight.grad.is_sparse
        before = sparse.weight.grad.clone()
        first.step()
        second.step()
        assert torch.equal(sparse.weight.grad.to_dense(), before.to_dense())
    touched = index.unique()
    torch.testing.assert_close(sparse.weight[touched], dense.weight[touched], rtol=1e-5, atol=1e-6)
    assert not torch.equal(sparse.weight[touched], start[touched])
    assert torch.equal(sparse.weight[rest], start[rest])
    for key, value in second.state[dense.weight].items():
        if value.dim():
            torch.testing.assert_close(first.state[sparse.weight][key][touched], value[touched], rtol=1e-4, atol=1e-6)


def test_sparse_rows_of_bfloat16_tables():
    for options in ({"master_weights": True}, {}):
        layer = table(Poincare(), sparse=True)
        layer.weight.data = layer.weight.data.bfloat16()
        start = layer.weight.detach().clone()
        optimizer = RiemannianAdam(layer.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([3, 5])).square().sum().backward()
            optimizer.step()
        assert not torch.equal(layer.weight[[3, 5]], start[[3, 5]])
        assert torch.equal(layer.weight[[0, 1, 2, 4]], start[[0, 1, 2, 4]])


def test_a_sparse_gradient_with_no_rows_and_a_wrong_one():
    p = mark_manifold(nn.Parameter(torch.rand(4, 3)), Lorentz())
    before = p.detach().clone()
    optimizer = RiemannianAdam([p])
    with torch.sparse.check_sparse_tensor_invariants():
        empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 3), (4, 3))
        wrong = torch.sparse_coo_tensor(torch.tensor([[1], [2]]), torch.ones(1), (4, 3))
    p.grad = empty
    optimizer.step()
    assert torch.equal(p, before)
    p.grad = wrong
    with pytest.raises(ValueError, match="sparse in every axis but the last"):
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        RiemannianAdam,
        RiemannianSGD,
        partial(RiemannianSGD, momentum=0.9, dampening=0.1),
        partial(RiemannianSGD, momentum=0.9, nesterov=True, maximize=True),
    ],
)
def test_the_compiled_update_agrees(make):
    torch.compiler.reset()  # of one function torch compiles eight variants at most
    params = []
    for manifold in (Lorentz(), Poincare(2.0)):
        params.append(mark_manifold(nn.Parameter(manifold.random(50, 6, std=0.5, dtype=torch.float64)), manifold))
    twins = [mark_manifold(nn.Parameter(p.detach().clone()), p.manifold) for p in params]
    options = {"lr": 0.1, "weight_decay": 0.1, "max_step": 0.08}
    eager, compiled = make(params, **options), make(twins, compile=True, **options)
    start = [p.detach().clone() for p in params]
    for _ in range(5):
        for p, q in zip(params, twins, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        eager.step()
        compiled.step()
    for p, q, x in zip(params, twins, start, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)
        assert (p - x).abs().max() > 0.01


def _sharded_worker(rank: int, world_size: int, path: str, seed: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        torch.set_num_threads(1)
        mesh = init_device_mesh("cpu", (world_size,))
        torch.manual_seed(seed)
        manifold = Lorentz()
        value, grads = manifold.random(7, 3), torch.randn(4, 7, 3)
        whole = mark_manifold(nn.Parameter(value.clone()), manifold)
        split = mark_manifold(nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])), manifold)
        for make in MAKERS.values():
            first, second = make([whole]), make([split])
            for g in grads:
                whole.grad, split.grad = g.clone(), distribute_tensor(g, mesh, [Shard(0)])
                first.step()
                second.step()
            torch.testing.assert_close(split.full_tensor(), whole, rtol=1e-6, atol=1e-7)
            for key, stored in first.state[whole].items():
                other = second.state[split][key]
                torch.testing.assert_close(other.full_tensor() if stored.dim() else other, stored, rtol=1e-5, atol=1e-6)
        across = mark_manifold(nn.Parameter(distribute_tensor(value, mesh, [Shard(1)])), manifold)
        with pytest.raises(ValueError, match="sharded along its last axis"):
            RiemannianAdam([across])
    finally:
        dist.destroy_process_group()


def test_rows_sharded_over_one_process(tmp_path, seed):
    _sharded_worker(0, 1, str(tmp_path / "store"), seed % 2**31)


@pytest.mark.slow
def test_rows_sharded_over_two_processes(tmp_path, seed):
    run_in_two(_sharded_worker, 2, str(tmp_path / "store"), seed % 2**31)


def test_optimizers_can_be_copied_and_pickled():
    p = mark_manifold(nn.Parameter(Lorentz().random(5, 3)), Lorentz())
    optimizer = RiemannianAdam([p], lr=0.1, max_step=0.5)
    p.grad = torch.randn(5, 3)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    q = twin.param_groups[0]["params"][0]
    assert twin.param_groups[0]["max_step"] == 0.5
    assert torch.equal(twin.state[q]["exp_avg"], optimizer.state[p]["exp_avg"])
