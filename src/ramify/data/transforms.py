"""Augmentation and normalisation of samples, by torchvision's v2 transforms and timm.

The picture, its label maps, boxes and instance masks move together. ``train_transform`` draws from the global random
generators, as the libraries below it do; the loader seeds them per sample (``ramify.data.seeding``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ramify.data.sample import IGNORE, Sample
from ramify.data.seeding import seeded
from ramify.data.settings import IMAGENET_MEAN, IMAGENET_STD, AugmentSettings
from ramify.errors import UserError

TaskName = Literal["classify", "segment", "detect"]

# What a task looks at; the rest of a sample is dropped before it costs time.
_FIELDS: dict[str, tuple[str, ...]] = {
    "classify": (),
    "segment": ("semantic", "parts"),
    "detect": ("boxes", "box_labels", "masks", "crowd"),
}


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
        if task not in _FIELDS:
            raise ValueError(f"task must be one of {', '.join(_FIELDS)}, got {task!r}")
        if augment is not None and task != "classify" and augment.rand_augment:
            raise UserError(
                f"rand_augment moves the picture without its masks, so it cannot be used to {task}; use colour_jitter"
            )
        self.size, self.task, self.augment, self.crop_pct = size, task, augment, crop_pct
        self.mean, self.std = tuple(mean), tuple(std)
        self.fill = tuple(round(255 * value) for value in mean)
        self._scale = (torch.tensor(std) * 255).reciprocal()[:, None, None]
        self._shift = (-torch.tensor(mean) / torch.tensor(std))[:, None, None]
        self._steps = self._geometry() + self._colours()
        self._erase = random_erasing(augment.erasing) if augment is not None and augment.erasing else None

    def __call__(self, sample: Sample) -> Sample:
        parts = self._run(_wrap(sample, self.task))
        image = self.normalise(parts.pop("image").as_subclass(Tensor))
        if self._erase is not None:
            image = self._erase(image)
        for name in ("semantic", "parts"):
            if name in parts:
                parts[name] = parts[name].as_subclass(Tensor)
        if "boxes" in parts:
            parts |= _instances(parts, sample)
            if self.augment is not None:
                parts |= _visible(parts, image.shape[-2:])
        unused = {name: None for fields in _FIELDS.values() for name in fields}
        return dataclasses.replace(sample, image=image, **(unused | parts))

    def normalise(self, image: Tensor) -> Tensor:
        """(..., 3, H, W) uint8 -> float32 with the mean subtracted, divided by the standard deviation."""
        return image.float().mul_(self._scale).add_(self._shift)

    @property
    def is_simple(self) -> bool:
        """Whether only flips, shifts and erasing happen, so that whole arrays can be augmented at once."""
        a = self.augment
        if self.task != "classify":
            return False
        return a is None or not (a.crop_scale or a.rand_augment or a.colour_jitter)

    def _run(self, parts: dict[str, Any]) -> dict[str, Any]:
        for step in self._steps:
            parts = step(parts)
        return parts

    def _geometry(self) -> list[Any]:
        from torchvision.transforms import InterpolationMode, v2

        augment, size, bicubic = self.augment, self.size, InterpolationMode.BICUBIC
        if augment is None:
            if self.task == "classify":
                return [v2.Resize(round(size / self.crop_pct), bicubic), v2.CenterCrop(size)]
            fit = _Fit(size, self.fill, square=self.task == "segment")
            return [fit]
        steps: list[Any]
        if augment.crop_scale is not None:
            steps = [v2.RandomResizedCrop(size, augment.crop_scale, augment.crop_ratio, bicubic)]
        elif self.task == "classify":
            steps = [v2.Resize(size, bicubic), v2.RandomCrop(size)]
        elif augment.scale_jitter is not None:
            steps = [v2.ScaleJitter((size, size), augment.scale_jitter), self._crop(pad_if_needed=True)]
        else:
            steps = [_Fit(size, self.fill, square=self.task == "segment")]
        if augment.translate:
            steps.append(_Shift(augment.translate, self.fill))
        if augment.flip:
            steps.append(v2.RandomHorizontalFlip(augment.flip))
        return steps

    def _crop(self, **options: Any) -> Any:
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        return v2.RandomCrop(
            self.size, fill={tv_tensors.Image: self.fill, tv_tensors.Mask: IGNORE, "others": 0}, **options
        )

    def _colours(self) -> list[Any]:
        from torchvision.transforms import v2

        augment = self.augment
        if augment is None:
            return []
        steps: list[Any] = []
        if augment.colour_jitter:
            strength = augment.colour_jitter
            steps.append(v2.ColorJitter(brightness=strength, contrast=strength, saturation=strength))
        if augment.rand_augment:
            steps.append(_RandAugment(augment.rand_augment, self.size, self.fill))
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


# ----------------------------------------------------------------------------------------------------- single steps


def _wrap(sample: Sample, task: str) -> dict[str, Any]:
    """The parts of a sample that move, as torchvision's own tensor types."""
    from torchvision import tv_tensors

    height, width = sample.image.shape[-2:]
    parts: dict[str, Any] = {"image": tv_tensors.Image(sample.image)}
    for name in ("semantic", "parts"):
        if name in _FIELDS[task] and (value := getattr(sample, name)) is not None:
            parts[name] = tv_tensors.Mask(value)
    if task == "detect" and sample.boxes is not None:
        parts["boxes"] = tv_tensors.BoundingBoxes(sample.boxes, format="XYXY", canvas_size=(height, width))
        if sample.masks is not None:
            parts["masks"] = tv_tensors.Mask(sample.masks.to(torch.uint8))
    return parts


