"""Adapters beside what others put on the same layers: accelerate's offloading, LoRA of peft, torchao, hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from hyptree.errors import UserError
from hyptree.vlm import AdapterConfig, LatentHierarchyHead, LoraConfig, ScaleAdapterConfig, attach, load_encoder
from hyptree.vlm.encoders.patch_features import dense_tower
from hyptree.vlm.lathadapter.hosts import JointHost, PromptHost
from tests.vlm.adapters.small_clips import CLIPS, SmallModel, encode, every_clip, pixels, shake, tokens
from tests.vlm.small_models import save_dual

pytestmark = pytest.mark.filterwarnings(  # their own
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:The following device_map keys:UserWarning"
)

HF_CLIP, OPEN_CLIP = CLIPS[0], CLIPS[2]
CONFIGS: list[AdapterConfig] = [
    ScaleAdapterConfig(16),
    LoraConfig(2, targets=("q", "v", "out", "mlp")),
    ScaleAdapterConfig(8, space="embedding"),
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=["scale", "lora", "embedding"])


def cpu_offload(model: nn.Module, folder: Path) -> None:
    accelerate.cpu_offload(model, execution_device="cpu")


def disk_offload(model: nn.Module, folder: Path) -> None:
    accelerate.disk_offload(model, str(folder), execution_device="cpu")


def device_map(model: nn.Module, folder: Path) -> None:
    places = {name: "disk" if name == "vision_model" else "cpu" for name, _ in model.named_children()}
    places |= {name: "cpu" for name, _ in model.named_parameters(recurse=False)}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


every_place = pytest.mark.parametrize("place", [cpu_offload, disk_offload, device_map])


@every_place
@every_config
@torch.no_grad()
def test_offloaded_after_attaching(config: AdapterConfig, place: Any, tmp_path: Path):
    model, words, pictures = HF_CLIP(), tokens(), pixels()
    shake(attach(model, config))
    expected = encode(model, words, pictures)
    place(model, tmp_path)
    for _ in range(2):
        torch.testing.assert_close(encode(model, words, pictures), expected, rtol=0, atol=1e-5)
    accelerate.hooks.remove_hook_from_submodules(model)


def forward(model: Any, words: Tensor, pictures: Tensor) -> Tensor:
    """Both embeddings by the model's own forward pass: a method past it brings no offloaded weight in."""
    if hasattr(model, "encode_text"):
        return torch.cat(model(pictures, words)[:2], dim=-1)
    output = model(input_ids=words, pixel_values=pictures)
    return torch.cat([output.image_embeds, output.text_embeds], dim=-1)


@pytest.mark.parametrize("to_disk", [False, True], ids=["cpu", "disk"])
@pytest.mark.parametrize("is_first", [False, True], ids=["offloaded last", "offloaded first"])
@every_clip
@every_config
@torch.no_grad()
def test_towers_with_torchs_attention_offloaded(
    config: AdapterConfig, small: SmallModel, is_first: bool, to_disk: bool, tmp_path: Path
):
    """torch's attention reads the weight of its output layer, so a hook around it brings in both."""
    model, twin, words, pictures = small(), small(), tokens(), pixels()
    twin.load_state_dict(model.state_dict())
    handle = attach(twin, config)
    shake(handle)
    if not is_first:
        attach(model, config).load_state_dict(handle.state_dict())
    whole = {"execution_device": "cpu", "preload_module_classes": ["MultiheadAttention"]}
    if to_disk:
        accelerate.disk_offload(model, str(tmp_path), **whole)
    else:
        accelerate.cpu_offload(model, **whole)
    if is_first:
        attach(model, config).load_state_dict(handle.state_dict())
    for _ in range(2):
        actual, expected = forward(model, words, pictures), forward(twin, words, pictures)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dual(tmp_path_factory.mktemp("clip"), "clip")


