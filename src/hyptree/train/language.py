"""Language models of runs and of Hugging Face folders, and training without the command line's dependencies.

Where tyro is not installed, this is ``hyptree train``::

    python -m hyptree.train.language recipes/helm_builtin.yaml --prepare
    python -m hyptree.train.language recipes/helm_builtin.yaml run.device=cuda --out runs/helm
    python -m hyptree.train.language runs/helm --resume
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyptree.errors import UserError, exit_code, one_line_parser, require

if TYPE_CHECKING:
    import torch


def load_language_model(source: Path | str, device: str | torch.device = "cpu") -> tuple[Any, Any]:
    """The model in eval mode and its tokenizer, from the folder of a run or from any folder of ``save_pretrained``.

    Nothing is downloaded, and no code or pickle of others is run.

    Raises:
        UserError: neither kind of folder, another task's run, no tokenizer, or one that is not the model's.
    """
    require("transformers", "lm")
    from hyptree.data.text.tokenizer import check_vocabulary, load_tokenizer
    from hyptree.train.run.folder import RunFolder

    folder = RunFolder(source)
    if not folder.path.is_dir():
        raise UserError(f"{source}: no such folder; give a run of hyptree train, or a folder of save_pretrained")
    if folder.holds_run:
        from hyptree.train.evaluate import load_model

        _require_language(folder)
        model: Any = load_model(source, device)[0]
        return model, unpack_tokenizer(folder.dataset()["tokenizer"])
    if not (folder.path / "config.json").is_file():
        raise UserError(
            f"{source} holds no language model: it has neither recipe.yaml (a run) nor config.json (save_pretrained)"
        )
    tokenizer = load_tokenizer(folder.path)  # before the weights: its absence is known at once
    from transformers import AutoModelForCausalLM

    import hyptree.lm  # noqa: F401  (makes transformers know our models)

    try:
        with _without_bars():
            model = AutoModelForCausalLM.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the model in {source}: {' '.join(str(error).split())[:300]}") from error
    check_vocabulary(tokenizer, model.config)
    return model.eval().to(device), tokenizer


def export_language_model(run: Path, out: Path | None = None) -> Path:
    """Write the best model of a run and its tokenizer as a Hugging Face folder, by default ``hf`` in the run."""
    from hyptree.train.run.folder import RunFolder

    _require_language(RunFolder(run))
    out = out if out is not None else run / "hf"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is already there and not empty; choose another --out")
    model, tokenizer = load_language_model(run)
    with _without_bars():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    return out


def pack_tokenizer(tokenizer: Any) -> dict[str, str]:
    """The files of a tokenizer, name to text: what a run keeps of it."""
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        files = sorted(path for path in Path(place).rglob("*") if path.is_file())
        try:
            return {path.relative_to(place).as_posix(): path.read_text(encoding="utf-8") for path in files}
        except UnicodeDecodeError as error:
            raise UserError("this tokenizer has files that are no text; use one with a tokenizer.json") from error


def unpack_tokenizer(files: dict[str, str]) -> Any:
    """The tokenizer that :func:`pack_tokenizer` packed."""
    from hyptree.data.text.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as place:
        for name, text in files.items():
            path = Path(place) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return load_tokenizer(place)


@contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bars of transformers inside: they are for downloads and shards, and these are one small file."""
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def _require_language(folder: Any) -> None:
    task = folder.recipe().task
    if task != "language":
        raise UserError(f"{folder.path} is a run of the task {task}, this needs one of the task language")


def run(argv: Sequence[str], prog: str = "python -m hyptree.train.language", about: str | None = __doc__) -> int:
    """Train what the arguments say, of any task; the same as ``hyptree train``."""
    from hyptree.config import load
    from hyptree.train.loop import fit
    from hyptree.train.run.log import headline
    from hyptree.train.run.recipe import Recipe

    parser = one_line_parser(prog, about)
    parser.add_argument("recipe", help="YAML file, or the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the recipe, e.g. optim.lr=3e-4")
    parser.add_argument("--out", type=Path, help="folder for the run; by default runs/ and the name of the recipe")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the folder")
    parser.add_argument("--prepare", action="store_true", help="only tokenise the text, for later runs")
    given = parser.parse_intermixed_args(list(argv))
    source = Path(given.recipe)
    out = given.out or (source if source.is_dir() else Path("runs") / source.stem)
    if source.is_dir():
        source = source / "recipe.yaml"
    recipe = load(Recipe, source, given.overrides)
    if given.prepare:
        from hyptree.data.text import build_text

        for split in ("train", "val"):
            text = build_text(recipe.text, split)
            print(f"{split}: {text.num_documents:,} documents, {text.num_tokens:,} tokens in {text.tokens.folder}")
        return 0
    result = fit(recipe, out, resume=given.resume)
    if result.numbers and os.environ.get("RANK", "0") == "0":
        print("  ".join(f"{name} {value:.4g}" for name, value in headline(result.numbers).items()))
        print(result.folder)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; a mistake of the user is one line and exit code 2, an interruption 130."""
    try:
        return exit_code(lambda: run(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
