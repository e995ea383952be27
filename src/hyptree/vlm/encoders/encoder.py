"""Encoders of text and pictures behind one face: open_clip; CLIP, SigLIP, SigLIP2 and BERT-like of transformers.

    encoder = load_encoder("hf:runs/clip_world/hf")
    encoder.encode_text(["a vehicle", "a red truck"])        # (2, d), with gradients
    encoder.encode_images(world.images()[:8])                # (8, d)
    encoder.root()                                           # (d,): the embedding of ""

Random weights are never used silently: they need ``random_init=True`` (``--random-init`` on the command line).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.vlm.adapters.base import CHILD, device_of
from hyptree.vlm.adapters.container import adapter_tower
from hyptree.vlm.encoders.pixels import PixelFormat
from hyptree.vlm.encoders.spec import KINDS, check_spec

BATCH = 256
"""Texts or pictures that go through a tower at once."""


class Encoder(ABC):
    """Text, and mostly pictures, as vectors of one space.

    Attributes:
        model: the bare module, in eval mode, with all its weights trainable.
        name: the spec it was loaded by.
        width: d, the length of its embeddings.
        pixels: the pictures that its image tower takes; None for an encoder of text alone.
        text_tower, image_tower: the modules with the blocks that read texts and pictures; None where there is none.
        curvature: c of the hyperboloid onto which its embeddings, as tangent vectors at the origin, are lifted; None
            for the usual, Euclidean encoder.
    """

    def __init__(
        self, model: Any, name: str, width: int, pixels: PixelFormat | None, text_tower: Any, image_tower: Any = None
    ):
        self.model: Any = model  # a module with the attributes of its library
        self.name, self.width, self.pixels = name, width, pixels
        self.text_tower, self.image_tower = text_tower, image_tower
        self.curvature: float | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, width={self.width})"

    @property
    def device(self) -> torch.device:
        """Where the weights are when they are used; move them with ``encoder.model.to(...)``."""
        return device_of(self.model, next(name for name, _ in self.model.named_parameters()))

    @abstractmethod
    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        """``input_ids`` (n, length), and what else the text tower wants, on the encoder's device."""

    @abstractmethod
    def encode_tokens(self, tokens: dict[str, Tensor]) -> Tensor:
        """(n, d) from what ``tokenize`` gave; not normalised."""

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """(n, d) from prepared pictures (n, 3, size, size); not normalised."""
        self._format()  # raises
        raise NotImplementedError

    _dense = encode_pixels  # of every patch

    @abstractmethod
    def save(self, folder: Path | str) -> Path:
        """Write the encoder so that ``load_encoder`` reads it back; an adapter must be merged first."""

    def text_parameters(self) -> list[nn.Parameter]:
        """Everything that text passes through: tower, embeddings, projection, its adapters; no scale of logits."""
        return [p for name, p in self.model.named_parameters() if self._part(name) == "text"]

    def image_parameters(self) -> list[nn.Parameter]:
        """Everything that pictures pass through, its adapters too."""
        return [p for name, p in self.model.named_parameters() if self._part(name) == "image"]

    _image_parts: tuple[str, ...] = ()
    _unused: tuple[str, ...] = ("logit_",)
    """First letters of parameters that belong to no tower."""

    def _part(self, name: str) -> str | None:
        """The tower that a parameter belongs to: text or image."""
        if name.startswith(self._unused):
            return None
        return adapter_tower(name) or ("image" if name.startswith(self._image_parts) else "text")

    def _check_is_bare(self) -> None:
        """Raises where the model carries adapters: in a file their keys would look like weights of the model."""
        if CHILD in self.model._modules:
            raise UserError(
                f"{self.name} carries an adapter: save it alone by handle.save(folder), or write it into the weights "
                "by handle.merge_and_unload() and save the encoder then"
            )

    def encode_text(self, texts: Sequence[str], normalize: bool = False) -> Tensor:
        """(n, d): the embeddings of texts, with gradients unless ``torch.no_grad``."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"texts must be a list of strings, got {str(texts)[:60]!r}")
        texts = list(texts)
        parts = [self.encode_tokens(self.tokenize(texts[i : i + BATCH])) for i in range(0, len(texts), BATCH)]
        return self._joined(parts, normalize)

    def encode_images(self, pictures: Sequence[Any] | Tensor | np.ndarray, normalize: bool = False) -> Tensor:
        """(n, d): the embeddings of pictures, with gradients unless ``torch.no_grad``.

        Args:
            pictures: bytes (n, H, W, 3) or (n, 3, H, W), a list of pictures, or prepared floats (n, 3, size, size).
        """
        pixels = self._prepared(pictures)
        parts = [self.encode_pixels(pixels[i : i + BATCH].to(self.device)) for i in range(0, len(pixels), BATCH)]
        return self._joined(parts, normalize)

    def image_tokens(self, pictures: Sequence[Any] | Tensor | np.ndarray) -> Tensor:
        """(n, h * w, d): an embedding for every patch, rows first, in the space of ``encode_text``; not normalised.

        A class token is left out; where a tower pools by attention, each patch is what the head gives for it alone.
        """
        pixels = self._prepared(pictures)
        parts = [self._dense(pixels[i : i + BATCH].to(self.device)) for i in range(0, len(pixels), BATCH)]
        return torch.cat(parts) if parts else torch.empty(0, 0, self.width, device=self.device)

    def preprocess(self, pictures: Sequence[Any] | Tensor | np.ndarray) -> Tensor:
        """(n, 3, size, size) float32: PIL pictures or byte arrays as ``encode_images`` prepares them itself."""
        return self._format().prepare(pictures)

    def root(self, normalize: bool = False) -> Tensor:
        """(d,): the embedding of the empty text, where the most general things lie."""
        return self.encode_text([""], normalize)[0]

    @property
    def logit_scale(self) -> Tensor:
        """What cosines are multiplied by (after exp), with gradient; only for encoders of pictures and text."""
        scale = getattr(self.model, "logit_scale", None)
        if scale is None:
            raise UserError(f"{self.name} reads text alone and has no scale for comparing it with pictures")
        return scale.exp().reshape(())

    @property
    def logit_bias(self) -> Tensor | None:
        """What SigLIP adds to the scaled cosines; None for the others."""
        bias = getattr(self.model, "logit_bias", None)
        return bias if bias is None else bias.reshape(())

    def _format(self) -> PixelFormat:
        if self.pixels is None:
            raise UserError(f"{self.name} reads text alone; for pictures load a CLIP or SigLIP model")
        return self.pixels

    def _prepared(self, pictures: Sequence[Any] | Tensor | np.ndarray) -> Tensor:
        form = self._format()
        if isinstance(pictures, np.ndarray):
            pictures = torch.from_numpy(np.ascontiguousarray(pictures))
        if not isinstance(pictures, Tensor) or not pictures.is_floating_point():
            return form.prepare(pictures)
        if pictures.dim() != 4 or pictures.shape[1] != 3:
            raise UserError(f"prepared pictures must be (n, 3, {form.size}, {form.size}), got {tuple(pictures.shape)}")
        return pictures

    def _joined(self, parts: list[Tensor], normalize: bool) -> Tensor:
        joined = torch.cat(parts) if parts else torch.empty(0, self.width, device=self.device)
        return F.normalize(joined, dim=-1) if normalize else joined


def load_encoder(spec: str, *, random_init: bool = False, seed: int = 0, device: str | torch.device = "cpu") -> Encoder:
    """The encoder that a spec names, in eval mode.

    Args:
        spec: ``open_clip:NAME:PRETRAINED`` (a tag of open_clip or a file of weights), or ``hf:DIR_OR_ID`` for CLIP,
            SigLIP and SigLIP2 of transformers and for sentence encoders such as MiniLM. A folder on this machine is
            read from there, another name asks the Hugging Face hub.
        random_init: fresh random weights instead of trained ones, for smoke tests: ``open_clip:NAME``, or ``hf:DIR``
            with a config.json.
    """
    kind, rest = check_spec(str(spec))
    module, function = KINDS[kind].split(":")
    encoder: Encoder = getattr(import_module(module), function)(rest, random_init=random_init, seed=seed)
    encoder.model.eval().to(device)
    return encoder


@contextmanager
def readable_imports() -> Iterator[None]:
    """Turns what torch, torchvision and transformers say of a pair that does not fit into one line."""
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, ImportError, AttributeError) as error:
        if "torchvision" not in str(error):
            raise
        raise UserError(
            f"torchvision does not fit torch {torch.__version__} ({' '.join(str(error).split())[-120:]}); install "
            "both together: pip install --upgrade torch torchvision"
        ) from error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's random numbers come from ``seed``; afterwards they go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def no_weights(name: str, why: str, what: str) -> UserError:
    """The error for weights that are not there."""
    return UserError(f"{name}: {why}; {what}, or --random-init (random_init=True) for random ones")
