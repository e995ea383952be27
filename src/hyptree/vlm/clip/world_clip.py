"""A small CLIP for the built-in world: a ``transformers.CLIPModel`` with a tokenizer of the world's words.

Trained by ``hyptree train recipes/clip_world.yaml`` and kept as a Hugging Face folder, so that it is a subject for
every system that works on a real CLIP, and everything about its pictures is known. With ``geometry="lorentz"`` it is a
hyperbolic one in MERU's manner: features are tangent vectors at the origin, scaled, and lifted to the hyperboloid.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyptree.config import build
from hyptree.data.text import unpack_tokenizer
from hyptree.errors import UserError, require, require_known
from hyptree.geometry import Lorentz
from hyptree.runs import BEST, RunFolder, best_weights
from hyptree.vlm.clip.world_text import CONTEXT, SPECIAL
from hyptree.vlm.encoders.encoder import Encoder, seeded
from hyptree.vlm.encoders.pixels import PixelFormat
from hyptree.vlm.encoders.transformers import HfEncoder, features_of

MAX_SCALE = 100.0
"""Largest factor of the similarities, as in CLIP."""
_SHAPE = ("geometry", "curvature")
"""Keys of ``model.head`` of a recipe that the model is built with; the others are about its training."""


@dataclass(frozen=True)
class WorldClipConfig:
    """Shape of the two towers."""

    size: int = 64
    """Side of the pictures."""
    patch: int = 8
    """Side of a patch."""
    image_width: int = 256
    image_layers: int = 6
    text_width: int = 192
    text_layers: int = 4
    embed_dim: int = 128
    """Length of the embeddings."""
    head_width: int = 32
    """Of both towers' attention."""
    context: int = CONTEXT
    """Tokens of a text, begin and end included."""

    def __post_init__(self) -> None:
        if self.size % self.patch:
            raise ValueError(f"the side of the pictures, {self.size}, must be a multiple of patch, {self.patch}")
        for name in ("image_width", "text_width"):
            if getattr(self, name) % self.head_width:
                raise ValueError(
                    f"{name} must be a multiple of head_width {self.head_width}, got {getattr(self, name)}"
                )


PRESETS = {
    "clip-world": WorldClipConfig(),
    "clip-world-tiny": WorldClipConfig(
        size=32, patch=4, image_width=64, image_layers=3, text_width=64, text_layers=2, embed_dim=64
    ),
}
"""Models by the name that a recipe gives."""


def preset(name: str, **options: Any) -> WorldClipConfig:
    """The shape by its name, with other values where given."""
    require_known("unknown model {!r} of the task contrast", [name], PRESETS)
    return build(WorldClipConfig, asdict(PRESETS[name]) | options, "model.args", f"model {name}")


def build_clip(config: WorldClipConfig, vocab_size: int) -> Any:
    """A ``transformers.CLIPModel`` of this shape with fresh weights, from torch's global generator."""
    require("transformers", "vlm")
    from transformers import CLIPConfig, CLIPModel

    def tower(width: int, layers: int) -> dict[str, Any]:
        return {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // config.head_width,
            "projection_dim": config.embed_dim,
            "hidden_act": "gelu",
        }

    pad, bos, _, eos = range(len(SPECIAL))
    words = {"vocab_size": vocab_size, "max_position_embeddings": config.context}
    ends = {"pad_token_id": pad, "bos_token_id": bos, "eos_token_id": eos}
    pictures = {"image_size": config.size, "patch_size": config.patch}
    return CLIPModel(
        CLIPConfig(
            text_config=tower(config.text_width, config.text_layers) | words | ends,
            vision_config=tower(config.image_width, config.image_layers) | pictures,
            projection_dim=config.embed_dim,
        )
    )


