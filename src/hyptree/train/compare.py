"""Tables of results: variants of one recipe over several seeds, trained alike, written as Markdown.

A YAML file names the recipe, the rows as overrides of it, and the seeds. Runs that are finished are not run again, and
one that was interrupted is resumed, so the same command goes on after any stop. ``{seed}`` in a value is the seed of
the run: so a row can start from the run of another table with the same seed. A row with ``time_of: ROW`` beside its
overrides is trained for as long, on the clock, as that row took: its schedule is stretched by what the row without
``time_of`` and otherwise equal took for a step.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyptree.config import load, read_override
from hyptree.errors import UserError, require_known, suggest
from hyptree.tables import markdown_head, markdown_row, spread, write_between_marks
from hyptree.train.run.recipe import Recipe

TIME_OF = "time_of"
"""Key of a row that names another one, whose training time is its own."""
SEED = "{seed}"
"""In a value of a row: the seed of the run."""
ABSENT = "–"
"""In a cell for which the evaluation of a row has no number."""


@dataclass
class TableSettings:
    """One table."""

    title: str
    """Heading of the table."""
    recipe: Path
    """The recipe that all rows share, relative to this file."""
    rows: dict[str, dict[str, Any]]
    """Name of a row, and the dotted keys of the recipe that it changes, e.g. {model.args.assignment: hard}; with
    time_of: another row, it is trained for as long as that one took (and needs a row that is equal but for this)."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Dotted keys that all rows change; {seed} in a value of these or of a row is the seed of the run."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Every row is trained once with each seed."""
    metrics: list[str] = field(default_factory=lambda: ["top1"])
    """Numbers of the last evaluation to show, the first one first; all but that one may be missing in some rows."""
    note: str = ""
    """A sentence below the heading."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows is empty; name at least one, e.g. {base: {}}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be different numbers, at least one, got {self.seeds}")
        if not self.metrics:
            raise ValueError("metrics is empty; name at least one, e.g. [top1]")
        slugs = [slug(name) for name in self.rows]
        if len(set(slugs)) != len(slugs):
            raise ValueError(f"names of rows must differ in letters and digits, got {', '.join(self.rows)}")
        for row, changes in self.rows.items():
            if TIME_OF in changes:
                self._check_time(row, changes[TIME_OF])

    def _check_time(self, row: str, other: Any) -> None:
        if other not in self.rows or TIME_OF in self.rows[other]:
            choices = [name for name, changes in self.rows.items() if TIME_OF not in changes]
            hint = suggest(str(other), choices) or f"expected one of {', '.join(choices)}"
            raise ValueError(f"row {row!r}: time_of {other!r} is no row that has a time of its own; {hint}")
        if self.twin(row) is None:
            raise ValueError(f"row {row!r} has time_of, which needs a row of the same keys without it, for its pace")

    def twin(self, row: str) -> str | None:
        """The row that is equal to this one but for ``time_of``."""
        own = {key: value for key, value in self.rows[row].items() if key != TIME_OF}
        return next((name for name, changes in self.rows.items() if name != row and changes == own), None)


@dataclass(frozen=True)
class Outcome:
    """What one run came to; goes to and from JSON."""

    row: str
    seed: int
    numbers: dict[str, float]
    parameters: int
    """Those that are trained."""
    seconds: float
    steps: int = 0
    step_seconds: float | None = None
    """Pace between the first and the last line of training; None if there were less than two."""


