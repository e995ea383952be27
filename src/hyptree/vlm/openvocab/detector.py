"""Detection of an open vocabulary: the library's detector finds regions, CLIP's patches and class texts name them.

A detector that was trained on base classes also finds things it has no name for, only with a lower score and a wrong
label. Its labels are thrown away here. The feature of a region is the mean of CLIP's dense features inside its box
(RoI-align), its class follows from the cosine with the texts, and its score joins how sure the detector is that there
is something with how sure CLIP is what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.data.sample import Sample
from hyptree.data.settings import IMAGENET_MEAN, IMAGENET_STD
from hyptree.errors import UserError
from hyptree.vlm.encoders.patch_features import dense_tower
from hyptree.vlm.openvocab.settings import OpenVocabSettings

Found = dict[str, Tensor]


def region_features(features: Tensor, boxes: Tensor, size: tuple[int, int], cells: int = 4) -> Tensor:
    """Mean feature inside each box: (d, h, w) of a picture of ``size``, boxes (N, 4) in its pixels -> (N, d).

    RoI-align on ``cells`` x ``cells`` places of the box, then their mean; boxes smaller than a patch are interpolated.
    """
    from torchvision.ops import roi_align

    height, width = features.shape[-2:]
    scale = boxes.new_tensor([width / size[1], height / size[0]]).repeat(2)
    index = boxes.new_zeros(len(boxes), 1)
    rois = torch.cat([index, boxes * scale], 1).to(features.dtype)
    sampled = roi_align(features[None], rois, (cells, cells), sampling_ratio=2, aligned=True)
    return sampled.mean((2, 3))


class OpenVocabDetector(nn.Module):
    """Boxes (and masks) of any detector of the library, named by text.

    Args:
        detector: gives boxes, labels, scores and maybe masks in eval mode (``hyptree.models.detection.mask_rcnn``).
        size, mean, std: how the detector wants its pictures, from the recipe it was trained with.
        clip_size: side of the square that CLIP looks at; by default that of its own training.
        text_weight: w in ``score = found^(1 - w) named^w``, from 0 (detector alone) to 1 (CLIP alone).
        min_score: of a region to be looked at; below what a detector usually shows, because new things score low.
        settings: sentence and words for the classes.
    """

    def __init__(
        self,
        detector: nn.Module,
        encoder: Any,
        *,
        size: int,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        clip_size: int | None = None,
        text_weight: float = 0.5,
        min_score: float = 0.01,
        settings: OpenVocabSettings | None = None,
        max_detections: int = 100,
    ):
        super().__init__()
        if encoder.pixels is None:
            raise UserError(f"{encoder.name} reads text alone; to name regions load a CLIP")
        if not 0 <= text_weight <= 1:
            raise ValueError(f"text_weight must be from 0 to 1, got {text_weight:g}")
        from hyptree.data.pictures.transforms import eval_transform

        self.detector, self.encoder, self.clip = detector, encoder, encoder.model
        self.tower = dense_tower(encoder)
        self.settings = settings or OpenVocabSettings(method="frozen")
        self.transform = eval_transform(size, "detect", mean=mean, std=std)
        self.clip_size = clip_size or encoder.pixels.size
        if self.clip_size % self.tower.patch:
            raise UserError(f"clip_size {self.clip_size} must be a multiple of the patch, {self.tower.patch}")
        self.text_weight, self.min_score, self.max_detections = text_weight, min_score, max_detections

    @torch.no_grad()
    def detect(self, pictures: Sequence[Tensor], classes: Sequence[str]) -> list[Found]:
        """Boxes (N, 4), labels (N,) from 1 (places in ``classes``), scores (N,) and masks (N, 1, H, W) of pictures.

        Args:
            pictures: each (3, H, W) uint8, of any size; the answers are in its pixels.
        """
        self.eval()
        text = F.normalize(self.encoder.encode_text(self.settings.prompts(classes)).float(), dim=-1)
        return [self._name(picture, regions, text) for picture, regions in self._regions(pictures)]

    def _regions(self, pictures: Sequence[Tensor]) -> Iterator[tuple[Tensor, Found]]:
        """What the detector finds, in the pixels of each picture; the same thing under two labels is kept once."""
        from torchvision.ops import nms

        from hyptree.data.pictures.single import resize_detections

        device = self.encoder.device
        inputs = [self.transform(Sample(picture, "")).image.to(device) for picture in pictures]
        with _shows_more(self.detector, self.min_score):
            answers = self.detector(inputs)
        for picture, seen, answer in zip(pictures, inputs, answers, strict=True):
            keep = nms(answer["boxes"], answer["scores"], 0.7)
            answer = {name: value[keep] for name, value in answer.items() if name != "labels"}
            yield picture, resize_detections(answer, seen.shape[-2:], picture.shape[-2:])

    def _name(self, picture: Tensor, regions: Found, text: Tensor) -> Found:
        from torchvision.ops import batched_nms

        named = self.class_probabilities(picture, regions["boxes"], text)  # (N, K)
        scores = regions["scores"][:, None] ** (1 - self.text_weight) * named**self.text_weight
        best, place = scores.flatten().topk(min(4 * self.max_detections, scores.numel()))
        region, label = place // len(text), place % len(text)
        keep = batched_nms(regions["boxes"][region], best, label, 0.5)[: self.max_detections]
        detections = {name: value[region[keep]] for name, value in regions.items()}
        return detections | {"labels": label[keep] + 1, "scores": best[keep]}

    @torch.no_grad()
    def class_probabilities(self, picture: Tensor, boxes: Tensor, text: Tensor) -> Tensor:
        """(N, K): what CLIP says of each box, softmax over the classes with CLIP's own scale.

        Args:
            picture: (3, H, W) uint8. boxes: (N, 4) in its pixels. text: (K, d), normalised.
        """
        device = text.device
        side = (self.clip_size, self.clip_size)
        pixels = F.interpolate(picture[None].to(device).float(), side, mode="bicubic", antialias=True)
        pixels = self.encoder.pixels.normalise(pixels.round().clamp(0, 255))
        features = self.tower(pixels).features[0].float()
        regions = F.normalize(region_features(features, boxes, (picture.shape[-2], picture.shape[-1])), dim=-1)
        return (self.encoder.logit_scale.float() * regions @ text.T).softmax(-1)


@contextlib.contextmanager
def _shows_more(detector: Any, min_score: float) -> Iterator[None]:
    """Inside, a torchvision detector keeps regions down to this score."""
    heads = getattr(detector, "roi_heads", None)
    if heads is None or not hasattr(heads, "score_thresh"):
        yield
        return
    before = heads.score_thresh
    heads.score_thresh = min(before, min_score)
    try:
        yield
    finally:
        heads.score_thresh = before
