"""HCFormer with the tools of others: peft's adapters, torchao's integers, accelerate's offloading, forward hooks."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from timm.layers import LayerScale
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from hyptree.geometry import Lorentz
from hyptree.models import HCFormer
from hyptree.nn import LorentzLinear
from hyptree.nn.cluster.level import ClusterLevel, PositionBias
from hyptree.ops import backend as backends
from hyptree.ops import bare
from hyptree.ops.map_norm import MapNorm

SIZES: dict[str, Any] = {
    "img_size": 64, "depths": (1, 1, 1, 1), "dims": (16, 24, 32, 40), "num_heads": (2, 2, 2, 2), "head_dim": 8,
    "mlp_ratios": (2, 2, 2, 2), "folds": (4, 3, 1, 1), "patch_centres": (2, 2, 2, 2), "window_centres": (3, 2, 1, 0),
    "num_classes": 5, "layer_scale": 1.0,
}  # fmt: skip
SWITCHES: dict[str, dict[str, Any]] = {
    "paper": {"learnable_curvature": True},
    "normed": {"norm": "batch", "convs": "normed", "layer_scale": None, "mixer_norm": False},
    "hard, input norm": {"assignment": "hard", "input_norm": True, "patch_geometry": "hyperbolic"},
}


def built(switch: str = "paper") -> HCFormer:
    """A model of which every part matters."""
    model = HCFormer(**{**SIZES, **SWITCHES[switch]})
    for name, parameter in model.named_parameters():
        if name.endswith("position.bias"):
            nn.init.normal_(parameter, std=0.3)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.eval()


@pytest.fixture(params=list(SWITCHES))
def model(request: pytest.FixtureRequest) -> HCFormer:
    return built(request.param)


@pytest.fixture
def x() -> Tensor:
    """Pictures of another size than the model was made for."""
    return torch.randn(2, 3, 64, 48)


@torch.no_grad()
def outputs(model: Any, x: Tensor) -> list[Tensor]:
    """Logits twice, without and with assignments."""
    logits, seen = model.assignments(x, with_output=True)
    return [model(x), logits, *(one.patch for one in seen)]


def close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


# ------------------------------------------------------------------------------------------------------------- adapters


def check_adapted(model: HCFormer, target: str | list[str], x: Tensor, num_layers: int) -> None:
    before = outputs(model, x)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=target, init_lora_weights=False))
    added = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(added) == 2 * num_layers
    adapted(x).square().sum().backward()
    for name, parameter in added.items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    attached = outputs(adapted, x)
    assert any(not torch.equal(a, b) for a, b in zip(attached, before, strict=True))
    merged = adapted.merge_and_unload()
    assert all(type(layer) is nn.Linear for layer in linears(merged).values())
    close(outputs(merged, x), attached, 2e-5)


def test_an_adapter_on_every_layer(model: HCFormer, x: Tensor) -> None:
    names = list(linears(model))
    assert len(names) == 4 * 4 + 1
    check_adapted(model, "all-linear", x, len(names))


def test_an_adapter_on_every_layer_by_name(x: Tensor) -> None:
    for name in linears(built()):
        check_adapted(built(), [name], x, 1)


@pytest.mark.parametrize("target", ["stages.0.downsample", "stages.1.downsample", "stages.1.downsample.conv"])
def test_no_adapter_for_other_maps_on_a_convolution(target: str) -> None:
    """Its numbers would be added with channels and rows changed about, without a word where these are as many."""
    model = built("normed" if target.endswith("conv") else "paper")
    with pytest.raises(ValueError, match="not supported"):
        get_peft_model(model, LoraConfig(r=2, target_modules=[target]))


def test_an_adapter_under_kernels(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (backends.HAS_TRITON and backends.interpreted()):
        pytest.skip("TRITON_INTERPRET=1 runs the kernels on the CPU")
    model = HCFormer(**{**SIZES, "folds": (2, 1, 1, 1), "window_centres": (1, 0, 0, 0)})
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    x = x[:, :, :32, :32]
    logits = adapted(x)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapted.parameters() if p.requires_grad)
    with torch.no_grad():
        merged = adapted.merge_and_unload()(x)
    torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- integers


def test_weights_in_integers(model: HCFormer, x: Tensor) -> None:
    before = outputs(model, x)
    quantize_(model, Int8WeightOnlyConfig())
    plain = copy.deepcopy(model)
    for layer in linears(plain).values():
        assert type(layer.weight.data) is not Tensor
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    actual = outputs(model, x)
    close(actual, outputs(plain, x), 1e-4)
    assert not torch.equal(actual[0], before[0]) and (actual[0] - before[0]).abs().max() < 0.5


# ---------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("training", [False, True])
def test_every_layer_is_called(model: HCFormer, x: Tensor, training: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever has weights: linear layers, convolutions, norms, levels, position biases, scales."""
    kinds = (nn.Linear, nn.Conv2d, MapNorm, nn.BatchNorm2d, ClusterLevel, PositionBias, LayerScale)
    expected, called = model.train(training)(x), dict[str, int]()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}

    def count(name: str) -> Any:
        return lambda *_: called.__setitem__(name, called.get(name, 0) + 1)

    for name, layer in layers.items():
        layer.register_forward_hook(count(name))
    bare._reported.clear()
    with caplog.at_level(logging.WARNING):
        actual = model(x)
        model(x)
    assert called == dict.fromkeys(layers, 2)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    messages = [record.getMessage().split(":")[0] for record in caplog.records]
    assert sorted(messages) == ["cluster_linear", "gelu_mlp"]


