"""``hyptree explain``: a page on what a model clustered, where its queries looked or what hierarchy its text has."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from hyptree.checks import require_numbers
from hyptree.cli.config import OnDevice
from hyptree.errors import UserError
from hyptree.files import require_path


@dataclass(kw_only=True)
class ExplainConfig(OnDevice):
    """``hyptree explain``; only language models are large enough to look into for a device to be chosen."""

    model: Annotated[str, "MODEL"]
    """Folder that hyptree train wrote (of a language model or a few-shot head too), or a name such as hcformer_nano
    (fresh weights), or an encoder: hf:FOLDER_OR_ID, open_clip:NAME:PRETRAINED."""
    images: Annotated[tuple[Path, ...], "[IMAGE ...]"] = ()
    """Pictures to explain. With none, a run is explained on validation pictures of its own data."""
    out: Path | None = None
    """Page to write; by default explain.html, or index.html in the folder of the run."""
    size: int | None = None
    """Pixels of the model's input; by default what it was trained with."""
    pictures: int | None = None
    """How many validation pictures the page of a run, or of the built-in world that of an encoder, shows. [8]"""
    table: bool = False
    """Print how well the clusters follow masks, beside a grid, SLIC and k-means, instead of writing a page."""
    samples: int | None = None
    """With --table: pictures to measure [64]. Of a language model: blocks of text [256]."""
    target: Literal["semantic", "parts"] = "semantic"
    """With --table: which masks."""
    heads: bool = False
    """With --table: a row for every head instead of their mean."""
    rival: str | None = None
    """With --table: a run or a timm name whose features are clustered by k-means. Of a language model: another run, put
    beside it."""
    json: bool = False
    """With --table: print the rows as JSON."""
    wordnet: Path | None = None
    """Of a language model: folder of WordNet's tables, for the depths of words. [HYPTREE_DATA/wordnet if there]"""
    texts: tuple[str, ...] = ()
    """Of an encoder: chains 'an animal => a dog => a black dog', or files of them. [captions of the built-in world]"""
    head: Path | None = None
    """Of an encoder: a run of the task fewshot, whose tree of classes, attributes and pictures is shown (validation
    pictures of its own data where none are given)."""
    pairs: Path | None = None
    """Of an encoder: HyperLex, its folder or one of its files."""
    geometry: str | None = None
    """Of an encoder: chord, geodesic or lorentz. [lorentz for a hyperbolic encoder, chord for the others]"""
    random_init: bool = False
    """Of an encoder: random weights, as a control."""

    def __post_init__(self) -> None:
        require_numbers(self, "at least 1", "pictures", "samples", "size", flag="--")


def run(config: ExplainConfig) -> None:
    """Show what a model clustered: one page with the pictures, the tree of their clusters, and the disk.

    Of a Hi-Mapper (a run with model.plugin.name himapper): where each query of its tree looked, and where it lies.
    Of an embedded hierarchy (a run of the task embed): its tree on the Poincaré disk.
    Of a language model's run: how far from the origin its tokens lie, by frequency and by depth in WordNet.
    Of an encoder (hf:..., open_clip:...) or of a few-shot run on one: how far captions lie from the root, and the tree
    class > attribute > image.

    hyptree explain runs/demo photo.jpg --out page.html
    """
    from hyptree.train.source import find_model
    from hyptree.vlm.encoders.spec import check_spec, is_encoder

    for path in config.images:
        require_path(path, "picture")
    for path in filter(None, (config.head, config.pairs)):
        require_path(path)
    if config.wordnet is not None:
        require_path(config.wordnet, "folder", "leave --wordnet out to do without depths")
    if _task_of(config.model) in ("contrast", "radial"):
        config = replace(config, model=f"hf:{config.model}", out=config.out or Path(config.model) / "index.html")
    if _task_of(config.model) == "fewshot":
        config = _with_head(config)
    source = find_model(config.model, "run", "timm", "hf", "open_clip")
    if config.rival is not None:
        find_model(config.rival, "run", "timm")
    if source.kind in ("hf", "open_clip"):
        check_spec(config.model if is_encoder(config.model) else f"hf:{config.model}")
        _require_read(config, "encoders")
        from hyptree.train.explain import page_of_encoder

        names = ("images", "texts", "head", "pairs", "geometry", "random_init")
        options = {name: getattr(config, name) for name in names} | {"num_pictures": config.pictures}
        print(page_of_encoder(config.model, config.out or Path("explain.html"), **options))
        return
    if _task_of(config.model) == "language":
        from hyptree.train.explain import page_of_tokens

        _require_read(config, "language models")
        options = {"wordnet": config.wordnet, "num_blocks": config.samples, "device": config.find_device()}
        print(page_of_tokens(config.model, config.rival, out=config.out, **options))
        return
    if _task_of(config.model) == "embed":
        from hyptree.train.explain import page_of_embedding

        _require_read(config, "embedded hierarchies")
        print(page_of_embedding(config.model, config.out))
        return
    _require_read(config, "tables of clusters" if config.table else "pages of pictures")
    from hyptree.explore.pages import run_pictures as report

    subject = _subject(config.model, config.size)
    if config.table:
        _print_table(config, subject)
        return
    is_run = subject.task is not None
    if not config.images and not is_run:
        raise UserError(f"give pictures to explain, e.g. hyptree explain {config.model} photo.jpg")
    if config.images:
        if config.pictures is not None:
            raise UserError("--pictures counts validation pictures, and here others are given; leave it out")
        path = report.page_of_pictures(subject, config.images, config.out or Path("explain.html"))
    else:
        out = config.out or Path(config.model) / "index.html"
        path, _ = report.page_of_run(subject, config.model, out, num_pictures=config.pictures or 8)
    print(path)


