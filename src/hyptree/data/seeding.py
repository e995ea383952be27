"""Random numbers that depend on (seed, epoch, index) alone, whoever draws them and in whatever order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = 2**64 - 1


def mix_bits(*words: int) -> int:
    """64 well-mixed bits from whole numbers: each is folded in and stirred by SplitMix64's finaliser."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniforms(seed: int, epoch: int, index: np.ndarray, count: int) -> np.ndarray:
    """(n, count) float64 in [0, 1): row i depends on (seed, epoch, index[i]) alone. All rows at once, no loop."""
    base = np.uint64(mix_bits(seed, epoch))
    with np.errstate(over="ignore"):  # wrapping around is how the mixing works
        state = base + np.asarray(index, np.uint64)[:, None] * np.uint64(0xD1342543DE82EF95)
        for added in (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), np.uint64(0)):
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = (state ^ (state >> np.uint64(31))) + added
    return (state >> np.uint64(11)) * 2.0**-53


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Whatever happens inside, afterwards the global generators of Python, numpy and torch (CPU) go on as before."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def reseed(*words: int, gpus: bool = False) -> None:
    """Seeds the global generators of Python, numpy and torch on the CPU; only inside ``preserve_rng``.

    timm and torchvision draw from the global generators, so this is the only way to make them repeatable.

    Args:
        gpus: those of every GPU too, as a run does that owns its process: what is drawn there first has to follow from
            the seed, whether the GPU is in use yet or not.
    """
    bits = mix_bits(*words)
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)  # noqa: NPY002  (timm and others draw from the global one)
    # Without a GPU torch would keep the seed for one, with a trace of the stack: up to half a millisecond per step.
    seed = torch.manual_seed if gpus and torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(bits & (2**63 - 1))


@contextmanager
def seeded(*words: int) -> Iterator[None]:
    """``preserve_rng`` and ``reseed`` in one: inside, chance follows from ``words``; outside, nobody notices."""
    with preserve_rng():
        reseed(*words)
        yield