def slug(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_table(path: Path | str, overrides: Sequence[str] = ()) -> TableSettings:
    """The settings in a YAML file, its recipe found and every row checked before anything is trained.

    Args:
        overrides: of the recipe, for all rows, e.g. ``data.root=cifar10``; those of the file give way.
    """
    settings = load(TableSettings, path)
    settings.overrides |= dict(map(read_override, overrides))
    settings.recipe = Path(path).parent / settings.recipe
    for row in settings.rows:
        row_recipe(settings, row, settings.seeds[0])
    return settings


def row_recipe(settings: TableSettings, row: str, seed: int, stretch: float = 1.0) -> Recipe:
    """The recipe of one run, its schedule ``stretch`` times as long (the warm-up stays)."""
    changes = {**settings.overrides, **settings.rows[row], "run.seed": seed}
    changes.pop(TIME_OF, None)
    recipe = load(Recipe, settings.recipe, json.loads(json.dumps(changes).replace(SEED, str(seed))))
    if stretch != 1:
        schedule = recipe.schedule
        steps = None if schedule.steps is None else max(1, round(schedule.steps * stretch))
        recipe.schedule = dataclasses.replace(schedule, epochs=schedule.epochs * stretch, steps=steps)
    return recipe


def stretch_to(reference: Outcome, twin: Outcome) -> float:
    """By how much the schedule of ``twin`` must be longer to take the time of ``reference``.

    What is no step (compiling, the evaluation at the end) is not stretched with it.
    """
    if not twin.step_seconds:
        return reference.seconds / twin.seconds
    steps = twin.steps + (reference.seconds - twin.seconds) / twin.step_seconds
    return max(1.0, steps) / twin.steps


def make_table(
    settings: TableSettings,
    out: Path,
    *,
    jobs: int = 1,
    say: Callable[[str], None] = lambda line: None,
    quiet: bool = True,
) -> list[Outcome]:
    """Train what is missing and give the outcome of every row and seed, in the order of the table.

    Seeds are the outer loop: when the time is up, the rows have been treated alike. Rows with ``time_of`` come after
    the others, and mean something only if their runs did not get in each other's way: with one job.

    Args:
        out: folder for the runs, one below it for each.
        jobs: runs at the same time, each in a process of its own.
        say: takes one line for each run that ends.
        quiet: with one job, whether the run that is trained now shows nothing; else its name and its progress.
    """
    if jobs < 1:
        raise UserError(f"jobs must be at least 1, got {jobs}")
    rows = sorted(settings.rows, key=lambda row: TIME_OF in settings.rows[row])  # stable: else in the table's order
    work = [(row, seed) for seed in settings.seeds for row in rows]
    outcomes: dict[tuple[str, int], Outcome] = {}

    def take(outcome: Outcome) -> None:
        outcomes[outcome.row, outcome.seed] = outcome
        _number(outcome, settings.metrics[0])
        numbers = "  ".join(f"{name} {_cell([outcome], name)}" for name in settings.metrics)
        say(f"[{len(outcomes)}/{len(work)}] {outcome.row}, seed {outcome.seed}: {numbers}  ({outcome.seconds:.0f} s)")

    def stretch(row: str, seed: int) -> float:
        other, twin = settings.rows[row].get(TIME_OF), settings.twin(row)
        return 1.0 if other is None or twin is None else stretch_to(outcomes[other, seed], outcomes[twin, seed])

    from hyptree.devices import free_threads

    threads = free_threads(jobs)  # asked once: runs at the same time would not see each other's load yet
    if jobs == 1:
        for row, seed in work:
            if not quiet:
                print(f"[{len(outcomes) + 1}/{len(work)}] {row}, seed {seed} ...", flush=True)
            take(train_one(settings, row, seed, out, threads, stretch(row, seed), quiet))
    else:
        from concurrent.futures import as_completed

        from hyptree.train.parallel.workers import workers

        _render_world(settings)  # once, instead of in every process at the same time
        with workers(jobs) as pool:
            for is_timed in (False, True):
                part = [(row, seed) for row, seed in work if (TIME_OF in settings.rows[row]) == is_timed]
                futures = [
                    pool.submit(train_one, settings, row, seed, out, threads, stretch(row, seed)) for row, seed in part
                ]
                for future in as_completed(futures):
                    take(future.result())
    return [outcomes[row, seed] for row in settings.rows for seed in settings.seeds]


def train_one(
    settings: TableSettings, row: str, seed: int, out: Path, threads: int, stretch: float = 1.0, quiet: bool = True
) -> Outcome:
    """One run, resumed if it was interrupted and only read if it is finished.

    Args:
        threads: of a CPU, for a run that begins now and whose recipe leaves them open.
    """
    import torch

    from hyptree.runs import RunFolder
    from hyptree.train.evaluate import load_model
    from hyptree.train.loop import fit

    folder = out / slug(row) / f"seed{seed}"
    try:
        recipe = row_recipe(settings, row, seed, stretch)
        on_gpu = recipe.run.device != "cpu" and torch.cuda.is_available()
        if recipe.run.threads is None and not on_gpu and not RunFolder(folder).holds_run:
            recipe.run.threads = threads
        result = fit(recipe, folder, resume=True, quiet=quiet)
    except UserError as error:
        raise UserError(f"row {row!r}, seed {seed}: {error}") from None
    model, _ = load_model(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    lines = RunFolder(folder).read_metrics()
    seconds = max((line["time"] for line in lines), default=0.0)
    return Outcome(row, seed, result.numbers, parameters, seconds, result.step, _step_seconds(lines))


def _step_seconds(lines: Sequence[dict[str, Any]]) -> float | None:
    """Seconds per step between the first and the last line of training; the first steps, which compile, are before."""
    training = [(line["step"], line["time"]) for line in lines if line["split"] == "train"]
    if len(training) < 2:
        return None
    (first, start), (last, stop) = training[0], training[-1]
    return (stop - start) / (last - first)


def _render_world(settings: TableSettings) -> None:
    from hyptree.train.tasks import build_task

    task = build_task(row_recipe(settings, next(iter(settings.rows)), settings.seeds[0]))
    for split in ("train", "val"):
        task.build_dataset(split)[0]


# ---------------------------------------------------------------------------------------------------------- Markdown


def to_markdown(settings: TableSettings, outcomes: Sequence[Outcome], about: Sequence[str] = ()) -> str:
    """The table: mean and spread over seeds, the best mean of the first metric in bold."""
    groups = {row: [outcome for outcome in outcomes if outcome.row == row] for row in settings.rows}
    means = {
        row: statistics.fmean(_number(outcome, settings.metrics[0]) for outcome in group)
        for row, group in groups.items()
    }
    best = max(means.values())
    for name in settings.metrics:
        if not any(name in outcome.numbers for outcome in outcomes):
            _number(outcomes[0], name)
    lines = [f"### {settings.title}", ""]
    if settings.note:
        lines += [textwrap.fill(settings.note, 100), ""]
    lines += markdown_head(["", "parameters", *settings.metrics, "training time"])
    for row, group in groups.items():
        cells = [_cell(group, name) for name in settings.metrics]
        if means[row] == best:
            cells[0] = f"**{cells[0]}**"
        seconds = statistics.fmean(outcome.seconds for outcome in group)
        lines.append(markdown_row([row, f"{group[0].parameters:,}", *cells, f"{seconds:.0f} s"]))
    seeds = ", ".join(map(str, settings.seeds))
    lines += ["", f"Mean ± standard deviation over seeds {seeds}, after the last step, not the best one."]
    return "\n".join([*lines, *(["", *(f"    {line}" for line in about)] if about else [])]) + "\n"


def _number(outcome: Outcome, name: str) -> float:
    require_known("the evaluation gives no {!r}", [name], outcome.numbers)
    return outcome.numbers[name]


def _cell(group: Sequence[Outcome], name: str) -> str:
    """Mean and spread of a number over the runs of a row."""
    values = [outcome.numbers[name] for outcome in group if name in outcome.numbers]
    return spread(values, 4) if values else ABSENT


# ------------------------------------------------------------------------------------------------------ without the CLI


def compare(
    path: Path,
    out: Path | None = None,
    results: Path | None = None,
    jobs: int = 1,
    overrides: Sequence[str] = (),
) -> str:
    """Everything that ``hyptree compare`` does: train, print, and write the table into a page; gives the Markdown."""
    from hyptree.machine import describe

    settings = read_table(path, overrides)
    out = out or Path("runs") / path.stem
    # On a terminal people want to see that it moves; in a file one line per run is enough.
    shows = jobs == 1 and sys.stdout.isatty()
    outcomes = make_table(settings, out, jobs=jobs, say=lambda line: print(line, flush=True), quiet=not shows)
    # Where somebody keeps data and weights is nobody else's business.
    private = ("data.root=", "data.cache=", "model.weights=", "model.name=hf:/")
    shown_overrides = [word for word in overrides if not word.startswith(private)]
    name = f"recipes/{path.name}" if path.parent.name == "recipes" else path.name
    command = " ".join(["hyptree compare", name, *(["--overrides", *shown_overrides] if shown_overrides else [])])
    text = to_markdown(settings, outcomes, [*describe(), f"command   {command}"])
    from hyptree.files import write_text

    write_text(out / "table.md", text)
    write_text(out / "table.json", json.dumps([outcome.__dict__ for outcome in outcomes], indent=1))
    if results is not None:
        write_between_marks(results, path.stem, text)
    return text
