"""``hyptree demo``: the main job on built-in data, nothing to download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyptree.checks import require_numbers
from hyptree.cli.config import OnDevice


@dataclass
class DemoConfig(OnDevice):
    """``hyptree demo``."""

    out: Path = Path("runs/demo")
    """Folder of the run and its page; made when absent. An earlier demo in it is replaced."""
    seed: int = 0
    """Same seed, same pictures and numbers."""
    recipe: Path | None = None
    """Train by this recipe instead of the demo's own (recipes/demo.yaml)."""

    def __post_init__(self) -> None:
        require_numbers(self, "from 0 to 2^31 - 1", "seed")


def run(config: DemoConfig) -> None:
    """Train an HCFormer on the built-in world and write a page on what it sees.

    Takes about three minutes on two CPU cores. Ctrl-C stops it; running it again starts anew.
    """
    from hyptree.config import find_yaml

    if config.recipe is not None:
        find_yaml(config.recipe)
    from hyptree.train import demo

    demo.run(**vars(config))
