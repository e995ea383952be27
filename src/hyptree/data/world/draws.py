"""Random numbers that depend on a key and a place in the sequence, and on nothing else.

Every picture and every object has a key of its own; the j-th number drawn for it is a hash of (key, j). So a picture
does not change with the number of pictures, with the size of the batch it is made in, or with its neighbours.
"""

from __future__ import annotations

import numpy as np

_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: successive keys lie far apart


def mix(x: np.ndarray) -> np.ndarray:
    """Well-mixed uint64 for each uint64 (multiply and shift, twice): neighbours come out unrelated."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(32))


def derive(key: np.ndarray, number: np.ndarray | int) -> np.ndarray:
    """A new key for each (key, number); arithmetic is modulo 2^64."""
    if isinstance(number, int):  # by far the most frequent case, and Python's own integers never overflow
        return mix(key + np.uint64((number + 1) * _STEP % 2**64))
    return mix(key + (np.asarray(number, np.uint64) + np.uint64(1)) * np.uint64(_STEP))


class Draws:
    """A stream of numbers for each of n keys; every call takes the next number of all streams."""

    def __init__(self, key: np.ndarray):
        self.key = np.asarray(key, np.uint64)
        self._taken = 0

    def __len__(self) -> int:
        return len(self.key)

    def uniform(self, low: float | np.ndarray = 0.0, high: float | np.ndarray = 1.0) -> np.ndarray:
        """(n,) float32 in [low, high)."""
        bits = derive(self.key, self._taken) >> np.uint64(40)  # 24 bits: exact in float32
        self._taken += 1
        unit = bits.astype(np.float32) * np.float32(2.0**-24)
        return np.asarray(low + (high - low) * unit, np.float32)

    def integer(self, low: int | np.ndarray, high: int | np.ndarray) -> np.ndarray:
        """(n,) int64 from low to high, both included."""
        span = np.asarray(high) - low + 1
        return low + np.minimum((self.uniform().astype(np.float64) * span).astype(np.int64), span - 1)

    def sign(self) -> np.ndarray:
        """(n,) float32, -1 or 1."""
        return np.where(self.uniform() < 0.5, np.float32(-1), np.float32(1))
