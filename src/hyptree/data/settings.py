"""Settings of pictures and their augmentation: plain dataclasses, no torch, so that the command line starts fast."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hyptree.checks import require_numbers
from hyptree.errors import UserError, suggest
from hyptree.files import require_path

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass
class AugmentSettings:
    """What may happen to a training picture. The defaults suit small pictures: flips alone."""

    crop_scale: tuple[float, float] | None = None
    """Random resized crop: smallest and largest share of the picture's area, e.g. [0.08, 1.0]. Null switches it off."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Width over height of the random resized crop."""
    scale_jitter: tuple[float, float] | None = None
    """Segmentation and detection: random zoom before a random crop, e.g. [0.5, 2.0]. Null fits the whole picture in."""
    flip: float = 0.5
    """Probability of a left-right flip."""
    translate: int = 0
    """Random shift of up to this many pixels each way; the border is filled with the mean colour."""
    rand_augment: str | None = None
    """timm's RandAugment, e.g. rand-m9-mstd0.5-inc1 (classification only)."""
    colour_jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation."""
    erasing: float = 0.0
    """Probability of a random rectangle of noise (timm's random erasing)."""
    mixup: float = 0.0
    """Alpha of Mixup, 0 switches it off (classification only)."""
    cutmix: float = 0.0
    """Alpha of CutMix, 0 switches it off (classification only)."""
    mix_prob: float = 1.0
    """Probability that a batch is mixed at all."""

    def __post_init__(self) -> None:
        for name in ("flip", "erasing", "mix_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability from 0 to 1, got {getattr(self, name)}")
        for name in ("mixup", "cutmix", "colour_jitter"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be 0 (off) or a positive number, got {value}")
        require_numbers(self, "at least 0", "translate")
        for name in ("crop_scale", "crop_ratio", "scale_jitter"):
            value = getattr(self, name)
            if value is not None and not 0 < value[0] <= value[1]:
                raise ValueError(f"{name} must be two positive numbers, the smaller one first, got {list(value)}")
        if self.crop_scale is not None and self.crop_scale[1] > 1:
            raise ValueError(f"crop_scale is a share of the area, at most 1, got {list(self.crop_scale)}")
        if self.rand_augment is not None and not self.rand_augment.startswith("rand"):
            raise ValueError(f"rand_augment must look like rand-m9-mstd0.5-inc1, got {self.rand_augment!r}")

    @property
    def mixes(self) -> bool:
        """Whether batches are mixed."""
        return self.mix_prob > 0 and (self.mixup > 0 or self.cutmix > 0)


@dataclass
class DataSettings:
    """Which pictures, how many, how large, and how they reach the model."""

    name: Literal["world", "folder", "arrays", "tiny-imagenet", "camvid", "pets", "ade20k", "coco"] = "world"
    """world is built in; the others read root."""
    root: Path | None = None
    """Folder or .npz file of the pictures; the built-in world needs none."""
    size: int = 64
    """Pictures enter the model at size x size pixels."""
    num_train: int | None = None
    """Training pictures to use; by default all (for world: its own default)."""
    num_val: int | None = None
    """Validation pictures to use; by default all (for world: its own default)."""
    num_classes: int | None = None
    """Expected number of classes (of pictures; where these have none, of pixels or boxes). By default what is there."""
    batch_size: int = 128
    """Pictures per training step, over all processes together."""
    eval_batch_size: int | None = None
    """Pictures per evaluation batch, over all processes together; by default batch_size."""
    workers: int = 0
    """Processes that read and augment; 0 reads in the training process."""
    strict: bool = False
    """Stop at the first picture that cannot be read instead of skipping and counting it."""
    cache: bool | Path | None = None
    """Folder that keeps what was rendered (world) or decoded (.npz files) for the next run; true for the usual one.
    By default nothing is kept."""
    resident: bool = False
    """Classification: hold all pictures on the device as uint8 and augment whole batches there, without workers."""
    seed: int = 0
    """Seed of the built-in world, and of the choice when num_train or num_val takes only some pictures."""
    crop_pct: float = 1.0
    """Classification, evaluation: the centre crop's share of the resized picture's side."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Mean of red, green, blue in [0, 1], subtracted."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Standard deviation of red, green, blue, divided by."""
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    """What may happen to a training picture."""

    def __post_init__(self) -> None:
        if self.eval_batch_size is None:
            self.eval_batch_size = self.batch_size
        require_numbers(self, "at least 1", "batch_size", "eval_batch_size", "num_train", "num_val", "num_classes")
        if not 8 <= self.size <= 8192:
            raise ValueError(f"size must be from 8 to 8192 pixels, got {self.size}")
        if self.name != "world" and self.root is None:
            raise ValueError(f"name {self.name} needs root, the folder or file of its pictures")
        require_numbers(self, "at least 0", "workers")
        require_numbers(self, "from 0 to 2^31 - 1", "seed")
        if not 0.5 <= self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be from 0.5 to 1, got {self.crop_pct}")
        if not all(0 <= value <= 1 for value in self.mean):
            raise ValueError(f"mean is given for colours from 0 to 1, got {list(self.mean)}")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std must be positive, got {list(self.std)}")
        if self.augment.translate >= self.size:
            raise ValueError(f"augment.translate must be less than size {self.size}, got {self.augment.translate}")
        if self.augment.mixes and self.batch_size % 2:
            raise ValueError(f"mixup and cutmix need an even batch_size, got {self.batch_size}")


def read_data_flag(text: str, flag: str = "--data") -> tuple[Any, Path | None]:
    """Name and root of ``DataSettings`` from ``world``, a folder, a .npz file or ``NAME:ROOT``, as ``flag`` has it."""
    names = typing.get_args(typing.get_type_hints(DataSettings)["name"])
    name, colon, root = text.partition(":")
    if text == "world":
        return "world", None
    if name == "cifar10":  # an .npz file like others, but people call it by its name
        name = "arrays"
    if colon and name in names and root:
        require_path(Path(root).expanduser())
        return name, Path(root)
    path = Path(text)
    if path.is_dir():
        return "folder", path
    if path.suffix == ".npz" and path.is_file():
        return "arrays", path
    hint = suggest(name, names)
    if text in names:
        hint = f"it needs a folder, e.g. {text}:DIR"
    raise UserError(
        f"{flag} {text}: no such folder or file, nor world, none or NAME:ROOT" + (f"; {hint}" if hint else "")
    )
