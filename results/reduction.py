"""Ways to reduce tokens side by side, over several runs of one recipe: accuracy as mean and spread, in Markdown.

Every run (one per seed) is measured with every way and keep rate at equal token counts, off the shelf. What was
measured is kept in the run's folder, so the same command goes on after any stop. There is no timing here: ``hyptree
reduce`` and ``hyptree bench tokens`` do that:

    python -m results.reduction runs/vit/seed0 runs/vit/seed1 runs/vit/seed2 --results docs/RESULTS.md
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from hyptree.cli import call
from hyptree.errors import UserError, suggest
from hyptree.machine import describe
from hyptree.tables import markdown_head, markdown_row, spread, write_between_marks

KEPT_AS = "reduction.json"
"""File in the run's folder."""
ALL = "all tokens"
"""The row without any reduction."""

WAYS: dict[str, dict[str, Any]] = {
    "ATC, average": {"method": "atc", "linkage": "average"},
    "ATC, complete": {"method": "atc", "linkage": "complete"},
    "ATC, single": {"method": "atc", "linkage": "single"},
    "ATC, average, hyperbolic": {"method": "atc", "linkage": "average", "metric": "lorentz"},
    "ToMe": {"method": "tome"},
    "k-means": {"method": "kmeans"},
    "k-medoids": {"method": "kmedoids"},
    "DPC-KNN": {"method": "dpcknn"},
    "top-k": {"method": "topk"},
    "EViT": {"method": "evit"},
    "random": {"method": "random"},
}
"""Row of the table, and the arguments of ``hyptree.tokens.patch``; a metric is named as in ``hyptree.geometry``."""


@dataclass
class Settings:
    """What is measured, and how."""

    runs: Annotated[tuple[Path, ...], "RUN"]
    """Folders of runs of one recipe, one per seed."""
    data: str | None = None
    """Where the pictures are, as NAME:ROOT, when they are not where they were in training."""
    keep: tuple[float, ...] = (0.9, 0.7, 0.5, 0.25)
    """Share of the tokens kept at each of three layers."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Rows of the table."""
    baseline: str = "ToMe"
    """The way that all others are compared with, run by run."""
    num_val: int | None = None
    """Use only so many pictures."""
    batch_size: int = 500
    """Pictures at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products in bfloat16 (autocast); distances are float32 in any case."""
    device: str = "auto"
    """auto takes a GPU if there is one; cpu or cuda to insist."""
    jobs: int = 1
    """Runs measured at the same time."""
    fresh: bool = False
    """Measure again what is already in the folders."""

    def __post_init__(self) -> None:
        if not self.runs or len(set(self.runs)) != len(self.runs):
            raise UserError(f"give the folders of different runs, at least one, got {len(self.runs)}")
        for way in self.ways:
            if way not in WAYS:
                hint = suggest(way, WAYS) or f"known are {'; '.join(WAYS)}"
                raise UserError(f"unknown way {way!r}; {hint}")
        for keep in self.keep:
            if not 0 < keep < 1:
                raise UserError(f"keep must be between 0 and 1, got {keep:g}; all tokens are measured anyway")
        if self.precision not in ("fp32", "bf16"):
            raise UserError(f"precision must be fp32 or bf16, got {self.precision!r}")
        if self.jobs < 1 or self.batch_size < 1:
            raise UserError(f"jobs and batch_size must be 1 or more, got {self.jobs} and {self.batch_size}")


@dataclass
class Measured:
    """Accuracies of one run; goes to and from JSON."""

    about: dict[str, Any]
    """What they depend on beside way and keep rate."""
    top1: dict[str, float] = field(default_factory=dict)
    """By ``cell``."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Keep rate, and the patch tokens that leave each of the layers."""


def cell(way: str, keep: float) -> str:
    """Key of one number."""
    return f"{way} @ {keep:g}"


# ----------------------------------------------------------------------------------------------------------- measuring


def measure_run(settings: Settings, run: Path, say: Callable[[str], None] = lambda line: None) -> Measured:
    """The accuracy of one run in every way at every keep rate; only what its folder lacks is measured."""
    from hyptree.files import write_text
    from hyptree.train.reduction.subject import load_subject
    from hyptree.train.run.settings import ReduceSettings

    subject = load_subject(
        ReduceSettings(
            model=str(run),
            data=settings.data,
            num_val=settings.num_val,
            batch_size=settings.batch_size,
            precision=settings.precision,
            device=settings.device,
        )
    )
    about = {"weights": subject.fingerprint(), "num_val": settings.num_val, "precision": settings.precision}
    path = run / KEPT_AS
    measured = _read(path, about) if not settings.fresh else Measured(about)

    def keep_it(key: str, top1: float) -> None:
        measured.top1[key] = top1
        write_text(path, json.dumps(measured.__dict__, indent=1) + "\n")
        say(f"{run.name}  {key}: {top1:.4f}")

    if ALL not in measured.top1:
        keep_it(ALL, subject.accuracy()["top1"])
    for way, keep in _missing(settings, measured):
        counts, top1 = _reduced_accuracy(subject, way, keep)
        measured.tokens[f"{keep:g}"] = counts
        keep_it(cell(way, keep), top1)
    return measured


