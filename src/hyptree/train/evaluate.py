"""A trained run, used: its model in eval mode, its numbers on any split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyptree.devices import cpu_threads
from hyptree.errors import UserError
from hyptree.runs import RunFolder, best_weights
from hyptree.train.parallel.distributed import Processes
from hyptree.train.run.recipe import Recipe
from hyptree.train.run.state import fill_tensors
from hyptree.train.task import Task
from hyptree.train.tasks import build_task


def load_model(run: Path | str, device: str | torch.device = "cpu") -> tuple[nn.Module, Recipe]:
    """The model of a run with its best weights (the average where one is kept), in eval mode, and its recipe.

    The data need not be there. Nothing is unpickled.
    """
    recipe = RunFolder(run).recipe(Recipe)
    return load_task(run, recipe)[1].to(device), recipe


def load_task(run: Path | str, recipe: Recipe) -> tuple[Task, nn.Module]:
    """The task of a recipe and its model with the best weights of a run, in eval mode."""
    task = build_task(recipe)
    # The weights come from the run: downloading others, or looking for those it once started from, would be wasted.
    task.recipe.model.pretrained, task.recipe.model.weights = False, None
    task.recipe.model.args.pop("checkpoint_path", None)  # timm's word for the same; it may be a pickle
    model = task.build_model(RunFolder(run).dataset())
    fill_tensors(model.state_dict(), best_weights(run), str(run))
    if hasattr(model, "check_base"):  # these weights are for one encoder
        model.check_base()  # type: ignore[operator]
    return task, model.eval()


def evaluate_run(
    run: Path | str, split: str = "val", recipe: Recipe | None = None, *, writes_results: bool = False
) -> dict[str, Any]:
    """Numbers of a run's best weights on a split of its data.

    Args:
        recipe: another one than the run's, e.g. with its data elsewhere or more workers; model and task must be equal.
        writes_results: keep what was found in the run's folder where the task can (detections, in COCO's format); the
            answer has the file's name under ``results``.
    """
    folder = RunFolder(run)
    recipe = recipe or folder.recipe(Recipe)
    processes = Processes(recipe.run.device)
    try:
        with cpu_threads(recipe.run.threads):
            task, model = load_task(run, recipe)
            model.to(processes.device)
            dataset = task.build_dataset(split)
            skipped: dict[str, str] = {}
            loader = task.build_loader(dataset, False, rank=processes.rank, world_size=processes.size, skipped=skipped)
            scores: dict[str, Any] = dict(task.score(model, loader, processes.device, processes.gather))
            loader.close()
            scores["skipped"] = int(processes.gather(torch.tensor([len(skipped)])).sum())
            if writes_results and hasattr(task, "write_results"):
                path = folder.path / f"results-{split}.json"
                if processes.is_main:
                    try:
                        task.write_results(path)
                    except OSError as error:
                        raise UserError(f"cannot write {path}: {error.strerror}") from error
                scores["results"] = str(path)
    finally:
        processes.close()
    return {"split": split, "samples": len(dataset), **scores}
