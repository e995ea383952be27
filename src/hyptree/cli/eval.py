"""``hyptree eval RUN``: numbers of a trained run, and of language models on multiple-choice tasks."""

from __future__ import annotations

import json as jsons
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from hyptree.cli.generate import LANGUAGE_MODELS
from hyptree.errors import UserError
from hyptree.files import require_path
from hyptree.runs import RunFolder
from hyptree.signals import is_main_process
from hyptree.train.run.recipe import Recipe


@dataclass
class EvalConfig:
    """``hyptree eval``: a run and a part of its data; or a language model and tasks."""

    source: Annotated[Path, "RUN"]
    """Folder that hyptree train wrote. Keys of its recipe are flags, e.g. --data.root, --data.workers, --run.device."""
    split: Literal["train", "val", "test"] | None = None
    """Which part of the data. [val]"""
    json: bool = False
    """Print the numbers as JSON, those of single classes too."""
    tasks: str | None = None
    """For language models: multiple-choice tasks instead, e.g. arc_easy,piqa or a file of JSON lines (query, choices,
    gold). RUN may also be a folder of transformers' save_pretrained."""
    limit: int | None = None
    """For tasks: questions of each, spread evenly; all by default."""
    shots: int | None = None
    """For tasks: solved examples before each question; by default as customary."""
    task_files: Path | None = None
    """For tasks: folder of their files; by default lm-eval in the folder that HYPTREE_DATA names, else data/lm-eval."""
    batch_size: int | None = None
    """For tasks: rows at once. [16]"""
    device: str | None = None
    """auto takes a GPU if there is one; cpu or cuda to insist. [that of the recipe; for tasks auto]"""
    settings: list[Recipe] = field(init=False)

    keys: ClassVar[type] = Recipe
    short: ClassVar = {"run.threads": "threads"}

    def bases(self, chosen: Mapping[str, Any]) -> list[Path]:
        """The run's recipe, which the flags lie over; tasks read none."""
        if self.tasks is None:
            for name in ("limit", "shots", "task_files", "batch_size"):
                if getattr(self, name) is not None:
                    raise UserError(f"--{name.replace('_', '-')} is for tasks; name some with --tasks arc_easy,piqa")
            RunFolder(self.source).require_run()
            return [self.source / "recipe.yaml"]
        for name in [*chosen, *(["split"] if self.split else [])]:
            raise UserError(f"--{name} does not go with --tasks: it is for the data of a recipe")
        if not self.tasks.strip(" ,"):
            raise UserError("--tasks needs names of tasks with commas, e.g. arc_easy,piqa")
        return []


def run(config: EvalConfig) -> int:
    """Numbers of a run's best weights on a split of its data."""
    if config.tasks is not None:
        require_path(config.source, "folder", LANGUAGE_MODELS)
        from hyptree.evaluate.text.choices import score_lines
        from hyptree.train.language import run_tasks

        scores = run_tasks(
            config.source,
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
