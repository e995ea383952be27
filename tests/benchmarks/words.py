"""The options of a benchmark from the words of its command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.command import SUBVERBS
from hyptree.cli.config import parse


def options_of(words: Sequence[str]) -> Any:
    """What ``hyptree bench VERB --flag ...`` hands to the benchmark."""
    assert list(words[:2]) == ["hyptree", "bench"]
    return parse(SUBVERBS[words[2]], "hyptree bench", words[3:])
