"""What others put around a HELM's layers takes part: offloading, adapters, quantised weights, hooks."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import Tensor, nn
from torchao import quantization

from hyptree.lm import HelmForCausalLM
from hyptree.ops import bare
from tests.lm.make import small, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:The following device_map keys:UserWarning"),  # parameters outside of layers
]
MODELS: dict[str, dict[str, Any]] = {
    "linear head": {},
    "lorentz head": {"head": "lorentz"},
    "tied head": {"head": "lorentz", "tie_word_embeddings": True},
    "split times": {"attn_implementation": "eager", "final_proj": False, "time_columns": "split"},
    "mice": {"variant": "mice"},
    "mice, full cache": {"variant": "mice", "cache_mode": "full", "q_lora_rank": 10, "shared_curvature": True},
    "mice, eager": {"variant": "mice", "attn_implementation": "eager", "head": "lorentz", "expert_norm": True},
}
CPU = torch.device("cpu")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> HelmForCausalLM:
    return small(dtype=torch.float32, **MODELS[request.param])


def outcome(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits and loss of one pass, and text with a cache and without."""
    with torch.no_grad():
        out = model(ids, labels=ids)
    texts = [model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=cache) for cache in (True, False)]
    return [out.logits, out.loss, *(text.float() for text in texts)]


def offloaded(kind: str, model: HelmForCausalLM, folder: Path) -> Any:
    if kind == "cpu":
        return accelerate.cpu_offload(model, CPU)
    if kind == "disk":
        return accelerate.disk_offload(model, str(folder), CPU)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
    places |= {"model.rotary": "cpu", "lm_head": "disk", "log_head_tau": "cpu", "model.final_proj": "disk"}
    places |= {"model.layers.2.attention": "disk", "model.layers.2": "cpu"}
    if model.config.tie_word_embeddings:
        places["lm_head"] = "cpu"
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("kind", ["cpu", "disk", "map"])
def test_offloaded_weights_give_the_same(kind: str, model: HelmForCausalLM, tmp_path: Path) -> None:
    ids = tokens(2, 9)
    expected = outcome(model, ids)
    moved = offloaded(kind, model, tmp_path)
    assert any(p.is_meta for p in moved.parameters())
    for _ in range(2):
        for one, other in zip(outcome(moved, ids), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_text_sees_what_happened_to_a_layer_since_the_last(model: HelmForCausalLM) -> None:
    ids = tokens(1, 6)
    model.generate(ids, max_new_tokens=3, do_sample=False)
    torch.nn.utils.parametrize.register_parametrization(model.model.layers[0].ffn.down_proj, "weight", _Negated())
    accelerate.cpu_offload(model.model.layers[1], CPU)
    plain = copy.deepcopy(model)
    text = model.generate(ids, max_new_tokens=6, do_sample=False)
    for length in range(6, 12):
        with torch.no_grad():
            assert int(plain(text[:, :length]).logits[0, -1].argmax()) == int(text[0, length])


class _Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


def with_lora(model: HelmForCausalLM, targets: Any, parameters: Any = None) -> Any:
    """The model with adapters that change it."""
    settings = peft.LoraConfig(target_modules=targets, target_parameters=parameters, r=4, lora_alpha=8)
    attached = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in attached.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.5)
    return attached.eval()


