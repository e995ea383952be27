"""Adapters as files: what is in them, that they come back bit for bit, and that another model refuses them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from hyptree.errors import UserError
from hyptree.files import load_tensors
from hyptree.vlm import (
    AdapterConfig,
    AdapterHandle,
    DiagonalConfig,
    FullConfig,
    LoraConfig,
    OrthogonalConfig,
    ScaleAdapterConfig,
    attach,
)
from hyptree.vlm.adapters import adapter_config
from hyptree.vlm.adapters.handle import handle_of
from tests.vlm.adapters.small_clips import CLIPS, encode, pixels, shake, tokens

OPEN_CLIP, HF_CLIP, SIGLIP = CLIPS[2], CLIPS[0], CLIPS[1]

CONFIGS: list[AdapterConfig] = [
    ScaleAdapterConfig(16, curvature={"text": 1.0, "image": 0.01}, share="layers", cap="paper"),
    ScaleAdapterConfig(8, space="embedding", towers=("text",)),
    DiagonalConfig(layers=(0, -1)),
    OrthogonalConfig(8),
    LoraConfig(4, seed=7),
    FullConfig(targets=("out",)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_an_adapter_comes_back_bit_for_bit(config: AdapterConfig, tmp_path: Path):
    state = OPEN_CLIP().state_dict()
    models = [OPEN_CLIP(), OPEN_CLIP()]
    for model in models:
        model.load_state_dict(state)
    words, pictures = tokens(), pixels()
    handle = attach(models[0], config, name="mine")
    shake(handle)
    assert handle.save_pretrained(tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    loaded = AdapterHandle.load(models[1], tmp_path / "new" / "folder")
    assert (loaded.name, loaded.config) == ("mine", config) and loaded.active == "mine"
    assert torch.equal(encode(models[0], words, pictures), encode(models[1], words, pictures))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_what_the_files_say(tmp_path: Path):
    model, other = OPEN_CLIP(), OPEN_CLIP()
    other.load_state_dict(model.state_dict())
    handle = attach(model, ScaleAdapterConfig(16))
    shake(handle)
    handle.save(tmp_path, torch.float16)
    about = json.loads((tmp_path / "adapter.json").read_text())
    assert (about["method"], about["version"], about["parameters"]) == ("scale", 1, 9984)
    assert about["config"]["block_size"] == 16 and about["config"]["layers"] == "all"
    names = [f"transformer.resblocks.{i}.attn.in_proj_weight" for i in range(2)]
    names += [f"visual.transformer.resblocks.{i}.attn.in_proj_weight" for i in range(3)]
    adapted = [[name, [96, 32] if name.startswith("trans") else [144, 48]] for name in names]
    assert about["adapted"] == sorted(adapted)
    assert about["fingerprint"] == hashlib.sha256(json.dumps(sorted(adapted)).encode()).hexdigest()
    stored, _ = load_tensors(tmp_path / "adapter.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    assert (tmp_path / "adapter.safetensors").stat().st_size < 2 * 9984 + 1000
    loaded = AdapterHandle.load(other, tmp_path)
    for name, value in loaded.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, handle.state_dict()[name].half().float())


@pytest.mark.parametrize("config", [LoraConfig(4), ScaleAdapterConfig(8, space="embedding", towers=("text",))])
def test_a_base_with_other_weights_is_told(config: AdapterConfig, tmp_path: Path):
    """Warnings are errors here, so a base that is the same but for rounding is taken in silence."""
    model = OPEN_CLIP()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, config).save(tmp_path)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        same = OPEN_CLIP()
        same.load_state_dict(state)
        AdapterHandle.load(same.to(dtype), tmp_path)
    with pytest.warns(
        UserWarning, match=r"made on the weights .*, and this model has other weights of the same shapes"
    ):
        AdapterHandle.load(OPEN_CLIP(), tmp_path)


@pytest.mark.parametrize("merged", ["default", "second"])
def test_an_adapter_saved_while_one_is_merged_knows_its_base(merged: str, tmp_path: Path):
    model, other = OPEN_CLIP(), OPEN_CLIP()
    other.load_state_dict(model.state_dict())
    handle = attach(model, LoraConfig(4, targets=("q", "v", "mlp")))
    attach(model, LoraConfig(4, targets=("q", "v", "mlp")), "second")
    for name in ("default", "second"):
        shake(handle.set_adapter(name))
    handle.set_adapter(merged).merge()
    handle.save(tmp_path)
    assert handle_of(model, merged).merged
    AdapterHandle.load(other, tmp_path)  # warnings are errors here
    with pytest.warns(UserWarning, match="other weights of the same shapes"):
        AdapterHandle.load(OPEN_CLIP(), tmp_path)


@torch.no_grad()
def test_an_offloaded_base_is_compared_too(tmp_path: Path):
    accelerate = pytest.importorskip("accelerate")
    model, other = CLIPS[0](), CLIPS[0]()
    same = CLIPS[0]()
    same.load_state_dict(model.state_dict())
    for one in (model, same, other):
        accelerate.cpu_offload(one, execution_device="cpu")
    attach(model, LoraConfig(4)).save(tmp_path)
    AdapterHandle.load(same, tmp_path)
    with pytest.warns(UserWarning, match="other weights of the same shapes"):
        AdapterHandle.load(other, tmp_path)


def test_sizes_of_vit_b_16_in_float16(tmp_path: Path):
    """11.8 MB for blocks of 128, and below 100 KB for a diagonal."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.CLIPModel(transformers.CLIPConfig(vision_config={"patch_size": 16}))
    for block_size, count, largest in ((128, 5_898_240, 11.81e6), (1, 46_080, 1e5)):
        handle = attach(model, ScaleAdapterConfig(block_size))
        handle._set.to_empty(device="cpu")
        handle.save(tmp_path, torch.float16)
        assert 2 * count < (tmp_path / "adapter.safetensors").stat().st_size < largest
        handle.detach()


