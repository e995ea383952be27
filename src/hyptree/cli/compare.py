"""``hyptree compare TABLE``: train variants of a recipe alike and write the table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass
class CompareConfig:
    table: Annotated[Path, "TABLE"]
    """YAML file: a recipe, rows that override it, seeds (see recipes/compare_hcformer.yaml)."""
    out: Path | None = None
    """Folder for the runs; by default runs/ and the name of the table. Finished runs in it are not run again."""
    results: Path | None = None
    """Page to write the table into, between marks named after the table, e.g. docs/RESULTS.md."""
    jobs: int = 1
    """Runs at the same time."""
    overrides: tuple[str, ...] = ()
    """Keys of the recipe to change in all rows, e.g. data.root=cifar10 schedule.epochs=30."""


def run(config: CompareConfig) -> None:
    """Train variants of a recipe over several seeds, all alike, and write the table."""
    from hyptree.config import find_yaml

    find_yaml(config.table)
    from hyptree.train.compare import compare

    print(compare(config.table, config.out, config.results, config.jobs, config.overrides))