@every_place
@pytest.mark.parametrize("kind", [PromptHost, JointHost])
def test_hosts_and_heads_on_an_offloaded_encoder(kind: Any, place: Any, clip_folder: Path, tmp_path: Path):
    """LatHAdapter's words of context and prompts, with an adapter below and a head on top that is offloaded as well."""
    losses, grads = [], []
    for away in (False, True):
        encoder = load_encoder(f"hf:{clip_folder}")
        torch.manual_seed(0)
        shake(attach(encoder, ScaleAdapterConfig(8)))
        if away:
            place(encoder.model, tmp_path)
            assert any(parameter.is_meta for parameter in encoder.model.parameters())
        host = kind(encoder)
        text = host.text_features(["truck", "car", "vehicle"])
        head = LatentHierarchyHead(24, 2).train()
        pictures = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
        images = host.image_features(pictures) if kind is JointHost else encoder.encode_images(pictures)
        loss = head(images, text, torch.tensor([0, 2]))[1]["total"]
        loss.backward()
        losses.append(loss.detach())
        grads.append([p.grad for p in [*host.parameters(), *head.parameters()]])
        if away:
            bare, baked = head.eval()(images, text)[0], head.bake(text)
            accelerate.cpu_offload(head, execution_device="cpu")
            torch.testing.assert_close(head(images, text)[0], bare, rtol=0, atol=1e-5)
            torch.testing.assert_close(head.classify(images, baked), bare, rtol=0, atol=1e-5)
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@every_place
@torch.no_grad()
def test_patches_of_an_offloaded_tower(place: Any, clip_folder: Path, tmp_path: Path):
    encoder, twin = (load_encoder(f"hf:{clip_folder}") for _ in range(2))
    for one in (encoder, twin):
        torch.manual_seed(0)
        shake(attach(one, ScaleAdapterConfig(8)))
    place(encoder.model, tmp_path)
    pictures = torch.randn(2, 3, 32, 32)
    actual, expected = (dense_tower(one)(pictures).features for one in (encoder, twin))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(encoder.image_tokens(pictures), twin.image_tokens(pictures), rtol=0, atol=1e-5)


def test_patches_of_an_offloaded_tower_of_open_clip_are_one_line():
    """Its weights would be read where no hook brings them in: any numbers came out, without a word."""
    model = OPEN_CLIP()
    accelerate.cpu_offload(model, execution_device="cpu", preload_module_classes=["MultiheadAttention"])
    with torch.no_grad(), pytest.raises(UserError, match=r"offloaded tower of open_clip; bring model\.visual") as error:
        dense_tower(model)(pixels())
    assert "\n" not in str(error.value)


@every_place
@every_config
def test_attached_after_offloading(config: AdapterConfig, place: Any, tmp_path: Path):
    model, twin, words, pictures = HF_CLIP(), HF_CLIP(), tokens(), pixels()
    twin.load_state_dict(model.state_dict())
    expected = attach(twin, config)
    shake(expected)
    place(model, tmp_path)
    handle = attach(model, config)
    handle.load_state_dict(expected.state_dict())
    with torch.no_grad():
        outputs = encode(twin, words, pictures)
        torch.testing.assert_close(encode(model, words, pictures), outputs, rtol=0, atol=1e-5)
        with handle.disable_adapter(), expected.disable_adapter():
            base = encode(twin, words, pictures)
            torch.testing.assert_close(encode(model, words, pictures), base, rtol=0, atol=1e-5)
    encode(model, words, pictures).square().sum().backward()
    encode(twin, words, pictures).square().sum().backward()
    for mine, plain in zip(handle.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-4, atol=1e-5)
    if place is not device_map or config.where == "weight":  # there only the image tower is away
        with pytest.raises(UserError, match="offloaded"):
            handle.merge()


def test_moving_by_accelerate_leaves_the_base():
    """It reads the attribute and writes it back where the device is another."""
    model = HF_CLIP()
    shake(attach(model, ScaleAdapterConfig(16)))
    layer = model.text_model.encoder.layers[0].self_attn.q_proj
    base = layer._parameters["weight"].detach().clone()
    assert not torch.equal(layer.weight, base)
    seen: list[Tensor] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.extend(arg for arg in args if isinstance(arg, Tensor) and arg.shape == base.shape)
            return function(*args, **(kwargs or {}))

    with Spy():
        accelerate.utils.set_module_tensor_to_device(layer, "weight", "meta")
    assert seen and all(torch.equal(value, base) for value in seen if not value.is_meta)


def lora_model(targets: list[str] | str) -> Any:
    return peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)


