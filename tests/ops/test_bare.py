"""A fused operation reads a weight only where calling the layer would do nothing else."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from hyptree.ops import bare
from hyptree.ops.bare import is_bare, readable, report_unfused


class _Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class _Subclass(nn.Linear):
    pass


def _with_lora(layer: nn.Linear) -> nn.Module:
    import peft

    model = nn.Sequential()
    model.add_module("layer", layer)
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["layer"], r=2), model).layer


def _offloaded(layer: nn.Linear) -> nn.Module:
    import accelerate

    return accelerate.cpu_offload(layer, execution_device=torch.device("cpu"))


def _quantised(layer: nn.Linear) -> nn.Module:
    from torchao import quantization

    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


def _with_weight(layer: nn.Linear, weight: Tensor) -> nn.Module:
    layer._parameters["weight"] = weight  # type: ignore[assignment]
    return layer


def _hooked(layer: nn.Linear, name: str) -> nn.Module:
    getattr(layer, f"register_{name}_hook")(lambda *args: None)
    return layer


def _parametrised(layer: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", _Twice())
    return layer


CHANGED = {
    "subclass": lambda layer: _Subclass(3, 4),
    "forward hook": lambda layer: _hooked(layer, "forward"),
    "forward pre-hook": lambda layer: _hooked(layer, "forward_pre"),
    "backward hook": lambda layer: _hooked(layer, "full_backward"),
    "backward pre-hook": lambda layer: _hooked(layer, "full_backward_pre"),
    "parametrisation": _parametrised,
    "weight norm": parametrizations.weight_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "LoRA": _with_lora,
    "offloaded": _offloaded,
    "int8": _quantised,
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_layer_with_anything_at_it_is_not_bare(change):
    layer = nn.Linear(3, 4)
    assert is_bare(layer)
    assert not is_bare(change(layer))


def test_global_hooks_count():
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert not is_bare(nn.Linear(3, 4))
    finally:
        handle.remove()
    assert is_bare(nn.Linear(3, 4))


def test_plain_tensors_as_weights_are_bare():
    """As ``torch.func.functional_call`` and FSDP put them in place."""
    assert is_bare(_with_weight(nn.Linear(3, 4), torch.zeros(4, 3)))
    assert is_bare(nn.Linear(3, 4, bias=False))


def test_only_known_classes_are_read():
    assert not is_bare(_Twice())
    assert is_bare(readable(type("Known", (nn.Linear,), {}))(3, 4))


def test_the_answer_is_known_inside_compiled_and_exported_code():
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if is_bare(self.layer) else x

    model, x = Asks(), torch.randn(2, 3)
    assert torch.compile(model, backend="eager", fullgraph=True)(x).shape == (2, 4)
    assert torch.export.export(model, (x,)).module()(x).shape == (2, 4)
    assert torch.export.export(model, (x,), strict=True).module()(x).shape == (2, 4)


def test_it_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(bare, "_reported", set())
    with caplog.at_level(logging.WARNING):
        report_unfused("norm_linear", _Subclass(3, 4))
        report_unfused("norm_linear", _Subclass(3, 4))
    assert [record.message for record in caplog.records] == [
        "norm_linear: a _Subclass with hooks, adapters or weights of another kind is called as it is, not fused"
    ]
