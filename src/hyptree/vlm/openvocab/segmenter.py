"""CLIP with a cost-volume head: a map of logits for every class that somebody names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.errors import UserError, as_user_error, require_known
from hyptree.vlm.encoders.patch_features import dense_tower
from hyptree.vlm.encoders.tuned import TunedEncoder, attach_method
from hyptree.vlm.openvocab.cost_volume import CostVolumeHead, cosine_volume
from hyptree.vlm.openvocab.settings import OpenVocabSettings


class OpenVocabSegmenter(TunedEncoder):
    """Segments pictures into classes given as text.

    Only what is trained is in its ``state_dict``: the head, and the adapter or the tuned weights of CLIP.

    Args:
        encoder: with an image tower. All its weights are frozen here, then ``settings.method`` decides which adapter is
            attached.
        window: side of the windows that ``scores`` looks by, in pixels; ``settings.window`` wins over it.
        head: options of ``CostVolumeHead``.
    """

    def __init__(
        self,
        encoder: Any,
        settings: OpenVocabSettings | None = None,
        *,
        window: int | None = None,
        head: Mapping[str, Any] | None = None,
    ):
        if encoder.pixels is None:
            raise UserError(f"{encoder.name} reads text alone; to segment pictures load a CLIP")
        super().__init__(encoder)
        self.settings = settings or OpenVocabSettings()
        self.tower = dense_tower(encoder, self.settings.blocks or None)
        self.window = self.settings.window or window or encoder.pixels.size
        for name, side in (("window", self.window), ("eval_size", self.settings.eval_size)):
            if side is not None and side % self.tower.patch:
                raise UserError(f"{name} {side} must be a multiple of the patch of {encoder.name}, {self.tower.patch}")
        self.handle = attach_method(encoder, self.settings.method, self.settings.adapter)
        for parameter in self.tuned_parameters():
            parameter._lr_scale = self.settings.adapter_lr  # type: ignore[attr-defined]
        options = {"gain": float(encoder.logit_scale.detach())} | _checked(head or {})
        with as_user_error("model.head"):
            self.head = CostVolumeHead(self.tower.width, self.tower.block_width, **options)
        self.save_trained_alone()

    def forward(self, pixels: Tensor, classes: Sequence[str] | None = None, text: Tensor | None = None) -> Tensor:
        """Logits (B, T, H, W) of pictures (B, 3, H, W), normalised as the encoder wants them.

        The classes are given by name, or as ``text``: their embeddings (T, d) from ``text_features``.
        """
        if (classes is None) == (text is None):
            raise UserError("a segmenter by names needs classes (or text, their embeddings), one of the two")
        words = self.text_features(classes) if classes is not None else text
        seen = self.tower(pixels)
        logits = self.head(seen.features, words, seen.blocks)
        return F.interpolate(logits.float(), size=pixels.shape[-2:], mode="bilinear", align_corners=False)

    def text_features(self, classes: Sequence[str]) -> Tensor:
        """(T, d): embeddings of the classes' sentences, not normalised; for many pictures ask once, and give ``text``.

        Nothing is kept: the text tower is asked as it is now.
        """
        return self.encoder.encode_text(self.settings.prompts(classes))

    @torch.no_grad()
    def scores(self, pixels: Tensor, classes: Sequence[str] | None = None, text: Tensor | None = None) -> Tensor:
        """Probabilities (B, T, H, W) by windows and one look at the whole (``sliding_scores``)."""
        words, settings = self.text_features(classes) if classes is not None else text, self.settings
        window = min(self.window, *pixels.shape[-2:])
        options: dict[str, Any] = {"overlap": settings.overlap, "global_view": settings.global_view}
        return sliding_scores(lambda views: self(views, text=words), pixels, window, **options)

    @torch.no_grad()
    def zero_shot(self, pixels: Tensor, text: Tensor) -> Tensor:
        """Cosines (B, T, H, W) of patches and classes (T, d) alone, without the head: the untrained baseline."""
        volume = cosine_volume(self.tower(pixels).features, text).mean(2)
        return F.interpolate(volume, size=pixels.shape[-2:], mode="bilinear", align_corners=False)


def _checked(head: Mapping[str, Any]) -> dict[str, Any]:
    names = [
        name
        for name, parameter in inspect.signature(CostVolumeHead).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "num_prompts"  # one sentence per class here
    ]
    require_known("unknown key model.head.{}", head, names)
    return dict(head)


def window_starts(length: int, window: int, overlap: float = 1 / 3) -> list[int]:
    """Where windows begin along an axis: neighbours share at least ``overlap`` of a window, the last ends at the end.

    They are as few as that allows and spread evenly: 640 pixels and windows of 384 with a third shared give 0 and 256.
    """
    if not 0 <= overlap < 1:
        raise ValueError(f"overlap must be from 0 to below 1, got {overlap:g}")
    if window < 1 or length < window:
        raise ValueError(f"window must be from 1 to the {length} pixels of the picture, got {window}")
    if length == window:
        return [0]
    # A hair above one third is one third: 256 of 384 pixels must not become three windows by rounding.
    stride = max(1, round(window * (1 - overlap)))
    steps = -(-(length - window) // stride)
    return [round(i * (length - window) / steps) for i in range(steps + 1)]


def sliding_scores(
    predict: Callable[[Tensor], Tensor],
    pictures: Tensor,
    window: int,
    overlap: float = 1 / 3,
    *,
    global_view: bool = True,
    batch_size: int = 8,
) -> Tensor:
    """Probabilities of classes for pictures of any size: (B, 3, H, W) -> (B, T, H, W), float32.

    Each window is predicted alone; where several cover a pixel their probabilities (sigmoids, not logits) are averaged.
    The whole picture, shrunk to one window, counts as much as all windows together. A picture of exactly one window is
    looked at once.

    Args:
        predict: (n, 3, window, window) -> logits (n, T, window, window).
    """
    height, width = pictures.shape[-2:]
    if (height, width) == (window, window):
        return predict(pictures).float().sigmoid()
    places = [(y, x) for y in window_starts(height, window, overlap) for x in window_starts(width, window, overlap)]
    size = pictures.shape[-2:]
    maps = []
    for picture in pictures:
        views = [picture[:, y : y + window, x : x + window] for y, x in places]
        if global_view:
            whole = F.interpolate(picture[None], (window, window), mode="bilinear", align_corners=False, antialias=True)
            views.append(whole[0])
        batches = (torch.stack(views[i : i + batch_size]) for i in range(0, len(views), batch_size))
        scores = torch.cat([predict(batch).float().sigmoid() for batch in batches])
        total, count = scores.new_zeros(scores.shape[1], *size), scores.new_zeros(size)
        for (y, x), score in zip(places, scores, strict=False):
            total[:, y : y + window, x : x + window] += score
            count[y : y + window, x : x + window] += 1
        mean = total / count
        if global_view:
            seen_whole = F.interpolate(scores[-1:], size=size, mode="bilinear", align_corners=False)[0]
            mean = (mean + seen_whole) / 2
        maps.append(mean)
    return torch.stack(maps)
