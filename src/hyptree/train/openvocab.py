"""Detection and panoptic segmentation of base and novel classes, from a trained detector and a trained segmenter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hyptree.data.pictures.transforms import eval_transform
from hyptree.data.sample import BadSample, Sample
from hyptree.errors import UserError, as_user_error
from hyptree.evaluate.pictures.openvocab_scores import BaseNovelScorer
from hyptree.evaluate.pictures.panoptic import PanopticQuality, join_panoptic, panoptic_truth
from hyptree.runs import RunFolder
from hyptree.train.evaluate import load_model
from hyptree.train.tasks import build_task
from hyptree.train.tasks.detect import instances
from hyptree.train.tasks.segment import KeepLabelMap, resize_scores
from hyptree.vlm.openvocab.detector import OpenVocabDetector
from hyptree.vlm.openvocab.segmenter import OpenVocabSegmenter


def evaluate_openvocab(
    detector_run: Path,
    segmenter_run: Path,
    *,
    split: str = "val",
    novel: Sequence[str] | None = None,
    limit: int | None = None,
    text_weight: float = 0.5,
    min_score: float = 0.3,
    device: str | torch.device = "cpu",
) -> dict[str, float]:
    """AP of boxes and masks and PQ, for all, base and novel classes, on the data of the detector's run.

    Args:
        detector_run: of the task ``detect`` or ``openvocab_detect``.
        segmenter_run: of the task ``openvocab``; its CLIP, with its adapter, names the boxes.
        novel: by default the classes that the segmenter did not see.
        limit: pictures to look at, from the first on.
        text_weight: see ``OpenVocabDetector``.
        min_score: of instances in the panoptic map.

    Raises:
        UserError: runs of other tasks, data without masks, or classes that do not go together.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit must be 1 picture or more, got {limit}")
    detector, recipe = load_model(detector_run, device)
    segmenter, other = load_model(segmenter_run, device)
    if recipe.task not in ("detect", "openvocab_detect"):
        raise UserError(f"{detector_run} is a run of the task {recipe.task}; expected detect or openvocab_detect")
    if not isinstance(segmenter, OpenVocabSegmenter):
        raise UserError(f"{segmenter_run} is a run of the task {other.task}; expected openvocab")
    dataset = build_task(recipe).build_dataset(split)
    things, classes = tuple(dataset.box_classes), tuple(dataset.semantic_classes)
    hidden = tuple(segmenter.settings.unseen if novel is None else novel)
    data = recipe.data
    named = OpenVocabDetector(
        detector,
        segmenter.encoder,
        size=data.size,
        mean=data.mean,
        std=data.std,
        text_weight=text_weight,
        settings=segmenter.settings,
    )
    has_masks = bool(RunFolder(detector_run).dataset().get("has_masks"))
    joins = has_masks and bool(classes) and set(things) <= set(classes)
    with as_user_error("novel"):
        scorer = BaseNovelScorer(things, [name for name in hidden if name in things], has_masks=has_masks)
        quality = PanopticQuality(classes, things, [name for name in hidden if name in classes]) if joins else None
    with torch.no_grad():
        words = segmenter.text_features(classes) if quality is not None else None
    for i in range(len(dataset) if limit is None else min(len(dataset), limit)):
        try:
            sample = dataset[i]
        except BadSample:
            continue
        if sample.boxes is None:
            raise UserError(f"{sample.id} has no boxes to compare with; give a detector's run whose data has some")
        detections = {name: value.cpu() for name, value in named.detect([sample.image], things)[0].items()}
        size = (sample.image.shape[-2], sample.image.shape[-1])
        scorer.add(sample.id, size, instances(sample), detections)
        if quality is not None and words is not None:
            semantic = semantic_scores(segmenter, sample.image, words, data_size=other.data.size).cpu()
            joined = join_panoptic(semantic, detections, classes, things, min_score=min_score)
            quality.add(joined, panoptic_truth(sample, classes, things))
    return scorer.scores() | ({} if quality is None else quality.scores())


@torch.no_grad()
def semantic_scores(segmenter: OpenVocabSegmenter, picture: Tensor, text: Tensor, *, data_size: int) -> Tensor:
    """Probabilities (K, H, W) of a picture (3, H, W) uint8, at its own size, as the task ``openvocab`` scores it."""
    form = segmenter.encoder.pixels
    size = segmenter.settings.eval_size or data_size
    blank = torch.zeros(picture.shape[-2:], dtype=torch.uint8)
    transform = KeepLabelMap(eval_transform(size, "segment", mean=form.mean, std=form.std))
    seen = transform(Sample(picture, "", semantic=blank))
    scores = segmenter.scores(seen.image[None].to(segmenter.base.device), text=text)[0]
    return resize_scores(scores, seen.extent, picture.shape[-2:])
