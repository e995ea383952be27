"""Semantic segmentation: a Semantic FPN on any backbone, cross entropy per pixel, mean IoU at the labels' own size."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.data.sample import IGNORE, BadSample, Sample
from hyptree.errors import UserError, as_user_error, require_known
from hyptree.evaluate.pictures.segmentation import Confusion
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Gather, Task


@dataclass
class ScoredSample(Sample):
    """A sample on its way to be scored: the picture as the model sees it, the truth as the dataset gave it.

    Numbers are then those of the dataset, whatever size the model looks at: predictions are brought to the truth, never
    the truth to the predictions.
    """

    truth: dict[str, Tensor] | None = None
    """Label map, or boxes, labels, masks and crowd, in the pixels of the dataset."""
    full_size: tuple[int, int] = (0, 0)
    """Height and width of the picture in the dataset."""
    extent: tuple[int, int] = (0, 0)
    """Height and width that the picture takes up, from the upper left corner, in what the model sees."""


def build_dense(make: Callable[..., Any], recipe: Recipe, num_classes: int, **options: Any) -> nn.Module:
    """A backbone of the recipe's name and arguments with the decoder that ``make(backbone, num_classes, ...)`` adds.

    A plug-in of the recipe goes between them.

    Args:
        options: of the decoder; the recipe's ``model.head`` wins over them.

    Raises:
        UserError: no such model, or options that backbone or decoder do not take.
    """
    from hyptree.models.decoders import pyramid_backbone

    settings = recipe.model
    choices = [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    require_known("unknown key model.head.{}", settings.head, choices)
    backbone = pyramid_backbone(settings.name, pretrained=settings.pretrained, **settings.args)
    if settings.plugin is not None:
        from hyptree.train.plugin import plug_in_features

        backbone = plug_in_features(backbone, settings.plugin, lr=recipe.optim.lr)
    with as_user_error("model.head"):
        model: nn.Module = make(backbone, num_classes, **options | settings.head)
    return model


class Segment(Task):
    """Cross entropy over the pixels that count; mIoU, pixel accuracy and the IoU of each class."""

    metric = "miou"
    sees = "segment"
    takes_plugin = True

    def describe(self, dataset: Any) -> dict[str, Any]:
        if not dataset.semantic_classes:
            raise UserError(f"data {self.recipe.data.name} has no label maps to segment; choose another task")
        return super().describe(dataset)

    def build_model(self, data: dict[str, Any]) -> nn.Module:
        from hyptree.models.decoders import Segmenter

        self._classes = tuple(data["semantic_classes"])
        return build_dense(Segmenter, self.recipe, len(self._classes))

    def transform(self, train: bool) -> Any:
        transform = super().transform(train)
        return transform if train else KeepLabelMap(transform)

    def collate(self, samples: Sequence[Sample], train: bool) -> dict[str, Any]:
        """Training: ``image`` (B, 3, S, S) and ``semantic`` (B, S, S). Scoring: the truth of each picture in a list."""
        batch: dict[str, Any] = {"image": torch.stack([sample.image for sample in samples])}
        if train:
            return batch | {"semantic": torch.stack([_label_map(sample) for sample in samples])}
        scored = [sample for sample in samples if isinstance(sample, ScoredSample)]
        return batch | {
            "truth": [sample.truth["semantic"] for sample in scored if sample.truth is not None],
            "extent": [sample.extent for sample in scored],
        }

    def count(self, batch: dict[str, Any]) -> Tensor:
        return (batch["semantic"] != IGNORE).sum()

    def training_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        logits, truth = model(batch["image"]).float(), batch["semantic"].long()
        count = batch["count"] if "count" in batch else self.count(batch)
        count = count + (count == 0)  # a batch in which nothing counts has loss 0, not NaN
        smoothing = self.recipe.loss.label_smoothing
        loss = F.cross_entropy(logits, truth, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing) / count
        right = (logits.detach().argmax(1) == truth).sum()
        return self.with_plugin(model, None, loss, {"pixel_accuracy": right / count})

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Any]], gather: Gather) -> dict[str, float]:
        device = next(model.parameters()).device
        confusion = Confusion(len(self._classes), device)
        loss = torch.zeros(1, dtype=torch.float64, device=device)
        for batch in batches:
            for scores, truth, extent in zip(model(batch["image"]), batch["truth"], batch["extent"], strict=True):
                scores = resize_scores(scores, extent, truth.shape)  # (K, H, W)
                confusion.add(scores.argmax(0), truth)
                loss += F.cross_entropy(scores[None], truth[None].long(), ignore_index=IGNORE, reduction="sum")
        loss = gather(loss).sum()
        numbers = confusion.scores(self._classes, gather)
        num_pixels = gather((confusion.matrix.sum())[None]).sum().clamp_min(1)
        return {"loss": float(loss / num_pixels), **numbers}


class KeepLabelMap:
    """An evaluation transform that leaves the label map as it is and notes which part of its result is picture."""

    def __init__(self, transform: Callable[[Sample], Sample]):
        self.transform = transform

    def __call__(self, sample: Sample) -> ScoredSample:
        truth = _label_map(sample)
        # A map of zeros goes along: where the transform pads, it writes IGNORE into it.
        seen = self.transform(dataclasses.replace(sample, semantic=None, parts=torch.zeros_like(truth)))
        assert seen.parts is not None, "a transform to segment keeps label maps"
        inside = seen.parts != IGNORE
        return ScoredSample(
            seen.image,
            seen.id,
            truth={"semantic": truth},
            full_size=(truth.shape[0], truth.shape[1]),
            extent=(int(inside.any(1).sum()), int(inside.any(0).sum())),
        )


def resize_scores(scores: Tensor, extent: tuple[int, int], size: Sequence[int]) -> Tensor:
    """Class scores (K, h, w) without padding, brought to the picture's own size: (K, H, W) float32."""
    scores = scores[None, :, : extent[0], : extent[1]].float()
    if scores.shape[-2:] != tuple(size):
        scores = F.interpolate(scores, size=tuple(size), mode="bilinear", align_corners=False)
    return scores[0]


def _label_map(sample: Sample) -> Tensor:
    if sample.semantic is None:
        raise BadSample(sample.id, "it has no label map")
    return sample.semantic