def _instances(parts: dict[str, Any], sample: Sample) -> dict[str, Tensor]:
    """Boxes, labels, masks and crowd marks as plain tensors."""
    found = {"boxes": parts["boxes"].as_subclass(Tensor)}
    if "masks" in parts:
        # Where a step padded a mask it says IGNORE, which is not part of the object.
        found["masks"] = parts["masks"].as_subclass(Tensor) == 1
    for name in ("box_labels", "crowd"):
        if (value := getattr(sample, name)) is not None:
            found[name] = value
    return found


def _visible(found: dict[str, Tensor], shape: Sequence[int]) -> dict[str, Tensor]:
    """The instances of which at least a pixel is still in the picture, with boxes cut to it."""
    height, width = shape
    boxes = found["boxes"].clone()
    if "masks" in found:
        boxes = _boxes_around(found["masks"])
    boxes[:, 0::2] = boxes[:, 0::2].clamp(0, width)
    boxes[:, 1::2] = boxes[:, 1::2].clamp(0, height)
    keep = (boxes[:, 2] - boxes[:, 0] >= 1) & (boxes[:, 3] - boxes[:, 1] >= 1)
    return {name: value[keep] for name, value in (found | {"boxes": boxes}).items()}


def _boxes_around(masks: Tensor) -> Tensor:
    """(N, H, W) bool -> (N, 4) float32 boxes that just hold the pixels; an empty mask gives an empty box."""
    if masks.shape[0] == 0:
        return torch.zeros(0, 4)

    def ends(present: Tensor) -> list[Tensor]:
        """(N, L) bool -> index of the first True and one past the last, both 0 where there is none."""
        first = present.int().argmax(1)
        last = present.shape[1] - present.flip(1).int().argmax(1)
        return [first, torch.where(present.any(1), last, first)]

    (x1, x2), (y1, y2) = ends(masks.any(1)), ends(masks.any(2))
    return torch.stack([x1, y1, x2, y2], 1).float()


def _pad(parts: dict[str, Any], padding: list[int], fill: tuple[int, ...]) -> dict[str, Any]:
    """Pads all parts by (left, top, right, bottom): the picture with a colour, label maps and masks with IGNORE."""
    from torchvision.transforms.v2 import functional as F

    return {
        name: F.pad(value, padding, fill=list(fill) if name == "image" else IGNORE) for name, value in parts.items()
    }


class _Fit:
    """Resizes the longer side to ``size`` and, on request, pads to a square."""

    def __init__(self, size: int, fill: tuple[int, ...], square: bool):
        self.size, self.fill, self.square = size, fill, square

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        from torchvision.transforms.v2 import functional as F

        height, width = parts["image"].shape[-2:]
        zoom = self.size / max(height, width)
        new = [max(1, round(height * zoom)), max(1, round(width * zoom))]
        if new != [height, width]:
            parts = {name: F.resize(value, new) for name, value in parts.items()}
        if self.square and new != [self.size, self.size]:
            parts = _pad(parts, [0, 0, self.size - new[1], self.size - new[0]], self.fill)
        return parts


class _Shift:
    """Moves everything by up to ``pixels`` each way: pads, then crops back to the size it had."""

    def __init__(self, pixels: int, fill: tuple[int, ...]):
        self.pixels, self.fill = pixels, fill

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        from torchvision.transforms.v2 import functional as F

        height, width = parts["image"].shape[-2:]
        top, left = torch.randint(0, 2 * self.pixels + 1, (2,)).tolist()
        padded = _pad(parts, [self.pixels] * 4, self.fill)
        return {name: F.crop(value, top, left, height, width) for name, value in padded.items()}


class _RandAugment:
    """timm's RandAugment, which works on PIL pictures."""

    def __init__(self, config: str, size: int, fill: tuple[int, ...]):
        from timm.data.auto_augment import rand_augment_transform

        try:
            self.augment = rand_augment_transform(config, {"translate_const": int(size * 0.45), "img_mean": fill})
        except (AssertionError, ValueError, KeyError) as error:
            raise UserError(f"rand_augment {config!r} is not one that timm understands: {error}") from error
        for op in self.augment.ops:
            if op.name.startswith("Posterize"):
                op.level_fn = _AtLeastOneBit(op.level_fn)

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional as F

        picture = self.augment(F.to_pil_image(parts["image"]))
        return parts | {"image": tv_tensors.Image(F.pil_to_tensor(picture))}


class _AtLeastOneBit:
    """Bits that posterising keeps: strong levels reach 0, a black picture, which newer Pillow refuses."""

    def __init__(self, level: Any):
        self.level = level

    def __call__(self, magnitude: float, hparams: dict[str, Any]) -> tuple[int]:
        return (max(1, self.level(magnitude, hparams)[0]),)


def random_erasing(probability: float) -> Any:
    """timm's random erasing: with this probability a rectangle of a (3, H, W) picture becomes noise, in place."""
    from timm.data.random_erasing import RandomErasing

    return RandomErasing(probability, mode="pixel", device="cpu")
