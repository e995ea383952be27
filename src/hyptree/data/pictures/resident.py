"""Batches of pictures that live on the device of the model: decoded once, augmented there, whole batches at once.

For small training sets, where decoding and augmenting picture by picture is slower than the model. Order, resuming and
sharing by several processes are those of every loader (``hyptree.data.plan``); chance is a function of (seed, epoch,
index). It is drawn on the CPU, 26 numbers a picture: 96 bytes per picture travel to the device, not its pixels.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.data.pictures.array_loader import draw_moves, kept_arrays
from hyptree.data.pictures.resample import ShareTable, resample, resize_shares
from hyptree.data.pictures.transforms import Transform
from hyptree.data.plan import Loader, Plan
from hyptree.data.sample import BadSample, PictureDataset, Sample, by
from hyptree.data.seeding import mix_bits, uniforms
from hyptree.data.settings import AugmentSettings
from hyptree.errors import UserError

_THREADS = 4
"""Decoding small pictures holds Python's lock most of the time; large ones gain from a few threads."""
_CHUNK = 512
_MAX_TABLE = 2**28
"""Bytes of tables of shares for crops; larger pictures have theirs computed for each batch."""
_TRIES = 10
"""Crops that are drawn before the whole picture is taken, as in torchvision."""


@dataclass(frozen=True)
class ResidentPictures:
    """All pictures of a split on a device."""

    images: Tensor
    """(n, H, 3, W) uint8; the colours lie between the axes, see ``resample``."""
    labels: Tensor
    """(n,) int64, -1 for none."""
    bad: dict[int, tuple[str, str]]
    """Pictures that cannot be read, their names and why; their pixels are 0."""


def load_resident(dataset: PictureDataset, device: torch.device, strict: bool = False) -> ResidentPictures:
    """The pictures of a dataset on the device.

    Raises:
        UserError: they differ in size, do not fit, or (most of them, with ``strict`` any) cannot be read.
    """
    images, labels, bad = _read_all(dataset, device)
    if bad:
        name, why = next(iter(bad.values()))
        if strict:
            raise UserError(f"cannot read picture {name}: {why}; repair it or switch strict off")
        if len(bad) * 2 > len(dataset):
            raise UserError(f"{len(bad)} of {len(dataset)} pictures cannot be read, e.g. {name}: {why}; check the data")
    there = torch.from_numpy(images).transpose(1, 2).contiguous().to(device)  # (n, H, 3, W)
    return ResidentPictures(there, torch.from_numpy(labels).to(device), bad)


