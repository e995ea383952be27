"""Tasks by name: what can be written as ``task:`` in a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyptree.errors import UserError, require_known

if TYPE_CHECKING:
    from hyptree.train.run.recipe import Recipe
    from hyptree.train.task import Task

# "module:class", so that a task's libraries are imported only by those who train it.
TASKS: dict[str, str] = {
    "classify": "hyptree.train.tasks.classify:Classify",
    "segment": "hyptree.train.tasks.segment:Segment",
    "detect": "hyptree.train.tasks.detect:Detect",
    "language": "hyptree.train.tasks.language:Language",
    "contrast": "hyptree.train.tasks.contrast:Contrast",
    "openvocab": "hyptree.train.tasks.openvocab:OpenVocab",
    "openvocab_detect": "hyptree.train.tasks.detect:OpenVocabDetect",
    "embed": "hyptree.train.tasks.embed:Embed",
    "radial": "hyptree.train.tasks.radial:Radial",
    "fewshot": "hyptree.train.tasks.fewshot:FewShot",
}


def build_task(recipe: Recipe) -> Task:
    """The task that a recipe names."""
    from importlib import import_module

    require_known("unknown task {!r}", [recipe.task], TASKS)
    module, name = TASKS[recipe.task].split(":")
    task: Task = getattr(import_module(module), name)(recipe)
    if recipe.model.plugin is not None and not task.takes_plugin:
        raise UserError(f"the task {recipe.task} takes no model.plugin, got {recipe.model.plugin.name}; leave it out")
    return task
