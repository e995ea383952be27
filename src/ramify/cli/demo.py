"""``ramify demo``: the library at work, nothing to download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class DemoConfig:
    out: Path = Path("runs/demo")
    """Folder the page and its pictures are written to; made when absent."""
    seed: int = 0
    """Same seed, same pictures and numbers."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")


def run(config: DemoConfig) -> None:
    """Show the library at work on built-in data and write a page to open."""
    from ramify.explore import demo

    demo.run(out=config.out, seed=config.seed)
