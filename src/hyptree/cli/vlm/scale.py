"""``hyptree vlm train-scale``: tune a CLIP for segmentation by names with an adapter and a cost-volume head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyptree.runs import RunFolder
from hyptree.train.run.recipe import Recipe
from hyptree.vlm.encoders.spec import check_spec


@dataclass
class TrainScaleConfig:
    """``hyptree vlm train-scale``; a setting that is not given is the recipe's, or the default without one."""

    model: str | None = None
    """The CLIP: open_clip:NAME:PRETRAINED, or hf:DIR_OR_ID. [hf:runs/clip_world]"""
    recipe: Path | None = None
    """YAML file of the task openvocab to start from, e.g. recipes/openvocab_world.yaml."""
    method: Literal["frozen", "scale", "lora", "diagonal", "orthogonal", "full"] | None = None
    """What is tuned in CLIP, beside the head. [scale]"""
    block_size: int | None = None
    """Side of the blocks of scale and orthogonal; must divide the widths of the towers. [64; 128 is the paper's]"""
    rank: int | None = None
    """Rank of lora. [the adapter's own]"""
    data: Literal["world", "camvid", "pets", "ade20k"] | None = None
    """Pictures with a class for every pixel. [world]"""
    root: Path | None = None
    """Folder or .npz file of the pictures; the built-in world needs none."""
    unseen: tuple[str, ...] | None = None
    """Classes that training never sees. [none]"""
    template: str | None = None
    """Sentence for a class, {} is its name. [A photo of a {} in the scene]"""
    size: int | None = None
    """Side of the training pictures and of the windows, in pixels. [64]"""
    eval_size: int | None = None
    """Side of the pictures when they are scored, by windows with a third in common and a look at the whole. [size]"""
    num_train: int | None = None
    """Training pictures to use. [all]"""
    num_val: int | None = None
    """Validation pictures to use. [all]"""
    batch_size: int | None = None
    """Pictures per step. [4]"""
    epochs: float | None = None
    """Passes over the training pictures. [10]"""
    steps: int | None = None
    """Optimiser steps; wins over epochs."""
    lr: float | None = None
    """Learning rate of the head. [2e-4]"""
    adapter_lr: float | None = None
    """That of the adapter as a share of it. [0.075]"""
    random_init: bool = False
    """Take random weights for the CLIP, for smoke tests."""
    device: str | None = None
    """auto takes a GPU if there is one; cpu or cuda to insist. [auto]"""
    seed: int | None = None
    """Of the head, the order of pictures and random weights. [0]"""
    out: Path = Path("runs/train_scale")
    """Folder for the run: checkpoints, metrics, openvocab.json and the adapter."""
    resume: bool = False
    """Go on from the newest whole checkpoint in the folder."""
    json: bool = False
    """Print the report as JSON."""
    quiet: bool = False
    """No lines while training."""

    def overrides(self) -> list[str]:
        """What was given, as overrides of a recipe."""
        import json

        places = {
            "model": "model.name",
            "method": "model.args.method",
            "block_size": "model.args.adapter.block_size",
            "rank": "model.args.adapter.rank",
            "data": "data.name",
            "root": "data.root",
            "unseen": "model.args.unseen",
            "template": "model.args.template",
            "size": "data.size",
            "eval_size": "model.args.eval_size",
            "num_train": "data.num_train",
            "num_val": "data.num_val",
            "batch_size": "data.batch_size",
            "epochs": "schedule.epochs",
            "steps": "schedule.steps",
            "lr": "optim.lr",
            "adapter_lr": "model.args.adapter_lr",
            "device": "run.device",
            "seed": "run.seed",
        }
        lines = []
        for name, place in places.items():
            value: Any = getattr(self, name)
            if value is not None:
                value = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
                lines.append(f"{place}={json.dumps(value)}")
        if self.random_init:
            lines.append("model.args.random_init=true")
        return lines

    def settings(self) -> Recipe:
        """The recipe of the run."""
        from hyptree.config import load, read_yaml

        overrides = self.overrides()
        if self.recipe is None:
            blocks = [_BLOCKS] if self.method in (None, "scale", "orthogonal") else []
            return load(Recipe, None, [*_DEFAULTS, *blocks, *overrides])
        if self.method is not None and self.method != _method(read_yaml(self.recipe)):
            overrides = ["model.args.adapter={}", *overrides]  # options of another method mean nothing to this one
        return load(Recipe, self.recipe, overrides)


