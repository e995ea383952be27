"""What others put on a layer of points, or on a layer inside it, takes part: hooks, parametrisations, offloading."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hyptree import nn as rn
from hyptree.geometry import Lorentz, Poincare, manifold_of
from hyptree.optim import RiemannianAdam
from tests.nn.examples import LAYERS

TO_CONTEXT = "LorentzAttention to a context"
NAMES = [*LAYERS, TO_CONTEXT]


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def example(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    layer, inputs = LAYERS[name.split(" ")[0]](torch.float64, 3)
    return layer.to(torch.float64), (inputs[0], torch.randn_like(inputs[0])) if name == TO_CONTEXT else inputs


def parts(layer: nn.Module) -> list[str]:
    """Layers with a weight, the whole among them; every one of them is called."""
    return [name for name, module in layer.named_modules() if isinstance(module._parameters.get("weight"), Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_that_is_computed(name: str) -> None:
    layer, inputs = example(name)
    halved = copy.deepcopy(layer)
    for part in parts(layer):
        parametrize.register_parametrization(layer.get_submodule(part), "weight", Halved())
        halved.get_submodule(part).weight.data.div_(2)
    torch.testing.assert_close(layer(*inputs), halved(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_hooks_run_and_may_change_what_a_layer_gives(name: str) -> None:
    layer, inputs = example(name)
    expected, called = layer(*inputs), set[str]()
    for part in parts(layer):
        layer.get_submodule(part).register_forward_hook(lambda *_, part=part: called.add(part))
    torch.testing.assert_close(layer(*inputs), expected, rtol=1e-12, atol=1e-12)
    assert called == set(parts(layer))
    for part in parts(layer):
        handle = layer.get_submodule(part).register_forward_hook(lambda module, args, out: 0.5 * out)
        assert not torch.allclose(layer(*inputs), expected)
        handle.remove()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_offloaded_weights(name: str) -> None:
    layer, inputs = example(name)
    expected = layer(*inputs)
    # Under every name: what several layers share has one in an ordinary state_dict, accelerate asks for all.
    accelerate.cpu_offload(layer, "cpu", state_dict=layer.state_dict(destination={}))
    assert all(p.is_meta for p in layer.parameters())
    for _ in range(2):
        torch.testing.assert_close(layer(*inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["moved", "offloaded", "swapped"])
def test_points_whose_parameter_was_replaced_stay_points(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Riemannian optimiser would move them off their manifold, as plain numbers."""
    table, index = rn.ManifoldEmbedding(5, 3, Poincare(), std=1.0), torch.arange(5)
    twin, before = copy.deepcopy(table), table.weight
    if how == "moved":
        accelerate.utils.set_module_tensor_to_device(table, "weight", "cpu", value=table.weight.detach().clone())
    elif how == "offloaded":
        accelerate.cpu_offload(table, "cpu")
        accelerate.hooks.remove_hook_from_submodules(table)
    else:
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        table.load_state_dict(twin.state_dict())
        assert manifold_of(table.weight) is not None
    assert table.weight is not before or how == "swapped"
    for one in (table, twin):
        optimizer = RiemannianAdam(one.parameters(), lr=0.1)
        one(index).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(table.weight, twin.weight)


def test_lora_of_peft_takes_linear_layers_alone() -> None:
    """A change of a LorentzLinear's ``weight`` is half of a change of its matrix: peft refuses it by name."""
    import peft

    space = Lorentz(0.7, learnable=True)
    model = nn.Sequential(rn.LorentzLinear(5, 6, space), rn.OnSpace(nn.Linear(6, 6), space), rn.LorentzMLR(6, 3, space))
    x = torch.randn(4, 5)
    with pytest.raises(ValueError, match="LorentzLinear"):
        peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["0"]))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted(x).square().sum().backward()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 2 and all(bool(p.grad.any()) for p in trained)
    expected = adapted(x)
    torch.testing.assert_close(adapted.merge_and_unload()(x), expected)
