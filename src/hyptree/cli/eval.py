"""``hyptree eval RUN``: numbers of a trained run, and of language models on multiple-choice tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import tyro

from hyptree.cli import config as configs
from hyptree.cli.generate import LANGUAGE_MODELS
from hyptree.cli.train import split_args
from hyptree.errors import UserError, suggest
from hyptree.files import require_path
from hyptree.runs import RunFolder
from hyptree.signals import is_main_process
from hyptree.train.run.recipe import Recipe

Split = Literal["train", "val", "test"]


@dataclass(kw_only=True)
class EvalHelp:
    """What ``hyptree eval --help`` shows."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder that hyptree train wrote. Keys of its recipe are flags, e.g. --data.root, --data.workers, --run.device."""
    split: Split = "val"
    """Which part of the data."""
    json: bool = False
    """Print the numbers as JSON, those of single classes too."""
    tasks: str = ""
    """For language models: multiple-choice tasks instead, e.g. arc_easy,piqa or a file of JSON lines (query, choices,
    gold). RUN may also be a folder of transformers' save_pretrained. The flags below are for tasks."""
    limit: int | None = None
    """Questions of each task, spread evenly; all by default."""
    shots: int | None = None
    """Solved examples before each question; as customary for the task by default."""
    task_files: Path | None = None
    """Folder of the tasks' files; by default lm-eval in the folder that HYPTREE_DATA names, else data/lm-eval."""
    batch_size: int = 16
    """Rows at once."""
    device: str = "auto"
    """auto takes a GPU if there is one; cpu or cuda to insist."""


@dataclass
class EvalConfig:
    """``hyptree eval``: a run, its recipe with overrides, a split; or a language model and tasks."""

    run: Path
    split: str
    json: bool
    settings: Any = field(default_factory=Recipe)
    """The recipe, or for tasks the arguments of ``hyptree.train.language.run_tasks``."""

    help: ClassVar[type] = EvalHelp

    @classmethod
    def from_args(cls, prog: str, args: Sequence[str], yaml_path: str | None) -> EvalConfig:
        """From ``RUN --split test --data.workers 2``."""
        names, own, overrides = split_args(args, {"split": "train, val or test", "json": None} | _TASK_FLAGS, prog)
        if len(names) != 1:
            raise UserError(f"{prog} needs one RUN, got {' and '.join(names) or 'none'} (see {prog} --help)")
        split = own.get("split", "val")
        if split not in get_args(Split):
            hint = suggest(split, get_args(Split))
            raise UserError(f"--split must be train, val or test, got {split!r}" + (f"; {hint}" if hint else ""))
        folder = Path(names[0])
        if chosen := _task_options(own, overrides, prog):
            if yaml_path is not None:
                raise UserError("--config holds keys of a run's recipe and does not go with --tasks; leave it out")
            return cls(folder, split, "json" in own, chosen)
        RunFolder(folder).require_run()
        sources: list[Path | str] = [folder / "recipe.yaml", *([] if yaml_path is None else [yaml_path])]
        return cls(folder, split, "json" in own, configs.load(Recipe, sources, overrides))


def run(config: EvalConfig) -> int:
    """Numbers of a run's best weights on a split of its data."""
    import json

    if isinstance(config.settings, dict):
        require_path(config.run, "folder", LANGUAGE_MODELS)
        from hyptree.evaluate.text.choices import score_lines
        from hyptree.train.language import run_tasks

        scores = run_tasks(config.run, **config.settings)
        print(json.dumps([score.as_dict() for score in scores]) if config.json else "\n".join(score_lines(scores)))
        return 0

    from hyptree.tables import numbers
    from hyptree.train.evaluate import evaluate_run
    from hyptree.train.run.log import headline

    results = evaluate_run(config.run, config.split, config.settings, writes_results=True)
    if is_main_process():
        print(json.dumps(results) if config.json else "\n".join(numbers(headline(results))))
    return 0


_TASK_FLAGS: dict[str, str | None] = {
    "tasks": "names of tasks with commas, e.g. arc_easy,piqa",
    "task_files": "a folder",
    "limit": "a number of questions",
    "shots": "a number of solved examples",
    "batch_size": "a number of rows",
    "device": "a device, e.g. cuda",
}


def _task_options(own: dict[str, str], overrides: Sequence[str], prog: str) -> dict[str, Any] | None:
    """What is to be done with tasks; None where there are none."""
    if "tasks" not in own:
        if stray := [name for name in _TASK_FLAGS if name in own]:
            raise UserError(f"--{stray[0].replace('_', '-')} is for tasks; name some with --tasks arc_easy,piqa")
        return None
    if overrides or "split" in own:
        name = "split" if "split" in own else overrides[0].partition("=")[0]
        hint = suggest(name, _TASK_FLAGS)
        raise UserError(f"--{name} does not go with --tasks; {hint or f'see {prog} --help'}")
    numbers: dict[str, int | None] = {"limit": None, "shots": None, "batch_size": 16}
    for name in numbers:
        if name in own:
            try:
                numbers[name] = int(own[name])
            except ValueError:
                raise UserError(f"--{name.replace('_', '-')} must be a whole number, got {own[name]!r}") from None
    tasks = [task.strip() for task in own["tasks"].split(",") if task.strip()]
    if not tasks:
        raise UserError(f"--tasks needs {_TASK_FLAGS['tasks']}")
    root = Path(own["task_files"]) if "task_files" in own else None
    return {"tasks": tasks, "root": root, **numbers, "device": own.get("device", "auto")}
