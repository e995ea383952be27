"""Which pictures make up which batch, and what every loader offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyptree.errors import UserError


@dataclass(frozen=True)
class Plan:
    """Which pictures make up which batch."""

    num_samples: int
    batch_size: int
    seed: int
    train: bool
    rank: int
    world_size: int

    def check(self) -> None:
        """``UserError`` when there is no such batch."""
        if self.num_samples == 0:
            raise UserError(f"the {'training' if self.train else 'validation'} set is empty")
        if self.train and self.num_samples < self.batch_size:
            raise UserError(
                f"batch_size {self.batch_size} is larger than the training set of {self.num_samples} pictures;"
                " choose a smaller one"
            )
        self.check_share()

    def check_share(self) -> None:
        """``UserError`` when the processes cannot share a batch evenly."""
        least = 1 if self.train else self.world_size
        if self.batch_size < least or (self.train and self.batch_size % self.world_size):
            raise UserError(
                f"batch_size {self.batch_size} cannot be shared evenly by {self.world_size} processes;"
                f" choose a multiple of {self.world_size}"
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
        """This process's share of every batch from ``start`` on; shares that are empty are left out.

        In training it lies at both ends of the batch, alike: what Mixup pairs, the first with the last and so on, stays
        in one process, so that the pairs are the same for any number of them.
        """
        order, world_size = self.order(epoch), self.world_size
        at_both_ends = self.train and self.batch_size % (2 * world_size) == 0
        for i in range(start, self.num_batches):
            batch = order[i * self.batch_size : (i + 1) * self.batch_size]
            parts = np.array_split(batch, 2 * world_size if at_both_ends else world_size)
            share = np.concatenate([parts[self.rank], parts[-1 - self.rank]]) if at_both_ends else parts[self.rank]
            if len(share):
                yield share


class Loader(ABC):
    """What every loader offers; see ``hyptree.data.loader``."""

    def __init__(self, plan: Plan):
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

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch, from the start batch on."""

    def close(self) -> None:  # noqa: B027  (most loaders have nothing to end)
        """Ends the workers, if there are any. The loader can still be used: it starts new ones."""
