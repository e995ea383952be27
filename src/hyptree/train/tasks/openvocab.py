"""Segmentation of an open vocabulary: CLIP with a cost-volume head, scored on classes seen in training and unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.data.sample import IGNORE, Sample
from hyptree.errors import UserError
from hyptree.evaluate.pictures.openvocab_scores import split_scores
from hyptree.evaluate.pictures.segmentation import Confusion
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Gather
from hyptree.train.tasks.segment import KeepLabelMap, Segment, resize_scores
from hyptree.vlm.openvocab.cost_volume import pixel_loss
from hyptree.vlm.openvocab.settings import OpenVocabSettings
from hyptree.vlm.radii import radius_summary

Batch = dict[str, Any]


class OpenVocab(Segment):
    """Binary cross entropy per pixel and class; mean IoU of seen and unseen classes and their harmonic mean.

    ``model.name`` is an encoder of ``hyptree.vlm`` (``hf:FOLDER``, ``open_clip:NAME:PRETRAINED``), ``model.args`` holds
    ``OpenVocabSettings``, ``model.head`` the options of ``CostVolumeHead``. Pictures are normalised as the encoder
    wants them, whatever ``data.mean`` and ``data.std`` say. The best checkpoint is chosen by the seen classes alone:
    unseen ones have no say in training. Beside the head, the cosines of patches and texts alone are scored
    (``cosine_seen``, ``cosine_unseen``, ...): what CLIP knows without it.
    """

    metric = "miou_seen"
    takes_plugin = False  # the model is a CLIP, not a backbone of timm

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.settings = OpenVocabSettings.read(recipe.model.args)
        self._encoder: Any = None
        self.radius_before: dict[str, Any] = {}
        """Radius of the class texts before any training."""

    @property
    def encoder(self) -> Any:
        """The CLIP that the recipe names, loaded once."""
        if self._encoder is None:
            from hyptree.vlm.encoders.encoder import load_encoder

            seed = self.recipe.run.seed
            encoder = load_encoder(self.recipe.model.name, random_init=self.settings.random_init, seed=seed)
            if encoder.pixels is None:
                raise UserError(f"{encoder.name} reads text alone; to segment pictures load a CLIP")
            self._encoder = encoder
        return self._encoder

    def build_model(self, data: dict[str, Any]) -> nn.Module:
        from hyptree.vlm.openvocab.segmenter import OpenVocabSegmenter

        self._classes = tuple(data["semantic_classes"])
        self._seen, self._unseen = self.settings.split(self._classes)
        model = OpenVocabSegmenter(
            self.encoder, self.settings, window=self.recipe.data.size, head=self.recipe.model.head
        )
        with torch.no_grad():
            self.radius_before = radius_summary(model.text_features(self._classes))
        places = [self._seen.index(name) if name in self._seen else IGNORE for name in self._classes]
        self._table = torch.tensor([*places, *[IGNORE] * (256 - len(places))], dtype=torch.uint8)
        self._trains_text = any(parameter.requires_grad for parameter in self.encoder.text_parameters())
        self._frozen_text: Tensor | None = None  # of the seen classes, where no step changes it
        return model

    def transform(self, train: bool) -> Callable[[Sample], Sample]:
        from hyptree.data.pictures.transforms import eval_transform, train_transform

        data, form = self.recipe.data, self.encoder.pixels
        if train:
            return train_transform(data.augment, data.size, "segment", mean=form.mean, std=form.std)
        size = self.settings.eval_size or data.size
        return KeepLabelMap(eval_transform(size, "segment", mean=form.mean, std=form.std))

    def training_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        truth = self._truth(batch)
        if self._frozen_text is None and not self._trains_text:
            with torch.no_grad():
                self._frozen_text = getattr(model, "module", model).text_features(self._seen)  # type: ignore[operator]
        words = {"classes": self._seen} if self._trains_text else {"text": self._frozen_text}
        logits = model(batch["image"], **words)
        counts = truth != IGNORE
        right = ((logits.detach().argmax(1) == truth) & counts).sum()
        count = batch["count"] if "count" in batch else counts.sum()
        return pixel_loss(logits, truth, count), {"pixel_accuracy": right / (count + (count == 0))}

    def count(self, batch: Batch) -> Tensor:
        return (self._truth(batch) != IGNORE).sum()

    def _truth(self, batch: Batch) -> Tensor:
        """Seen classes by their place. Unseen ones count nowhere: their names are not among the texts, so nothing says
        that they are absent."""
        self._table = self._table.to(batch["semantic"].device)
        return self._table[batch["semantic"].long()]

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], gather: Gather) -> dict[str, float]:
        from hyptree.vlm.openvocab.segmenter import OpenVocabSegmenter

        assert isinstance(model, OpenVocabSegmenter)
        text = model.text_features(self._classes)
        head, cosine = (Confusion(len(self._classes), text.device) for _ in range(2))
        for batch in batches:
            images = batch["image"]
            for confusion, scores in ((head, model.scores(images, text=text)), (cosine, model.zero_shot(images, text))):
                for score, truth, extent in zip(scores, batch["truth"], batch["extent"], strict=True):
                    confusion.add(resize_scores(score, extent, truth.shape).argmax(0), truth)
        numbers, alone = (
            split_scores(gather(confusion.matrix[None]).sum(0), self._classes, self._unseen)
            for confusion in (head, cosine)
        )
        return numbers | {
            **{name.replace("miou", "cosine"): alone[name] for name in alone if name.startswith("miou")},
            "text_radius": radius_summary(text)["radius"]["mean"],
            "text_radius_before": self.radius_before["radius"]["mean"],
        }
