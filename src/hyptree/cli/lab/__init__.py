"""``hyptree lab``: train grids of toy models, fit their exponents, draw them, ask the theory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from hyptree.checks import require_numbers
from hyptree.cli.config import AsJson
from hyptree.cli.lab.lm_heads import llm_fit, overlap
from hyptree.errors import UserError
from hyptree.files import full_disk_is_one_line, write_text
from hyptree.lab.sweeps.grid import Grid
from hyptree.lab.sweeps.messages import print_fits
from hyptree.progress import progress_bar, say


@dataclass(kw_only=True)
class SweepConfig(AsJson):
    """``hyptree lab sweep``: which grids, and how the work is done; what is given of a grid lies over all of them."""

    preset: str | None = None
    """smoke (about 40 s of CPU), quick (4 minutes), curvature (1 minute); for a GPU: curvature-grid, paper-grid,
    paper-density, paper-wide."""
    device: str = "auto"
    """auto takes a GPU if there is one; cpu or cuda to insist."""
    dtype: Literal["float32", "float64"] = "float32"
    """float64 only to check; fewer bits than float32 give other results."""
    threads: int = 0
    """CPU threads; 0 for one where batches are small, else torch's choice. Processes gain more than threads."""
    chunk: int = 0
    """Models worked on at once; 0 chooses."""
    pad: bool = False
    """Put all widths into one tensor, for a GPU that many small products do not fill."""
    out: Path = Path("runs/lab")
    """Folder for the sweep."""
    resume: bool = False
    """Go on from the checkpoint in the folder."""
    overwrite: bool = False
    """Replace a sweep that is already in the folder."""
    checkpoint_seconds: float = 60.0
    """Time between checkpoints."""
    keep_weights: bool = False
    """Also write the weights of every model."""
    dry_run: bool = False
    """Only say what would be trained and what it would cost."""
    quiet: bool = False
    """No line of progress."""
    parts: tuple[Grid, ...] = ()
    """Grids of your own, in a file of --config."""
    settings: list[Grid] = field(init=False)

    keys: ClassVar[type] = Grid

    def __post_init__(self) -> None:
        require_numbers(self, "at least 0", "threads", "chunk", "checkpoint_seconds", flag="--")

    def bases(self, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The parts of the file or of the preset, those of the sweep to resume, or the default grid."""
        grids: Sequence[Grid] = self.parts or (Grid(),)
        if self.preset is not None:
            from hyptree.lab.sweeps.grid import preset

            if self.parts:
                raise UserError(f"a file gives parts, and --preset {self.preset} others; leave one of them out")
            grids = preset(self.preset)
        elif self.resume and not self.parts:
            from hyptree.lab.sweeps.folder import stored_parts

            grids = stored_parts(self.out)
        shapes = [chosen.get("dist", grid.dist) for grid in grids]
        if "alpha" in chosen and "power" not in shapes:
            raise UserError(f"--alpha is for the shape power, and the data are {shapes[0]}; leave it out")
        return [grid.as_dict() for grid in grids]


@dataclass(kw_only=True)
class FitConfig(AsJson):
    """``hyptree lab fit``."""

    runs: Annotated[Path, "RUNS"]
    """Folder of a sweep, or its table of runs."""
    drop_small: int = 0
    """Leave out so many of the smallest widths; the table of fits says so."""
    loss: Literal["eval", "train"] = "eval"
    """Fresh samples, or the mean of the last 5 % of training."""
    out: Path | None = None
    """CSV to write; by default fits.csv in the folder."""


@dataclass
class PlotConfig:
    """``hyptree lab plot``."""

    runs: Annotated[Path, "RUNS"]
    """Folder of a sweep."""
    which: tuple[str, ...] = ("all",)
    """all, or some of loss, represented, exponents, weak, strong, published, density, curvature."""
    out: Path | None = None
    """Folder for PNG, SVG and CSV; by default figures in that of the sweep."""
    page: bool = True
    """Also write index.html: the figures with a table of exponents, regime checks and theory."""


@dataclass
class TheoryConfig(AsJson):
    """``hyptree lab theory``."""

    n: int = 1000
    """Features."""
    m: tuple[int, ...] = (10, 15, 25, 39, 63, 100)
    """Widths."""
    alpha: tuple[float, ...] = (0.0, 0.5, 1.0, 1.25, 1.5, 1.75, 2.0)
    """Exponents of the feature frequencies."""
    density: float = 1.0
    """Expected active features per sample."""
    curvature: tuple[float, ...] = ()
    """Also the loss that no width takes away in hyperbolic spaces of curvature minus these."""


def sweep(config: SweepConfig) -> None:
    """Train a grid of toy models at once and fit loss against width.

    Ctrl-C writes a checkpoint; --resume goes on bit for bit, with the settings that are in the folder. Processes share
    the models: torchrun --nproc-per-node 2 -m -- hyptree lab sweep (without -- torchrun takes --n and --m for its own).
    """
    parts = config.settings
    import torch

    from hyptree.devices import find_device
    from hyptree.lab.fits import best_curvatures, fit_runs
    from hyptree.lab.sweeps.runner import sweep as run

    # Two threads that wait for each other in small products can be ten times slower than one on a busy machine.
    if config.threads or max(grid.batch * grid.n for grid in parts) < 2**20:
        torch.set_num_threads(config.threads or 1)
    device, dtype = find_device(config.device), getattr(torch, config.dtype)
    if config.dry_run:
        from hyptree.lab.sweeps.cost import cost, describe

        print("\n".join(describe([cost(grid, device, dtype) for grid in parts])))
        return
    with progress_bar(parts[0].name, parts[0].steps, quiet=config.quiet) as bar:
        rows = run(
            parts,
            config.out,
            device=device,
            dtype=dtype,
            chunk=config.chunk,
            pad=config.pad,
            resume=config.resume,
            overwrite=config.overwrite,
            checkpoint_seconds=config.checkpoint_seconds,
            keep_weights=config.keep_weights,
            bar=None if config.quiet else bar,
            say=say,
        )
    if os.environ.get("RANK", "0") != "0":  # under torchrun the first process speaks
        return
    print_fits(fit_runs(rows), config.json, best_curvatures(rows))
    say(f"sweep in {config.out}")


def fit(config: FitConfig) -> None:
    """Fit the exponents of a sweep, with errors, the regime check and the theory beside them.

    Of a sweep that was stopped, the parts that are complete.
    """
    from hyptree.lab.figures.drawing import require_apart
    from hyptree.lab.fits import best_curvatures, fit_runs
    from hyptree.lab.sweeps.run_table import read_runs
    from hyptree.tables import to_csv

    folder = config.runs if config.runs.is_dir() else config.runs.parent
    out = config.out or folder / "fits.csv"
    tables = [folder / "runs.csv", folder / "runs.parquet"] if config.runs.is_dir() else [config.runs]
    require_apart([out], {f"the table of runs {path.name}": path for path in tables})
    rows, loss = read_runs(config.runs, say), f"loss_{config.loss}"
    lines = fit_runs(rows, config.drop_small, loss)
    with full_disk_is_one_line(folder, "fit again"):
        write_text(out, to_csv(lines))
    print_fits(lines, config.json, best_curvatures(rows, config.drop_small, loss))


def plot(config: PlotConfig) -> None:
    """Draw the figures of a sweep, with the data of each as CSV beside it, and put them on a page.

    Of a sweep that was stopped, the parts that are complete.
    """
    from hyptree.lab.figures.drawing import plot as draw

    written = draw(config.runs, config.which, config.out, say)
    for name, files in written.items():
        if files:
            print("\n".join(map(str, files)))
        else:
            say(f"no figure {name}: the sweep has no data for it")
    if config.page:
        from hyptree.explore.pages.lab_page import lab_page

        pictures = {name: files[0] for name, files in written.items() if files}
        print(lab_page(config.runs, pictures, config.out and config.out / "index.html"))


def theory(config: TheoryConfig) -> None:
    """Print what theory expects of a grid: exponents, and the loss of a model that keeps m features."""
    from hyptree.lab.theory import (
        curved_floor,
        finite_exponent,
        frequencies,
        strong_exponent,
        unlearned_loss,
        weak_exponent,
    )
    from hyptree.tables import show

    curvature = config.curvature or (0.0,)
    grid = Grid(n=config.n, m=config.m, alpha=config.alpha, density=(config.density,), curvature=curvature)  # checks
    if len(grid.m) < 2 or max(grid.m) >= grid.n:
        raise UserError(f"an exponent needs two widths below n = {grid.n}, got {' '.join(map(str, grid.m))}")
    lines: list[dict[str, Any]] = []
    for alpha in config.alpha:
        p = frequencies(config.n, alpha, config.density)
        lines.append(
            {
                "alpha": alpha,
                "weak_finite": finite_exponent(p, config.m),
                "weak": weak_exponent(alpha),
                "strong": strong_exponent(alpha),
                **{f"loss_{m}": float(unlearned_loss(p, m)) for m in config.m},
                "floors": {f"{c:g}": curved_floor(p, c)[0] for c in config.curvature},
            }
        )
    if config.json:
        print(json.dumps(lines))
        return
    columns = {
        "alpha": "{alpha:g}",
        "finite-n": "{weak_finite:.3f}",
        "weak": "{weak:.3f}",
        "strong": "{strong:.3f}",
    }
    columns |= {f"loss, m={m}": f"{{loss_{m}:.4g}}" for m in config.m}
    columns |= {f"floor, c={c:g}": f"{{floor_{i}:.2g}}" for i, c in enumerate(config.curvature)}
    shown = [{**line, **{f"floor_{i}": v for i, v in enumerate(line["floors"].values())}} for line in lines]
    print("\n".join(show(shown, columns)))


SUBVERBS = {"sweep": sweep, "fit": fit, "plot": plot, "theory": theory, "overlap": overlap, "llm-fit": llm_fit}