_DEFAULTS = (
    "task=openvocab",
    "model.name=hf:runs/clip_world",
    "data.batch_size=4",
    "optim.lr=2e-4",
    "optim.weight_decay=1e-4",
    "optim.clip=0.01",
    "schedule.epochs=10",
    "schedule.min_lr=0",
    "run.eval_every=0",
)

_BLOCKS = "model.args.adapter.block_size=64"
"""Fits the default model, 192 wide, and those of open_clip."""


def train_scale(config: TrainScaleConfig) -> int:
    """Tune a CLIP for segmentation by names: adapter and cost-volume head.

    Prints mean IoU of seen and unseen classes for the cosines of CLIP alone, before and after, and for the head, with
    the radius of the class texts before and after. Every key of the task is in recipes/openvocab_*.yaml; hyptree train
    runs them too.
    """
    settings = config.settings()
    if settings.task == "openvocab":
        check_spec(settings.model.name)
    from hyptree.train.tasks.openvocab_job import report_lines, train_and_report

    report = train_and_report(settings, config.out, resume=config.resume, quiet=config.quiet or config.json)
    if not report:  # not the first process
        return 0
    if config.json:
        import json

        print(json.dumps(report))
    else:
        print("\n".join([*report_lines(report), str(config.out)]))
    return 0


def _method(recipe: dict[str, Any]) -> str:
    args = (recipe.get("model") or {}).get("args") or {}
    return str(args.get("method", "scale"))


@dataclass(kw_only=True)
class EvalOpenVocabConfig:
    """``hyptree vlm eval-openvocab``."""

    detector: Path
    """Run of the task detect or openvocab_detect: its boxes, and its data."""
    segmenter: Path
    """Run of the task openvocab: its CLIP names the boxes, its map fills what they leave."""
    split: Literal["train", "val", "test"] = "val"
    """Which part of the detector's data."""
    novel: tuple[str, ...] | None = None
    """Classes to count as novel. [those that the segmenter did not see]"""
    limit: int | None = None
    """Pictures to look at. [all]"""
    text_weight: float = 0.5
    """Share of CLIP in a score, from 0 (the detector alone) to 1."""
    min_score: float = 0.3
    """Score of an instance in the panoptic map."""
    device: str = "cpu"
    """cpu, cuda, ..."""
    out: Path | None = None
    """JSON file for the numbers."""
    json: bool = False
    """Print them as JSON, those of single classes too."""


def eval_openvocab(config: EvalOpenVocabConfig) -> int:
    """AP and PQ of base and novel classes, by a detector whose boxes are named by text."""
    for run in (config.detector, config.segmenter):
        RunFolder(run).require_run()
    import json

    from hyptree.errors import as_user_error
    from hyptree.files import write_text
    from hyptree.tables import numbers
    from hyptree.train.openvocab import evaluate_openvocab
    from hyptree.train.run.log import headline

    with as_user_error():
        scores = evaluate_openvocab(
            config.detector,
            config.segmenter,
            split=config.split,
            novel=config.novel,
            limit=config.limit,
            text_weight=config.text_weight,
            min_score=config.min_score,
            device=config.device,
        )
    if config.out is not None:
        write_text(config.out, json.dumps(scores, indent=2) + "\n")
    print(json.dumps(scores) if config.json else "\n".join(numbers(headline(scores))))
    return 0
