"""Hi-Mapper with the tools of others: peft's adapters, torchao's integers, accelerate's offloading, forward hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import timm
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from hyptree.models import HiMapper, HiMapperOutput
from hyptree.models.decoders import pyramid_backbone
from hyptree.models.himapper.dense import HiMapperFeatures

VIT = {"img_size": 64, "patch_size": 16, "depth": 2, "embed_dim": 48, "num_heads": 3}
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64, "num_labels": 5}


def of_transformers() -> nn.Module:
    config = transformers.ViTConfig(image_size=64, patch_size=16, **SMALL)
    return transformers.ViTForImageClassification(config)


BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", num_classes=5, **VIT),
    "resnet": lambda: timm.create_model("test_resnet", num_classes=5),
    "transformers": of_transformers,
    "distilled": lambda: timm.create_model("deit_tiny_distilled_patch16_224", num_classes=5, **VIT),
}


@pytest.fixture(params=list(BACKBONES))
def model(request: pytest.FixtureRequest) -> HiMapper:
    """With a last layer that is not zero: what the tree reads matters."""
    built = HiMapper(BACKBONES[request.param](), num_leaves=8, depth=3, width=32, heads=2, learn_tau=True)
    nn.init.normal_(built.encode.out_proj.weight, std=0.3)
    for module in built.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # one pass in training, and the statistics of evaluation stay
    return built.eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 64, 64)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> HiMapperOutput:
    """With losses: every part has been called."""
    return model(x, compute_losses=True)


def close(actual: HiMapperOutput, expected: HiMapperOutput, tolerance: float = 1e-5) -> None:
    """Losses by fewer digits, as distances of points that nearly coincide have no more."""
    for a, b in zip(tensors(actual), tensors(expected), strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())
    for name, loss in (expected.losses or {}).items():
        assert actual.losses is None or actual.losses[name].item() == pytest.approx(loss.item(), rel=1e-2)


def tensors(out: HiMapperOutput) -> list[Tensor]:
    assert out.pre_logits is not None
    return [out.logits, out.pre_logits, *out.nodes, *out.hyperbolic]


def check_adapted(model: HiMapper, target: str | list[str], x: Tensor, num_layers: int) -> None:
    before = outputs(model, x)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=target, init_lora_weights=False))
    added = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(added) == 2 * num_layers
    out = adapted.train()(x)
    (out.logits.square().sum() + out.losses["aux_total"]).backward()
    for name, parameter in added.items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    attached = outputs(adapted.eval(), x)
    differs = [not torch.equal(a, b) for a, b in zip(tensors(attached), tensors(before), strict=True)]
    assert any(differs)
    close(outputs(adapted.merge_and_unload(), x), attached, 2e-5)


def test_an_adapter_on_every_layer(model: HiMapper, x: Tensor) -> None:
    check_adapted(model, "all-linear", x, len(linears(model)))


def test_an_adapter_on_each_layer_by_its_name(model: HiMapper, x: Tensor) -> None:
    for name in linears(model):
        check_adapted(copy.deepcopy(model), [name], x, 1)


def test_weights_in_integers(model: HiMapper, x: Tensor) -> None:
    before = outputs(model, x)
    quantize_(model, Int8WeightOnlyConfig())
    plain = copy.deepcopy(model)
    for layer in linears(plain).values():
        assert type(layer.weight.data) is not Tensor
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    actual = outputs(model, x)
    close(actual, outputs(plain, x))
    assert not torch.equal(actual.logits, before.logits)


@pytest.mark.parametrize("training", [False, True])
def test_every_layer_is_called(model: HiMapper, x: Tensor, training: bool) -> None:
    called: set[str] = set()
    for name, layer in linears(model).items():
        layer.register_forward_hook(lambda *_, name=name: called.add(name))
    expected = outputs(copy.deepcopy(model), x)
    actual = outputs(model.train(training), x)
    assert called == set(linears(model))
    if not training:
        close(actual, expected)


def test_hooks_around_the_backbone_run(model: HiMapper, x: Tensor) -> None:
    """It is read by its parts, which a hook on the whole would not see."""
    seen: list[Tensor] = []
    expected = outputs(model, 2 * x)

    def doubled(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Tensor]) -> Any:
        return tuple(2 * a for a in args), {name: 2 * a for name, a in options.items()}

    before = model.backbone.register_forward_pre_hook(doubled, with_kwargs=True)
    after = model.backbone.register_forward_hook(lambda module, args, output: seen.append(output))
    close(outputs(model, x), expected)
    assert len(seen) == 1 and "forward_head" not in model.backbone.__dict__
    before.remove()
    after.remove()
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        outputs(model, x)
    assert any(module is model.backbone for module in seen)


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "half on disk", "the rest on disk"])
def test_weights_that_are_elsewhere(model: HiMapper, x: Tensor, how: str, tmp_path: Path) -> None:
    expected = outputs(model, x)
    device = torch.device("cpu")
    if how == "cpu_offload":
        accelerate.cpu_offload(model, device)
    elif how == "disk_offload":
        accelerate.disk_offload(model, str(tmp_path), device)
    else:
        names = ["backbone", "tree", "decompose", "space", "loss"]
        names += [f"encode.{name}" for name, _ in model.encode.named_children()]
        places = {name: ("disk", "cpu")[(i + (how == "the rest on disk")) % 2] for i, name in enumerate(names)}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
    assert any(p.is_meta for p in model.parameters())
    close(outputs(model, x), expected)
    close(model.inspect(x), expected)


def test_below_a_pyramid_too(x: Tensor) -> None:
    """The maps of a dense backbone, whose last one knows what the tree read."""
    backbone = pyramid_backbone("test_resnet", out_indices=(2, 3, 4))
    model = HiMapperFeatures(backbone, num_leaves=8, depth=3, width=32, heads=2).eval()
    nn.init.normal_(model.encode.out_proj.weight, std=0.3)
    called: set[str] = set()
    for name, layer in linears(model).items():
        layer.register_forward_hook(lambda *_, name=name: called.add(name))
    with torch.no_grad():
        plain = model(x)
        assert called == set(linears(model))
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        attached = adapted(x)
        merged = adapted.merge_and_unload()
        again = merged(x)
        accelerate.cpu_offload(merged, "cpu")
        offloaded = merged(x)
    assert torch.equal(plain[0], attached[0]) and not torch.allclose(plain[-1], attached[-1], atol=1e-3)
    torch.testing.assert_close(again, attached, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(offloaded, again)