@every_config
def test_lora_of_peft_on_the_same_layers(config: AdapterConfig):
    model, words, pictures = HF_CLIP(), tokens(), pixels()
    handle = attach(model, config)
    shake(handle)
    adapted = encode(model, words, pictures)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, lora_model(["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]))
    for parameter in handle.parameters():
        parameter.requires_grad_(True)  # peft freezes all but its own
    both = encode(model, words, pictures)
    assert (both - adapted).abs().max() > 1e-3
    both.square().sum().backward()
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    assert len(trained) > len(list(handle.parameters()))
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in trained)
    # The same by hand: what peft adds to the weights that our adapter gives.
    if config.where == "weight":
        with pytest.raises(UserError, match=r"peft's merge would write .* handle\.merge_and_unload\(\)"):
            wrapped.merge_and_unload()
        handle.merge_and_unload()
    torch.testing.assert_close(encode(model, words, pictures), both, rtol=1e-4, atol=1e-5)
    if config.where == "weight":
        bare = wrapped.merge_and_unload()
        torch.testing.assert_close(encode(bare, words, pictures), both, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", [("q", "k", "v"), ("mlp",)])
def test_attaching_to_what_peft_has_wrapped_is_one_line(targets: tuple[str, ...]):
    model, words, pictures = HF_CLIP(), tokens(), pixels()
    wrapped = peft.get_peft_model(model, lora_model(["q_proj", "fc1"]))
    before = encode(model, words, pictures)
    with pytest.raises(UserError, match=r"has an adapter of another library .* before") as error:
        attach(model, ScaleAdapterConfig(8, targets=targets))
    assert "\n" not in str(error.value) and torch.equal(encode(model, words, pictures), before)
    attach(wrapped.merge_and_unload(), ScaleAdapterConfig(8, targets=targets))


def test_lora_of_peft_on_other_layers_can_stay():
    model, words, pictures = HF_CLIP(), tokens(), pixels()
    wrapped = peft.get_peft_model(model, lora_model(["fc1"]))
    before = encode(model, words, pictures)
    handle = attach(model, ScaleAdapterConfig(8))
    torch.testing.assert_close(encode(model, words, pictures), before, rtol=0, atol=1e-5)
    shake(handle)
    after = encode(model, words, pictures)
    assert (after - before).abs().max() > 1e-3
    wrapped.merge_and_unload()
    torch.testing.assert_close(encode(model, words, pictures), after, rtol=1e-4, atol=1e-5)


def test_lora_of_peft_on_the_attention_of_open_clip_is_one_line():
    """It takes the fused weight away and puts another in its place, in every forward pass too."""
    model = OPEN_CLIP()
    attach(model, ScaleAdapterConfig(16))
    with pytest.raises(UserError, match="would write to a in_proj_weight that an adapter of hyptree computes"):
        peft.get_peft_model(model, lora_model(["attn"]))


def test_int8_of_torchao_is_one_line():
    model = HF_CLIP()
    handle = attach(model, ScaleAdapterConfig(16))
    with pytest.raises(UserError, match=r"cannot become a .*merge_and_unload") as error:
        quantize_(model, Int8WeightOnlyConfig())
    assert "\n" not in str(error.value)
    bare = handle.merge_and_unload()
    words, pictures = tokens(), pixels()
    before = encode(bare, words, pictures)
    quantize_(bare, Int8WeightOnlyConfig())
    assert (encode(bare, words, pictures) - before).abs().max() < 0.05
    with pytest.raises(UserError, match=r"adapters need plain floating-point weights"):
        attach(bare, ScaleAdapterConfig(16))


def test_hooks_on_every_layer_run():
    model, words, pictures = HF_CLIP(), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(16, targets=("q", "k", "v", "out", "mlp")))
    shake(handle)
    expected = encode(model, words, pictures)
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_, name=name: calls.append("before " + name))
            module.register_forward_hook(lambda *_, name=name: calls.append("after " + name))
    torch.testing.assert_close(encode(model, words, pictures), expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == 2 * sum(isinstance(module, nn.Linear) for module in model.modules())


def test_a_hook_that_writes_to_its_layer_is_seen_in_the_same_pass():
    model, words = HF_CLIP(), tokens()
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    layer = model.text_model.encoder.layers[1].self_attn.q_proj

    def double(module: nn.Module, args: Any) -> None:
        module._parameters["weight"].mul_(2.0)

    with torch.no_grad():
        before = model.text_model(words).last_hidden_state
        hook = layer.register_forward_pre_hook(double)
        during = model.text_model(words).last_hidden_state
        hook.remove()
        after = model.text_model(words).last_hidden_state
    assert not torch.equal(before, during)
    torch.testing.assert_close(during, after, rtol=1e-5, atol=1e-6)