class ResidentLoader(Loader):
    """Batches of pictures on the device: random crops, flips and shifts, or the centre crop of an evaluation.

    Args:
        transform: what ``Transform`` would do to each picture; says size, colours and augmentation.
        pack: makes the batch from (B, 3, S, S) float32 pictures and (B,) int64 labels.
    """

    def __init__(
        self,
        plan: Plan,
        pictures: ResidentPictures,
        transform: Transform,
        pack: Callable[[Tensor, Tensor], Any],
        channels_last: bool = False,
    ):
        super().__init__(plan)
        require_simple(transform)
        self.pictures, self.transform, self.pack = pictures, transform, pack
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        device = pictures.images.device
        self._scale, self._shift = (value[:, :, 0].to(device) for value in (transform.scale, transform.shift))  # (3, 1)
        self._fill = torch.tensor(transform.fill, dtype=torch.float32, device=device)[:, None]  # (3, 1)
        self._pixels = torch.arange(transform.size, device=device)
        self._tables: list[ShareTable] = []
        augment, size = transform.augment, transform.size
        only_crops = augment is not None and augment.crop_scale is not None and not augment.translate
        if only_crops and sum(ShareTable.bytes(source, size) for source in self.shape) <= _MAX_TABLE:
            self._tables = [ShareTable(source, size, device) for source in self.shape]
        self._centre: tuple[Tensor, Tensor] | None = None
        if transform.augment is None:  # all pictures alike
            window = torch.tensor(centre_window(self.shape, transform.size, transform.crop_pct), device=device)
            self._centre = self._shares(0, self._pixels[None], window), self._shares(1, self._pixels[None], window)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the pictures as they are held."""
        return self.pictures.images.shape[1], self.pictures.images.shape[3]

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        for indices in self.plan.batches(epoch, self.start_batch):
            indices = self._readable(indices, epoch)
            if len(indices):
                yield self.pack(*self._batch(indices, epoch))

    @torch.no_grad()
    def _batch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        """(B, 3, S, S) pictures, augmented and normalised, and their labels."""
        augment, size = self.transform.augment, self.transform.size
        if augment is None:
            assert self._centre is not None
            index = self._send(indices)
            images = resample(self.pictures.images[index], *self._centre)
        else:
            chance = uniforms(self.plan.seed, epoch, indices, 4 + 2 * _TRIES + 2)
            windows = draw_windows(augment, self.shape, size, chance[:, 4:])
            flip, shift = draw_moves(augment, chance)
            sent = self._send(np.concatenate([indices[:, None], windows, flip[:, None], shift], 1))
            index, where, flipped, moved = sent[:, 0], sent[:, 1:9], sent[:, 9], sent[:, 10:12]
            if self._tables:
                down, across = self._tables
                shares = down(where[:, 0], where[:, 1]), across(where[:, 4], where[:, 5], flipped)
                images = resample(self.pictures.images[index], *shares)
            else:
                images = self._move(index, where, flipped, moved)
        images = images.mul_(self._scale).add_(self._shift).transpose(1, 2)  # (B, 3, S, S)
        return images.contiguous(memory_format=self.memory_format), self.pictures.labels[index]

    def _move(self, index: Tensor, windows: Tensor, flipped: Tensor, moved: Tensor) -> Tensor:
        """(B, S, 3, S) pictures: each its part, resized, then flipped, then shifted."""
        size = self.transform.size
        down = self._pixels - moved[:, :1]  # (B, S), the place of each pixel before the shift
        across = self._pixels - moved[:, 1:]
        mirrored = torch.where(flipped[:, None] > 0, size - 1 - across, across)
        images = resample(
            self.pictures.images[index],
            self._shares(0, down.clamp(0, size - 1), windows),
            self._shares(1, mirrored.clamp(0, size - 1), windows),
        )
        inside = [(place >= 0) & (place < size) for place in (down, across)]
        return torch.where(inside[0][:, :, None, None] & inside[1][:, None, None], images, self._fill)

    def _shares(self, axis: int, place: Tensor, windows: Tensor) -> Tensor:
        start, length, resized, first = windows[:, 4 * axis : 4 * axis + 4].unbind(1)
        return resize_shares(self.shape[axis], place + first[:, None], start, length, resized)

    def _send(self, numbers: np.ndarray) -> Tensor:
        there, device = torch.from_numpy(numbers), self.pictures.images.device
        if device.type == "cuda":  # from ordinary memory the copy would wait for the step before it
            there = there.pin_memory()
        return there.to(device, non_blocking=True)

    def _readable(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        """The batch without bad pictures: training puts others in their place, by the rule of ``SampleLoader``."""
        bad = self.pictures.bad
        if not bad:
            return indices
        kept = []
        for index in indices.tolist():
            for attempt in itertools.count():
                if index not in bad:
                    kept.append(index)
                    break
                name, why = bad[index]
                self.skipped[name] = why
                if not self.plan.train:
                    break
                index = mix_bits(self.plan.seed, epoch, index, attempt) % self.plan.num_samples
        return np.array(kept, np.int64)


# -------------------------------------------------------------------------------------------------------------- chance
# A window is eight whole numbers, four for the vertical axis and four for the horizontal one: where the part of the
# picture starts, how long it is, how long it gets, and which of its new pixels is the first that is wanted.


def draw_windows(augment: AugmentSettings, shape: tuple[int, int], size: int, chance: np.ndarray) -> np.ndarray:
    """(B, 8) the random part of each picture that is seen; chance is (B, 22) uniform numbers.

    With ``crop_scale`` as torchvision's RandomResizedCrop draws it: the first of ten areas and shapes that fits, else
    the largest central part of an allowed shape. Without, a random square of the picture resized by its shorter side.
    """
    count = len(chance)
    if augment.crop_scale is None:
        resized = _fit_shorter(shape, size)
        first = [np.floor(chance[:, i] * (resized[i] - size + 1)).astype(np.int64) for i in range(2)]
        axes = [[np.zeros_like(first[i]), shape[i] + 0 * first[i], resized[i] + 0 * first[i], first[i]] for i in (0, 1)]
        return np.stack([*axes[0], *axes[1]], 1)
    height, width = shape
    tries = chance[:, : 2 * _TRIES].reshape(count, _TRIES, 2)
    smallest, largest = augment.crop_scale
    low, high = np.log(augment.crop_ratio)
    area = height * width * (smallest + (largest - smallest) * tries[..., 0])
    ratio = np.exp(low + (high - low) * tries[..., 1])
    wide, tall = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))  # (B, 10)
    fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
    which = fits.argmax(1)[:, None]
    is_any = fits.any(1)
    whole = _largest_part(shape, augment.crop_ratio)
    long = [np.where(is_any, np.take_along_axis(v, which, 1)[:, 0], whole[i]) for i, v in enumerate((tall, wide))]
    start = [
        np.where(is_any, np.floor(chance[:, 2 * _TRIES + i] * (shape[i] - long[i] + 1)), (shape[i] - long[i]) // 2)
        for i in range(2)
    ]
    same, zero = np.full(count, size), np.zeros(count)
    return np.stack([start[0], long[0], same, zero, start[1], long[1], same, zero], 1).astype(np.int64)


def centre_window(shape: tuple[int, int], size: int, crop_pct: float) -> list[list[int]]:
    """(1, 8) the centre crop of an evaluation, as torchvision's Resize and CenterCrop make it."""
    resized = _fit_shorter(shape, round(size / crop_pct))
    return [[v for i in range(2) for v in (0, shape[i], resized[i], round((resized[i] - size) / 2))]]


