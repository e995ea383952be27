"""``ramify eval RUN``: numbers of a trained run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from ramify.cli import config as configs
from ramify.cli.train import split_args
from ramify.errors import UserError, suggest
from ramify.train.recipe import Recipe

Split = Literal["train", "val", "test"]


@dataclass(kw_only=True)
class EvalHelp:
    """What ``ramify eval --help`` shows."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder that ramify train wrote. Keys of its recipe are flags, e.g. --data.root, --data.workers, --run.device."""
    split: Split = "val"
    """Which part of the data."""
    json: bool = False
    """Print the numbers as JSON, those of single classes too."""


@dataclass
class EvalConfig:
    """``ramify eval``: a run, its recipe with overrides, a split."""

    run: Path
    split: str
    json: bool
    settings: Recipe = field(default_factory=Recipe)

    @classmethod
    def from_args(cls, prog: str, args: Sequence[str], yaml_path: str | None) -> EvalConfig | None:
        """From ``RUN --split test --data.workers 2``; None when help was asked for and printed."""
        if "-h" in args or "--help" in args:
            configs.parse(_help, prog, ["--help"])
            return None
        names, own, overrides = split_args(args, {"split": "train, val or test", "json": None}, prog)
        if len(names) != 1:
            raise UserError(f"{prog} needs one RUN, got {' and '.join(names) or 'none'} (see {prog} --help)")
        split = own.get("split", "val")
        if split not in get_args(Split):
            hint = suggest(split, get_args(Split))
            raise UserError(f"--split must be train, val or test, got {split!r}" + (f"; {hint}" if hint else ""))
        run = Path(names[0])
        source = run / "recipe.yaml" if yaml_path is None else yaml_path
        if not (run / "recipe.yaml").is_file():
            raise UserError(f"{run} is not the folder of a run: it has no recipe.yaml")
        return cls(run, split, "json" in own, configs.load(Recipe, source, overrides))


def run(config: EvalConfig) -> int:
    """Numbers of a run's best weights on a split of its data."""
    import json
    import os

    from ramify.train.evaluate import evaluate_run
    from ramify.train.report import headline

    found = evaluate_run(config.run, config.split, config.settings, writes_results=True)
    if os.environ.get("RANK", "0") != "0":
        return 0
    if config.json:
        print(json.dumps(found))
    else:
        shown = headline(found)
        width = max(map(len, shown)) + 2
        for name, value in shown.items():
            print(f"{name:<{width}}{value:.4f}" if isinstance(value, float) else f"{name:<{width}}{value}")
    return 0


def _help(config: EvalHelp) -> None:
    """Numbers of a run's best weights on a split of its data."""