def projections(model: HelmForCausalLM) -> list[str]:
    """Last names of all linear maps but the head."""
    names = {name.rsplit(".", 1)[-1] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return sorted(names - {"lm_head"})


def check_lora(model: HelmForCausalLM, targets: Any, parameters: Any = None) -> None:
    ids = tokens(2, 9)
    before = outcome(model, ids)[0]
    attached = with_lora(model, targets, parameters)
    for training in (True, False):
        attached.zero_grad()
        attached.train(training)(ids, labels=ids).loss.backward()
        idle = [n for n, p in attached.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
        assert not idle
    with torch.no_grad():
        expected = attached(ids).logits
        assert (expected - before).abs().max() > 5e-4
        actual = attached.merge_and_unload()(ids).logits
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_adapters_on_all_layers_learn_and_merge(model: HelmForCausalLM) -> None:
    check_lora(model, "all-linear")


def test_adapters_on_each_layer_learn_and_merge(model: HelmForCausalLM) -> None:
    names = projections(model)
    assert len(names) >= 4
    for name in names:
        check_lora(copy.deepcopy(model), [name])


@pytest.mark.parametrize("variant", ["dense", "mice"])
def test_an_adapter_on_a_linear_head_learns_and_merges(variant: str) -> None:
    check_lora(small(variant, dtype=torch.float32), ["lm_head"])


PARAMETERS = ["ffn.routed.weight_out", "ffn.routed.time_in", "ffn.shared.weight_out", "ffn.gate.weight", "kv_up.weight"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_experts_and_gates_take_adapters(name: str) -> None:
    check_lora(small("mice", dtype=torch.float32), [], [name])


def test_a_head_of_points_takes_an_adapter_of_its_parameter() -> None:
    check_lora(small(dtype=torch.float32, head="lorentz"), [], ["lm_head.weight"])


def test_gate_and_up_of_experts_are_one_parameter_of_four_axes_and_peft_says_so() -> None:
    with pytest.raises(ValueError, match="4 dimensional Parameter, but only 2d and 3d are supported"):
        with_lora(small("mice", dtype=torch.float32), [], ["ffn.routed.weight_in"])


def test_a_head_of_points_takes_no_adapter() -> None:
    """Its rows are points, and a changed row moves their times: merged, it would not be what was attached."""
    with pytest.raises(ValueError, match="LorentzHead"):
        with_lora(small(dtype=torch.float32, head="lorentz"), ["lm_head"])


def test_int8_weights_are_those_that_were_rounded(model: HelmForCausalLM) -> None:
    ids = tokens(2, 9)
    exact = outcome(model, ids)[0]
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    plain = copy.deepcopy(model)
    count = 0
    for layer in plain.modules():
        if isinstance(layer, nn.Linear) and type(layer.weight) is not nn.Parameter:
            layer.weight = nn.Parameter(layer.weight.dequantize())
            count += 1
    assert count == sum(isinstance(layer, nn.Linear) for layer in model.modules())
    actual, expected = outcome(model, ids), outcome(plain, ids)
    assert 1e-4 < (actual[0] - exact).abs().max() < 0.5
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_hooks_of_every_linear_layer_fire(model: HelmForCausalLM, caplog: pytest.LogCaptureFixture) -> None:
    ids, called = tokens(2, 9), dict[str, int]()
    expected = model(ids, labels=ids)
    layers = {name: layer for name, layer in model.named_modules() if name == "lm_head" or isinstance(layer, nn.Linear)}

    def count(name: str) -> Any:
        return lambda *_: called.__setitem__(name, called.get(name, 0) + 1)

    for name, layer in layers.items():
        layer.register_forward_hook(count(name))
    bare._reported.clear()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        without = model(ids).logits
        assert set(called) == set(layers) and set(called.values()) == {1}
        called.clear()
        model.train()
        with_labels = model(ids, labels=ids)
        assert set(called) == set(layers) and set(called.values()) == {1}
    torch.testing.assert_close(without, expected.logits)
    torch.testing.assert_close(with_labels.loss - (with_labels.aux_loss or 0), expected.loss)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["next_token_loss"]


def test_a_hook_may_change_what_a_layer_gives(model: HelmForCausalLM) -> None:
    ids = tokens(2, 9)
    doubled, scaled = copy.deepcopy(model), model
    names = ["attention.down", "attention.kv_up", "ffn.down_proj"]
    names = names if model.config.variant == "mice" else ["attention.qkv_proj", "attention.o_proj", "ffn.down_proj"]
    for name in names:
        doubled.model.layers[0].get_submodule(name).register_forward_hook(lambda _, args, out: 2 * out)
        with torch.no_grad():
            for parameter in scaled.model.layers[0].get_submodule(name).parameters():
                parameter.mul_(2)
    for one, other in zip(outcome(doubled, ids), outcome(scaled, ids), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_prefix_is_learned() -> None:
    """Rows of the cache, where the width of a head is that of the stream over the heads, as in the aligned presets."""
    model, ids = small(dtype=torch.float32), tokens(2, 9)
    tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    tuned(ids, labels=ids).loss.backward()
    assert all(bool(p.grad.any()) for p in tuned.parameters() if p.requires_grad)
