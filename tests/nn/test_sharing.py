"""A learned manifold shared by several layers is one parameter: in checkpoints, copies and optimisers."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from hyptree import nn as rn
from hyptree.geometry import Curvature, Lorentz, Poincare, curvature_parameters
from hyptree.optim import RiemannianAdam, param_groups

NAME = "0.manifold.curvature.raw"
OTHERS = [f"{layer}.manifold.curvature.raw" for layer in ("2", "2.qkv", "2.proj", "3")]


def model():
    shared = Lorentz(0.3 + torch.rand(()).item(), learnable=True)
    heads = Lorentz(0.3 + torch.rand(2, 1, 1))  # a buffer, of one layer
    attention = rn.LorentzAttention(6, 2, shared, heads)
    return nn.Sequential(rn.LorentzLinear(5, 6, shared), nn.GELU(), attention, rn.LorentzMLR(6, 3, shared))


def points():
    return torch.randn(2, 4, 5)


def test_a_state_dict_holds_it_once_under_the_name_of_the_parameter():
    net = model()
    for keep_vars in (False, True):
        keys = [key for key in net.state_dict(keep_vars=keep_vars) if "manifold.curvature.raw" in key]
        assert keys == [NAME] == [name for name, _ in net.named_parameters() if name.endswith("raw")]
    assert set(net.state_dict()) == {n for n, _ in net.named_parameters()} | {n for n, _ in net.named_buffers()}
    assert set(net.state_dict()) == set(net.state_dict())  # the second call as the first
    assert "manifold.curvature.raw" in net[3].state_dict()  # a layer by itself is complete
    memory = [t.untyped_storage().data_ptr() for t in net.state_dict().values()]
    assert len(set(memory)) == len(memory)


def test_two_manifolds_may_share_a_curvature():
    curvature = Curvature(torch.tensor([0.5, 2.0]).reshape(2, 1), learnable=False)
    net = nn.ModuleList([Lorentz(curvature), Poincare(curvature)])
    assert list(net.state_dict()) == ["0.curvature.value"]
    twin = nn.ModuleList([Lorentz(other := Curvature(torch.ones(2, 1))), Poincare(other)])
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin[1].c, curvature.value)


@pytest.mark.parametrize("how", ["state_dict", "save_file", "save_model", "deepcopy", "pickle", "assign"])
def test_every_way_to_keep_a_model_keeps_the_sharing(how, tmp_path):
    net, twin, x = model(), model(), points()
    if how == "state_dict":
        assert str(twin.load_state_dict(net.state_dict())) == "<All keys matched successfully>"
    elif how == "assign":
        twin.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    elif how == "save_file":
        save_file(net.state_dict(), tmp_path / "model.safetensors")
        twin.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    elif how == "save_model":
        save_model(net, str(tmp_path / "model.safetensors"))
        assert load_model(twin, str(tmp_path / "model.safetensors")) == (set(), [])
    else:
        twin = copy.deepcopy(net) if how == "deepcopy" else pickle.loads(pickle.dumps(net))
    assert twin[0].manifold.curvature.raw is twin[3].manifold.curvature.raw is not net[0].manifold.curvature.raw
    assert torch.equal(twin(x), net(x))


def test_it_loads_from_any_of_its_names_and_is_missed_without_all():
    net, twin = model(), model()
    state = net.state_dict()
    raw = state.pop(NAME)
    with pytest.raises(RuntimeError, match=rf'Missing key.*"{NAME}"'):
        twin.load_state_dict(state)
    assert set(twin.load_state_dict(state, strict=False).missing_keys) == {NAME, *OTHERS}
    for name in (NAME, *OTHERS):
        value = raw + torch.rand(())
        assert str(twin.load_state_dict({**state, name: value})) == "<All keys matched successfully>"
        assert torch.equal(twin[2].manifold.curvature.raw, value)
    twin.load_state_dict(
        {**state, **dict.fromkeys((NAME, *OTHERS), raw)}
    )  # a checkpoint with every name, as torch writes
    assert torch.equal(twin[0].manifold.curvature.raw, raw)


def test_a_plain_dict_of_the_callers_gets_every_name():
    net = model()
    assert {NAME, *OTHERS} <= set(net.state_dict(destination={}))


def test_the_optimiser_moves_it_once():
    net, x = model(), points()
    raw = net[0].manifold.curvature.raw
    assert [p is raw for p in curvature_parameters(net)] == [True]
    groups = param_groups(net, weight_decay=0.1)
    assert sum(p is raw for group in groups for p in group["params"]) == 1
    optimizer = RiemannianAdam(groups, lr=0.01)
    before = raw.item()
    net(x).square().mean().backward()
    optimizer.step()
    # The first step of Adam is lr times the sign of the gradient: twice that would be a parameter counted twice.
    assert raw.item() == pytest.approx(before - 0.01 * raw.grad.sign().item(), abs=1e-6)
    assert net[3].manifold.c.item() == pytest.approx(raw.exp().item())


def test_export_takes_a_shared_curvature():
    net, x = model(), points()
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), net(x))
