"""Encoders of transformers: ``hf:FOLDER_OR_ID``; CLIP, SigLIP, SigLIP2, and sentence encoders (BERT and the like)."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.data.text.tokenizer import require_plain_templates
from hyptree.errors import UserError, require
from hyptree.files import check_weights, read_json, sign_weights, write_text
from hyptree.progress import quiet_transformers
from hyptree.runs import RunFolder
from hyptree.vlm.encoders.encoder import Encoder, no_weights, readable_imports, seeded
from hyptree.vlm.encoders.pixels import CLIP_MEAN, CLIP_STD, PixelFormat
from hyptree.vlm.encoders.spec import hf_source

_HALF = (0.5, 0.5, 0.5)
_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_mean_tokens": "mean",
}
"""Keys of 1_Pooling/config.json to their newer, short names."""


class HfEncoder(Encoder):
    """A dual model of transformers: it has ``get_text_features`` and ``get_image_features``."""

    _image_parts = ("vision_model.", "visual_projection.")

    def __init__(self, model: Any, name: str, tokenizer: Any, pixels: PixelFormat):
        text = model.config.text_config
        width = getattr(model.config, "projection_dim", None) or getattr(text, "projection_size", text.hidden_size)
        super().__init__(model, name, int(width), pixels, model.text_model, model.vision_model)
        self.tokenizer = tokenizer
        self.siglip = str(model.config.model_type).startswith("siglip")
        self.patches = model.config.model_type == "siglip2"  # takes rows of patches instead of pictures
        self.length = int(text.max_position_embeddings)
        self.curvature = getattr(model.config, "hyperbolic_curvature", None)

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        # SigLIP reads its answer at the last place and was trained without a mask: always the full length.
        padding = "max_length" if self.siglip else "longest"
        tokens = self.tokenizer(texts, padding=padding, truncation=True, max_length=self.length, return_tensors="pt")
        names = ("input_ids",) if self.siglip else ("input_ids", "attention_mask")
        return {name: tokens[name].to(self.device) for name in names}

    def encode_tokens(self, tokens: dict[str, Tensor]) -> Tensor:
        return features_of(self.model.get_text_features(**tokens))

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        return features_of(self.model.get_image_features(**self._pixel_inputs(pixels)))

    def _pixel_inputs(self, pixels: Tensor) -> dict[str, Any]:
        if not self.patches:
            other = tuple(pixels.shape[2:]) != (self._format().size,) * 2
            return {"pixel_values": pixels} | ({"interpolate_pos_encoding": True} if other else {})
        side = int(self.model.config.vision_config.patch_size)
        n, channels, height, width = pixels.shape
        rows, columns = height // side, width // side
        cut = pixels[..., : rows * side, : columns * side].reshape(n, channels, rows, side, columns, side)
        return {
            "pixel_values": cut.permute(0, 2, 4, 3, 5, 1).reshape(n, rows * columns, -1),
            "pixel_attention_mask": torch.ones(n, rows * columns, dtype=torch.int32, device=pixels.device),
            "spatial_shapes": torch.tensor([[rows, columns]], device=pixels.device).expand(n, 2),
        }

    def _dense(self, pixels: Tensor) -> Tensor:
        tower: Any = self.model.vision_model
        tokens = tower(**self._pixel_inputs(pixels), return_dict=True).last_hidden_state
        if not self.siglip:
            return self.model.visual_projection(tower.post_layernorm(tokens[:, 1:]))
        head = tower.head if hasattr(tower, "head") else tower.vision_model.head
        return head(tokens.flatten(0, 1)[:, None]).unflatten(0, tokens.shape[:2])

    def save(self, folder: Path | str) -> Path:
        """Write a Hugging Face folder: weights, tokenizer and how pictures are prepared."""
        self._check_is_bare()
        folder = _save(self.model, self.tokenizer, folder)
        form = self._format()
        settings = {
            "image_processor_type": "Siglip2ImageProcessor"
            if self.patches
            else ("SiglipImageProcessor" if self.siglip else "CLIPImageProcessor"),
            "do_center_crop": not form.whole,
            "crop_size": {"height": form.size, "width": form.size},
            "size": {"height": form.size, "width": form.size} if form.whole else {"shortest_edge": form.size},
            "do_normalize": True,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_resize": True,
            "resample": 3,
            "image_mean": list(form.mean),
            "image_std": list(form.std),
        }
        write_text(folder / "preprocessor_config.json", json.dumps(settings, indent=2) + "\n")
        return folder


class SentenceEncoder(Encoder):
    """A text model of transformers, pooled over its tokens as ``1_Pooling`` in its folder says (else the mean)."""

    _unused = ("pooler.",)  # BERT's own, which nothing passes through

    def __init__(self, model: Any, name: str, tokenizer: Any, pooling: str = "mean", length: int | None = None):
        super().__init__(model, name, int(model.config.hidden_size), None, model)
        self.tokenizer, self.pooling = tokenizer, pooling
        self.length = length or int(getattr(model.config, "max_position_embeddings", 512))

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        tokens = self.tokenizer(texts, padding="longest", truncation=True, max_length=self.length, return_tensors="pt")
        return {key: value.to(self.device) for key, value in tokens.items()}

    def encode_tokens(self, tokens: dict[str, Tensor]) -> Tensor:
        hidden: Tensor = self.model(**tokens, return_dict=True).last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        mask = tokens["attention_mask"][..., None].to(hidden.dtype)
        if self.pooling == "max":
            return hidden.masked_fill(mask == 0, float("-inf")).amax(1)
        count = mask.sum(1)
        return (hidden * mask).sum(1) / (count.sqrt() if self.pooling == "mean_sqrt_len_tokens" else count)

    def save(self, folder: Path | str) -> Path:
        """Write a Hugging Face folder: weights, tokenizer and pooling."""
        self._check_is_bare()
        folder = _save(self.model, self.tokenizer, folder)
        (folder / "1_Pooling").mkdir(exist_ok=True)
        modes = {key: self.pooling == mode for key, mode in _POOLING.items()}
        settings = {"word_embedding_dimension": self.width, **modes}
        write_text(folder / "1_Pooling" / "config.json", json.dumps(settings, indent=2) + "\n")
        write_text(folder / "sentence_bert_config.json", json.dumps({"max_seq_length": self.length}) + "\n")
        return folder


def load(rest: str, *, random_init: bool, seed: int) -> Encoder:
    """The encoder of a folder on this machine (a run of contrast or radial is one too), or of a name on the hub."""
    with readable_imports():
        require("transformers", "vlm")
        from transformers import AutoConfig, AutoModel
    spec, source = f"hf:{rest}", hf_source(rest)
    if RunFolder(source).holds_run:
        return load_run(source, random_init=random_init, seed=seed)
    with readable_imports(), quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            where = "no model here" if Path(source).is_dir() else "no such folder, and no model of the hub"
            raise UserError(f"{spec}: {where} ({_why(error)}); give a folder of save_pretrained") from error
        tokenizer = _tokenizer(spec, source)
        if random_init:
            with seeded(seed):
                model = AutoModel.from_config(config)
        else:
            model = _trained(AutoModel, spec, source)
    if hasattr(model, "get_image_features") and hasattr(model, "get_text_features"):
        return HfEncoder(model, spec, tokenizer, _pixel_format(source, config))
    if getattr(config, "hidden_size", None) is None:
        raise UserError(f"{spec} is a {config.model_type} model; expected CLIP, SigLIP, SigLIP2 or a text encoder")
    length = _settings(source, "sentence_bert_config.json").get("max_seq_length")
    return SentenceEncoder(model, spec, tokenizer, _pooling(spec, source), length)


def load_run(run: Path | str, *, random_init: bool = False, seed: int = 0) -> Encoder:
    """The encoder with the best weights of a run of the task contrast or radial."""
    task = RunFolder(run).settings().get("task")
    home = import_module(f"hyptree.vlm.{'radial.tuned_text' if task == 'radial' else 'clip.world_clip'}")
    return home.load_run(run, random_init=random_init, seed=seed)


def _trained(auto: Any, spec: str, source: str) -> nn.Module:
    check_weights(source)
    try:
        model, info = auto.from_pretrained(source, trust_remote_code=False, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise no_weights(spec, f"cannot read the weights ({_why(error)})", "give a folder with them") from error
    # A pooler that a sentence encoder was saved without is never used; anything else would be random.
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise no_weights(spec, f"{len(missing)} weights are missing, e.g. {missing[0]}", "give a whole checkpoint")
    assert isinstance(model, nn.Module)
    return model


def _tokenizer(spec: str, source: str) -> Any:
    from transformers import AutoTokenizer

    missing = f"{spec} has no tokenizer; put the files of tokenizer.save_pretrained (tokenizer.json) beside config.json"
    files = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in files):
        raise UserError(missing)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises all sorts of things for damaged files
        raise UserError(f"{missing} ({_why(error)})") from error
    require_plain_templates(tokenizer, source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _pixel_format(source: str, config: Any) -> PixelFormat:
    """What preprocessor_config.json says, else what the kind of model is trained with."""
    siglip = str(config.model_type).startswith("siglip")
    settings = _settings(source, "preprocessor_config.json")
    vision = config.vision_config
    size = getattr(vision, "image_size", 224)
    if config.model_type == "siglip2":  # the picture that fills all positions
        size = round(int(vision.num_patches) ** 0.5) * int(vision.patch_size)
    mean = tuple(settings.get("image_mean") or (_HALF if siglip else CLIP_MEAN))
    std = tuple(settings.get("image_std") or (_HALF if siglip else CLIP_STD))
    return PixelFormat(int(size), mean, std, whole=not settings.get("do_center_crop", not siglip))


def _pooling(spec: str, source: str) -> str:
    settings = _settings(source, "1_Pooling/config.json")
    stored = settings.get("pooling_mode")
    modes = [stored] if stored else [mode for key, mode in _POOLING.items() if settings.get(key)]
    if len(modes) > 1 or (modes and modes[0] not in _POOLING.values()):
        raise UserError(f"{spec} is pooled by {' + '.join(modes)}; expected one of {', '.join(_POOLING.values())}")
    return str(modes[0]) if modes else "mean"


def _settings(source: str, name: str) -> dict[str, Any]:
    """A JSON file beside the model; empty where there is none."""
    path = Path(source) / name
    if not Path(source).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(source, name)
        path = Path(cached) if isinstance(cached, str) else path
    return read_json(path) if path.is_file() else {}


def _save(model: Any, tokenizer: Any, folder: Path | str) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    sign_weights(folder)
    return folder


def features_of(output: Any) -> Tensor:
    """transformers 4 gives the features themselves, 5 an object that holds them."""
    return output if isinstance(output, Tensor) else output.pooler_output


def _why(error: Exception) -> str:
    return " ".join(str(error).strip().split("\n")[0].split())[:160].rstrip(".")