class WorldClip(nn.Module):
    """Pictures and texts to embeddings, in one call: what the task ``contrast`` trains.

    Args:
        clip: a ``CLIPModel``.
        geometry: "cosine", or "lorentz" for points of a hyperboloid of learned curvature. Both towers then have a
            learned scale that starts at ``1 / sqrt(d)``, so that a fresh embedding lies at a radius of about 1.
    """

    def __init__(self, clip: Any, geometry: Literal["cosine", "lorentz"] = "cosine", curvature: float = 1.0):
        super().__init__()
        self.clip = clip
        self.space: Lorentz | None = None
        if geometry == "lorentz":
            self.space = Lorentz(c=curvature, learnable=True, min=curvature / 10, max=curvature * 10)
            start = -0.5 * math.log(clip.config.projection_dim)
            self.image_scale = nn.Parameter(torch.tensor([start]))
            self.text_scale = nn.Parameter(torch.tensor([start]))

    def forward(self, pixels: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Embeddings ``image`` (n, d) and ``text`` (m, d), ``scale``, and ``c`` on the hyperboloid.

        Args:
            pixels: (n, 3, size, size) prepared pictures.
            tokens: (m, length) numbers of tokens, padded on the right: the towers look to the left only.
        """
        output = {"image": self.embed_images(pixels), "text": self.embed_texts(tokens), "scale": self.scale}
        return output if self.space is None else output | {"c": torch.as_tensor(self.space.c)}

    @property
    def scale(self) -> Tensor:
        """Factor of the similarities, at most ``MAX_SCALE``."""
        return self.clip.logit_scale.clamp(max=math.log(MAX_SCALE)).exp()

    @property
    def curvature(self) -> float | None:
        """c of the hyperboloid; None where embeddings are compared by cosines."""
        return None if self.space is None else float(self.space.c)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """(n, d)."""
        return self._lift(features_of(self.clip.get_image_features(pixel_values=pixels)), "image_scale")

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """(m, d)."""
        return self._lift(features_of(self.clip.get_text_features(input_ids=tokens)), "text_scale")

    def _lift(self, features: Tensor, scale: str) -> Tensor:
        if self.space is None:
            return features
        with torch.autocast(features.device.type, enabled=False):
            # At most 1, as in MERU: the exponential map must not be fed with raw features.
            return self.space.expmap0(getattr(self, scale).clamp(max=0.0).exp() * features.float())


def as_encoder(model: WorldClip, tokenizer: Any, pixels: PixelFormat, name: str = "world") -> HfEncoder:
    """The encoder of a trained model, on a copy of its weights.

    A hyperbolic one gives tangent vectors at the origin, its scales being part of the projections; ``curvature`` says
    where ``hyptree.geometry.lorentz.expmap0(features, encoder.curvature)`` lies.
    """
    import copy

    clip = copy.deepcopy(model.clip).eval()
    with torch.no_grad():
        clip.logit_scale.copy_(model.scale.log())
        if model.space is not None:
            clip.visual_projection.weight.mul_(model.image_scale.clamp(max=0.0).exp())
            clip.text_projection.weight.mul_(model.text_scale.clamp(max=0.0).exp())
            clip.config.hyperbolic_curvature = model.curvature
    return HfEncoder(clip, name, tokenizer, pixels)


def load_run(run: Path | str, *, random_init: bool = False, seed: int = 0) -> Encoder:
    """The encoder with the best weights of a run of the task contrast, or one of its shape with random weights."""
    folder = RunFolder(run)
    recipe = folder.settings()
    if recipe.get("task") != "contrast":
        task = recipe.get("task")
        raise UserError(f"{run} is a run of the task {task}; an encoder is a run of contrast or radial")
    about = folder.dataset("vocab_size", "tokenizer")
    try:
        model, data, head = recipe["model"], recipe["data"], recipe["model"]["head"]
        shape = preset(model["name"], **{"size": data["size"]} | model["args"])
        pixels = PixelFormat(data["size"], data["mean"], data["std"])
        with seeded(seed):
            clip = WorldClip(build_clip(shape, about["vocab_size"]), **{k: head[k] for k in _SHAPE if k in head})
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder.path / 'recipe.yaml'} is not a recipe of contrast: {error}") from error
    if not random_init:
        if not (folder.checkpoints / BEST).is_dir():
            says = "was not evaluated yet: its newest weights are used, and it may not be finished"
            print(f"{run} {says}", file=sys.stderr)
        try:
            clip.load_state_dict(best_weights(run))
        except RuntimeError as error:
            raise UserError(
                f"the weights of {run} are not those of its recipe: {' '.join(str(error).split())}"
            ) from error
    return as_encoder(clip, unpack_tokenizer(about["tokenizer"]), pixels, f"hf:{run}")
