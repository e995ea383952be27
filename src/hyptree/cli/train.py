"""``hyptree train RECIPE``: train what a recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from hyptree.cli import config as configs
from hyptree.errors import UserError
from hyptree.signals import is_main_process
from hyptree.train.run.recipe import Recipe
from hyptree.vlm.encoders.spec import KINDS, check_spec

OWN = {"out": "a folder", "resume": None, "strict": None, "prepare": None}
"""Flags that are no part of the recipe, with what they want; None for nothing."""


@dataclass(kw_only=True)
class TrainHelp(Recipe):
    """What ``hyptree train --help`` shows: the flags beside the recipe's own keys."""

    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")]
    """YAML file, or the name of one of hyptree's own such as world_classify, or the folder of a run to take its recipe
    (with --resume: to go on with it)."""
    out: Path | None = None
    """Folder for the run; by default runs/ and the name of the recipe."""
    resume: bool = False
    """Go on from the newest whole checkpoint in the folder, bit for bit."""
    strict: bool = False
    """Short for --data.strict true: stop at the first sample that cannot be read."""
    prepare: bool = False
    """Only tokenise the text of a language model, once for all processes and later runs."""


@dataclass
class TrainConfig:
    """``hyptree train``: a recipe with overrides, and where the run goes."""

    settings: Recipe = field(default_factory=Recipe)
    out: Path = Path("runs/train")
    resume: bool = False
    prepare: bool = False

    help: ClassVar[type] = TrainHelp

    @classmethod
    def from_args(cls, prog: str, args: Sequence[str], yaml_path: str | None) -> TrainConfig:
        """From ``RECIPE --out DIR --optim.lr 3e-4 --model.args.depth 3``.

        Keys are read by ``configs.load`` and not by tyro, because ``model.args`` may have any key.
        """
        names, own, overrides = split_args(args, OWN, prog)
        if yaml_path is not None and not names:
            names, yaml_path = [yaml_path], None
        if len(names) != 1:
            raise UserError(f"{prog} needs one RECIPE, got {' and '.join(names) or 'none'} (see {prog} --help)")
        source = Path(names[0])
        out = Path(own["out"]) if "out" in own else Path("runs") / source.stem
        if source.is_dir():
            out = Path(own["out"]) if "out" in own else source
            source = source / "recipe.yaml"
        elif "resume" in own and not source.suffix and not source.exists() and source.parent != Path():
            raise UserError(f"{source}: no such folder to go on in; give the one that {prog} --out wrote")
        if "strict" in own:
            overrides.append("data.strict=true")
        sources: list[Path | str] = [source] if yaml_path is None else [source, yaml_path]
        return cls(configs.load(Recipe, sources, overrides), out, "resume" in own, "prepare" in own)


def run(config: TrainConfig) -> int:
    """Train what a recipe says; every key of the recipe is also a flag, e.g. --optim.lr 3e-4."""
    if config.prepare:
        return _prepare(config.settings)
    if config.settings.model.name.partition(":")[0] in KINDS:
        check_spec(config.settings.model.name)  # before torch is imported
    from hyptree.train.loop import fit
    from hyptree.train.run.log import headline

    result = fit(config.settings, config.out, resume=config.resume)
    if result.numbers and is_main_process():
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in headline(result.numbers).items())
        print(f"{numbers}\n{result.folder}")
    return 0


def _prepare(recipe: Recipe) -> int:
    from hyptree.data.text import build_text

    if recipe.task != "language":
        raise UserError(f"--prepare tokenises text; a recipe of the task {recipe.task} has none, leave it out")
    for split in ("train", "val"):
        text = build_text(recipe.text, split)
        print(f"{split}: {text.num_documents:,} documents, {text.num_tokens:,} tokens in {text.tokens.folder}")
    return 0


def split_args(
    args: Sequence[str], own: dict[str, str | None], prog: str
) -> tuple[list[str], dict[str, str], list[str]]:
    """Positional names, the verb's ``own`` flags, and everything else as overrides for ``configs.load``.

    ``--optim.lr 3e-4`` and ``--optim.lr=3e-4`` become ``optim.lr=3e-4``; a flag without a value means true.
    """
    names: list[str] = []
    settings: dict[str, str] = {}
    overrides: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            names.append(arg)
            continue
        key, equals, value = arg[2:].partition("=")
        key = key.replace("-", "_")
        is_switch = key in own and own[key] is None
        if not equals and not is_switch and rest and not rest[0].startswith("--"):
            value, equals = rest.pop(0), "="
        if key in own:
            if own[key] is not None and not equals:
                raise UserError(f"--{key} needs {own[key]} (see {prog} --help)")
            settings[key] = value
        else:
            overrides.append(f"{key}={value if equals else 'true'}")
    return names, settings, overrides
