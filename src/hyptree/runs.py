"""The folder of a run, and the only code that writes into it. A kill at any moment leaves a run that resumes.

    recipe.yaml         the recipe, resolved
    dataset.json        what the model must know of the data: class names, ...
    metrics.jsonl       one JSON object a line: step, epoch, split (train or val), time, numbers
    log.txt             the lines a terminal would have shown
    checkpoints/last, checkpoints/previous    model.safetensors, ema.safetensors, training.safetensors, manifest.json
    checkpoints/best/model.safetensors        the weights with the best validation number

A checkpoint is a folder that is written under another name, synced and renamed. Its manifest holds the size and SHA-256
of every file, so that a damaged one is noticed, named, and the previous one used. Everything is safetensors or JSON:
nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hyptree.config import load, read_yaml, to_yaml
from hyptree.errors import UserError, as_called
from hyptree.files import cut_log, load_tensors, path_inside, read_json, read_log, save_tensors, sync, write_text

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R")
MANIFEST = "manifest.json"
MODEL, EMA, TRAINING = "model.safetensors", "ema.safetensors", "training.safetensors"
LAST, PREVIOUS, BEST, DAMAGED = "last", "previous", "best", "damaged"


@dataclass
class Checkpoint:
    """Everything needed to go on: full tensors on the CPU, and the progress in JSON's types."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict[str, Tensor]
    progress: dict[str, Any]


