"""Pictures and their captions brought together: the small CLIP of ``hyptree.vlm.clip``, flat or hyperbolic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyptree.config import build
from hyptree.data.sample import Sample
from hyptree.errors import UserError
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Gather, Task
from hyptree.vlm.clip.contrast import chain_loss, contrastive_loss, entailment_loss
from hyptree.vlm.clip.contrast_scores import score_embeddings
from hyptree.vlm.clip.world_clip import WorldClip, build_clip, preset
from hyptree.vlm.clip.world_text import PROMPTS, captions_of, encode_table, world_tokenizer

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ContrastSettings:
    """What ``model.head`` of a recipe may say."""

    geometry: Literal["cosine", "lorentz"] = "cosine"
    """Compare by cosines, or by distances on a hyperboloid of learned curvature (as MERU does)."""
    levels: Literal["all", "drawn", "specific"] = "all"
    """The captions a picture is compared with: all, one that is drawn anew in every step, or the most specific."""
    prompted: float = 0.5
    """Share of texts that stand in a prompt ("a photo of ...") instead of alone."""
    mask: bool = True
    """Captions that are true of a picture are never held against it, whoever's they are."""
    entail: float = 0.2
    """Lorentz: weight of the angle by which pictures lie outside the cones of their texts."""
    chain: float = 0.2
    """Lorentz: weight of the angle by which captions lie outside the cones of the more general ones."""
    curvature: float = 1.0
    """Lorentz: c at the start; it may be learned up to ten times larger or smaller."""

    def __post_init__(self) -> None:
        if not 0 <= self.prompted <= 1:
            raise UserError(f"model.head.prompted is a share from 0 to 1, got {self.prompted}")
        for name in ("entail", "chain"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise UserError(f"model.head.{name} must be 0 or a positive number, got {getattr(self, name)}")
        if not (self.curvature > 0 and math.isfinite(self.curvature)):
            raise UserError(f"model.head.curvature must be a positive number, got {self.curvature}")

    @classmethod
    def of(cls, settings: dict[str, Any]) -> ContrastSettings:
        """From the dictionary of a recipe."""
        return build(cls, settings, "model.head", "recipe")


class Captioned:
    """A dataset whose labels say where the captions of a picture stand in the task's table."""

    def __init__(self, dataset: Any, first: int):
        self.dataset, self.first = dataset, first
        if hasattr(dataset, "images") and hasattr(dataset, "labels"):
            self.images, self.labels = dataset.images, self._labels

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        position = range(len(self))[index]
        return dataclasses.replace(self.dataset[position], label=self.first + position)

    def _labels(self) -> Tensor:
        return torch.arange(self.first, self.first + len(self))


class Contrast(Task):
    """Symmetric InfoNCE; retrieval, zero-shot classes, order of caption levels. ``model.head`` is ContrastSettings."""

    metric = "r1"

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.settings = ContrastSettings.of(recipe.model.head)
        self.shape = preset(recipe.model.name, **{"size": recipe.data.size} | recipe.model.args)
        if recipe.model.pretrained:
            raise UserError("model.pretrained: there are no weights to download; model.weights starts from a run")
        if self.shape.size != recipe.data.size:
            raise UserError(f"model.args.size {self.shape.size} is not data.size {recipe.data.size}; leave it out")
        self.tokenizer = world_tokenizer(self.shape.context)
        self.texts: list[str] = []
        self._number_of: dict[str, int] = {}
        self._captions: list[list[int]] = []
        self._tables: dict[str, Tensor] = {}

    # -------------------------------------------------------------------------------------------------------- data

    def build_dataset(self, split: str) -> Captioned:
        if self.recipe.data.name != "world":
            raise UserError(f"data {self.recipe.data.name} has no captions of four levels; take data.name world")
        dataset = super().build_dataset(split)
        first = len(self._captions)
        for true, wrong in captions_of(dataset):
            self._captions.append([self._number(text) for text in (*true, *wrong)])
        self._tables = {}
        return Captioned(dataset, first)

    def _number(self, text: str) -> int:
        if text not in self._number_of:
            self._number_of[text] = len(self.texts)
            self.texts.append(text)
        return self._number_of[text]

    def _table(self, name: Literal["captions", "tokens"], device: torch.device) -> Tensor:
        """``captions`` (pictures, 8): numbers of four texts and four contradictions. ``tokens`` (prompts, texts, L)."""
        key = f"{name} {device}"
        if key not in self._tables:
            if name == "captions":
                table = torch.tensor(self._captions)
            else:
                put = [[prompt.format(text) for text in self.texts] for prompt in PROMPTS]
                table = torch.stack([encode_table(self.tokenizer, texts, self.shape.context) for texts in put])
                longest = int((table != self.tokenizer.pad_token_id).sum(-1).max())
                table = table[..., :longest].contiguous()
            self._tables[key] = table.to(device)
        return self._tables[key]

    def describe(self, dataset: Any) -> dict[str, Any]:
        """The tokenizer, whole, and its size."""
        from hyptree.data.text import pack_tokenizer

        return {"tokenizer": pack_tokenizer(self.tokenizer), "vocab_size": len(self.tokenizer)}

    def build_model(self, data: dict[str, Any]) -> WorldClip:
        settings = self.settings
        return WorldClip(build_clip(self.shape, data["vocab_size"]), settings.geometry, settings.curvature)

    def pack(self, images: Tensor, labels: Tensor) -> Batch:
        """The batch of pictures that lie in memory: (B, 3, S, S) and their places in the table of captions (B,)."""
        return {"image": images, "place": labels}

    def prepare_batch(self, batch: Batch, step: int) -> Batch:
        """Adds numbers of texts: ``captions`` (B, 4) and ``chosen`` (B, k), those that its pictures are compared with.

        ``tokens`` (B, j, L) are of the chosen ones, or of all where the loss orders levels; ``level`` (B, k) says which
        of these were chosen.
        """
        device, count = batch["image"].device, len(batch["place"])
        captions = self._table("captions", device)[batch["place"]]
        captions = captions[:, : captions.shape[1] // 2]
        levels = captions.shape[1]
        # torch's global generator, which the loop seeds by step and process
        is_put = torch.rand(count) < self.settings.prompted
        prompt = torch.where(is_put, torch.randint(1, len(PROMPTS), (count,)), 0)[:, None].to(device)
        level = torch.arange(levels).expand(count, levels)
        if self.settings.levels == "drawn":
            level = torch.randint(levels, (count, 1))
        elif self.settings.levels == "specific":
            level = level[:, -1:]
        level = level.to(device)
        chosen = captions.gather(1, level)
        if not self._orders_levels:  # then the others need not be read
            level = torch.arange(chosen.shape[1], device=device).expand_as(chosen)
        tokens = self._table("tokens", device)[prompt, captions if self._orders_levels else chosen]
        return batch | {"captions": captions, "chosen": chosen, "level": level, "tokens": tokens}

    @property
    def _orders_levels(self) -> bool:
        return self.settings.geometry == "lorentz" and self.settings.chain > 0

    # -------------------------------------------------------------------------------------------------------- loss

    def training_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, settings = batch["tokens"], self.settings
        output = model(batch["image"], tokens.flatten(0, 1))
        image, c = output["image"], output.get("c")
        levels = output["text"].unflatten(0, tokens.shape[:2])  # (B, j, d)
        rows = torch.arange(len(levels), device=levels.device)[:, None]
        text = levels[rows, batch["level"]].flatten(0, 1)  # (B k, d)
        masks = {"captions": batch["captions"], "chosen": batch["chosen"].flatten()} if settings.mask else {}
        loss = contrast = contrastive_loss(image, text, output["scale"], c=c, **masks)
        numbers = {"contrast": contrast.detach(), "scale": output["scale"].detach()}
        if c is not None:
            entail = entailment_loss(text, image.repeat_interleave(len(text) // len(image), 0), c)
            loss = loss + settings.entail * entail
            numbers |= {"entail": entail.detach(), "curvature": c.detach()}
            if self._orders_levels:
                chain = chain_loss(levels, c)
                loss = loss + settings.chain * chain
                numbers["chain"] = chain.detach()
        return loss, numbers

    # ----------------------------------------------------------------------------------------------------- numbers

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], gather: Gather) -> dict[str, float]:
        assert isinstance(model, WorldClip)
        images, places = [], []
        for batch in batches:
            images.append(model.embed_images(batch["image"]).float())
            places.append(batch["place"])
        image, place = gather(torch.cat(images)), gather(torch.cat(places))
        captions = self._table("captions", place.device)[place]

        def embed(texts: Sequence[str]) -> Tensor:
            tokens = encode_table(self.tokenizer, texts, self.shape.context).to(image.device)
            return torch.cat([model.embed_texts(part).float() for part in tokens.split(512)])

        return score_embeddings(image, captions, self.texts, embed, c=model.curvature)
