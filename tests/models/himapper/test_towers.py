"""Vision models of transformers as backbones, made from small configurations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyptree.models import HiMapper

transformers = pytest.importorskip("transformers")

VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "bos_token_id": 97,
    "eos_token_id": 98,
}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1, 1],
    "num_heads": [1, 2, 2],
    "window_size": 4,
}
CONV = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}

# model -> configuration, its options, size of the picture, grid
MODELS = {
    "ViTModel": ("ViTConfig", VIT, 32, 4),
    "ViTForImageClassification": ("ViTConfig", VIT, 32, 4),
    "DeiTForImageClassification": ("DeiTConfig", VIT, 32, 4),
    "Dinov2Model": ("Dinov2Config", VIT, 32, 4),
    "Dinov2ForImageClassification": ("Dinov2Config", VIT, 32, 4),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", VIT, 32, 4),
    "SwinModel": ("SwinConfig", SWIN, 32, 4),
    "SwinForImageClassification": ("SwinConfig", SWIN, 32, 4),
    "Swinv2ForImageClassification": ("Swinv2Config", SWIN, 32, 4),
    "ResNetModel": ("ResNetConfig", {"embedding_size": 8, **CONV}, 64, 2),
    "ResNetForImageClassification": ("ResNetConfig", {"embedding_size": 8, **CONV}, 64, 2),
    "RegNetForImageClassification": ("RegNetConfig", {"embedding_size": 8, "groups_width": 8, **CONV}, 64, 2),
    "ConvNextModel": ("ConvNextConfig", CONV, 64, 2),
    "ConvNextForImageClassification": ("ConvNextConfig", CONV, 64, 2),
    "ConvNextV2ForImageClassification": ("ConvNextV2Config", CONV, 64, 2),
    "BeitForImageClassification": ("BeitConfig", VIT, 32, 4),
    "CLIPVisionModel": ("CLIPVisionConfig", VIT, 32, 4),
    "CLIPForImageClassification": ("CLIPConfig", {"vision_config": VIT, "text_config": TEXT}, 32, 4),
    "SiglipForImageClassification": ("SiglipConfig", {"vision_config": VIT, "text_config": TEXT}, 32, 4),
    "PvtV2ForImageClassification": ("PvtV2Config", {"num_attention_heads": [1, 2, 2, 2], **CONV}, 64, 2),
    "HieraForImageClassification": (
        "HieraConfig",
        {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]},
        64,
        2,
    ),
    "IJepaForImageClassification": ("IJepaConfig", VIT, 32, 4),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor, int]:
    kind, options, size, grid = MODELS[name]
    config = getattr(transformers, kind)(**options)
    config.num_labels = 5
    backbone = getattr(transformers, name)(config).eval()
    for module in getattr(backbone, "classifier", nn.Identity()).modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
    return backbone, torch.randn(2, 3, size, size), grid


@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_model_of_transformers(name: str) -> None:
    backbone, x, grid = made(name)
    model = HiMapper(backbone, num_leaves=8, depth=3, width=16).eval()
    out = backbone(pixel_values=x)
    own = out.logits if hasattr(out, "logits") else out.pooler_output.flatten(1)
    assert own.std() > 0.01

    start = model(x, return_maps=True)
    assert (start.logits - own).abs().max() < 1e-5
    assert model.grid == (grid, grid) and start.maps[0].shape == (2, 8, grid, grid)
    assert (start.maps[0].sum((-1, -2)) - 1).abs().max() < 1e-5

    step = torch.randn(model.reader.pooled_channels)
    model.encode.out_proj.bias.copy_(step)
    moved = model(x).logits - own
    layers = [m for m in getattr(backbone, "classifier", nn.Identity()).modules() if isinstance(m, nn.Linear)]
    expected = layers[0].weight @ step if layers else step
    assert torch.allclose(moved, expected.expand(2, -1), atol=1e-4)

    model.enabled = False
    assert torch.equal(model(x).logits, own)


def test_a_model_of_two_towers_is_read_by_its_eyes() -> None:
    config = transformers.CLIPConfig(vision_config=VIT, text_config=TEXT)
    backbone = transformers.CLIPModel(config).eval()
    model = HiMapper(backbone, num_leaves=8, depth=3, width=16).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x).logits, backbone.vision_model(pixel_values=x).pooler_output)


def test_training_reaches_the_tower() -> None:
    backbone, x, _ = made("ViTForImageClassification")
    model = HiMapper(backbone, num_leaves=8, depth=3, width=16).train()
    out = model(x)
    (out.logits.square().sum() + out.losses["aux_total"]).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_models_that_cannot_be_read() -> None:
    bert = transformers.BertModel(transformers.BertConfig(**{**TEXT, "vocab_size": 9, "pad_token_id": 0}))
    with pytest.raises(ValueError, match=r"^BertModel takes no pictures"):
        HiMapper(bert)
    pool = transformers.PoolFormerForImageClassification(transformers.PoolFormerConfig(**CONV))
    with pytest.raises(ValueError, match="how a poolformer comes to its logits is not known; pass feature_fn="):
        HiMapper(pool)
    teacher = transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**VIT))
    with pytest.raises(ValueError, match="comes to its logits is not known"):
        HiMapper(teacher)
    pyramid = transformers.ResNetBackbone(transformers.ResNetConfig(embedding_size=8, **CONV))
    with pytest.raises(TypeError, match=r"^ResNetBackbone gives BackboneOutput, .*pass feature_fn="):
        HiMapper(pyramid)(torch.randn(1, 3, 64, 64))
