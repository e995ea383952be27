"""Augmentation and normalisation of samples, by torchvision's v2 transforms and timm.

The picture, its label maps, boxes and instance masks move together. ``train_transform`` draws from the global random
generators, as the libraries below it do; the loader seeds them per sample (``hyptree.data.seeding``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hyptree.data.pictures.steps import (
    FIELDS,
    Fit,
    RandAugment,
    ResizedCrop,
    Shift,
    Unless,
    Zoom,
    instances,
    random_erasing,
    visible,
    wrap,
)
from hyptree.data.sample import IGNORE, Sample
from hyptree.data.seeding import seeded
from hyptree.data.settings import IMAGENET_MEAN, IMAGENET_STD, AugmentSettings
from hyptree.errors import UserError

TaskName = Literal["classify", "segment", "detect"]


def train_transform(
    augment: AugmentSettings,
    size: int,
    task: TaskName = "classify",
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Transform:
    """Augments a sample and gives its picture as (3, size, size) normalised floats.

    For detection without ``scale_jitter`` the picture keeps its shape, its longer side is ``size``.
    """
    return Transform(size, task, mean, std, augment=augment)


def eval_transform(
    size: int,
    task: TaskName = "classify",
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    crop_pct: float = 1.0,
) -> Transform:
    """Brings a sample to ``size`` without any chance: the centre crop to classify, the whole picture else.

    To segment, the picture is padded below and on the right to a square; padded pixels are ``IGNORE``.
    """
    return Transform(size, task, mean, std, crop_pct=crop_pct)


class Transform:
    """Sample -> Sample with float32 picture, normalised; see ``train_transform`` and ``eval_transform``.

    A box that a crop leaves with less than a pixel is dropped together with its label, mask and crowd mark; boxes of
    instances with masks are taken from what is left of the mask. Can be pickled.
    """

    def __init__(
        self,
        size: int,
        task: TaskName,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        augment: AugmentSettings | None = None,
        crop_pct: float = 1.0,
    ):
        if task not in FIELDS:
            raise ValueError(f"task must be one of {', '.join(FIELDS)}, got {task!r}")
        if augment is not None and task != "classify" and augment.rand_augment:
            raise UserError(
                f"rand_augment moves the picture without its masks, so it cannot be used to {task}; use colour_jitter"
            )
        self.size, self.task, self.augment, self.crop_pct = size, task, augment, crop_pct
        self.mean, self.std = tuple(mean), tuple(std)
        self.fill = tuple(round(255 * value) for value in mean)
        self.scale = (torch.tensor(std) * 255).reciprocal()[:, None, None]
        self.shift = (-torch.tensor(mean) / torch.tensor(std))[:, None, None]
        self._steps = self._all_steps()
        self._erase = random_erasing(augment.erasing) if augment is not None and augment.erasing else None

    def __call__(self, sample: Sample) -> Sample:
        parts = wrap(sample, self.task)
        for step in self._steps:
            parts = step(parts)
        image = self.normalise(parts.pop("image").as_subclass(Tensor))
        if self._erase is not None:
            image = self._erase(image)
        for name in ("semantic", "parts"):
            if name in parts:
                parts[name] = parts[name].as_subclass(Tensor)
        if "boxes" in parts:
            parts |= instances(parts, sample)
            if self.augment is not None:
                parts |= visible(parts, image.shape[-2:])
        unused = {name: None for fields in FIELDS.values() for name in fields}
        return dataclasses.replace(sample, image=image, **(unused | parts))

    def normalise(self, image: Tensor) -> Tensor:
        """(..., 3, H, W) uint8 -> float32 with the mean subtracted, divided by the standard deviation."""
        return image.float().mul_(self.scale).add_(self.shift)

    def _all_steps(self) -> list[Any]:
        """What happens to a sample before it is normalised: geometry first, then colours."""
        from torchvision import tv_tensors
        from torchvision.transforms import InterpolationMode, v2

        augment, size, bicubic = self.augment, self.size, InterpolationMode.BICUBIC
        steps: list[Any]
        if augment is None:
            if self.task == "classify":
                steps = [v2.Resize(round(size / self.crop_pct), bicubic), v2.CenterCrop(size)]
                return [Unless(size, *steps)] if self.crop_pct == 1 else steps
            fit = Fit(size, self.fill, square=self.task == "segment")
            return [fit]
        if augment.crop_scale is not None:
            steps = [ResizedCrop(size, augment.crop_scale, augment.crop_ratio)]
        elif self.task == "classify":
            steps = [Unless(size, v2.Resize(size, bicubic), v2.RandomCrop(size))]
        elif augment.scale_jitter is not None:
            fill = {tv_tensors.Image: self.fill, tv_tensors.Mask: IGNORE, "others": 0}
            steps = [Zoom(size, augment.scale_jitter), v2.RandomCrop(size, pad_if_needed=True, fill=fill)]
        else:
            steps = [Fit(size, self.fill, square=self.task == "segment")]
        if augment.translate:
            steps.append(Shift(augment.translate, self.fill))
        if augment.flip:
            steps.append(v2.RandomHorizontalFlip(augment.flip))
        if augment.colour_jitter:
            strength = augment.colour_jitter
            steps.append(v2.ColorJitter(brightness=strength, contrast=strength, saturation=strength))
        if augment.rand_augment:
            steps.append(RandAugment(augment.rand_augment, self.size, self.fill))
        return steps


class Mixer:
    """Mixup and CutMix of a batch by timm: ``mixer(images, labels, step)`` -> images, (B, num_classes) targets.

    What happens depends on (seed, step) alone; the global generators go on as if nothing had happened. The pictures
    are changed in place. The batch must be even.
    """

    def __init__(self, augment: AugmentSettings, num_classes: int, *, smoothing: float = 0.0, seed: int = 0):
        from timm.data import Mixup

        self.seed = seed
        self._mixup = Mixup(
            mixup_alpha=augment.mixup,
            cutmix_alpha=augment.cutmix,
            prob=augment.mix_prob,
            label_smoothing=smoothing,
            num_classes=num_classes,
        )

    def __call__(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        with seeded(self.seed, step, 0x4D4958):  # a stream of its own: not the one of any sample
            return self._mixup(images, labels)