def test_a_hook_may_change_what_a_layer_gives(model: HCFormer, x: Tensor) -> None:
    doubled, scaled = copy.deepcopy(model), model
    for name in ("points_and_values", "proj"):
        getattr(doubled.stages[0].blocks[0].mixer, name).register_forward_hook(lambda _, args, out: 2 * out)
        for parameter in getattr(scaled.stages[0].blocks[0].mixer, name).parameters():
            parameter.data.mul_(2)
    for name in ("fc1", "fc2"):
        getattr(doubled.stages[1].blocks[0].mlp, name).register_forward_hook(lambda _, args, out: 2 * out)
        for parameter in getattr(scaled.stages[1].blocks[0].mlp, name).parameters():
            parameter.data.mul_(2)
    close(outputs(doubled, x), outputs(scaled, x))


OTHERS: dict[str, Any] = {
    "norm2": lambda dim, hidden: nn.LayerNorm(dim),
    "scale2": lambda dim, hidden: nn.Sequential(nn.Linear(dim, dim)),
    "mlp.act": lambda dim, hidden: nn.Sequential(nn.Tanh()),
    "mlp.fc1": lambda dim, hidden: LorentzLinear(dim, hidden, Lorentz()),
    "mlp.fc2": lambda dim, hidden: LorentzLinear(hidden, dim, Lorentz()),
    "mlp": lambda dim, hidden: nn.Sequential(nn.Linear(dim, dim)),
}


@pytest.mark.parametrize("place", list(OTHERS))
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_layer_of_another_kind_is_called(place: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of these have weight, bias and eps as well, and fused operations elsewhere that read them."""
    if backend == "triton" and not (backends.HAS_TRITON and backends.interpreted()):
        pytest.skip("TRITON_INTERPRET=1 runs the kernels on the CPU")
    monkeypatch.setenv("HYPTREE_BACKEND", backend)
    block: Any = built().stages[0].blocks[0]
    dim, hidden = block.mixer.dim, block.mlp.fc1.out_features
    other = OTHERS[place](dim, hidden)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    block.set_submodule(place, other)
    x = torch.randn(2, 4, 4, dim)
    torch.testing.assert_close(block._mlp(x), block.scale2(block.mlp(block.norm2(x))), rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------- elsewhere


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "half on disk", "the rest on disk"])
def test_weights_that_are_elsewhere(model: HCFormer, x: Tensor, how: str, tmp_path: Path) -> None:
    expected = outputs(model, x)
    device = torch.device("cpu")
    if how == "cpu_offload":
        accelerate.cpu_offload(model, device)
    elif how == "disk_offload":
        accelerate.disk_offload(model, str(tmp_path), device)
    else:
        names = [f"stages.{i}" for i in range(4)] + ["norm", "head"]
        places = {name: ("disk", "cpu")[(i + (how == "the rest on disk")) % 2] for i, name in enumerate(names)}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
    assert any(p.is_meta for p in model.parameters())
    for _ in range(2):
        close(outputs(model, x), expected)
