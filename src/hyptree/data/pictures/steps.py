"""Single steps of the room's ``transforms.py``: each takes and gives the parts of a sample that move, as a dict.

The parts are torchvision's own tensor types, so that its functions know a picture from a mask from boxes. Random steps
draw from the global generators, as torchvision and timm do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyptree.data.sample import IGNORE, Sample
from hyptree.errors import UserError

# What a task looks at; the rest of a sample is dropped before it costs time.
FIELDS: dict[str, tuple[str, ...]] = {
    "classify": (),
    "segment": ("semantic", "parts"),
    "detect": ("boxes", "box_labels", "masks", "crowd"),
}


def wrap(sample: Sample, task: str) -> dict[str, Any]:
    """The parts of a sample that move, as torchvision's own tensor types."""
    from torchvision import tv_tensors

    height, width = sample.image.shape[-2:]
    parts: dict[str, Any] = {"image": tv_tensors.Image(sample.image)}
    for name in ("semantic", "parts"):
        if name in FIELDS[task] and (value := getattr(sample, name)) is not None:
            parts[name] = tv_tensors.Mask(value)
    if task == "detect" and sample.boxes is not None:
        parts["boxes"] = tv_tensors.BoundingBoxes(sample.boxes, format="XYXY", canvas_size=(height, width))
        if sample.masks is not None:
            parts["masks"] = tv_tensors.Mask(sample.masks.to(torch.uint8))
    return parts


def instances(parts: dict[str, Any], sample: Sample) -> dict[str, Tensor]:
    """Boxes, labels, masks and crowd marks as plain tensors."""
    moved = {"boxes": parts["boxes"].as_subclass(Tensor)}
    if "masks" in parts:
        # Where a step padded a mask it says IGNORE, which is not part of the object.
        moved["masks"] = parts["masks"].as_subclass(Tensor) == 1
    for name in ("box_labels", "crowd"):
        if (value := getattr(sample, name)) is not None:
            moved[name] = value
    return moved


def visible(instances: dict[str, Tensor], shape: Sequence[int]) -> dict[str, Tensor]:
    """The instances of which at least a pixel is still in the picture, with boxes cut to it."""
    from torchvision.ops import masks_to_boxes

    height, width = shape
    if "masks" in instances:
        seen = instances["masks"].any((1, 2))
        instances = {name: value[seen] for name, value in instances.items()}
        around = masks_to_boxes(instances["masks"])  # its right and lower ends are the last pixels inside
        instances["boxes"] = around + torch.tensor([0.0, 0.0, 1.0, 1.0])
    boxes = instances["boxes"].clone()
    boxes[:, 0::2] = boxes[:, 0::2].clamp(0, width)
    boxes[:, 1::2] = boxes[:, 1::2].clamp(0, height)
    keep = (boxes[:, 2] - boxes[:, 0] >= 1) & (boxes[:, 3] - boxes[:, 1] >= 1)
    return {name: value[keep] for name, value in (instances | {"boxes": boxes}).items()}


def _resize(parts: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """Resizes all parts. Masks take the source pixel under the centre of the new one.

    torchvision would take the pixel under its corner, half a pixel off from where the picture goes.
    """
    from torchvision import tv_tensors
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    if list(parts["image"].shape[-2:]) == [height, width]:
        return parts
    resized = {}
    for name, value in parts.items():
        if isinstance(value, tv_tensors.Mask):
            layers = value.as_subclass(Tensor).reshape(-1, 1, *value.shape[-2:])  # (N, 1, H, W)
            if len(layers):
                layers = F.resize_image(layers, [height, width], InterpolationMode.NEAREST_EXACT)
            resized[name] = tv_tensors.Mask(layers.reshape(*value.shape[:-2], height, width))
        else:
            resized[name] = F.resize(value, [height, width], InterpolationMode.BICUBIC)
    return resized


class Fit:
    """Resizes the longer side to ``size`` and, on request, pads to a square: with a colour, label maps with IGNORE."""

    def __init__(self, size: int, fill: tuple[int, ...], square: bool):
        self.size, self.fill, self.square = size, fill, square

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        from torchvision.transforms.v2 import functional as F

        parts = _scale(parts, self.size)
        height, width = parts["image"].shape[-2:]
        if not self.square or (height, width) == (self.size, self.size):
            return parts
        beyond, colour = [0, 0, self.size - width, self.size - height], list(self.fill)  # left, top, right, bottom
        return {name: F.pad(v, beyond, fill=colour if name == "image" else IGNORE) for name, v in parts.items()}


class Zoom:
    """Resizes the longer side to ``size`` times a random factor."""

    def __init__(self, size: int, factors: tuple[float, float]):
        self.size, self.factors = size, factors

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        return _scale(parts, self.size * torch.empty(1).uniform_(*self.factors).item())


class ResizedCrop:
    """A random part of the picture, as torchvision's RandomResizedCrop chooses it, resized to a square."""

    def __init__(self, size: int, scale: tuple[float, float], ratio: tuple[float, float]):
        from torchvision.transforms import v2

        self.size, self.choice = size, v2.RandomResizedCrop(size, scale, ratio)

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        from torchvision.transforms.v2 import functional as F

        where = self.choice.make_params([parts["image"]])
        box = [where[name] for name in ("top", "left", "height", "width")]
        return _resize({name: F.crop(value, *box) for name, value in parts.items()}, self.size, self.size)


def _scale(parts: dict[str, Any], longer_side: float) -> dict[str, Any]:
    """Resizes all parts so that the longer side gets this long, the shape kept."""
    height, width = parts["image"].shape[-2:]
    zoom = longer_side / max(height, width)
    return _resize(parts, max(1, round(height * zoom)), max(1, round(width * zoom)))


class Shift:
    """Moves everything by up to ``pixels`` each way; what comes in is the fill colour, for label maps IGNORE."""

    def __init__(self, pixels: int, fill: tuple[int, ...]):
        self.pixels, self.fill = pixels, torch.tensor(fill, dtype=torch.uint8)[:, None, None]

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        from torchvision import tv_tensors

        dy, dx = torch.randint(-self.pixels, self.pixels + 1, (2,)).tolist()
        moved = {}
        for name, value in parts.items():
            if isinstance(value, tv_tensors.BoundingBoxes):
                moved[name] = tv_tensors.wrap(value.as_subclass(Tensor) + torch.tensor([dx, dy, dx, dy]), like=value)
            else:
                moved[name] = tv_tensors.wrap(self._moved(value.as_subclass(Tensor), dy, dx, name), like=value)
        return moved

    def _moved(self, value: Tensor, dy: int, dx: int, name: str) -> Tensor:
        height, width = value.shape[-2:]
        out = self.fill.expand_as(value).clone() if name == "image" else torch.full_like(value, IGNORE)
        if abs(dy) < height and abs(dx) < width:
            out[..., max(dy, 0) : height + min(dy, 0), max(dx, 0) : width + min(dx, 0)] = value[
                ..., max(-dy, 0) : height + min(-dy, 0), max(-dx, 0) : width + min(-dx, 0)
            ]
        return out


class Unless:
    """Some steps, left out where the picture has the wanted size anyway: even doing nothing takes them a while."""

    def __init__(self, size: int, *steps: Any):
        self.size, self.steps = size, steps

    def __call__(self, parts: dict[str, Any]) -> dict[str, Any]:
        if parts["image"].shape[-2:] != (self.size, self.size):
            for step in self.steps:
                parts = step(parts)
        return parts


class RandAugment:
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
