"""Batches of pictures that depend neither on the number of workers or processes nor on where a run resumed.

A loader is asked once for the whole run and told the epoch::

    loader = build_loader(dataset, collate, batch_size=128, seed=0, train=True, workers=2, transform=transform)
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

import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.data.pictures.array_loader import ArrayLoader, whole_arrays
from hyptree.data.pictures.transforms import Transform
from hyptree.data.plan import Loader, Plan
from hyptree.data.sample import BadSample, PictureDataset, Sample
from hyptree.data.seeding import mix_bits, preserve_rng, reseed
from hyptree.errors import UserError

__all__ = ["ArrayLoader", "Loader", "SampleLoader", "build_loader"]

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
    resident: torch.device | None = None,
    channels_last: bool = False,
) -> Loader:
    """The loader of one split, set to ``epoch`` and ``start_batch``.

    Args:
        collate: makes a batch of transformed samples; runs in the workers.
        transform: e.g. from ``hyptree.data.pictures.transforms``; its chance is seeded by (seed, epoch, index).
        skipped: where to write unreadable pictures, to share one count between loaders; by default a new dict.
        pack: makes the same batch as ``collate`` from (B, 3, S, S) float32 pictures and (B,) int64 labels. When given,
            and the dataset holds its pictures in memory (``images()`` and ``labels()``), and the transform only flips,
            shifts and erases, whole arrays are augmented at once: about ten times the pictures per second.
        resident: hold all pictures on this device and augment whole batches there (``hyptree.data.pictures.resident``);
            needs ``pack`` and a ``Transform``, uses no workers.
        channels_last: with ``resident``, the memory format of its pictures.

    Raises:
        UserError: no pictures, fewer than a batch to train on, or a batch that the processes cannot share evenly.
    """
    plan = Plan(len(dataset), batch_size, seed, train, rank, world_size)
    plan.check()
    arrays = whole_arrays(dataset, transform) if pack is not None and resident is None else None
    loader: Loader
    if resident is not None:
        from hyptree.data.pictures.resident import ResidentLoader, load_resident, require_simple

        if pack is None or not isinstance(transform, Transform):
            raise UserError("data.resident is for tasks with one label per picture; leave it out")
        require_simple(transform)  # before anything is read
        loader = ResidentLoader(plan, load_resident(dataset, resident, strict), transform, pack, channels_last)
    elif arrays is not None and pack is not None and isinstance(transform, Transform):
        loader = ArrayLoader(plan, *arrays, transform, pack, pin_memory)
    else:
        source = BatchSource(dataset, collate, transform, seed, train, strict)
        loader = SampleLoader(plan, source, workers, pin_memory)
    if skipped is not None:
        loader.skipped = skipped
    loader.set_epoch(epoch, start_batch)
    return loader


class SampleLoader(Loader):
    """Reads, augments and collates samples, in worker processes if asked; see ``build_loader``."""

    def __init__(self, plan: Plan, source: BatchSource, workers: int = 0, pin_memory: bool = False):
        super().__init__(plan)
        self.workers, self.pin_memory, self._source = workers, pin_memory, source
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
        for batch, num_read, bad, fatal in _living(loaded):
            self.skipped.update(bad)
            if message := fatal or self._count(num_read, len(bad)):
                self.close()
                raise UserError(message)
            if batch is not None:
                yield batch

    def close(self) -> None:
        # Dropping the loader would do, but an exception that is being handled may still hold on to it.
        iterator: Any = getattr(self._loader, "_iterator", None)
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
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
                worker_init_fn=_settle,
            )

    def _count(self, num_read: int, num_bad: int) -> str | None:
        """Why the run must end, once most pictures turn out to be bad."""
        self._num_read += num_read
        self._num_bad += num_bad
        if self._num_bad * 2 <= self._num_read or self._num_read < min(_MAX_TRIES, self.plan.num_samples):
            return None
        name, why = next(iter(self.skipped.items()))
        return (
            f"{self._num_bad} of the first {self._num_read} pictures cannot be read, e.g. {name}: {why}; check the data"
        )


class _Requests:
    """The sampler of torch's loader: (epoch, indices) per batch, of whatever epoch is set when iteration starts.

    Knows nothing of the loader that owns it: without a cycle the workers end as soon as nobody uses them any more.
    """

    def __init__(self, plan: Plan):
        self.plan, self.epoch, self.start_batch = plan, 0, 0

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        epoch = self.epoch
        for indices in self.plan.batches(epoch, self.start_batch):
            yield epoch, indices

    def __len__(self) -> int:
        return self.plan.num_batches


@dataclass
class BatchSource:
    """Makes whole batches; lives in the workers."""

    dataset: PictureDataset
    collate: Callable[[Sequence[Sample]], Any]
    transform: Callable[[Sample], Sample] | None
    seed: int
    train: bool
    strict: bool

    def __getitem__(self, request: tuple[int, np.ndarray]) -> tuple[Any, int, dict[str, str], str | None]:
        """The batch (None when nothing is left), pictures tried, bad ones, and a message that must end the run."""
        with preserve_rng():
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


def _settle(worker: int) -> None:
    """Makes a worker a quiet helper of its parent.

    Several workers share the cores; threads inside them would only get in each other's way. Ctrl-C and SIGTERM often
    reach the whole group of processes: the parent decides what happens then (it may still need batches to end a step
    and write a checkpoint) and ends the workers; when it dies, torch ends them.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _living(loaded: Iterator[Any]) -> Iterator[Any]:
    """The same, with one line instead of torch's many when a worker was killed."""
    try:
        yield from loaded
    except RuntimeError as error:
        if "DataLoader worker" in str(error) and ("killed" in str(error) or "exited" in str(error)):
            raise UserError(
                "a process that reads pictures was killed, most likely for lack of memory; use fewer workers"
            ) from error
        raise
