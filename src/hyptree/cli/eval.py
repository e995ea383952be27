"""``hyptree eval RUN``: numbers of a trained run, and of language models on multiple-choice tasks."""

from __future__ import annotations

import json as jsons
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from hyptree.cli.config import AsJson
from hyptree.errors import UserError
from hyptree.files import require_path
from hyptree.signals import is_main_process
from hyptree.train.run.recipe import Recipe
from hyptree.train.source import find_model

_NOT_READ = ("task", "optim.", "schedule.", "loss.", "data.augment.", "data.batch_size", "model.weights", "model.pre")
"""Beginnings of keys of a recipe that say how to train, or whose place the weights of the run take."""
_RUN = ("run.device", "run.threads", "run.precision", "run.channels_last", "run.seed")
"""Those of its section run that evaluation reads; the seed is that of random encoders and of samples."""


@dataclass(kw_only=True)
class EvalConfig(AsJson):
    """``hyptree eval``: a run and a part of its data; or a language model and a text, or tasks."""

    source: Annotated[str, "RUN"]
    """Folder that hyptree train wrote. Keys of its recipe are flags, e.g. --data.root, --data.workers, --run.device.
    With --text or --tasks also hf:FOLDER_OR_ID, a language model of transformers."""
    split: Literal["train", "val", "test"] | None = None
    """Which part of the data. [val]"""
    tasks: str | None = None
    """For language models: multiple-choice tasks instead, e.g. arc_easy,piqa or a file of JSON lines (query, choices,
    gold)."""
    files: tuple[Path, ...] = ()
    """For language models: perplexity and bits per byte of these files instead, in blocks of the model's context, at
    most of 1,024 tokens."""
    limit: int | None = None
    """For tasks: questions of each, spread evenly; all by default."""
    shots: int | None = None
    """For tasks: solved examples before each question; by default as customary."""
    task_files: Path | None = None
    """For tasks: folder of their files; by default lm-eval in the folder that HYPTREE_DATA names, else data/lm-eval."""
    batch_size: int | None = None
    """For tasks and text: rows at once. [16]"""
    device: str | None = None
    """auto takes a GPU if there is one; cpu or cuda to insist. [that of the recipe; for tasks and text auto]"""
    settings: list[Recipe] = field(init=False)

    keys: ClassVar[type] = Recipe
    short: ClassVar = {"run.threads": "threads", "files": "text"}

    def bases(self, chosen: Mapping[str, Any]) -> list[Path]:
        """The run's recipe, which the flags lie over; tasks and texts read none."""
        asks = "--tasks" if self.tasks is not None else "--text" if self.files else None
        find_model(self.source, "run", *(["hf"] if asks or self.limit or self.shots else []))
        for name in ("limit", "shots", "task_files", "batch_size"):
            if getattr(self, name) is not None and self.tasks is None and not (self.files and name == "batch_size"):
                raise UserError(f"--{name.replace('_', '-')} is for tasks; name some with --tasks arc_easy,piqa")
        if asks is None:
            for key in chosen:
                if key.startswith(_NOT_READ) or (key.startswith("run.") and key not in _RUN):
                    raise UserError(f"{key} means nothing to hyptree eval; leave it out")
            return [Path(self.source) / "recipe.yaml"]
        for name in [*chosen, *(["split"] if self.split else []), *(["text"] if self.files and self.tasks else [])]:
            raise UserError(f"--{name} does not go with {asks}: it is for the data of a recipe")
        if self.tasks is not None and not self.tasks.strip(" ,"):
            raise UserError("--tasks needs names of tasks with commas, e.g. arc_easy,piqa")
        return []


def run(config: EvalConfig) -> int:
    """Numbers of a run's best weights on a split of its data."""
    if config.files:
        for path in config.files:
            require_path(path)
        from hyptree.devices import find_device
        from hyptree.tables import numbers
        from hyptree.train.language import measure_text

        model, device = find_model(config.source, "run", "hf"), find_device(config.device or "auto")
        results = measure_text(model, config.files, config.batch_size or 16, device)
        print(jsons.dumps(results) if config.json else "\n".join(numbers(results)))
        return 0
    if config.tasks is not None:
        from hyptree.evaluate.text.choices import score_lines
        from hyptree.train.language import run_tasks

        scores = run_tasks(
            find_model(config.source, "run", "hf").folder(),
            [task.strip() for task in config.tasks.split(",") if task.strip()],
            root=config.task_files,
            limit=config.limit,
            shots=config.shots,
            batch_size=config.batch_size or 16,
            device=config.device or "auto",
        )
        print(jsons.dumps([score.as_dict() for score in scores]) if config.json else "\n".join(score_lines(scores)))
        return 0

    from hyptree.tables import numbers
    from hyptree.train.evaluate import evaluate_run
    from hyptree.train.run.log import headline

    (recipe,) = config.settings
    recipe.run.device = config.device or recipe.run.device
    results = evaluate_run(config.source, config.split or "val", recipe, writes_results=True)
    if is_main_process():
        print(jsons.dumps(results) if config.json else "\n".join(numbers(headline(results))))
    return 0
