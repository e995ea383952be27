"""What ``hyptree explain`` looks into: the model of a run or of a name, and the tokens of a language model's run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from hyptree.config import load
from hyptree.data.pictures.single import default_size
from hyptree.errors import UserError
from hyptree.evaluate.text.token_radii import NUM_BLOCKS, curvatures
from hyptree.explore.pages import encoder_subject, himapper_page
from hyptree.explore.pages.language import VALIDATION, write_token_page
from hyptree.explore.pages.run_pictures import Subject
from hyptree.files import data_folder
from hyptree.runs import RunFolder
from hyptree.train.evaluate import load_model
from hyptree.train.language import measure_run
from hyptree.train.model import create_model
from hyptree.train.run.recipe import ModelSettings, Recipe
from hyptree.tree import Tree


def subject_of_run(run: Path | str) -> Subject:
    """The best model of a run that ``hyptree train`` wrote."""
    model, recipe = load_model(run)
    about = RunFolder(run).dataset()
    tree = about.get("tree")
    return Subject(
        model=model,
        name=f"Hi-Mapper on {recipe.model.name}" if himapper_page.find_himapper(model) else recipe.model.name,
        size=recipe.data.size,
        mean=recipe.data.mean,
        std=recipe.data.std,
        classes=tuple(about.get("classes") or ()),
        tree=None if tree is None else Tree(np.asarray(tree["parent"]), label=tree["label"]),
        task=recipe.task,
        data=recipe.data,
        crop_pct=recipe.data.crop_pct if recipe.task == "classify" else 1.0,
    )


def subject_of_name(name: str, size: int | None = None) -> Subject:
    """A model of this name with fresh weights."""
    torch.manual_seed(0)  # fresh weights, but the same ones each time
    model = create_model(ModelSettings(name=name)).eval()
    return Subject(model, name, size or default_size(model))


def page_of_encoder(model: str, out: Path | str, *, random_init: bool = False, **options: Any) -> Path:
    """The page of an encoder (``hyptree.explore.pages.encoder_subject``), with a head that is trained for it.

    The head learns from four pictures of each class of the built-in world, where no head, picture or text is given.
    """
    from hyptree.train.loop import fit

    keys = {"task": "fewshot", "model.name": model, "fewshot.random_init": random_init, "fewshot.shots": 4}
    keys |= {"data.size": 96, "data.num_train": 400, "data.num_val": 40, "run.tensorboard": False}
    with TemporaryDirectory() as folder:
        run = Path(folder) / "the built-in world"

        def make_head() -> Path:
            words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
            fit(load(Recipe, None, [*words, f"fewshot.cache={json.dumps(folder)}"]), run, quiet=True)
            return run

        return encoder_subject.page_of_encoder(model, out, random_init=random_init, make_head=make_head, **options)


def page_of_tokens(
    run: Path | str,
    twin: Path | str | None = None,
    *,
    out: Path | str | None = None,
    wordnet: Path | str | None = None,
    num_blocks: int | None = None,
    device: str = "cpu",
) -> Path:
    """Writes the page of a run's tokens, and gives its path.

    Args:
        run: folder that ``hyptree train`` wrote, of the task ``language``; its text must still be there.
        twin: another run to put beside it, e.g. of the Euclidean twin.
        out: by default ``tokens.html`` in the run; the numbers go beside it, to the same name with ``.json``.
        wordnet: folder of WordNet's tables (noun_synsets.tsv.gz, noun_hypernyms.tsv.gz); by default ``wordnet`` in
            HYPTREE_DATA or in ``data`` where there is one. Without, depths are left out.
        num_blocks: blocks of validation text that go through the models.
        device: cpu, cuda, ...

    Raises:
        UserError: not a run of a language model, text that is gone, a disk that is full.
    """
    wordnet = _find_wordnet(wordnet)
    path = Path(out) if out is not None else Path(run) / "tokens.html"
    models = []
    for source in [run] if twin is None else [run, twin]:
        numbers = measure_run(source, wordnet=wordnet, num_blocks=num_blocks or NUM_BLOCKS, device=device)
        metrics = RunFolder(source).read_metrics()
        models.append(numbers | {"curvatures": curvatures(metrics), "val": _last_validation(metrics)})
    return write_token_page(path, models)


def page_of_embedding(run: Path | str, out: Path | str | None = None) -> Path:
    """Writes the page of a run of the task ``embed``, by default ``index.html`` in its folder, and gives its path."""
    from hyptree.evaluate.hierarchy.embedding import measure, sample_size
    from hyptree.explore.pages.tree_demo import write_embedding_page
    from hyptree.train.tasks.embed import load_embedding

    embedding = load_embedding(run)
    numbers = measure(embedding, num_samples=sample_size(len(embedding.names), None))
    path = Path(out) if out is not None else Path(run) / "index.html"
    return write_embedding_page(path, embedding, numbers, RunFolder(run).read_metrics())


def _find_wordnet(folder: Path | str | None) -> Path | None:
    if folder is not None:
        if not Path(folder).is_dir():
            raise UserError(f"no WordNet at {folder}: no such folder; leave it out to do without depths")
        return Path(folder)
    place = data_folder() / "wordnet"
    return place if place.is_dir() else None


def _last_validation(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    rows = [row for row in metrics if row.get("split") == "val"]
    return {name: rows[-1][name] for name in VALIDATION if rows and name in rows[-1]}
