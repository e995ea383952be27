"""Small models of both libraries, as adapters meet them: every way in which attention holds its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 60
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 2}


def tokens(count: int = 3, length: int = 8) -> Tensor:
    """(count, length) random words; the last is the end of text, which has the largest number."""
    words = torch.randint(3, VOCABULARY - 1, (count, length))
    words[:, -1] = VOCABULARY - 1
    return words


def pixels(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def _hf(kind: str) -> nn.Module:
    import transformers

    ends = {"bos_token_id": 1, "eos_token_id": VOCABULARY - 1, "pad_token_id": 0}
    text = {**TEXT, **ends, "vocab_size": VOCABULARY, "max_position_embeddings": 8}
    image = {**IMAGE, "image_size": 32, "patch_size": 16}
    options: dict[str, Any] = {"projection_dim": 24} if kind == "CLIP" else {}
    if kind == "Siglip":
        text |= {"hidden_size": 48, "projection_size": 48}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=image, **options)
    return getattr(transformers, f"{kind}Model")(config)


def _open_clip(text_as_child: bool = False) -> nn.Module:
    import open_clip
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    image = CLIPVisionCfg(layers=3, width=48, head_width=24, patch_size=16, image_size=32)
    text = CLIPTextCfg(context_length=8, vocab_size=VOCABULARY, width=32, heads=2, layers=2)
    kind = open_clip.CustomTextCLIP if text_as_child else open_clip.CLIP
    return kind(24, image, text)


def _timm(trunk: str, **options: Any) -> nn.Module:
    """A model of open_clip with an image tower of timm."""
    import timm
    from open_clip.timm_model import TimmModel

    model = _open_clip(text_as_child=True)
    tower = TimmModel("vit_tiny_patch16_224", embed_dim=24, image_size=32, pool="", proj="linear", pretrained=False)
    tower.trunk = timm.create_model(trunk, img_size=32, patch_size=16, depth=3, num_classes=0, **options)
    tower.head = nn.Sequential(nn.Dropout(0.0), nn.Linear(tower.trunk.num_features, 24))
    model.visual = tower
    return model


@dataclass(frozen=True)
class SmallModel:
    """A model, and what to expect of it.

    Attributes:
        matrices: q, k and v that there are in text and image.
    """

    name: str
    build: Callable[[], nn.Module]
    matrices: dict[str, int]

    def __call__(self) -> nn.Module:
        """A fresh one, in eval mode; torch's generator decides the weights."""
        return self.build().eval()


CLIPS = [
    SmallModel("hf-clip", lambda: _hf("CLIP"), {"text": 6, "image": 9}),
    SmallModel("hf-siglip", lambda: _hf("Siglip"), {"text": 6, "image": 12}),
    SmallModel("open_clip", _open_clip, {"text": 6, "image": 9}),
    SmallModel("open_clip-text", lambda: _open_clip(True), {"text": 6, "image": 9}),
    SmallModel(
        "open_clip-timm", lambda: _timm("vit_tiny_patch16_224", embed_dim=48, num_heads=2), {"text": 6, "image": 9}
    ),
    SmallModel(
        "open_clip-map",
        lambda: _timm("vit_base_patch16_siglip_224", embed_dim=48, num_heads=2),
        {"text": 6, "image": 12},
    ),
    SmallModel(
        "open_clip-eva",
        lambda: _timm("eva02_tiny_patch14_224", embed_dim=48, num_heads=2, qkv_fused=False),
        {"text": 6, "image": 9},
    ),
]

every_clip = pytest.mark.parametrize("small", CLIPS, ids=lambda small: small.name)


@contextmanager
def frozen_without_autograd(model: nn.Module) -> Iterator[None]:
    """Freezes all weights meanwhile, if autograd is off.

    torch folds a product by whether its weight wants a gradient, even then, and on some CPUs (AMD's) the last bit
    follows. What is compared bit by bit must not differ in that.
    """
    trained = [] if torch.is_grad_enabled() else [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def encode_text(model: Any, words: Tensor) -> Tensor:
    with frozen_without_autograd(model):
        output = (model.encode_text if hasattr(model, "encode_text") else model.get_text_features)(words)
    return output if isinstance(output, Tensor) else output.pooler_output


def encode_image(model: Any, pictures: Tensor) -> Tensor:
    with frozen_without_autograd(model):
        output = (model.encode_image if hasattr(model, "encode_image") else model.get_image_features)(pictures)
    return output if isinstance(output, Tensor) else output.pooler_output


def encode(model: nn.Module, words: Tensor, pictures: Tensor) -> Tensor:
    """Both embeddings, next to each other."""
    return torch.cat([encode_text(model, words), encode_image(model, pictures)], dim=-1)


def shake(handle: Any, size: float = 0.1) -> None:
    """Random values for an adapter's parameters."""
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.add_(size * torch.randn_like(parameter))