class RunFolder:
    """Reads and writes the folder of one run."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "log.txt"
        """Locked as long as a process trains here."""

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return (self.path / "recipe.yaml").is_file()

    def recipe(self, kind: type[R]) -> R:
        """The recipe that the run was started with, as a dataclass of this kind."""
        self.require_run()
        return load(kind, self.path / "recipe.yaml")

    def settings(self) -> dict[str, Any]:
        """The same as plain values, for those who read only a part of it."""
        self.require_run()
        return read_yaml(self.path / "recipe.yaml")

    def dataset(self, *keys: str) -> dict[str, Any]:
        """What the task's ``describe`` said about the data, these keys at least."""
        self.require_run()
        return read_json(self.path / "dataset.json", *keys)

    def require_run(self) -> None:
        """Raise unless a run was started here."""
        if not self.holds_run:
            why = "it has no recipe.yaml" if self.path.exists() else "no such folder"
            raise UserError(f"{self.path} is not the folder of a run: {why}")

    def require_writable(self) -> None:
        """Raise if the folder cannot be made or written: before data are read and a model is built, not after."""
        there = next(path for path in (self.path, *self.path.parents, Path()) if path.exists())
        if not there.is_dir():
            raise UserError(f"{there} is a file; the run needs a folder, choose another --out than {self.path}")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"{there} cannot be written to; choose another --out than {self.path}")

    def clear(self) -> None:
        """Remove a run and what was made of it; other files stay. ``recipe.yaml``, which says it is one, goes first."""
        for name in ("recipe.yaml", "dataset.json", "metrics.jsonl", "log.txt", "index.html", "numbers.json"):
            (self.path / name).unlink(missing_ok=True)
        for name in ("checkpoints", "tensorboard"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def start(self, recipe: Any, dataset: dict[str, Any]) -> None:
        """Make the folder of a new run; ``recipe.yaml`` comes last, because it says that there is a run."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "dataset.json", json.dumps(dataset, indent=1) + "\n")
        write_text(self.path / "recipe.yaml", to_yaml(recipe))

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save(self, checkpoint: Checkpoint) -> None:
        """Write ``last``; what was ``last`` becomes ``previous``. A full disk leaves both as they were."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        new, old = self.checkpoints / ".new", self.checkpoints / ".old"
        last, previous = self.checkpoints / LAST, self.checkpoints / PREVIOUS
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            new.mkdir()
            save_tensors(new / MODEL, checkpoint.model)
            if checkpoint.ema is not None:
                save_tensors(new / EMA, checkpoint.ema)
            save_tensors(new / TRAINING, checkpoint.optimizer, checkpoint.progress)
            files = {path.name: _fingerprint(path) for path in sorted(new.iterdir())}
            where = {key: checkpoint.progress.get(key) for key in ("step", "num_steps")}
            write_text(new / MANIFEST, json.dumps({**where, "files": files}, indent=1) + "\n")
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        # At every moment between these renames last or previous is there, whole.
        if last.exists():
            if previous.exists():
                previous.rename(old)
            last.rename(previous)
        new.rename(last)
        sync(self.checkpoints)
        shutil.rmtree(old, ignore_errors=True)

    def about_best(self) -> dict[str, Any]:
        """Step and number of the best evaluation, as :meth:`save_best` was told; the weights are not read."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.checkpoints / BEST / MODEL, "np") as file:
                return json.loads(file.metadata()["state"].partition(" ")[2])
        except (SafetensorError, OSError, ValueError, TypeError, KeyError):
            return {}

    def is_running(self) -> bool:
        """Whether a process trains here now, on this machine."""
        with contextlib.suppress(ImportError, OSError):  # not every system and disk has locks
            import fcntl

            with self.log.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        return False

    def save_best(self, weights: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write the weights of the best evaluation so far, atomically."""
        (self.checkpoints / BEST).mkdir(parents=True, exist_ok=True)
        save_tensors(self.checkpoints / BEST / MODEL, weights, about)

    def find(self, say: Callable[[str], None]) -> str | None:
        """Name of the newest whole checkpoint, None if none was written yet.

        A damaged one is named through ``say`` and set aside as ``damaged``, so that it cannot push a whole one out.

        Raises:
            UserError: there are checkpoints, and all of them are damaged.
        """
        problems = []
        for name in (LAST, PREVIOUS):
            folder = self.checkpoints / name
            if not folder.is_dir():
                continue
            problem = damage(folder)
            if problem is None:
                return name
            problems.append(f"checkpoint {folder} is damaged: {problem}")
            say(problems[-1])
            if name == LAST:
                aside = self.checkpoints / DAMAGED
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
        if problems:
            raise UserError(f"{'; '.join(problems)}; no whole checkpoint is left, start anew with another --out")
        return None

    def load(self, name: str) -> Checkpoint:
        """The checkpoint of this name, which ``find`` gave."""
        folder = self.checkpoints / name
        model, _ = load_tensors(folder / MODEL)
        ema = load_tensors(folder / EMA)[0] if (folder / EMA).is_file() else None
        optimizer, progress = load_tensors(folder / TRAINING)
        return Checkpoint(model, ema, optimizer, progress)

    # ----------------------------------------------------------------------------------------------------- metrics

    def tidy(self, step: int) -> None:
        """Remove what a kill left behind, also lines of metrics after ``step``: they will be written again."""
        for name in (".new", ".old"):
            shutil.rmtree(self.checkpoints / name, ignore_errors=True)
        for folder in (self.path, self.checkpoints / BEST):
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink()
        cut_log(self.metrics, "step", step)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that a kill cut short is left out."""
        return read_log(self.metrics, "step")


def best_weights(run: Path | str) -> dict[str, Tensor]:
    """The weights to use of a run: those in its :func:`best_file`."""
    return load_tensors(best_file(run))[0]


def best_file(run: Path | str) -> Path:
    """The file of the weights to use of a run: the best, else the newest average, else the newest weights.

    Raises:
        UserError: there is none, or its manifest knows it to be damaged. Nothing takes its place unasked: other weights
            give other numbers.
    """
    folder = RunFolder(run)
    folder.require_run()
    for name in (f"{BEST}/{MODEL}", f"{LAST}/{EMA}", f"{LAST}/{MODEL}", f"{PREVIOUS}/{EMA}", f"{PREVIOUS}/{MODEL}"):
        path = folder.checkpoints / name
        if path.is_file():
            problem = damage(path.parent, path.name) if (path.parent / MANIFEST).is_file() else None
            if problem is not None:
                raise UserError(f"checkpoint {path.parent} is damaged: {problem}; copy it again, or train again")
            return path
    raise UserError(f"{run} has no checkpoint yet; train it first: {as_called('train', run, '--resume')}")


def damage(folder: Path, only: str | None = None) -> str | None:
    """What is wrong with a checkpoint, or with one file of it; None when every file is what the manifest says."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            path = path_inside(folder, name)
            if only not in (None, name):
                continue
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if (present := _fingerprint(path)) != expected:
                was, now = expected["sha256"], present["sha256"]
                return f"the content of {name} has changed (SHA-256 {now[:16]} instead of {was[:16]})"
        missing = [name for name in (MODEL, TRAINING) if name not in files]
        return f"{MANIFEST} does not list {missing[0]}" if missing else None
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
