"""Benchmarks collect garbage before each thing that they time."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def little_to_look_at() -> None:
    """What earlier tests have left is collected once, and not looked at again."""
    gc.collect()
    gc.freeze()
