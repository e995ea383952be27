"""Batches of pictures that depend neither on the number of workers or processes nor on where a run resumed.

A loader is asked once for the whole run and told the epoch::

    loader = build_loader(dataset, collate, batch_size=128, seed=0, epoch=0, train=True, workers=2, transform=transform)
    for epoch in range(first_epoch, num_epochs):
        loader.set_epoch(epoch, start_batch if epoch == first_epoch else 0)
        for batch in loader: ...
    loader.close()

``batch_size`` counts the pictures of all processes together: process ``rank`` of ``world_size`` gets its share of each
global batch. Training order is a permutation by (seed, epoch), the last incomplete batch is left out. Evaluation keeps
the order and the last batch; when that is smaller than the number of processes, the last ones get one batch less.

A picture that cannot be read is named in ``loader.skipped`` (id -> why). Training puts another one in its place, chosen
by (seed, epoch, index); evaluation leaves it out. With ``strict``, or when most are bad, a ``UserError`` ends it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.data.sample import BadSample, PictureDataset, Sample
from ramify.data.seeding import mix_bits, preserved, reseed, uniforms
from ramify.data.steps import random_erasing
from ramify.data.transforms import Transform
from ramify.errors import UserError

_MAX_TRIES = 32
"""Pictures in a row that may be bad before a place in a batch is given up."""


def build_loader(
    dataset: PictureDataset,
    collate: Callable[[Sequence[Sample]], Any],
    *,
    batch_size: int,
    seed: int,
    epoch: int = 0,
    train: bool,
    workers: int = 0,
    transform: Callable[[Sample], Sample] | None = None,
    start_batch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    strict: bool = False,
    skipped: dict[str, str] | None = None,
    pack: Callable[[Tensor, Tensor], Any] | None = None,
    pin_memory: bool = False,
) -> Loader:
    """The loader of one split, set to ``epoch`` and ``start_batch``.

    Args:
        collate: makes a batch of transformed samples; runs in the workers.
        transform: e.g. from ``ramify.data.transforms``; its chance is seeded by (seed, epoch, index).
        skipped: where to write unreadable pictures, to share one count between loaders; by default a new dict.
        pack: makes the same batch as ``collate`` from (B, 3, S, S) float32 pictures and (B,) int64 labels. When given,
            and the dataset holds its pictures in memory (``images()`` and ``labels()``), and the transform only flips,
            shifts and erases, whole arrays are augmented at once: about ten times the pictures per second.

    Raises:
        UserError: no pictures, fewer than a batch to train on, or a batch that the processes cannot share evenly.
    """
    plan = _Plan(len(dataset), batch_size, seed, train, rank, world_size)
    plan.check()
    loader: Loader | None = None
    if pack is not None and isinstance(transform, Transform) and (arrays := _arrays(dataset, transform)) is not None:
        loader = ArrayLoader(plan, *arrays, transform, pack)
    if loader is None:
        loader = SampleLoader(plan, dataset, collate, transform, workers, strict, pin_memory)
    if skipped is not None:
        loader.skipped = skipped
    loader.set_epoch(epoch, start_batch)
    return loader


@dataclass(frozen=True)
class _Plan:
    """Which pictures make up which batch."""

    num_samples: int
    batch_size: int
    seed: int
    train: bool
    rank: int
    world_size: int

    def check(self) -> None:
        if self.num_samples == 0:
            raise UserError(f"the {'training' if self.train else 'validation'} set is empty")
        if self.train and self.num_samples < self.batch_size:
            raise UserError(
                f"batch_size {self.batch_size} is larger than the training set of {self.num_samples} pictures;"
                " choose a smaller one"
            )
        if self.batch_size % self.world_size and (self.train or self.batch_size < self.world_size):
            raise UserError(
                f"batch_size {self.batch_size} cannot be shared evenly by {self.world_size} processes;"
                " choose a multiple of it"
            )

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, over all processes."""
        return self.num_samples // self.batch_size if self.train else -(-self.num_samples // self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """(num_samples,) the pictures in the order of this epoch."""
        if not self.train:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)

    def batches(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        """This process's share of every batch from ``start`` on; shares that are empty are left out."""
        order = self.order(epoch)
        for i in range(start, self.num_batches):
            batch = order[i * self.batch_size : (i + 1) * self.batch_size]
            share = np.array_split(batch, self.world_size)[self.rank]
            if len(share):
                yield share


class Loader:
    """What both kinds of loader offer; see the module's text."""

    def __init__(self, plan: _Plan):
        self.plan = plan
        self.skipped: dict[str, str] = {}
        self.epoch, self.start_batch = 0, 0

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """The next iteration gives this epoch from this batch on; what comes before it is neither read nor made."""
        if not 0 <= start_batch <= len(self):
            raise ValueError(f"start_batch must be from 0 to {len(self)}, the batches of an epoch, got {start_batch}")
        self.epoch, self.start_batch = epoch, start_batch

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.plan.num_batches

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def close(self) -> None:
        """Ends the workers, if there are any. The loader can still be used: it starts new ones."""


# ------------------------------------------------------------------------------------------- one sample after another


class SampleLoader(Loader):
    """Reads, augments and collates samples, in worker processes if asked; see ``build_loader``."""

    def __init__(
        self,
        plan: _Plan,
        dataset: PictureDataset,
        collate: Callable[[Sequence[Sample]], Any],
        transform: Callable[[Sample], Sample] | None,
        workers: int = 0,
        strict: bool = False,
        pin_memory: bool = False,
    ):
        super().__init__(plan)
        self.workers, self.pin_memory = workers, pin_memory
        self._source = _Source(dataset, collate, transform, plan.seed, plan.train, strict)
        self._requests = _Requests(plan)
        self._num_read = self._num_bad = 0
        self._loader: Any = None

    def __iter__(self) -> Iterator[Any]:
        if self._loader is None:
            self._loader = self._start()
        self._requests.epoch, self._requests.start_batch = self.epoch, self.start_batch
        with warnings.catch_warnings():
            # Python says this about every fork of a process with threads; torch's loader forks by design.
            warnings.filterwarnings("ignore", r".*multi-threaded, use of fork\(\)", DeprecationWarning)
            loaded = iter(self._loader)
        for batch, num_read, bad, fatal in loaded:
            self.skipped.update(bad)
            if fatal is not None:
                raise UserError(fatal)
            self._count(num_read, len(bad))
            if batch is not None:
                yield batch

    def close(self) -> None:
        self._loader = None

    def _start(self) -> Any:
        from torch.utils.data import DataLoader

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            return DataLoader(
                self._source,  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._requests,
                num_workers=self.workers,
                collate_fn=_unchanged,
                pin_memory=self.pin_memory,
                persistent_workers=self.workers > 0,
                # Its own generator: by default torch draws the workers' seeds from the global one.
                generator=torch.Generator().manual_seed(self.plan.seed),
                worker_init_fn=_one_thread,
            )

    def _count(self, num_read: int, num_bad: int) -> None:
        self._num_read += num_read
        self._num_bad += num_bad
        if self._num_bad * 2 > self._num_read and self._num_read >= min(_MAX_TRIES, self.plan.num_samples):
            name, why = next(iter(self.skipped.items()))
            raise UserError(
                f"{self._num_bad} of the first {self._num_read} pictures cannot be read, e.g. {name}: {why};"
                " check the data"
            )


class _Requests:
    """The sampler of torch's loader: (epoch, indices) per batch, of whatever epoch is set when iteration starts.

    Knows nothing of the loader that owns it: without a cycle the workers end as soon as nobody uses them any more.
    """

    def __init__(self, plan: _Plan):
        self.plan, self.epoch, self.start_batch = plan, 0, 0

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        epoch = self.epoch
        for indices in self.plan.batches(epoch, self.start_batch):
            yield epoch, indices

    def __len__(self) -> int:
        return self.plan.num_batches


class _Source:
    """Makes whole batches; lives in the workers."""

    def __init__(
        self,
        dataset: PictureDataset,
        collate: Callable[[Sequence[Sample]], Any],
        transform: Callable[[Sample], Sample] | None,
        seed: int,
        train: bool,
        strict: bool,
    ):
        self.dataset, self.collate, self.transform = dataset, collate, transform
        self.seed, self.train, self.strict = seed, train, strict

    def __getitem__(self, request: tuple[int, np.ndarray]) -> tuple[Any, int, dict[str, str], str | None]:
        """The batch (None when nothing is left), pictures tried, bad ones, and a message that must end the run."""
        with preserved():
            return self._load(*request)

    def _load(self, epoch: int, indices: np.ndarray) -> tuple[Any, int, dict[str, str], str | None]:
        samples: list[Sample] = []
        bad: dict[str, str] = {}
        num_read = 0
        for index in indices.tolist():
            for attempt in range(_MAX_TRIES):
                num_read += 1
                try:
                    samples.append(self._read(index, epoch))
                    break
                except BadSample as error:
                    bad[error.id] = error.why
                    if self.strict:
                        return None, num_read, bad, f"cannot read picture {error}; repair it or switch strict off"
                if not self.train:
                    break
                index = mix_bits(self.seed, epoch, index, attempt) % len(self.dataset)
            else:
                name, why = next(iter(bad.items()))
                message = f"{_MAX_TRIES} pictures in a row cannot be read, e.g. {name}: {why}; check the data"
                return None, num_read, bad, message
        return self.collate(samples) if samples else None, num_read, bad, None

    def _read(self, index: int, epoch: int) -> Sample:
        sample = self.dataset[index]
        if self.transform is None:
            return sample
        if self.train:
            reseed(self.seed, epoch, index)
        return self.transform(sample)


def _unchanged(batch: Any) -> Any:
    return batch


def _one_thread(worker: int) -> None:
    """Workers share the cores by being several; threads inside them would only get in each other's way."""
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------ whole arrays at once


class ArrayLoader(Loader):
    """Batches cut from arrays in memory: shifts, flips and erasing, seeded by (seed, epoch, index) as everywhere."""

    def __init__(
        self,
        plan: _Plan,
        images: np.ndarray,
        labels: np.ndarray,
        transform: Transform,
        pack: Callable[[Tensor, Tensor], Any],
    ):
        super().__init__(plan)
        self.images, self.labels = images, torch.as_tensor(labels).long()
        self.transform, self.pack = transform, pack
        self._eraser = random_erasing(1.0)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        for indices in self.plan.batches(epoch, self.start_batch):
            images = self.transform.normalise(torch.from_numpy(self._moved(indices, epoch)))
            self._erase(images, indices, epoch)
            yield self.pack(images, self.labels[torch.from_numpy(indices)])

    def _erase(self, images: Tensor, indices: np.ndarray, epoch: int) -> None:
        """Erases a rectangle of some of the pictures, in place."""
        augment = self.transform.augment
        if augment is None or not augment.erasing:
            return
        chosen = np.flatnonzero(uniforms(self.plan.seed, epoch, indices, 4)[:, 3] < augment.erasing)
        with preserved():
            for i in chosen.tolist():
                reseed(self.plan.seed, epoch, int(indices[i]))
                self._eraser(images[i])

    def _moved(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        """(B, 3, S, S) uint8: the pictures, each shifted and flipped in its own way."""
        augment = self.transform.augment
        if augment is None or not (augment.flip or augment.translate):
            return self.images[indices]
        size, reach = self.images.shape[-1], augment.translate
        chance = uniforms(self.plan.seed, epoch, indices, 3)
        flip = (chance[:, 0] < augment.flip).tolist()
        shift = (np.floor(chance[:, 1:] * (2 * reach + 1)).astype(int) - reach).tolist()
        moved = np.empty((len(indices), *self.images.shape[1:]), np.uint8)
        if reach:
            moved[:] = np.array(self.transform.fill, np.uint8)[:, None, None]
        # A loop of slices: indexing all pixels at once would be several times slower.
        for out, index, flipped, (dy, dx) in zip(moved, indices.tolist(), flip, shift, strict=True):
            image = self.images[index]
            if flipped:
                image = image[:, :, ::-1]
            out[:, max(dy, 0) : size + min(dy, 0), max(dx, 0) : size + min(dx, 0)] = image[
                :, max(-dy, 0) : size + min(-dy, 0), max(-dx, 0) : size + min(-dx, 0)
            ]
        return moved


def _arrays(dataset: Any, transform: Transform) -> tuple[np.ndarray, np.ndarray] | None:
    """All pictures and labels of a dataset that keeps them in memory at the size they enter the model, else None."""
    if not transform.is_simple or not (hasattr(dataset, "images") and hasattr(dataset, "labels")):
        return None
    if transform.augment is None and transform.crop_pct != 1:
        return None
    try:
        images, labels = np.asarray(dataset.images()), np.asarray(dataset.labels())
    except BadSample:
        return None  # the other loader skips and counts it
    size = transform.size
    return (images, labels) if images.shape[1:] == (3, size, size) else None
