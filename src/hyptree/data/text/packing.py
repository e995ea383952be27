"""Tokens cut into blocks of one length, nothing left out, any block at once.

The text is repeated without end and cut every ``block_length`` tokens: block ``b`` holds the tokens from ``b L`` to
``(b + 1) L``. A document that is longer than what is left of a block goes on in the next one. In training, the end of
the text that does not fill a block is filled by the beginning of the next pass, so every token is seen equally often
and every pass is cut elsewhere. In evaluation the last block is padded, and there is no next pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hyptree.data.text.tokens import Tokens
from hyptree.errors import UserError

IGNORED = -100
"""Label of a token that counts in no loss, as in transformers."""


class TextBlocks:
    """Blocks of a text, as dicts of int64 tensors for a causal language model of transformers.

    * ``input_ids`` (L,).
    * ``labels`` (L,): the same (models shift them inside), -100 for padding and, with ``mask_boundaries``, for the
      first token of a document, which the token before it, of another document, would have to predict.
    * ``position_ids`` (L,), for packing ``documents`` only: they start again at every document, by which transformers'
      ``create_causal_mask`` keeps documents apart. Padding counts as a document.
    """

    def __init__(
        self,
        tokens: Tokens,
        block_length: int,
        *,
        packing: Literal["stream", "documents"] = "stream",
        positions: Literal["restart", "continue"] = "restart",
        mask_boundaries: bool | None = None,
        train: bool = True,
        pad_token_id: int = 0,
        tokenizer: Any = None,
    ):
        """Blocks of ``tokens``; see ``hyptree.data.text.TextSettings`` for what the options mean.

        Args:
            train: whether the text is repeated; otherwise it ends with a padded block.
            pad_token_id: fills the padded block.
            tokenizer: kept as ``tokenizer``, for those who train or show.

        Raises:
            UserError: blocks that are too short, or in training longer than the whole text.
        """
        if block_length < 2:
            raise UserError(f"block_length must be at least 2 (a token and the one it predicts), got {block_length}")
        if train and tokens.num_tokens < block_length:
            raise UserError(
                f"the training text has {tokens.num_tokens} tokens, less than one block of {block_length}; "
                "choose a smaller block_length or more text"
            )
        self.tokens, self.block_length, self.train = tokens, block_length, train
        self.packing, self.positions = packing, positions
        self.mask_boundaries = packing == "documents" if mask_boundaries is None else mask_boundaries
        self.pad_token_id, self.tokenizer = pad_token_id, tokenizer

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.tokens.num_tokens

    @property
    def num_documents(self) -> int:
        """Documents of the text."""
        return self.tokens.num_documents

    def __len__(self) -> int:
        """Whole blocks of the first pass in training; all blocks in evaluation."""
        if self.train:
            return self.num_tokens // self.block_length
        return -(-self.num_tokens // self.block_length)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, block: int) -> dict[str, Tensor]:
        """Block ``block``; in training those from ``len`` on are the blocks of later passes."""
        return {name: value[0] for name, value in self.batch([block]).items()}

    def batch(self, blocks: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Several blocks as one batch, (B, L) each."""
        rows = [self._block(int(block)) for block in blocks]
        return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}

    def _block(self, block: int) -> dict[str, np.ndarray]:
        if block < 0 or (not self.train and block >= len(self)):
            raise IndexError(f"block {block} of {len(self)}")
        length = self.block_length
        begin = block * length % self.num_tokens  # inside the text, which is repeated
        ids = self.tokens.tokens[begin : begin + length].astype(np.int64)
        num_missing = length - len(ids)
        if num_missing:
            rest = self.tokens.tokens[:num_missing] if self.train else np.full(num_missing, self.pad_token_id)
            ids = np.concatenate([ids, rest.astype(np.int64)])
        tensors = {"input_ids": ids}
        starts = self._starts(begin) if self.packing == "documents" or self.mask_boundaries else None
        if self.packing == "documents":
            assert starts is not None
            tensors["position_ids"] = self._positions(begin, starts)
        labels = ids.copy()
        if self.mask_boundaries:
            assert starts is not None
            labels[starts] = IGNORED
        if num_missing and not self.train:
            labels[length - num_missing :] = IGNORED
        return tensors | {"labels": labels}

    def _starts(self, begin: int) -> np.ndarray:
        """Where in the block from token ``begin`` on documents start; the padding, or the next pass, counts as one."""
        starts, length = self.tokens.starts, self.block_length
        first, last = np.searchsorted(starts, [begin, begin + length])
        inside = starts[first:last] - begin
        left = self.num_tokens - begin
        if left >= length:
            return inside
        if not self.train:
            return np.append(inside, left)
        return np.concatenate([inside, starts[: np.searchsorted(starts, length - left)] + left])

    def _positions(self, begin: int, starts: np.ndarray) -> np.ndarray:
        """Place of each token in its document, or in what the block has of it."""
        count = np.arange(self.block_length)
        latest = np.zeros(self.block_length, np.int64)
        latest[starts] = starts
        if self.positions == "continue" and (len(starts) == 0 or starts[0] > 0):
            document = np.searchsorted(self.tokens.starts, begin, side="right") - 1
            latest[0] = self.tokens.starts[document] - begin
            return count - np.maximum.accumulate(np.where(latest == 0, latest[0], latest))
        return count - np.maximum.accumulate(latest)
