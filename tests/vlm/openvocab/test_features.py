"""Dense features of CLIP: the formula of the last block, any picture size, and both libraries alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.vlm.encoders.patch_features import dense_tower
from tests.vlm.small_models import register_open_clip, save_dual

pytest.importorskip("transformers", reason="install hyptree[vlm]")


def clip_pair(folder: Path) -> tuple[nn.Module, nn.Module]:
    """A tiny CLIP of open_clip and one of transformers with the same image tower."""
    open_clip = pytest.importorskip("open_clip", reason="install hyptree[vlm]")
    from transformers import CLIPConfig, CLIPModel

    ours = open_clip.create_model(register_open_clip(folder)).eval()
    towers: dict[str, Any] = {
        "text_config": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "hidden_act": "gelu",
        },
    }
    theirs = CLIPModel(CLIPConfig(**towers, projection_dim=24)).eval()
    source, target = ours.visual, theirs.vision_model
    with torch.no_grad():
        for p in source.parameters():  # biases and norms that are not 0 and 1, or a mix-up of them would not show
            p.add_(0.1 * torch.randn_like(p))
        target.embeddings.class_embedding.copy_(source.class_embedding)
        target.embeddings.patch_embedding.weight.copy_(source.conv1.weight)
        target.embeddings.position_embedding.weight.copy_(source.positional_embedding)
        theirs.visual_projection.weight.copy_(source.proj.T)
        target.pre_layrnorm.load_state_dict(source.ln_pre.state_dict())
        target.post_layernorm.load_state_dict(source.ln_post.state_dict())
        for mine, other in zip(source.transformer.resblocks, target.encoder.layers, strict=True):
            weights, biases = mine.attn.in_proj_weight.chunk(3), mine.attn.in_proj_bias.chunk(3)
            for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
                getattr(other.self_attn, name).load_state_dict({"weight": weight, "bias": bias})
            other.self_attn.out_proj.load_state_dict(mine.attn.out_proj.state_dict())
            other.layer_norm1.load_state_dict(mine.ln_1.state_dict())
            other.layer_norm2.load_state_dict(mine.ln_2.state_dict())
            other.mlp.fc1.load_state_dict(mine.mlp.c_fc.state_dict())
            other.mlp.fc2.load_state_dict(mine.mlp.c_proj.state_dict())
    return ours, theirs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, nn.Module]:
    return clip_pair(tmp_path_factory.mktemp("clip"))


@pytest.mark.parametrize("size", [(32, 32), (40, 24), (64, 64)])
def test_both_libraries_give_the_same_features(pair: tuple[nn.Module, nn.Module], size: tuple[int, int]) -> None:
    pixels = torch.randn(2, 3, *size)
    with torch.no_grad():
        ours, theirs = (dense_tower(model, [1])(pixels) for model in pair)
    assert ours.features.shape == (2, 24, size[0] // 8, size[1] // 8)
    torch.testing.assert_close(ours.features, theirs.features, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours.blocks[0], theirs.blocks[0], atol=2e-5, rtol=1e-4)


def test_last_block_is_values_and_class_token(pair: tuple[nn.Module, nn.Module]) -> None:
    """The formula written out on the hidden states that transformers hands out."""
    model: Any = pair[1]
    pixels = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        states = model.vision_model(pixel_values=pixels, output_hidden_states=True).hidden_states
        block, x = model.vision_model.encoder.layers[-1], states[-2]
        rows = []
        for k in range(1, 17):  # patch by patch
            value = block.self_attn.v_proj(block.layer_norm1(x[:, k]))
            y = x[:, 0] + block.self_attn.out_proj(value)
            rows.append(model.visual_projection(model.vision_model.post_layernorm(y + block.mlp(block.layer_norm2(y)))))
        actual = dense_tower(model)(pixels)
    torch.testing.assert_close(actual.features.flatten(2), torch.stack(rows, -1), atol=1e-5, rtol=1e-4)
    patches = states[1][:, 1:].transpose(1, 2).unflatten(2, (4, 4))
    torch.testing.assert_close(actual.blocks[0], patches)


def test_the_model_itself_stays_as_it_was(pair: tuple[nn.Module, nn.Module]) -> None:
    model = pair[1]
    pixels = torch.randn(1, 3, 32, 32)

    def num_hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    with torch.no_grad():
        before, hooks = model.vision_model(pixel_values=pixels).last_hidden_state, num_hooks()
        tower = dense_tower(model)
        tower(pixels)
        with pytest.raises(RuntimeError):  # also where the tower fails in the middle
            tower(torch.randn(1, 4, 32, 32))
        assert torch.equal(before, model.vision_model(pixel_values=pixels).last_hidden_state)
    assert num_hooks() == hooks


@pytest.mark.parametrize("library", [0, 1], ids=["open_clip", "transformers"])
def test_queries_of_the_last_block_get_a_gradient_of_zero(pair: tuple[nn.Module, nn.Module], library: int) -> None:
    model: Any = pair[library].requires_grad_(True)
    model.zero_grad()
    dense_tower(model)(torch.randn(1, 3, 40, 32)).features.square().sum().backward()
    if library == 0:
        grad = model.visual.transformer.resblocks[-1].attn.in_proj_weight.grad
        query, value = grad[:32], grad[64:]
    else:
        attention = model.vision_model.encoder.layers[-1].self_attn
        query, value = attention.q_proj.weight.grad, attention.v_proj.weight.grad
    assert query is not None and float(query.abs().max()) == 0
    assert float(value.abs().max()) > 0


def test_siglip_patches_are_pooled_alone(tmp_path: Path) -> None:
    from hyptree.vlm.encoders.encoder import load_encoder

    encoder = load_encoder(f"hf:{save_dual(tmp_path / 'siglip', 'siglip')}")
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        dense = dense_tower(encoder)(pixels).features.flatten(2).transpose(1, 2)
        torch.testing.assert_close(dense, encoder.image_tokens(pixels), atol=1e-5, rtol=1e-4)


def test_what_cannot_be_read_is_one_line(pair: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(UserError, match="Linear has no image tower whose patches"):
        dense_tower(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="multiple of 8 pixels, got 30x32"):
        dense_tower(pair[1])(torch.zeros(1, 3, 30, 32))
    with pytest.raises(ValueError, match=r"from 1 to 1 .* got 2"):
        dense_tower(pair[1], [2])


def test_cosine_volume_is_the_cosine_by_definition() -> None:
    from hyptree.vlm.openvocab.cost_volume import cosine_volume

    features, text = torch.randn(2, 5, 3, 4), torch.randn(6, 2, 5)
    volume = cosine_volume(features, text)
    assert volume.shape == (2, 6, 2, 3, 4)
    expected: Tensor = F.cosine_similarity(features[1, :, 2, 3], text[4, 1], dim=0)
    torch.testing.assert_close(volume[1, 4, 1, 2, 3], expected)
    torch.testing.assert_close(cosine_volume(3 * features, text / 7), volume)
    with torch.autocast("cpu", torch.bfloat16):  # classes differ in the third digit: float32 whatever the precision
        assert torch.equal(cosine_volume(features, text), volume)