def _missing(settings: Settings, measured: Measured) -> Iterator[tuple[str, float]]:
    for way in settings.ways:
        for keep in settings.keep:
            if cell(way, keep) not in measured.top1:
                yield way, keep


def _reduced_accuracy(subject: Any, way: str, keep: float) -> tuple[list[int], float]:
    """Tokens after each layer, and top-1 accuracy."""
    from hyptree.tokens.patch import patched

    options = dict(WAYS[way])
    if "metric" in options:
        from hyptree.geometry import Lorentz

        assert options["metric"] == "lorentz"
        options["metric"] = Lorentz(1.0)
    with patched(subject.model, keep=keep, **options) as handle:
        top1 = subject.accuracy()["top1"]
        return [int(count) for count in handle.num_tokens], top1


def _read(path: Path, about: dict[str, Any]) -> Measured:
    """What the file holds of the same weights, pictures and precision; nothing if it is of others or is not there."""
    try:
        measured = Measured(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Measured(about)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} does not hold accuracies of reduced tokens; --overwrite replaces it") from error
    return measured if measured.about == about else Measured(about)


def measure(settings: Settings, say: Callable[[str], None] = lambda line: None) -> list[Measured]:
    """All runs, several at a time if asked for."""
    if settings.jobs == 1:
        return [measure_run(settings, run, say) for run in settings.runs]
    from hyptree.train.parallel.workers import workers

    with workers(settings.jobs) as pool:
        futures = [pool.submit(measure_run, settings, run) for run in settings.runs]
        rows = []
        for run, future in zip(settings.runs, futures, strict=True):
            rows.append(future.result())
            say(f"{run} done")
        return rows


# ------------------------------------------------------------------------------------------------------------ Markdown


def to_markdown(settings: Settings, runs: Sequence[Measured], about: Sequence[str] = ()) -> str:
    """Accuracies in per cent, best of each keep rate in bold, and the difference to the baseline run by run."""
    tokens = {keep: runs[0].tokens.get(f"{keep:g}", []) for keep in settings.keep}
    heads = [f"keep {keep:g} ({', '.join(map(str, tokens[keep]))})" for keep in settings.keep]
    whole = spread([100 * run.top1[ALL] for run in runs], 2)
    lines = [
        f"Top-1 accuracy in per cent, off the shelf, mean ± standard deviation over {len(runs)} runs; in brackets the",
        f"tokens after each of the layers. All tokens: {whole}.",
        "",
        *markdown_head(["", *heads]),
    ]
    means = {
        cell(way, keep): _mean([run.top1[cell(way, keep)] for run in runs])
        for way in settings.ways
        for keep in settings.keep
    }
    best = {keep: max((means[cell(way, keep)] for way in settings.ways), default=0.0) for keep in settings.keep}
    for way in settings.ways:
        cells = []
        for keep in settings.keep:
            text = spread([100 * run.top1[cell(way, keep)] for run in runs], 2)
            cells.append(f"**{text}**" if means[cell(way, keep)] == best[keep] else text)
        lines.append(markdown_row([way, *cells]))
    if settings.baseline in settings.ways and len(settings.ways) > 1:
        lines += ["", *_differences(settings, runs, heads)]
    return "\n".join([*lines, *(["", *(f"    {line}" for line in about)] if about else [])]) + "\n"


def _differences(settings: Settings, runs: Sequence[Measured], heads: Sequence[str]) -> list[str]:
    """Pairs of numbers of the same run: what the seed does to all ways alike is not in their spread."""
    lines = [
        f"Difference to {settings.baseline} in percentage points, run by run (mean ± standard deviation).",
        "",
        *markdown_head(["", *heads]),
    ]
    for way in settings.ways:
        if way != settings.baseline:
            cells = [spread(_paired(runs, way, settings.baseline, keep), 2, "+") for keep in settings.keep]
            lines.append(markdown_row([way, *cells]))
    return lines


def _paired(runs: Sequence[Measured], way: str, baseline: str, keep: float) -> list[float]:
    return [100 * (run.top1[cell(way, keep)] - run.top1[cell(baseline, keep)]) for run in runs]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


# ------------------------------------------------------------------------------------------------------------- command


@dataclass
class TableConfig(Settings):
    """The flags: those of the settings, and the page that gets the table."""

    results: Path | None = None
    """Page to write the table into."""
    name: str = "reduction"
    """Of the marks in that page."""


def table(config: TableConfig) -> None:
    """Measure what is missing, and print the table; on request also between the marks of a page."""
    runs = measure(config, lambda line: print(line, flush=True))
    text = to_markdown(config, runs, [*describe(), f"precision {config.precision}"])
    if config.results is not None:
        write_between_marks(config.results, config.name, text)
    print(text)


if __name__ == "__main__":
    raise SystemExit(call(table, "python -m results.reduction"))
