"""``hyptree train RECIPE``: train what a recipe says."""

from __future__ import annotations

import json as jsons
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from hyptree.cli.config import AsJson
from hyptree.errors import UserError
from hyptree.signals import is_main_process
from hyptree.train.run.recipe import Recipe


@dataclass(kw_only=True)
class TrainConfig(AsJson):
    """``hyptree train``: a recipe, and where the run goes."""

    recipe: Annotated[Path, "RECIPE"]
    """YAML file, or the name of one of hyptree's own such as world_classify, or the folder of a run to take its recipe
    (with --resume: to go on with it)."""
    out: Path | None = None
    """Folder for the run; by default runs/ and the name of the recipe."""
    resume: bool = False
    """Go on from the newest whole checkpoint in the folder, bit for bit."""
    overwrite: bool = False
    """Replace the run in the folder."""
    prepare: bool = False
    """Only tokenise the text of a language model, once for all processes and later runs."""
    settings: list[Recipe] = field(init=False)

    keys: ClassVar[type] = Recipe
    short: ClassVar = {
        "run.device": "device",
        "run.seed": "seed",
        "run.threads": "threads",
        "data.strict": "strict",
    }

    def bases(self, chosen: Mapping[str, Any]) -> list[Path]:
        """The recipe that the flags lie over."""
        source = self.recipe
        if source.is_dir():
            self.out, source = self.out or source, source / "recipe.yaml"
        elif self.resume and not source.suffix and not source.exists() and source.parent != Path():
            raise UserError(f"{source}: no such folder to go on in; give the one that hyptree train --out wrote")
        self.out = self.out or Path("runs") / source.stem
        return [source]


def run(config: TrainConfig) -> int:
    """Train what a recipe says; every key of the recipe is also a flag, e.g. --optim.lr 3e-4."""
    (recipe,), out = config.settings, config.out
    assert out is not None
    if config.prepare:
        return _prepare(recipe)
    if recipe.model.name.startswith(("hf:", "open_clip:")):
        from hyptree.vlm.encoders.spec import check_spec

        check_spec(recipe.model.name)  # before torch is imported
    from hyptree.train.loop import fit
    from hyptree.train.run.log import headline

    result = fit(recipe, out, resume=config.resume, overwrite=config.overwrite, quiet=config.json)
    if is_main_process():
        if config.json:
            print(jsons.dumps({"folder": str(result.folder), "step": result.step, "numbers": result.numbers}))
        elif result.numbers:
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
