"""Language models of runs and of Hugging Face folders: loaded, exported, asked, measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.data.text import build_text, check_vocabulary, load_tokenizer, unpack_tokenizer
from hyptree.devices import find_device
from hyptree.errors import UserError, require
from hyptree.evaluate.text.choices import ChoiceScore, evaluate_tasks
from hyptree.evaluate.text.token_radii import NUM_BLOCKS, count_tokens, measure_tokens, read_depths
from hyptree.files import check_weights, sign_weights
from hyptree.progress import quiet_transformers
from hyptree.runs import RunFolder
from hyptree.train.run.recipe import Recipe
from hyptree.train.source import Source, find_model

if TYPE_CHECKING:
    import torch


def load_language_model(source: Path | str, device: str | torch.device = "cpu") -> tuple[Any, Any]:
    """The model in eval mode and its tokenizer, from the folder of a run or from any folder of ``save_pretrained``.

    Nothing is downloaded, and no code or pickle of others is run.

    Raises:
        UserError: neither kind of folder, another task's run, no tokenizer, or one that is not the model's.
    """
    require("transformers", "lm")
    folder = RunFolder(source)
    if folder.holds_run:
        from hyptree.train.evaluate import load_model

        _require_language(folder)
        model: Any = load_model(source, device)[0]
        return model, unpack_tokenizer(folder.dataset("tokenizer")["tokenizer"])
    find_model(source, "run", "hf")
    tokenizer = load_tokenizer(folder.path)  # before the weights: its absence is known at once
    from transformers import AutoModelForCausalLM

    import hyptree.lm  # noqa: F401  (makes transformers know our models)

    check_weights(folder.path)
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the model in {source}: {' '.join(str(error).split())[:300]}") from error
    check_vocabulary(tokenizer, model.config)
    return model.eval().to(device), tokenizer


def export_language_model(run: Path, out: Path | None = None) -> Path:
    """Write the best model of a run and its tokenizer as a Hugging Face folder, by default ``hf`` in the run."""
    _require_language(RunFolder(run))
    out = fresh_folder(out or run / "hf")
    model, tokenizer = load_language_model(run)
    with quiet_transformers():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    sign_weights(out)
    return out


def fresh_folder(folder: Path) -> Path:
    """The folder, if nothing is in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is already there and not empty; choose another --out")
    return folder


def _require_language(folder: Any) -> None:
    task = folder.recipe(Recipe).task
    if task != "language":
        raise UserError(f"{folder.path} is a run of the task {task}, this needs one of the task language")


def measure_text(source: Source, text: Sequence[Path], batch_size: int, device: torch.device) -> dict[str, Any]:
    """Perplexity per token and bits per byte of files, block by block as the task ``language`` measures them."""
    import torch

    from hyptree.data.text import TextSettings, build_text_loader
    from hyptree.evaluate.text.perplexity import byte_lengths, score

    model, tokenizer = load_language_model(source.folder(), device)
    context = min(getattr(model.config, "max_position_embeddings", None) or 1024, 1024)
    settings = TextSettings(path=tuple(text), val_path=tuple(text), block_length=context)
    blocks = build_text(settings, "val", tokenizer)
    moved = ({k: v.to(device) for k, v in batch.items()} for batch in build_text_loader(blocks, batch_size=batch_size))
    with torch.no_grad():
        result = score(model, moved, byte_lengths(tokenizer).to(device))
    numbers = {"loss": result.loss, "perplexity": result.perplexity, "bits_per_byte": result.bits_per_byte}
    return {"tokens": result.num_tokens, "bytes": result.num_bytes, "block_length": context, **numbers}


def run_tasks(source: Path | str, tasks: Sequence[str], *, device: str = "cpu", **options: Any) -> list[ChoiceScore]:
    """Scores of the model in a folder (a run, or one of ``save_pretrained``), progress on standard error."""
    model, tokenizer = load_language_model(source, find_device(device))
    return evaluate_tasks(model, tokenizer, tasks, progress=sys.stderr, **options)


def measure_run(
    run: Path | str,
    *,
    wordnet: Path | str | None = None,
    split: str = "val",
    num_blocks: int = NUM_BLOCKS,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """The numbers of :func:`hyptree.evaluate.text.token_radii.measure_tokens` for a run that ``hyptree train`` wrote.

    Counts are those of the training text; ``num_blocks`` blocks of ``split``, spread over it, go through the model.

    Args:
        wordnet: folder with noun_synsets.tsv.gz and noun_hypernyms.tsv.gz; without it depths are left out.

    Raises:
        UserError: not a run of a language model, or its text is not there any more.
    """

    folder = RunFolder(run)
    model, tokenizer = load_language_model(folder.path, device)
    if not folder.holds_run:
        raise UserError(f"{run} is not the folder of a run, which says what text the model was trained on")
    recipe = folder.recipe(Recipe)
    training = build_text(recipe.text, "train", tokenizer)
    counts = count_tokens(training.tokens.tokens, model.config.vocab_size)
    blocks = build_text(recipe.text, split, tokenizer)
    chosen = np.unique(np.linspace(0, len(blocks) - 1, min(num_blocks, len(blocks))).astype(int))
    batches = (blocks.batch(chosen[k : k + 8]) for k in range(0, len(chosen), 8))
    depths = read_depths(wordnet) if wordnet is not None else None
    return {"model": recipe.model.name} | measure_tokens(model, tokenizer, counts, batches, depths)
