"""Encoders of open_clip: ``open_clip:NAME:PRETRAINED``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyptree.errors import UserError, require, require_known, suggest
from hyptree.files import check_weights, save_tensors
from hyptree.vlm.encoders.encoder import Encoder, no_weights, readable_imports, seeded
from hyptree.vlm.encoders.patch_features import in_memory
from hyptree.vlm.encoders.pixels import CLIP_MEAN, CLIP_STD, PixelFormat


class OpenClipEncoder(Encoder):
    """A model of ``open_clip.create_model`` and its tokenizer."""

    _image_parts = ("visual.",)

    def __init__(self, model: Any, name: str, tokenizer: Any):
        form = getattr(model.visual, "preprocess_cfg", None) or {}
        size = form.get("size", getattr(model.visual, "image_size", 224))
        pixels = PixelFormat(
            size=int(size[0] if isinstance(size, (tuple, list)) else size),
            mean=tuple(form.get("mean", CLIP_MEAN)),
            std=tuple(form.get("std", CLIP_STD)),
            whole=form.get("resize_mode") == "squash",
        )
        text_tower = getattr(model, "text", None) or model.transformer
        super().__init__(model, name, 0, pixels, text_tower, model.visual)
        self.tokenizer = tokenizer
        with torch.no_grad():  # the width has another name in every kind of tower
            self.width = self.encode_tokens(self.tokenize([""])).shape[-1]

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        return {"input_ids": self.tokenizer(texts).to(self.device)}

    def encode_tokens(self, tokens: dict[str, Tensor]) -> Tensor:
        return self.model.encode_text(tokens["input_ids"])

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        return self.model.encode_image(pixels)

    def _dense(self, pixels: Tensor) -> Tensor:
        visual: Any = self.model.visual
        if hasattr(visual, "trunk"):
            return self._dense_timm(visual, pixels)
        projection = getattr(visual, "proj", None)
        if projection is None or not hasattr(visual, "transformer") or getattr(visual, "attn_pool", None) is not None:
            raise UserError(f"{self.name} gives no embeddings of patches: its image tower is no plain ViT")
        output = visual.forward_intermediates(
            pixels, indices=1, normalize_intermediates=True, intermediates_only=True, output_fmt="NLC"
        )
        return output["image_intermediates"][0] @ in_memory(projection)

    def _dense_timm(self, visual: Any, pixels: Tensor) -> Tensor:
        trunk = visual.trunk
        tokens = trunk.forward_features(pixels)
        if tokens.dim() != 3:
            raise UserError(f"{self.name} gives no embeddings of patches: its image tower is no plain ViT")
        tokens = tokens[:, getattr(trunk, "num_prefix_tokens", 0) :]
        if getattr(trunk, "attn_pool", None) is not None:  # each patch alone: what the head gives for it
            tokens = trunk.forward_head(tokens.flatten(0, 1)[:, None]).unflatten(0, tokens.shape[:2])
        elif hasattr(trunk, "fc_norm"):
            tokens = trunk.head(trunk.fc_norm(tokens))
        return visual.head(tokens)

    def save(self, folder: Path | str) -> Path:
        """Write ``open_clip_model.safetensors``; read it with ``open_clip:NAME:THAT_FILE``."""
        self._check_is_bare()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / "open_clip_model.safetensors", {k: v.clone() for k, v in self.model.state_dict().items()})
        return folder


def load(rest: str, *, random_init: bool, seed: int) -> OpenClipEncoder:
    """The encoder of ``NAME[:PRETRAINED]``."""
    name, _, pretrained = rest.partition(":")
    spec = f"open_clip:{rest}"
    with readable_imports():
        open_clip = require("open_clip", "vlm")
    otherwise = "open_clip.list_models() has them all"
    require_known("open_clip has no model {!r}", [name], open_clip.list_models(), otherwise)
    if random_init and pretrained:
        raise UserError(f"{spec} names trained weights; leave {pretrained!r} out to have random ones")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if not pretrained and not random_init:
        known = f"one of {', '.join(tags[:6])}, or a file" if tags else "a file"
        raise no_weights(spec, "no weights were named", f"add :PRETRAINED ({known})")
    weights = Path(pretrained).expanduser() if pretrained else None
    if weights is not None and weights.is_file():
        check_weights(weights)
    elif pretrained and pretrained not in tags:
        hint = suggest(pretrained, tags) or f"{name} has the tags {', '.join(tags) or '(none)'}"
        raise no_weights(spec, f"{pretrained!r} is neither a file nor a tag of open_clip; {hint}", "give one of them")
    tokenizer = _tokenizer(open_clip, spec, name)
    with _quiet(), seeded(seed):
        try:
            model = open_clip.create_model(name, pretrained=pretrained and str(weights), load_weights=bool(pretrained))
        except (OSError, RuntimeError, ValueError) as error:
            if not pretrained:
                raise
            why = "cannot read the weights: " + " ".join(str(error).split())[:160]
            raise no_weights(spec, why, "give a file that open_clip reads") from error
    return OpenClipEncoder(model, spec, tokenizer)


def _tokenizer(open_clip: Any, spec: str, name: str) -> Any:
    try:
        return open_clip.get_tokenizer(name)
    except (OSError, ValueError, ImportError) as error:
        why = str(error).split(". ")[0].split("\n")[0][:160]
        raise UserError(
            f"{spec} has no tokenizer on this machine ({why}); fetch it once with a network, or take a model with "
            "open_clip's own tokenizer such as ViT-B-32"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without open_clip's lines on random weights: here they were asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
