"""Sparse samples: the active (row, feature, value) of a batch for every frequency table at once.

Each cell (row, feature) of a batch has one uniform ``u`` and one value ``v``, which depend on the data seed, the step
and the cell alone; a table ``p`` takes the cells with ``u < p_i``. So all tables share their random numbers, and what a
model sees does not depend on which other models are trained.

Only cells that can be active are worth more than a glance: 16 random bits for every cell find them, and their
remaining bits come from hashing the cell's number. ``u`` has 42 bits, so rare features keep their frequency (24 bits
of a float32 would change a chance of 1e-6 by percents).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyptree.data.seeding import mix_bits

TRAIN, EVAL = 0, 1
"""Streams that share no random numbers."""

_COARSE = 2**16
_FINE_BITS = 26
_VALUE_BITS = 64 - _FINE_BITS


@dataclass
class Batch:
    """The active cells of a batch for A frequency tables, one table after the other; rows without any are left out.

    Each table may be split into S pieces of neighbouring rows; piece ``s`` of table ``a`` is number ``a S + s``.
    ``rows`` count from 0 within each piece, over the kept rows only. The second triple holds the same cells ordered by
    feature instead of row.
    """

    size: int
    """Samples, those without an active feature included."""
    sizes: list[int]
    """(S) samples of each piece."""
    starts: list[int]
    """(A S + 1) where the cells of each piece begin."""
    num_rows: list[int]
    """(A S) samples with an active feature."""
    rows: Tensor
    features: Tensor
    values: Tensor
    rows_by_feature: Tensor
    features_by_feature: Tensor
    values_by_feature: Tensor

    def dense(self, table: int, n: int) -> Tensor:
        """(num_rows, n) the kept samples of one table, for definitions that want whole vectors."""
        pieces = []
        for piece in range(table * len(self.sizes), (table + 1) * len(self.sizes)):
            part = slice(self.starts[piece], self.starts[piece + 1])
            x = self.values.new_zeros(self.num_rows[piece], n)
            x[self.rows[part], self.features[part]] = self.values[part]
            pieces.append(x)
        return torch.cat(pieces)


class Sampler:
    """Draws batches for frequency tables of chances ``p`` (A, n).

    Args:
        piece: most rows of a piece of a table; 0 for whole tables. Which samples are drawn does not depend on it.
    """

    def __init__(self, p: Tensor, batch: int, seed: int, dtype: torch.dtype = torch.float32, piece: int = 0):
        self.p, self.batch, self.seed, self.dtype = p.double(), batch, seed, dtype
        count = -(-batch // (piece or batch))
        self.piece = -(-batch // count)
        self.sizes = [min(self.piece, batch - start) for start in range(0, batch, self.piece)]
        # Cells whose 16 bits are at most this may lie below the largest chance of their feature.
        limit = torch.ceil(self.p.amax(0) * _COARSE) - 1 - _COARSE // 2
        self._limit = limit.to(torch.int16)  # (n,)
        self._generator = torch.Generator(p.device)

    def draw(self, step: int, stream: int = TRAIN) -> Batch:
        """The batch of a step; the same whenever and in whatever order it is asked for."""
        device, n = self.p.device, self.p.shape[1]
        words = mix_bits(self.seed, stream, step)
        self._generator.manual_seed(words >> 1)
        cells = self.batch * n
        bits = torch.empty((cells + 3) // 4, dtype=torch.int64, device=device)
        coarse = bits.random_(-(2**63), None, generator=self._generator).view(torch.int16)[:cells]
        cell = _nonzero((coarse.view(self.batch, n) <= self._limit).view(-1))  # (C)
        fine = _hash(cell, words)
        u = (coarse[cell].double() + _COARSE // 2 + _fraction(_shift(fine, _VALUE_BITS), _FINE_BITS)) / _COARSE
        v = 2 * _fraction(fine & (2**_VALUE_BITS - 1), _VALUE_BITS)  # (C) in (0, 2)
        row, feature = cell // n, cell % n

        active = u < self.p[:, feature]  # (A, C)
        table, pick = active.nonzero(as_tuple=True)  # by table, then row, then feature
        row, feature, value = row[pick], feature[pick], v[pick].to(self.dtype)
        piece = table * len(self.sizes) + row // self.piece
        num_pieces = len(self.p) * len(self.sizes)
        key = table * self.batch + row
        is_new = torch.ones_like(key)
        is_new[1:] = key[1:] != key[:-1]
        counts = torch.zeros(2, num_pieces, dtype=torch.int64, device=device)
        counts.index_add_(1, piece, torch.stack([torch.ones_like(piece), is_new]))  # cells and kept rows
        first_row = counts[1].cumsum(0) - counts[1]
        local = is_new.cumsum(0) - 1 - first_row[piece]
        order = torch.argsort(piece * n + feature, stable=True)
        num_cells, num_rows = counts.tolist()  # the one wait for the device
        return Batch(
            size=self.batch,
            sizes=self.sizes,
            starts=np.concatenate([[0], np.cumsum(num_cells)]).tolist(),
            num_rows=num_rows,
            rows=local,
            features=feature,
            values=value,
            rows_by_feature=local[order],
            features_by_feature=feature[order],
            values_by_feature=value[order],
        )


def _nonzero(mask: Tensor) -> Tensor:
    """Where a flat mask is true. numpy finds few true cells among many about ten times faster than torch on a CPU."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift that brings in zeros; torch's brings in the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _hash(cell: Tensor, words: int) -> Tensor:
    """64 mixed bits per cell (SplitMix64's finaliser; products wrap around)."""
    x = cell * _signed(0x9E3779B97F4A7C15) + _signed(words)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _fraction(x: Tensor, bits: int) -> Tensor:
    """The middle of the ``x``-th of ``2**bits`` equal parts of (0, 1), float64."""
    return (x.double() + 0.5) / 2**bits