def test_another_model_is_refused(tmp_path: Path):
    attach(OPEN_CLIP(), ScaleAdapterConfig(16)).save(tmp_path)
    with pytest.raises(UserError, match=r"for another model: it adapts transformer\.resblocks\.0") as error:
        AdapterHandle.load(HF_CLIP(), tmp_path)
    assert "\n" not in str(error.value)
    attach(HF_CLIP(), ScaleAdapterConfig(16)).save(tmp_path)
    siglip = SIGLIP()  # of the same names, another width, and a head that pools
    with pytest.raises(UserError, match=r"of shape \(32, 32\), and the model's is \(48, 48\)"):
        AdapterHandle.load(siglip, tmp_path)
    assert not any("hyptree" in key for key in siglip.state_dict())


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "adapter.json").unlink(), "it has no adapter.json"),
        (lambda folder: (folder / "adapter.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "adapter.json").write_text("[]"), "is damaged: it has no name"),
        (lambda folder: (folder / "adapter.safetensors").unlink(), "no such file"),
        (lambda folder: (folder / "adapter.safetensors").write_bytes(b"abc"), "is damaged"),
        (lambda folder: attach(HF_CLIP(), DiagonalConfig()).save(folder / "other"), "belong to different adapters"),
        (lambda folder: _edit(folder, version=99), "reads up to 1; upgrade"),
        (lambda folder: _edit(folder, method="scal"), "did you mean 'scale'"),
        (lambda folder: _edit(folder, config={"block_siz": 2}), "no setting 'block_siz'; did you mean 'block_size'"),
    ],
)
def test_damaged_files_are_one_line(harm, words: str, tmp_path: Path):
    attach(OPEN_CLIP(), ScaleAdapterConfig(16)).save(tmp_path)
    harm(tmp_path)
    if (tmp_path / "other").exists():
        (tmp_path / "other" / "adapter.safetensors").replace(tmp_path / "adapter.safetensors")
    model = OPEN_CLIP()
    with pytest.raises(UserError, match=words) as error:
        AdapterHandle.load(model, tmp_path)
    assert "\n" not in str(error.value) and not any("hyptree" in key for key in model.state_dict())


def _edit(folder: Path, **changes: object) -> None:
    about = json.loads((folder / "adapter.json").read_text())
    (folder / "adapter.json").write_text(json.dumps({**about, **changes}))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_settings_go_through_json(config: AdapterConfig):
    assert adapter_config(config.method, json.loads(json.dumps(config.as_dict()))) == config
