"""The training loop of every task: from a recipe to a folder with weights and numbers.

``fit`` is the whole story: prepare, then for each step train, log, evaluate, save. Every random choice is a function of
(seed, step, process), and the learning rate one of the step. So a checkpoint needs the weights, their average, the
optimiser's moments and a few counters, and a run that was killed at any moment goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.data.seeding import reseed
from hyptree.devices import cpu_threads, free_threads
from hyptree.errors import UserError, as_called, require
from hyptree.files import full_disk_is_one_line, require_path
from hyptree.runs import Checkpoint, RunFolder
from hyptree.signals import stop_signals
from hyptree.train.compiled import Compiled
from hyptree.train.model import checkpoint_activations, load_weights
from hyptree.train.optimizer.build import (
    Ema,
    Schedule,
    build_optimizer,
    clip_gradients,
    parameter_marks,
    step_if_finite,
)
from hyptree.train.parallel.batchnorm import sync_batch_norms
from hyptree.train.parallel.distributed import Processes, deterministic
from hyptree.train.run.log import Reporter
from hyptree.train.run.recipe import Recipe, check_resumable, require_read
from hyptree.train.run.state import RunState, fill_optimizer, fill_tensors, full_tensors, optimizer_tensors
from hyptree.train.task import move
from hyptree.train.tasks import build_task

_ASK_EVERY = 10
"""Steps between two questions to the other processes whether somebody wants to stop."""


@dataclass
class Result:
    """What ``fit`` came to."""

    folder: Path
    step: int
    numbers: dict[str, float]
    """Of the last evaluation."""
    best: float | None
    best_step: int | None


def fit(
    recipe: Recipe, out: Path | str, *, resume: bool = False, overwrite: bool = False, quiet: bool = False
) -> Result:
    """Train what the recipe says and keep it in a folder that can be resumed after any interruption.

    Uses the global random generators of Python, numpy and torch: the run owns its process. Under torchrun every
    process calls this, and only the first one prints and writes. Ctrl-C and SIGTERM write a checkpoint after the step.

    Args:
        out: the run's folder; one that already holds a run is refused unless ``resume`` or ``overwrite``.
        resume: go on from the newest whole checkpoint in ``out``; where there is none, start from the beginning.
        overwrite: replace the run in ``out``, as soon as nothing but training is left to do.
        quiet: print nothing (files are written all the same).

    Raises:
        UserError: something the user can repair; what was saved before is whole.
        KeyboardInterrupt: after a checkpoint was written because of Ctrl-C or SIGTERM.
    """
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite replaces it; leave one of them out")
    if recipe.run.tensorboard is True:
        require("tensorboard", "board", asked_by="run.tensorboard true")
    processes = Processes(recipe.run.device, recipe.run.parallel)
    folder = RunFolder(out)
    quiet = quiet or not processes.is_main
    most, asked = torch.get_num_threads(), recipe.run.threads
    try:
        threads = asked or most
        if asked is None and processes.device.type == "cpu":
            # Kept in the folder and taken up again, because the last bits of a run depend on it.
            kept = folder.recipe(Recipe).run.threads if resume and folder.holds_run else None
            threads = kept or processes.together(free_threads, on_main=True)
            recipe = replace(recipe, run=replace(recipe.run, threads=threads))
        with cpu_threads(threads), deterministic(recipe.run.deterministic), full_disk_is_one_line(Path(out)):
            trainer = processes.together(Trainer, recipe, folder, processes, resume, overwrite)
            if asked is None and threads < most:
                why = "others kept the rest busy when this run began"
                trainer.notes.append(f"{threads} of {most} CPU threads: {why}; --run.threads {most} takes all")
            with stop_signals(quiet) as stopped:
                return trainer.run(stopped, quiet)
    finally:
        processes.close()


class Trainer:
    """One run: its task, data, model, optimiser and progress."""

    def __init__(self, recipe: Recipe, folder: RunFolder, processes: Processes, resume: bool, overwrite: bool):
        """Everything that can go wrong without the other processes: folder, data, model."""
        self.recipe, self.folder, self.processes = recipe, folder, processes
        self.notes: list[str] = []
        self.overwrites, self.is_old = folder.holds_run and overwrite, folder.holds_run and not overwrite
        """Whether there is a run to replace, or to go on with; asked before any process can have started this one."""
        if self.is_old and not resume:
            raise UserError(
                f"{folder.path} already holds a run; choose another --out, --overwrite it, or {self._go_on()}"
            )
        if self.is_old:
            check_resumable(folder.recipe(Recipe), recipe, folder.path)
        else:
            require_read(recipe)
        if resume and not self.is_old:
            self.notes.append(f"nothing to resume in {folder.path} yet: starting from the beginning")
        folder.require_writable()
        if recipe.model.weights is not None:
            require_path(recipe.model.weights)  # now, not when the data have been read

        self.task = build_task(recipe)
        train_set, val_set = self.task.build_dataset("train"), self.task.build_dataset("val")
        share = {"rank": processes.rank, "world_size": processes.size}
        self.skipped: dict[str, str] = {}
        """Samples that could not be read, and why."""
        self.train_loader = self.task.build_loader(train_set, True, **share, skipped=self.skipped)
        self.val_loader = self.task.build_loader(val_set, False, **share, skipped=self.skipped)
        if len(val_set) < processes.size:
            raise UserError(f"{processes.size} processes cannot share {len(val_set)} validation samples; use fewer")
        self.steps_per_epoch = len(self.train_loader) // recipe.run.accumulate
        if self.steps_per_epoch == 0:
            raise UserError(
                f"data.batch_size {recipe.data.batch_size} is larger than the training set of {len(train_set)} samples"
            )
        self.units = recipe.data.batch_size * self.task.units_per_sample
        """Samples of an optimiser step in the task's unit, over all processes."""
        self.schedule = Schedule(recipe.schedule, self.steps_per_epoch)
        self.data = self.task.describe(train_set)
        self.model = self._build_model()
        self.progress = RunState(num_steps=self.schedule.num_steps)

    def _build_model(self) -> nn.Module:
        run, settings = self.recipe.run, self.recipe.model
        reseed(run.seed, gpus=True)  # the same fresh weights in every process
        model = self.task.build_model(self.data)
        if settings.weights is not None:
            fresh = load_weights(model, settings.weights)
            rest = f" and {len(fresh) - 6} more" if len(fresh) > 6 else ""
            note = f"; fresh: {', '.join(fresh[:6])}{rest}" if fresh else ""
            self.notes.append(f"weights from {settings.weights}{note}")
        if run.grad_checkpointing:
            checkpoint_activations(model, settings.name)
        model.to(self.processes.device)
        if run.channels_last:
            model.to(memory_format=torch.channels_last)
        if self.processes.size * run.accumulate > 1:
            self.notes += sync_batch_norms(model, self.processes.size, run.accumulate)
        self.compiled: Compiled | None = None
        if run.compile:
            self.compiled = Compiled(model, run.compile, self.processes.device, eager_evaluation=run.eval_every == 0)
            self.notes += self.compiled.notes
        if self.task.before_training is not None:
            with torch.no_grad():
                self.task.before_training(model.eval())
        return model

    # --------------------------------------------------------------------------------------------------- the story

    def run(self, stopped: Any, quiet: bool) -> Result:
        """All steps that are left."""
        marks = parameter_marks(self.model)
        self.wrapped = (self.processes.wrap(self.model) if self.processes.size > 1 else self.model).train()
        self.optimizer = build_optimizer(self.model, self.recipe.optim, marks)
        self.ema = Ema(self.model, self.recipe.run.ema) if self.recipe.run.ema is not None else None
        self._open_folder()
        if hasattr(self.model, "check_base"):  # weights that were filled in may belong to another encoder
            self.processes.together(self.model.check_base)  # type: ignore[arg-type]
        run, schedule, progress = self.recipe.run, self.schedule, self.progress
        self.reporter = Reporter(
            self.folder,
            schedule.num_steps,
            self.task.unit,
            writes=self.processes.is_main,
            quiet=quiet,
            tensorboard=bool(run.tensorboard),
            step=progress.step,
        )
        self._clock = self._logged_at = time.perf_counter()
        self._logged_step, self._pause = progress.step, 0.0
        self._losses: dict[str, list[Tensor]] = {}
        self._num_skipped = 0
        self._introduce()
        batches = self._batches()
        try:
            if run.eval_first and progress.step == 0:
                self.evaluate()
            while progress.step < schedule.num_steps:
                self.train_step(batches)
                progress.step += 1
                self.reporter.advance(progress.step)
                is_last = progress.step == schedule.num_steps
                evaluates = is_last or self._is_due(run.eval_every)
                stops = stopped()
                if self.processes.size > 1:  # all stop where one is told to
                    asks = progress.step % _ASK_EVERY == 0
                    stops = asks and bool(self.processes.mean(torch.tensor(float(stops))) > 0)
                stops = stops and not is_last
                saves = evaluates or stops or self._is_due(run.save_every, run.save_steps)
                if is_last or progress.step % run.log_steps == 0:
                    self.log()
                if evaluates:
                    self.evaluate()
                if saves:
                    self.save()
                if stops:
                    self.reporter.say(f"stopped at step {progress.step} of {schedule.num_steps}; {self._go_on()}")
                    self._leave(KeyboardInterrupt(), 130)
            return self._result()
        finally:
            self.train_loader.close()
            self.val_loader.close()
            self.reporter.close()

    def train_step(self, batches: Iterator[Any]) -> None:
        """One optimiser step: forward and backward over the parts of a batch, clip, step, average."""
        recipe, step = self.recipe, self.progress.step
        parts, several = recipe.run.accumulate, self.processes.size > 1
        reseed(recipe.run.seed, step, self.processes.rank, gpus=True)
        lr = recipe.optim.lr * self.schedule.factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        totals: dict[str, Tensor] = {}
        for part, batch in enumerate(self._parts(batches)):
            batch = move(batch, self.processes.device, recipe.run.channels_last)
            batch = self.task.prepare_batch(batch, step * parts + part)
            if self.compiled is not None:
                self.compiled.begin_pass()
            waits = self.processes.no_sync(self.wrapped, part < parts - 1) if several else contextlib.nullcontext()
            with waits:
                with self.task.autocast(self.processes.device):
                    loss, numbers = self.task.training_loss(self.wrapped, batch)
                (loss / parts).backward()
            for name, value in {"loss": loss.detach(), **numbers}.items():
                totals[name] = totals.get(name, 0.0) + value.float() / parts
            if part == 0 and parts > 1 and self.compiled is not None:
                self.compiled.keep_gradients()
        if self.processes.shards:
            self.processes.sync_rest(self.model)
        totals["grad_norm"] = clip_gradients(self.model, recipe.optim.clip)
        if recipe.run.max_skipped_steps:
            step_if_finite(self.optimizer, totals["grad_norm"])
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.task.after_step is not None:
            self.task.after_step(self.model)
        if self.ema is not None:
            self.ema.update(self.model)
        for name, value in totals.items():  # tensors on the device: reading them here would wait for every step
            self._losses.setdefault(name, []).append(value.detach())
        if self.task.probes:
            self._last_batch = batch

    def log(self) -> None:
        """One line of metrics: means over the steps since the last one."""
        self._read_losses()
        progress, now = self.progress, time.perf_counter()
        seconds = now - self._logged_at - self._pause
        steps = progress.step - self._logged_step
        line = self._line("train") | {name: sum(v) / len(v) for name, v in progress.window.items() if v}
        line["lr"] = self.recipe.optim.lr * self.schedule.factor(progress.step - 1)
        line["per_second"] = round(steps * self.units / seconds, 1)
        if progress.num_skipped_steps:
            line["skipped_steps"] = progress.num_skipped_steps
        if self.task.probes:
            line |= self._probe()
            now = time.perf_counter()
        self.reporter.write(line, left=(self.schedule.num_steps - progress.step) * seconds / max(1, steps))
        progress.window = {}
        self._logged_at, self._logged_step, self._pause = now, progress.step, 0.0

    def evaluate(self) -> None:
        """Numbers on the validation set, of the averaged weights where they are kept; the best ones are saved."""
        self._read_losses()  # NaN is reported where it starts, not as a bad accuracy
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if self.ema is not None:
                stack.enter_context(self.ema.swapped_in(self.model))
            if self.compiled is not None:
                stack.enter_context(self.compiled.evaluating())
            if self.processes.size > 1:
                stack.enter_context(self.processes.evaluating(self.model))
                self.processes.sync_buffers(self.model)
            scores = self.task.score(self.model, self.val_loader, self.processes.device, self.processes.gather)
        self._numbers = scores
        line = self._line("val") | scores
        num_skipped = int(self.processes.gather(torch.tensor([len(self.skipped)])).sum())
        if num_skipped:
            line["skipped"] = num_skipped
            if num_skipped > self._num_skipped and self.skipped:
                name, why = next(reversed(self.skipped.items()))
                self.reporter.say(f"{num_skipped} samples could not be read and were skipped, e.g. {name}: {why}")
            self._num_skipped = num_skipped
        value = scores[self.task.metric]
        best = self.progress.best
        if self.progress.step and not math.isnan(value) and (best is None or value > best):
            self.progress.best, self.progress.best_step = value, self.progress.step
            tensors = full_tensors(self.ema.tensors if self.ema is not None else self.model.state_dict())
            about = {"step": self.progress.step, self.task.metric: value}
            self._on_main(self.folder.save_best, tensors, about)
        self.reporter.write(line)
        self._pause += time.perf_counter() - began

    def save(self) -> None:
        """Write a checkpoint; never one whose losses were not finite."""
        self._read_losses()
        began = time.perf_counter()
        if self.ema is not None:
            self.progress.num_ema_updates = self.ema.num_updates
        progress = asdict(self.progress) | {"seconds": self.progress.seconds + began - self._clock}
        checkpoint = Checkpoint(
            model=full_tensors(self.model.state_dict()),
            ema=full_tensors(self.ema.tensors) if self.ema is not None else None,
            optimizer=optimizer_tensors(self.model, self.optimizer),
            progress=progress,
        )
        self._on_main(self.folder.save, checkpoint)
        self._pause += time.perf_counter() - began

    # --------------------------------------------------------------------------------------------------- the parts

    def _open_folder(self) -> None:
        """Start a new folder, or take over the state of the newest whole checkpoint in an old one."""
        folder = self.folder
        name = self.processes.together(folder.find, self.notes.append, on_main=True) if self.is_old else None
        if name is None:
            if self.is_old:
                self.notes.append(f"{folder.path} has no checkpoint yet: starting from the beginning")
            elif self.overwrites:
                self._on_main(folder.clear)
            self._on_main(folder.start, self.recipe, self.data)
        else:
            self.processes.together(self._check_data)
            checkpoint = self.processes.together(folder.load, name)
            where = str(folder.checkpoints / name)
            self.progress = RunState(**checkpoint.progress)
            fill_tensors(self.model.state_dict(), checkpoint.model, where)
            fill_optimizer(self.model, self.optimizer, checkpoint.optimizer)
            if self.ema is not None and checkpoint.ema is not None:
                fill_tensors(self.ema.tensors, checkpoint.ema, where)
                self.ema.num_updates = self.progress.num_ema_updates
            self.notes.append(f"going on from step {self.progress.step} ({where})")
        self._on_main(folder.tidy, -1 if name is None else self.progress.step)

    def _check_data(self) -> None:
        """Refuse to go on with other data than the run was started with, where the task can tell."""
        before, now = self.folder.dataset(), json.loads(json.dumps(self.data))
        differs = [key for key in now if key in before and before[key] != now[key]]
        if differs:
            raise UserError(
                f"cannot resume {self.folder.path}: its data had other {differs[0]} (dataset.json); give the same "
                "data, or another --out for a new run"
            )

    def _introduce(self) -> None:
        count = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        threads = self.recipe.run.threads
        say = self.reporter.say
        for note in self.notes:
            say(note)
        if self.progress.step >= self.schedule.num_steps:
            say(f"this run is finished: {self.progress.step} steps")
            return
        where = self.processes.device.type
        if self.processes.size > 1:
            where += f" x {self.processes.size} ({'fsdp2' if self.processes.shards else 'ddp'})"
        say(
            f"{self.recipe.model.name}: {count:,} parameters; {self.schedule.num_steps:,} steps of "
            f"{self.units} {self.task.unit}, {self.steps_per_epoch:,} per epoch, on "
            f"{where}" + (f", {threads} CPU thread" + "s" * (threads > 1) if threads else "")
        )

    def _batches(self) -> Iterator[Any]:
        """Batches without end, from where the run is."""
        epoch, done = divmod(self.progress.step, self.steps_per_epoch)
        parts = self.recipe.run.accumulate
        while True:
            self.train_loader.set_epoch(epoch, done * parts)
            for batch, _ in zip(self.train_loader, range((self.steps_per_epoch - done) * parts), strict=False):
                yield batch
            epoch, done = epoch + 1, 0

    def _parts(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The parts of this process's share of the next batch, which know over how much their loss is to be a mean."""
        num_parts = self.recipe.run.accumulate
        parts = itertools.islice(batches, num_parts)
        if num_parts * self.processes.size == 1:
            return parts
        first = next(parts)
        if self.task.count(first) is None:
            return itertools.chain([first], parts)
        whole = [first, *parts]
        counts = [count for part in whole if (count := self.task.count(part)) is not None]
        count = self.processes.mean(torch.stack(counts).float().mean())
        return (part | {"count": count} for part in whole)

    def _probe(self) -> dict[str, float]:
        """What the task finds inside the model, which is left as it was."""
        self.model.eval()
        try:
            eager = torch.compiler.set_stance("force_eager")
            with (
                torch.no_grad(),
                self.task.autocast(self.processes.device),
                eager,
                self.processes.evaluating(self.model),
            ):
                return self.task.probe(self.model, self._last_batch)
        finally:
            self.model.train()

    def _read_losses(self) -> None:
        """Move the numbers of recent steps into the progress, and stop at the first that is not finite."""
        count = len(next(iter(self._losses.values()), []))
        if not count:
            return
        names = list(self._losses)  # in the order of the first step, the same in every process
        table = self.processes.mean(torch.stack([torch.stack(self._losses[name]) for name in names]))
        self._losses = {}
        for name, values in zip(names, table.tolist(), strict=True):
            self.progress.window.setdefault(name, []).extend(values)
        saved = self.folder.checkpoints / "last"
        try:
            if self.recipe.run.max_skipped_steps:
                count = self.progress.drop_skipped(count, self.recipe.run.max_skipped_steps)
            self.progress.require_finite(count, f"; the last good checkpoint is {saved}" if saved.is_dir() else "")
        except UserError as error:
            self._leave(error, 2)

    def _is_due(self, epochs: float, steps: int | None = None) -> bool:
        step = self.progress.step
        by_epoch = epochs > 0 and step % max(1, round(epochs * self.steps_per_epoch)) == 0
        return by_epoch or (steps is not None and step % steps == 0)

    def _on_main(self, work: Any, *args: Any) -> None:
        """Files are written by the first process; its failure ends all of them."""
        self.processes.together(full_disk_is_one_line(self.folder.path)(work), *args, on_main=True)

    def _leave(self, error: BaseException, code: int) -> None:
        """All processes end, the first one with words."""
        raise error if self.processes.is_main else SystemExit(code)

    def _go_on(self) -> str:
        return f"go on with: {as_called('train', self.folder.path, '--resume')}"

    def _line(self, split: str) -> dict[str, Any]:
        step = self.progress.step
        epoch = round(step / self.steps_per_epoch, 4)
        seconds = self.progress.seconds + time.perf_counter() - self._clock
        return {"step": step, "epoch": epoch, "split": split, "time": round(seconds, 3)}

    def _result(self) -> Result:
        numbers = getattr(self, "_numbers", None)
        if numbers is None:  # it was finished before
            lines = [line for line in self.folder.read_metrics() if line["split"] == "val"]
            numbers = {k: v for k, v in (lines or [{}])[-1].items() if k not in ("step", "epoch", "split", "time")}
        progress = self.progress
        return Result(self.folder.path, progress.step, numbers, progress.best, progress.best_step)