def _fit_shorter(shape: tuple[int, int], size: int) -> tuple[int, int]:
    """Height and width when the shorter side becomes ``size``."""
    shorter = min(shape)
    return (size if shape[0] == shorter else int(size * shape[0] / shorter)), (
        size if shape[1] == shorter else int(size * shape[1] / shorter)
    )


def _largest_part(shape: tuple[int, int], ratio: tuple[float, float]) -> tuple[int, int]:
    height, width = shape
    if width / height < ratio[0]:
        return round(width / ratio[0]), width
    if width / height > ratio[1]:
        return height, round(height * ratio[1])
    return shape


def require_simple(transform: Transform) -> None:
    """``UserError`` for what is not done on the device."""
    augment = transform.augment
    if transform.task != "classify":
        raise UserError(f"data.resident is for pictures to classify, not to {transform.task}; leave it out")
    for name in ("rand_augment", "colour_jitter", "erasing"):  # what is done picture by picture only
        if augment is not None and getattr(augment, name):
            raise UserError(f"data.augment.{name} is not done on the device; leave it out, or data.resident")


# ------------------------------------------------------------------------------------------------------------- reading


def _read_all(
    dataset: PictureDataset, device: torch.device
) -> tuple[np.ndarray, np.ndarray, dict[int, tuple[str, str]]]:
    """(n, 3, H, W) uint8 pictures, (n,) labels, and what could not be read."""
    count = len(dataset)
    read: Callable[[int], Sample] = getattr(dataset, "read_picture", dataset.__getitem__)
    images: np.ndarray | None = None
    first = ""
    labels = np.full(count, -1, np.int64)
    bad: dict[int, tuple[str, str]] = {}

    def attempt(index: int) -> Sample | BadSample:
        try:
            return read(index)
        except BadSample as error:
            return error

    kept = kept_arrays(dataset)
    if kept is not None:
        require_memory(kept[0].shape, device)
        return *kept, bad
    # The outer one, because the decoder's own are no use in threads: they restore each other's filters.
    with warnings.catch_warnings(), ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, count, _CHUNK):
            chunk = range(start, min(start + _CHUNK, count))
            for index, sample in zip(chunk, pool.map(attempt, chunk), strict=True):
                if isinstance(sample, BadSample):
                    bad[index] = sample.id, sample.why
                    continue
                if images is None:
                    first = sample.id
                    require_memory((count, *sample.image.shape), device)
                    images = np.zeros((count, *sample.image.shape), np.uint8)
                if sample.image.shape != images.shape[1:]:
                    raise UserError(
                        f"data.resident needs pictures of one size: {sample.id} has {by(sample.image.shape)} pixels, "
                        f"{first} {by(images.shape)}; leave data.resident out"
                    )
                images[index] = sample.image.numpy()
                labels[index] = -1 if sample.label is None else sample.label
    return (np.zeros((count, 3, 1, 1), np.uint8) if images is None else images), labels, bad


def require_memory(shape: tuple[int, ...], device: torch.device) -> None:
    """``UserError`` when uint8 pictures of this shape are more than the device has room for."""
    needed, free = int(np.prod(shape, dtype=np.int64)), free_bytes(device)
    if needed > free:
        raise UserError(
            f"data.resident: {shape[0]:,} pictures of {by(shape)} pixels need {needed:,} bytes, "
            f"{device} has {free:,} free; leave data.resident out, or use fewer (data.num_train, data.num_val)"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return int(psutil.virtual_memory().available)
