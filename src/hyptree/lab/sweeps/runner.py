"""Runs a sweep into a folder: training with checkpoints, evaluation, the table of runs, the fits.

    config.json            the parts, as they were asked for
    checkpoints/           state of the part that is being trained, and the one before it (of every process)
    parts/                 one file per finished part: rows of the table, norms of the features
    weights/               the weights, where they were asked for
    runs.csv, fits.csv     the tables (runs.parquet where pyarrow is installed)

Every file is whole or not there, so that a kill at any moment leaves a sweep that resumes, bit for bit on the same
device with the same number of threads.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hyptree.errors import UserError
from hyptree.files import full_disk_is_one_line, load_tensors, save_tensors, write_text
from hyptree.lab.engine import Engine
from hyptree.lab.fits import fit_runs
from hyptree.lab.metrics import measure
from hyptree.lab.sweeps.folder import open_folder, read_part
from hyptree.lab.sweeps.grid import Grid, Model, preset
from hyptree.lab.sweeps.run_table import COLUMNS, write_runs
from hyptree.lab.theory import unlearned_loss
from hyptree.progress import ProgressBar
from hyptree.signals import Stopped, stop_signals
from hyptree.tables import to_csv

LOOK_EVERY = 2.0
"""Seconds between two looks at the losses for the line of progress."""

MARK_DIVERGED = 2.0
"""A model whose loss ends above this many times its first loss counts as diverged, and one that is not finite."""


def sweep(
    parts: str | Grid | Sequence[Grid],
    out: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk: int = 0,
    pad: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint_seconds: float = 60.0,
    keep_weights: bool = False,
    bar: ProgressBar | None = None,
    say: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Train every part, write the tables, and give the rows of the table of runs.

    Under torchrun each process trains a share of the models of every width, with the same result; ``out`` must then
    be a folder that all of them see.

    Args:
        parts: the grids to train one after the other, or the name of a preset.
        out: folder; it must not hold a sweep unless ``resume`` or ``overwrite`` says what to do with it.
        bar: shows where the sweep is, about every two seconds.
        say: called with a line for people where something had to be worked around.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, when the checkpoint is written.
    """
    out = Path(out)
    if isinstance(parts, str):
        parts = preset(parts)
    elif isinstance(parts, Grid):
        parts = (parts,)
    names = [grid.name for grid in parts]
    if len(set(names)) != len(names):
        raise UserError(f"parts of a sweep need different names, got {', '.join(names)}")
    rows: list[dict[str, Any]] = []
    with processes() as ranks, full_disk_is_one_line(out):
        config = {
            "dtype": str(dtype).removeprefix("torch."),
            "pad": pad,
            "processes": ranks.size,
            "parts": {grid.name: grid.as_dict() for grid in parts},
        }
        if ranks.is_main:
            open_folder(out, config, resume, overwrite)
        ranks.wait()
        bar = bar if ranks.is_main else None
        with stop_signals(quiet=bar is None) as is_asked_to_stop:
            for grid in parts:
                name = f"{grid.name}{ranks.suffix}"
                done = out / "parts" / f"{name}.safetensors"
                if done.is_file():
                    if keep_weights and not (out / "weights" / done.name).is_file() and say is not None:
                        say(f"no weights of part {grid.name}: it was finished without --keep-weights")
                    continue
                engine = Engine(grid, ranks.device(device), dtype, chunk, pad, ranks.share(grid))
                run = _Part(name, engine, out, checkpoint_seconds, bar, say)
                run.train(is_asked_to_stop)
                run.finish(done, keep_weights)
        ranks.wait()
        for grid in parts:
            if ranks.is_main:
                _merge(grid, out)
            ranks.wait()
            rows += load_tensors(out / "parts" / f"{grid.name}.safetensors")[1]["rows"]
        if ranks.is_main:
            write_runs(out, rows)
            write_text(out / "fits.csv", to_csv(fit_runs(rows)))
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
        ranks.wait()
    return rows


