"""The order in which blocks are seen: shuffled, shared by processes, and resumable at any block.

Everything is a function of (seed, place): blocks come in one endless row, pass after pass, each pass shuffled by
(seed, epoch). So a place in that row is the whole state. It is written as (epoch, next block of that epoch), for all
processes together, and may be resumed by another number of processes or with another batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from hyptree.data.plan import Loader, Plan
from hyptree.data.text.packing import TextBlocks
from hyptree.data.text.settings import TextSettings
from hyptree.data.text.sources import source_of
from hyptree.data.text.tokenizer import default_tokenizer, load_tokenizer
from hyptree.data.text.tokens import tokens_of
from hyptree.errors import UserError


class BlockOrder:
    """Which block comes at which place of the endless row."""

    def __init__(self, num_tokens: int, block_length: int, seed: int, shuffle: bool = True):
        self.num_tokens, self.block_length = num_tokens, block_length
        self.seed, self.shuffle = seed, shuffle
        self._permuted: tuple[int, np.ndarray] | None = None

    def epoch_of(self, place: int) -> int:
        """The pass over the text in which the block at this place ends."""
        return ((place + 1) * self.block_length - 1) // self.num_tokens

    def first(self, epoch: int) -> int:
        """Place of the first block of a pass. Passes differ by at most one block in length."""
        return epoch * self.num_tokens // self.block_length

    def blocks(self, place: int, count: int) -> np.ndarray:
        """(count,) the blocks at the places from ``place`` on; each pass has every one of its blocks once."""
        pieces: list[np.ndarray] = []
        while count > 0:
            epoch = self.epoch_of(place)
            inside = self._pass(epoch)[place - self.first(epoch) :][:count]
            pieces.append(inside)
            place, count = place + len(inside), count - len(inside)
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def _pass(self, epoch: int) -> np.ndarray:
        """All blocks of a pass in their order; the latest is kept, since one comes after the other."""
        if self._permuted is None or self._permuted[0] != epoch:
            begin, end = self.first(epoch), self.first(epoch + 1)
            order = np.arange(begin, end)
            if self.shuffle:
                order = begin + np.random.default_rng([self.seed, epoch]).permutation(end - begin)
            self._permuted = epoch, order
        return self._permuted[1]


class BlockBatches(Loader):
    """Blocks of each batch for this process: a ``batch_sampler`` for torch's ``DataLoader`` that can be resumed.

    Training batches follow the endless row, ``len`` of them make an epoch: they do not stop where a pass over the text
    ends, so no block is left out, and no two processes ever get the same one. What one iteration gives, the next goes
    on from. Evaluation gives every block once, in order; its last batch may be smaller.
    """

    def __init__(
        self,
        dataset: TextBlocks,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ):
        """Batches of ``batch_size`` blocks over all processes together.

        Args:
            shuffle: in training; evaluation never shuffles.
            accumulate: batches of one optimiser step; an epoch is a multiple of it, so that no batch is left over.

        Raises:
            UserError: a batch larger than the text, or one that the processes cannot share evenly.
        """
        super().__init__(Plan(len(dataset), batch_size, seed, dataset.train, rank, world_size))
        self.dataset, self.batch_size, self.accumulate = dataset, batch_size, accumulate
        self.order = BlockOrder(dataset.num_tokens, dataset.block_length, seed, shuffle and dataset.train)
        self.place = 0
        """Blocks that were given to any process so far."""
        self.plan.check_share()
        if len(self) == 0:
            raise UserError(
                f"the training text has {len(dataset)} blocks of {dataset.block_length} tokens, less than one step of "
                f"{batch_size * accumulate}; choose a smaller batch_size or block_length"
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self.dataset.train:
            return len(self.dataset) // (self.batch_size * self.accumulate) * self.accumulate
        return self.plan.num_batches

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        super().set_epoch(epoch, start_batch)
        passed = epoch * len(self) if self.dataset.train else 0
        self.place = (passed + start_batch) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        if not self.dataset.train:
            yield from (blocks.tolist() for blocks in self.plan.batches(0, self.place // self.batch_size))
            return
        length = len(self) * self.batch_size
        for _ in range(-(-(length - self.place % length) // self.batch_size)):
            blocks = self.order.blocks(self.place, self.batch_size)
            self.place += self.batch_size  # before it is handed out: the state is what comes next
            yield np.array_split(blocks, self.plan.world_size)[self.plan.rank].tolist()

    def state_dict(self) -> dict[str, Any]:
        """Where the training is, in JSON's types; the same in every process after the same number of batches.

        With workers, a ``DataLoader`` asks for batches before it gives them: count batches and use ``set_epoch`` there.
        """
        epoch = self.order.epoch_of(self.place)
        return {"epoch": epoch, "next_block": self.place - self.order.first(epoch)} | self._about()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, with any number of processes and any batch size.

        Raises:
            UserError: the state belongs to another text, tokenizer, block length or seed.
        """
        for name, value in self._about().items():
            if state[name] != value:
                raise UserError(f"cannot resume the text: {name} was {state[name]!r} and is {value!r} now")
        self.place = self.order.first(state["epoch"]) + state["next_block"]

    def _about(self) -> dict[str, Any]:
        about = {name: getattr(self.order, name) for name in ("block_length", "seed", "shuffle")}
        return about | {"fingerprint": self.dataset.tokens.fingerprint}


class TextLoader(BlockBatches):
    """Batches of a text as dicts of (B, L) tensors, for the training loop; see :class:`BlockBatches`.

    No workers: a block is a slice of a mapped file, which takes microseconds.
    """

    def __init__(self, dataset: TextBlocks, *, pin_memory: bool = False, **options: Any):
        super().__init__(dataset, **options)
        self.pin_memory = pin_memory

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for blocks in super().__iter__():
            batch = self.dataset.batch(blocks)
            yield {name: value.pin_memory() for name, value in batch.items()} if self.pin_memory else batch


def build_tokenizer(settings: TextSettings) -> Any:
    """The tokenizer of the settings: the one of their folder, or one trained on the training text and cached."""
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    return default_tokenizer(source_of(settings, "train"), settings.vocab_size, settings.cache_folder)


def build_text(settings: TextSettings, split: str, tokenizer: Any = None) -> TextBlocks:
    """The blocks of a split, ``train``, ``val`` or ``test``; the text is tokenised once and then read from the cache.

    Args:
        tokenizer: one that is loaded already; by default that of the settings.

    Raises:
        UserError: text or tokenizer cannot be read, are empty or do not fit each other.
    """
    source = source_of(settings, split)
    tokenizer = build_tokenizer(settings) if tokenizer is None else tokenizer
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return TextBlocks(
        tokens_of(source, tokenizer, settings.cache_folder, settings.bos, settings.eos),
        settings.block_length,
        packing=settings.packing,
        positions=settings.positions,
        mask_boundaries=settings.mask_boundaries,
        train=split == "train",
        pad_token_id=pad,
        tokenizer=tokenizer,
    )


def build_text_loader(dataset: TextBlocks, **options: Any) -> TextLoader:
    """The loader of a split: ``set_epoch(epoch, start_batch)``, ``len``, iteration, ``state_dict``, ``close``.

    See :class:`BlockBatches` for the options, and ``pin_memory``. Whether it trains or
    evaluates follows from the dataset.
    """
    return TextLoader(dataset, **options)