_READ = {
    "encoders": ("images", "out", "pictures", "texts", "head", "pairs", "geometry", "random_init"),
    "language models": ("out", "wordnet", "rival", "samples", "device", "threads"),
    "embedded hierarchies": ("out",),
    "tables of clusters": ("table", "size", "samples", "target", "heads", "rival", "json"),
    "pages of pictures": ("images", "out", "size", "pictures"),
}
"""What is explained, and the flags that say something about it."""


def _require_read(config: ExplainConfig, kind: str) -> None:
    """Raise if a flag was given that would do nothing."""
    for field in fields(config):
        if field.name not in ("model", *_READ[kind]) and getattr(config, field.name) != field.default:
            where = " and ".join(name for name, flags in _READ.items() if field.name in flags)
            shown = "pictures are" if field.name == "images" else f"--{field.name.replace('_', '-')} is"
            what = "the pictures" if field.name == "images" else "it"
            raise UserError(f"{shown} for {where}, not for {kind}; leave {what} out")


def _task_of(model: str) -> str | None:
    """What a run trained; None where the model is no run."""
    from hyptree.runs import RunFolder

    folder = RunFolder(model)
    return folder.settings().get("task") if folder.holds_run else None


def _with_head(config: ExplainConfig) -> ExplainConfig:
    """For a few-shot run: its encoder, with the head of the run."""
    from hyptree.runs import RunFolder
    from hyptree.train.run.recipe import Recipe
    from hyptree.vlm.encoders.spec import is_encoder

    if config.head is not None:
        raise UserError(f"{config.model} is a run with a head of its own; leave --head out")
    run, recipe = Path(config.model), RunFolder(config.model).recipe(Recipe)
    name, out = recipe.model.name, config.out or run / "index.html"
    name = name if is_encoder(name) else f"hf:{name}"
    return replace(config, model=name, head=run, out=out, random_init=recipe.fewshot.random_init)


def _subject(model: str, size: int | None) -> Any:
    """The model that a folder or a name stands for."""
    from hyptree.train.explain import subject_of_name, subject_of_run
    from hyptree.train.source import find_model

    source = find_model(model, "run", "timm")
    if source.kind == "timm":
        return subject_of_name(source.name, size)
    subject = subject_of_run(model)
    subject.size = size or subject.size
    return subject


def _print_table(config: ExplainConfig, subject: Any) -> None:
    import json

    from hyptree.data.build import build_dataset
    from hyptree.data.settings import DataSettings
    from hyptree.evaluate.pictures.interpretability import interpretability_table, print_table
    from hyptree.tables import without_nan

    if subject.has_queries:
        raise UserError(
            f"--table measures clusters, and {subject.name} has a tree of queries, whose maps are no regions; leave "
            "--table out: the page has their numbers"
        )
    data = subject.data if subject.data is not None else DataSettings(size=subject.size)
    rival = None if config.rival is None else _subject(config.rival, subject.size).model
    rows = interpretability_table(
        subject.model,
        build_dataset(data, "val"),
        rival=rival,
        rival_name=config.rival or "",
        num_images=config.samples or 64,
        target=config.target,
        by_head=config.heads,
        mean=subject.mean,
        std=subject.std,
    )
    print(json.dumps(without_nan(rows)) if config.json else print_table(rows))