def _merge(grid: Grid, out: Path) -> None:
    """One file for a part of which every process wrote some models; in the order of the grid."""
    whole, part = out / "parts" / f"{grid.name}.safetensors", read_part(out, grid.name, len(grid.models()))
    if part is None:
        raise UserError(f"{whole.parent} holds only some models of part {grid.name}; go on with --resume")
    if not whole.is_file():
        save_tensors(whole, *part)


class _Part:
    """One part of a sweep on its way: the engine, its checkpoints, what is kept of the losses."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        out: Path,
        checkpoint_seconds: float,
        bar: ProgressBar | None,
        say: Callable[[str], None] | None,
    ):
        self.engine, self.grid, self.out = engine, engine.grid, out
        self.checkpoint_seconds, self.bar, self.say = checkpoint_seconds, bar, say
        count = len(engine.models)
        self.first_loss = torch.full((count,), math.nan, dtype=torch.float64, device=engine.device)
        self.tail_sum = torch.zeros_like(self.first_loss)
        self.last = out / "checkpoints" / f"{name}.safetensors"
        self.previous = self.last.with_suffix(".previous.safetensors")

    def train(self, is_asked_to_stop: Callable[[], bool]) -> None:
        """From the newest checkpoint to the last step."""
        self._load()
        grid, engine = self.grid, self.engine
        begin = saved = looked = time.monotonic()
        first_step = engine.step
        while engine.step < grid.steps:
            in_tail = engine.step >= grid.steps - grid.tail
            now = time.monotonic()
            look = now - looked >= LOOK_EVERY
            loss = engine.advance(with_loss=in_tail or look or engine.step == 0)
            if loss is not None:
                if engine.step == 1:
                    self.first_loss = loss
                if in_tail:
                    self.tail_sum += loss
            if loss is not None and (look or engine.step == grid.steps):
                looked = now
                self._show(first_step, time.monotonic() - begin, loss)
            if is_asked_to_stop():
                self.save()
                raise Stopped
            if now - saved >= self.checkpoint_seconds:
                self.save()
                saved = time.monotonic()

    def _show(self, first_step: int, seconds: float, loss: Tensor) -> None:
        if self.bar is None:
            return
        count, steps = len(self.engine.models), max(1, self.engine.step - first_step)
        rate, median = count * steps / seconds if seconds else math.inf, loss.nanmedian().item()
        note = f"{count} models  {rate:,.0f} model-steps/s  median loss {median:.4g}"
        self.bar.reach(self.engine.step, note, name=self.grid.name, total=self.grid.steps)

    def save(self) -> None:
        """Write the checkpoint; the one before is kept until the next."""
        self.last.parent.mkdir(parents=True, exist_ok=True)
        tensors = {**self.engine.state(), "first_loss": self.first_loss, "tail_sum": self.tail_sum}
        newest = self.last.with_suffix(".new.safetensors")
        save_tensors(newest, tensors, {"step": self.engine.step})
        if self.last.exists():
            self.last.replace(self.previous)
        newest.replace(self.last)

    def _load(self) -> None:
        problems = []
        # A kill between the two renames of save leaves the newest under its first name.
        for path in (self.last.with_suffix(".new.safetensors"), self.last, self.previous):
            if not path.is_file():
                continue
            try:
                tensors, state = load_tensors(path)
                self.engine.load_state(tensors, int(state["step"]))
                self.first_loss.copy_(tensors["first_loss"])
                self.tail_sum.copy_(tensors["tail_sum"])
                return
            except (UserError, ValueError, KeyError) as error:
                problems.append(f"checkpoint {path} cannot be used: {error}")
                if self.say is not None:
                    self.say(problems[-1])
        if problems:
            raise UserError(
                f"{'; '.join(problems)}; no whole checkpoint is left, remove {self.last.parent} to train this part anew"
            )

    def finish(self, done: Path, keep_weights: bool) -> None:
        """Evaluate, measure, and write the rows of this part; its checkpoints are not needed any more."""
        engine, grid = self.engine, self.grid
        loss, error = engine.evaluate(grid.eval_samples)
        train_loss = self.tail_sum / grid.tail
        number = {model: place for place, model in enumerate(grid.models())}
        finished: dict[int, tuple[dict[str, Any], Tensor]] = {}
        weights: dict[str, Tensor] = {}
        k = 0
        for bucket in engine.buckets:
            for i, model in enumerate(bucket.models):
                W, b = bucket.weights(i)
                values = {"loss_train": train_loss, "loss_eval": loss, "loss_se": error, "first_loss": self.first_loss}
                numbers = {name: value[k].item() for name, value in values.items()}
                row = _row(grid, model, W, b, engine.p[bucket.groups[i]].cpu().numpy(), numbers)
                finished[number[model]] = row, W.norm(dim=1)
                weights |= {f"{number[model]}.W": W, f"{number[model]}.b": b}
                k += 1
        places = sorted(finished)
        norms = torch.stack([finished[place][1] for place in places])
        if keep_weights:
            (self.out / "weights").mkdir(exist_ok=True)
            save_tensors(self.out / "weights" / done.name, weights)
        save_tensors(done, {"norms": norms}, {"rows": [finished[place][0] for place in places], "places": places})
        for path in (self.last, self.previous, self.last.with_suffix(".new.safetensors")):
            path.unlink(missing_ok=True)


def _row(grid: Grid, model: Model, W: Tensor, b: Tensor, p: np.ndarray, numbers: dict[str, float]) -> dict[str, Any]:
    """One row of the table of runs."""
    measured: dict[str, Any] = measure(W, model.curvature, b)
    is_finite = measured["regime"] != "diverged" and all(map(math.isfinite, numbers.values()))
    values = {
        **{name: getattr(grid, name) for name in ("n", "dist", "steps", "batch", "warmup", "bias_init")},
        **{name: getattr(model, name) for name in ("m", "alpha", "gamma", "density", "curvature", "seed")},
        **numbers,
        **measured,
        "part": grid.name,
        "lr": grid.learning_rates(model.m)[0],
        "loss_unlearned": unlearned_loss(p, round(measured["phi_half"] * grid.n)).item() if is_finite else math.nan,
        "diverged": not is_finite or numbers["loss_eval"] > MARK_DIVERGED * numbers["first_loss"],
    }
    if grid.dist != "power":
        values["alpha"] = math.nan  # plays no part
    return {name: values[name] for name in COLUMNS}


@dataclass(frozen=True)
class Ranks:
    """Who we are among the processes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process shows progress and writes the tables."""
        return self.rank == 0

    @property
    def suffix(self) -> str:
        """What tells this process's files from the others'; empty for one process."""
        return f".{self.rank}-of-{self.size}" if self.size > 1 else ""

    def share(self, grid: Grid) -> list[Model]:
        """The models of this process: an even share of every width, since a model's cost is that of its width."""
        models_of_rank = []
        for m in grid.m:
            models = [model for model in grid.models() if model.m == m]
            if len(models) < self.size:
                raise UserError(
                    f"{self.size} processes need {self.size} models or more of every width, part {grid.name} has "
                    f"{len(models)}; start fewer processes"
                )
            models_of_rank += models[len(models) * self.rank // self.size : len(models) * (self.rank + 1) // self.size]
        return models_of_rank

    def device(self, device: torch.device | str) -> torch.device:
        """This process's device of the kind that was asked for."""
        device = torch.device(device)
        if self.size > 1 and device.type != "cpu" and str(device) == device.type:
            return torch.device(device.type, self.local_rank)
        return device

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def processes() -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield Ranks()
        return
    is_ours = not dist.is_initialized()
    if is_ours:  # on the CPU, whatever trains: they only wait for each other, and the slowest may take hours
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield Ranks(rank, size, int(os.environ.get("LOCAL_RANK", 0)))
    finally:
        if is_ours:
            dist.destroy_process_group()
