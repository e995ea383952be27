"""``hyptree tree``: embed a hierarchy, measure an embedding, look at it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hyptree.checks import require_numbers
from hyptree.errors import UserError, as_user_error
from hyptree.files import require_path
from hyptree.progress import progress_bar, say
from hyptree.tables import numbers, without_nan
from hyptree.train.run.settings import EmbedSettings


@dataclass(kw_only=True)
class EmbedConfig(EmbedSettings):
    """``hyptree tree embed``: the job and where it goes."""

    edges: Annotated[Path, "EDGES"]
    """File of (child, parent) or (child, ancestor) rows: .tsv, .csv, .txt (also .gz), or .npz with an array pairs."""
    out: Path = Path("runs/embed")
    """Folder for the run."""
    resume: bool = False
    """Go on from the checkpoint in the folder."""
    overwrite: bool = False
    """Replace a run that is already in the folder."""
    eval_every: int = 0
    """Measure MAP each so many epochs; 0 for only at the end."""
    eval_samples: int | None = None
    """Nodes whose ancestors are ranked at the end; 0 for all. By default all up to 20,000 nodes, 2,000 of more."""
    checkpoint_seconds: float = 60.0
    """Time between checkpoints."""
    max_seconds: float | None = None
    """Stop after this time of training; --resume goes on."""
    draw: bool = True
    """Write disk.png, the embedding on the Poincaré disk."""
    json: bool = False
    """Print the metrics as JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(
            self, "at least 0", "eval_every", "eval_samples", "checkpoint_seconds", "max_seconds", flag="--"
        )


@dataclass
class EvalConfig:
    """``hyptree tree eval``."""

    run: Annotated[Path, "RUN"]
    """Folder that hyptree tree embed wrote."""
    samples: int | None = None
    """Nodes whose ancestors are ranked; 0 for all. By default all up to 20,000 nodes, 2,000 of more."""
    seed: int = 0
    """Of the sample."""
    device: str = "cpu"
    """cpu, cuda, ..."""
    json: bool = False
    """Print the metrics as JSON."""

    def __post_init__(self) -> None:
        require_numbers(self, "at least 0", "samples", "seed", flag="--")


@dataclass
class DrawConfig:
    """``hyptree tree draw``."""

    run: Annotated[Path, "RUN"]
    """Folder that hyptree tree embed wrote."""
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


def embed(config: EmbedConfig) -> None:
    """Embed a hierarchy of (child, parent) edges in hyperbolic space.

    Ctrl-C writes a checkpoint; the same command with --resume goes on bit for bit.
    """
    from hyptree.config import to_yaml
    from hyptree.data.hierarchies.edges import read_hierarchy

    out = config.out
    has_run = (out / "checkpoint.safetensors").exists() or (out / "embedding.safetensors").exists()
    if config.resume and not (out / "checkpoint.safetensors").exists():
        raise UserError(f"nothing to resume in {out}: it has no checkpoint.safetensors; start without --resume")
    if has_run and not (config.resume or config.overwrite):
        raise UserError(
            f"{out} already holds a run; continue it with --resume, replace it with --overwrite, or choose --out"
        )
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file, expected a folder")
    hierarchy = read_hierarchy(config.edges, closure=config.closure, header=config.header)

    from hyptree.evaluate.hierarchy.embedding import resume_command
    from hyptree.files import write_text
    from hyptree.train.embedding.job import embed as train
    from hyptree.train.embedding.job import measure_run

    settings = EmbedSettings(**{f.name: getattr(config, f.name) for f in dataclasses.fields(EmbedSettings)})
    say(
        f"{config.edges}: {hierarchy.num_nodes:,} nodes, {len(hierarchy.pairs):,} pairs"
        + _dropped(hierarchy.num_dropped)
    )
    out.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        write_text(out / "config.yaml", to_yaml(config))
    with progress_bar("embed", 1) as shown:
        embedder = train(
            hierarchy,
            settings,
            out,
            resume=config.resume,
            eval_every=config.eval_every,
            checkpoint_seconds=config.checkpoint_seconds,
            max_seconds=config.max_seconds,
            show=shown.reach,
        )
    metrics = measure_run(embedder, config.eval_samples)
    write_text(out / "metrics.json", json.dumps(without_nan(metrics), indent=2) + "\n")
    if config.draw:
        _draw(embedder.embedding(), out / "disk.png", 24, required=False)
    _report(metrics, config.json)
    if not embedder.is_done:
        say(f"stopped after {embedder.epoch} of {settings.epochs} epochs; go on with: {resume_command(out)}")
    say(f"run in {out}")


def evaluate(config: EvalConfig) -> None:
    """Measure an embedding: mean rank, MAP, distortion, cones."""
    require_path(config.run, "folder", "give one that hyptree tree embed wrote")
    from hyptree.devices import find_device
    from hyptree.evaluate.hierarchy.embedding import load_embedding, measure
    from hyptree.train.embedding.job import sample_size

    embedding = load_embedding(config.run)
    device = find_device(config.device)
    embedding.points, embedding.pairs = embedding.points.to(device), embedding.pairs.to(device)
    samples = sample_size(len(embedding.names), config.samples)
    _report(measure(embedding, num_samples=samples, seed=config.seed), config.json)


def draw(config: DrawConfig) -> None:
    """Draw an embedding on the Poincaré disk."""
    require_path(config.run, "folder", "give one that hyptree tree embed wrote")
    from hyptree.evaluate.hierarchy.embedding import load_embedding

    path = config.out or config.run / "disk.png"
    with as_user_error():
        _draw(load_embedding(config.run), path, config.names, required=True)
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


SUBVERBS = {"embed": embed, "eval": evaluate, "draw": draw, "show": show, "demo": demo}


def _draw(embedding: Any, path: Path, names: int, required: bool) -> None:
    from hyptree.evaluate.hierarchy.embedding import draw_disk

    try:
        draw_disk(embedding, path, names=names)
    except UserError as error:  # no matplotlib
        if required:
            raise
        say(f"no picture: {error}")


def _dropped(count: int) -> str:
    return f" ({count:,} rows repeated a pair or led to themselves)" if count else ""


def _report(metrics: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(without_nan(metrics)) if as_json else "\n".join(numbers(metrics)))
