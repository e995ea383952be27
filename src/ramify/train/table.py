"""Tables of results: variants of one recipe over several seeds, trained alike, written as Markdown.

A YAML file names the recipe, the rows as overrides of it, and the seeds. Runs that are finished are not run again, and
one that was interrupted is resumed, so the same command goes on after any stop. ``python -m ramify.train.table FILE``
does what ``ramify compare FILE`` does where only torch, timm and accelerate are installed.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ramify.errors import UserError, exit_code, one_line_parser, suggest
from ramify.train.recipe import Recipe


@dataclass
class TableSettings:
    """One table."""

    title: str
    """Heading of the table."""
    recipe: Path
    """The recipe that all rows share, relative to this file."""
    rows: dict[str, dict[str, Any]]
    """Name of a row, and the dotted keys of the recipe that it changes, e.g. {model.args.assignment: hard}."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Dotted keys that all rows change."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Every row is trained once with each seed."""
    metrics: list[str] = field(default_factory=lambda: ["top1"])
    """Numbers of the last evaluation to show, the first one first."""
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


@dataclass(frozen=True)
class Outcome:
    """What one run came to; goes to and from JSON."""

    row: str
    seed: int
    numbers: dict[str, float]
    parameters: int
    seconds: float


def slug(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_table(path: Path | str, overrides: Sequence[str] = ()) -> TableSettings:
    """The settings in a YAML file, its recipe found and every row checked before anything is trained.

    Args:
        overrides: of the recipe, for all rows, e.g. ``data.root=cifar10``; those of the file give way.
    """
    import yaml

    from ramify.cli.config import load

    settings = load(TableSettings, path)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"an override looks like schedule.epochs=30, got {override!r}")
        settings.overrides[key] = yaml.safe_load(value)
    settings.recipe = Path(path).parent / settings.recipe
    for row in settings.rows:
        row_recipe(settings, row, settings.seeds[0])
    return settings


def row_recipe(settings: TableSettings, row: str, seed: int) -> Recipe:
    """The recipe of one run."""
    from ramify.cli.config import load

    changes = {**settings.overrides, **settings.rows[row], "run.seed": seed}
    return load(Recipe, settings.recipe, [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def make_table(
    settings: TableSettings,
    out: Path,
    *,
    jobs: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Train what is missing and give the outcome of every row and seed, in the order of the table.

    Seeds are the outer loop: when the time is up, the rows have been treated alike.

    Args:
        out: folder for the runs, one below it for each.
        jobs: runs at the same time, each in a process of its own.
        say: takes one line for each run that ends.
    """
    if jobs < 1:
        raise UserError(f"jobs must be at least 1, got {jobs}")
    work = [(row, seed) for seed in settings.seeds for row in settings.rows]
    found: dict[tuple[str, int], Outcome] = {}

    def take(outcome: Outcome) -> None:
        found[outcome.row, outcome.seed] = outcome
        numbers = "  ".join(f"{name} {_number(outcome, name):.4f}" for name in settings.metrics)
        say(f"[{len(found)}/{len(work)}] {outcome.row}, seed {outcome.seed}: {numbers}  ({outcome.seconds:.0f} s)")

    if jobs == 1:
        for row, seed in work:
            take(train_one(settings, row, seed, out))
    else:
        from concurrent.futures import ProcessPoolExecutor, as_completed
        from multiprocessing import get_context

        _render_world(settings)  # once, instead of in every process at the same time
        # Fresh processes: a forked one could not use the GPU.
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
            futures = [pool.submit(train_one, settings, row, seed, out) for row, seed in work]
            try:
                for future in as_completed(futures):
                    take(future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [found[row, seed] for row in settings.rows for seed in settings.seeds]


def train_one(settings: TableSettings, row: str, seed: int, out: Path) -> Outcome:
    """One run, resumed if it was interrupted and only read if it is finished."""
    from ramify.train.evaluate import load_model
    from ramify.train.folder import RunFolder
    from ramify.train.loop import fit

    folder = out / slug(row) / f"seed{seed}"
    try:
        result = fit(row_recipe(settings, row, seed), folder, resume=True, quiet=True)
    except UserError as error:
        raise UserError(f"row {row!r}, seed {seed}: {error}") from None
    model, _ = load_model(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = max((line["time"] for line in RunFolder(folder).read_metrics()), default=0.0)
    return Outcome(row, seed, result.numbers, parameters, seconds)


def end_with_parent() -> None:
    """Watch the process that started this one, and end when it is gone: a killed table leaves nothing running.

    What was trained is in the run's checkpoint, from which the next call goes on.
    """
    import os
    import threading
    import time

    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _render_world(settings: TableSettings) -> None:
    from ramify.train.tasks import build_task

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
    lines = [f"### {settings.title}", ""]
    if settings.note:
        lines += [settings.note, ""]
    lines += [
        "| " + " | ".join(["", "parameters", *settings.metrics, "training time"]) + " |",
        "|" + "---|" * (len(settings.metrics) + 3),
    ]
    for row, group in groups.items():
        cells = [_spread([_number(outcome, name) for outcome in group]) for name in settings.metrics]
        if means[row] == best:
            cells[0] = f"**{cells[0]}**"
        seconds = statistics.fmean(outcome.seconds for outcome in group)
        lines.append("| " + " | ".join([row, f"{group[0].parameters:,}", *cells, f"{seconds:.0f} s"]) + " |")
    seeds = ", ".join(map(str, settings.seeds))
    lines += [
        "",
        f"Mean ± standard deviation over seeds {seeds}, after the last step (no choice of a best checkpoint).",
    ]
    return "\n".join([*lines, *(["", *(f"    {line}" for line in about)] if about else [])]) + "\n"


def write_between_marks(path: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- /name -->`` in a page, which gets both if it has none."""
    from ramify.train.checkpoint import write_text

    start, stop = f"<!-- {name} -->", f"<!-- /{name} -->"
    page = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    if (start in page) != (stop in page):
        raise UserError(f"{path} has only one of the marks {start} and {stop}; add the other or remove it")
    if start in page:
        before, rest = page.split(start, 1)
        page = before + f"{start}\n{text}{stop}" + rest.split(stop, 1)[1]
    else:
        page = page.rstrip("\n") + f"\n\n{start}\n{text}{stop}\n"
    write_text(path, page)


def _number(outcome: Outcome, name: str) -> float:
    if name not in outcome.numbers:
        hint = suggest(name, outcome.numbers) or f"expected one of {', '.join(outcome.numbers)}"
        raise UserError(f"the evaluation gives no {name!r}; {hint}")
    return outcome.numbers[name]


def _spread(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{mean:.4f}"


# ------------------------------------------------------------------------------------------------------ without the CLI


def compare(
    path: Path,
    out: Path | None = None,
    results: Path | None = None,
    jobs: int = 1,
    overrides: Sequence[str] = (),
) -> str:
    """Everything that ``ramify compare`` does: train, print, and write the table into a page; gives the Markdown."""
    from ramify.bench.machine import describe

    settings = read_table(path, overrides)
    out = out or Path("runs") / path.stem
    outcomes = make_table(settings, out, jobs=jobs, say=lambda line: print(line, flush=True))
    # The folder of the data is nobody else's business.
    given = [word for word in overrides if not word.startswith("data.root=")]
    command = " ".join(["ramify compare", path.name, *(["--overrides", *given] if given else [])])
    text = to_markdown(settings, outcomes, [*describe(), f"command   {command}"])
    from ramify.train.checkpoint import write_text

    write_text(out / "table.md", text)
    write_text(out / "table.json", json.dumps([outcome.__dict__ for outcome in outcomes], indent=1))
    if results is not None:
        write_between_marks(results, path.stem, text)
    return text


def _main(argv: Sequence[str] | None = None) -> int:
    parser = one_line_parser("python -m ramify.train.table", compare.__doc__)
    parser.add_argument("path", type=Path, metavar="TABLE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--overrides", nargs="+", default=(), metavar="KEY=VALUE")

    def command() -> int:
        print(compare(**vars(parser.parse_args(argv))))
        return 0

    return exit_code(command)


if __name__ == "__main__":
    raise SystemExit(_main())
