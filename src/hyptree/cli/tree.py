"""``hyptree tree``: draw an embedding that ``hyptree train`` made, and look at hierarchies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hyptree.checks import require_numbers
from hyptree.errors import as_user_error
from hyptree.files import require_path


@dataclass
class DrawConfig:
    """``hyptree tree draw``."""

    run: Annotated[Path, "RUN"]
    """Folder of a run of the task embed."""
    out: Path | None = None
    """Picture to write (.png, .svg, .pdf); by default disk.png in the folder."""
    names: int = 24
    """How many names to write."""

    def __post_init__(self) -> None:
        require_numbers(self, "at least 0", "names", flag="--")


@dataclass
class ShowConfig:
    """``hyptree tree show``."""

    edges: Annotated[Path, "EDGES"]
    """File of (child, parent) or (child, ancestor) rows."""
    max_lines: int = 40
    """How much of the tree to print."""
    max_depth: int | None = None
    """Levels to print."""

    def __post_init__(self) -> None:
        require_numbers(self, "at least 0", "max_lines", "max_depth", flag="--")


@dataclass
class DemoConfig:
    """``hyptree tree demo``."""

    out: Path = Path("runs/tree_demo")
    """Folder the page and its pictures are written to; made when absent."""
    seed: int = 0
    """Same seed, same pictures and numbers."""

    def __post_init__(self) -> None:
        require_numbers(self, "from 0 to 2^31 - 1", "seed")


def draw(config: DrawConfig) -> None:
    """Draw an embedding on the Poincaré disk."""
    require_path(config.run, "folder", "give a run of the task embed")
    from hyptree.evaluate.hierarchy.embedding import draw_disk
    from hyptree.train.tasks.embed import load_embedding

    path = config.out or config.run / "disk.png"
    with as_user_error():
        draw_disk(load_embedding(config.run), path, names=config.names)
    print(path)


def show(config: ShowConfig) -> None:
    """Print a hierarchy as an indented tree."""
    from hyptree.data.hierarchies.edges import read_hierarchy
    from hyptree.tree import Tree

    hierarchy = read_hierarchy(config.edges, closure="given")
    tree = Tree.from_edges(hierarchy.pairs).relabel(hierarchy.names)
    tree.show(max_lines=config.max_lines, max_depth=config.max_depth)


def demo(config: DemoConfig) -> None:
    """Learn a small tree in the hyperbolic plane and in the flat one, and write a page on the difference."""
    from hyptree.explore.pages import tree_demo

    tree_demo.run(out=config.out, seed=config.seed)


SUBVERBS = {"draw": draw, "show": show, "demo": demo}
