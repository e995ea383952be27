"""A model with points, sharded by FSDP2 over two processes, trains as it does in one."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyptree import nn as rn
from hyptree.geometry import Lorentz, Poincare, curvature_parameters, manifold_of
from hyptree.optim import RiemannianAdam, RiemannianSGD, param_groups
from tests.processes import run_in_two

BATCH, STEPS = 8, 6
WAYS = {
    "adam": lambda net: RiemannianAdam(param_groups(net, weight_decay=0.01, point_weight_decay=0.1), lr=0.05),
    "sgd": lambda net: RiemannianSGD(net.parameters(), lr=0.1, momentum=0.9),  # without a word about points
    "rescaled": lambda net: RiemannianAdam(net.parameters(), lr=0.05, rescale_points=True),
}


class Net(nn.Module):
    """Points of two spaces, two Lorentz layers and a classifier; one learned curvature for all of the hyperboloid."""

    def __init__(self, learnable: bool):
        super().__init__()
        manifold = Lorentz(0.7, learnable=learnable)
        self.table = rn.ManifoldEmbedding(11, 4, manifold, std=0.5)
        self.ball = rn.ManifoldEmbedding(11, 4, Poincare(), std=0.5)
        self.blocks = nn.ModuleList([rn.LorentzLinear(4, 4, manifold), rn.LorentzFC(4, 4, manifold)])
        self.residual = rn.LorentzResidual(manifold, gain=1.2, learnable=True)
        self.head = rn.LorentzMLR(4, 3, manifold)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.table(index)
        for block in self.blocks:
            x = self.residual(x, block(x))
        return self.head(x) + Poincare().dist0(self.ball(index)).unsqueeze(-1) * torch.arange(3)


def train(net: Net, way: str, seed: int, part: slice) -> None:
    """Some steps on this part of every batch; the mean over equal parts is the mean over the batch."""
    optimizer = WAYS[way](net)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        index, target = (torch.randint(0, high, (BATCH,), generator=generator) for high in (11, 3))
        F.cross_entropy(net(index[part]), target[part]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _worker(rank: int, world_size: int, path: str, seed: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        torch.set_num_threads(1)
        mesh = init_device_mesh("cpu", (world_size,))
        share = BATCH // world_size
        for way, learnable in (("adam", True), ("sgd", True), ("rescaled", True), ("adam", False)):
            torch.manual_seed(seed)
            net = Net(learnable)
            alone = Net(learnable)
            alone.load_state_dict(net.state_dict())
            start = {name: p.detach().clone() for name, p in alone.named_parameters()}
            shared = set(curvature_parameters(net))  # belongs to the outermost unit, as several inner ones use it
            for block in net.blocks:
                fully_shard(block, mesh=mesh, ignored_params=shared)
            fully_shard(net, mesh=mesh)
            assert manifold_of(net.table.weight) is net.table.manifold and "DTensor" in str(type(net.ball.weight))
            assert not learnable or rank or "sharded" in repr(net)  # one process alone can print it
            train(net, way, seed, slice(rank * share, (rank + 1) * share))
            train(alone, way, seed, slice(None))
            for name, expected in alone.state_dict().items():
                actual = net.state_dict()[name].full_tensor()
                torch.testing.assert_close(
                    actual, expected, rtol=1e-4, atol=1e-5, msg=partial("{}, {}: {}".format, way, name)
                )
                assert (expected - start[name]).abs().max() > 1e-3, f"{way}: {name} did not move"
            net.ball.manifold.check(net.ball.weight.full_tensor())
    finally:
        dist.destroy_process_group()


def test_two_processes_train_as_one(tmp_path, seed):
    run_in_two(_worker, 2, str(tmp_path / "store"), seed % 2**31)


@pytest.mark.parametrize("learnable", [False, True])
def test_points_stay_marked_when_their_parameter_is_replaced(learnable):
    net = Net(learnable)
    net.table.weight = nn.Parameter(net.table.weight.detach().double())
    assert manifold_of(net.table.weight) is net.table.manifold
    net.table.note = nn.Parameter(torch.ones(2))  # not a point
    assert manifold_of(net.table.note) is None
