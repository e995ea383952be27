"""``hyptree lab overlap`` and ``hyptree lab llm-fit``: heads of real models, and losses of language models by width."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from hyptree.cli.config import AsJson
from hyptree.errors import UserError, as_user_error, require
from hyptree.files import full_disk_is_one_line, require_path, write_text
from hyptree.progress import say

OVERLAP_COLUMNS = {
    "head": "{head}",
    "tensor": "{tensor}",
    "": "{tied}",
    "rows": "{num}",
    "m": "{m}",
    "zero rows": "{num_zero}",
    "norm": "{norm_mean:.3g} ± {norm_std:.2g}",
    "overlap² m": "{mso_m:.4g}",
    "centred": "{mso_centred_m:.4g}",
    "mean": "{signed_mean:.3g}",
    "largest": "{sampled_max:.3f}",
    "least possible": "{welch:.3g}",
    "rank": "{effective_rank:.4g}",
}

LORENTZ_COLUMNS = {
    "Lorentz": "{mso_lorentz_m:.4g}",
    "spacelike rows": "{num_spacelike}",
    "time share": "{time_share:.3g}",
}
"""Shown where a head has a time column."""


@dataclass(kw_only=True)
class OverlapConfig(AsJson):
    """``hyptree lab overlap``."""

    paths: Annotated[tuple[str, ...], "PATH ..."]
    """Checkpoints: a .safetensors or .gguf file, a folder with one or with shards, a run of hyptree train, or org/name
    of a model on the Hub; of the last two also as hf:FOLDER_OR_ID."""
    tensor: str | None = None
    """Name of the matrix, or the end of its name; by default the output head, else the embedding of words."""
    compare: bool = False
    """Insist on the exponent with which overlaps fall with width; without it, given where widths differ."""
    remove_pcs: int = 0
    """Main directions to take away, beside the mean, for the centred numbers."""
    pairs_sample: int = 2_000_000
    """Pairs for the largest overlap and the quantiles."""
    exact: bool = False
    """Also the largest overlap of all pairs; the time grows with the square of the rows."""
    block: int = 8192
    """Rows in memory at once."""
    curvature: float | None = None
    """The c of a hyperbolic head whose hyperplanes have offsets, for its Lorentz numbers: checkpoints lack it."""
    allow_pickle: bool = False
    """Also read torch's older files, which are pickles, by weights_only."""
    seed: int = 0
    """Of the sample."""
    csv: Path | None = None
    """File for the numbers, one row per head."""
    plot: Path | None = None
    """Figure to draw: overlaps against 1/m, norms. Writes PNG, SVG and CSV of this name, which is not that of --csv."""


@dataclass(kw_only=True)
class LlmFitConfig(AsJson):
    """``hyptree lab llm-fit``."""

    table: Annotated[Path, "TABLE"]
    """CSV with columns model, family, dataset, m, loss."""
    draws: int = 1000
    """Rounds of the bootstrap over models."""
    seed: int = 0
    """Of the bootstrap."""
    plot: Path | None = None
    """Figure to draw: losses against width with the fit. Writes PNG, SVG and CSV of this name, which is not that of the
    table."""


def overlap(config: OverlapConfig) -> None:
    """Measure how much the rows of real output heads overlap, raw and centred, without loading the model.

    Random directions have a mean squared overlap of 1/m: the columns give it times m. With several heads of different
    width, also the exponent with which it falls.
    """
    if not config.paths:
        raise UserError("name at least one checkpoint: hyptree lab overlap PATH")
    config.paths = tuple(path.removeprefix("hf:") for path in config.paths)
    checkpoints = {f"the checkpoint {path}": Path(path) for path in config.paths}
    csv = {"the file of --csv": config.csv} if config.csv is not None else {}
    _require_figure(config.plot, checkpoints | csv)
    for path in config.paths:  # what can be no name on the Hub is looked for before torch is imported
        if path.count("/") != 1 or path.endswith((".safetensors", ".gguf")):
            require_path(path, "file or folder")
    from hyptree.lab.lm_heads.checkpoint import require_lm_head

    for path in config.paths:
        require_lm_head(path)
    from hyptree.lab.figures.drawing import require_apart
    from hyptree.lab.lm_heads import overlap as head_overlap
    from hyptree.lab.lm_heads.checkpoint import find_lm_head
    from hyptree.tables import show, to_csv, without_nan

    require_apart(list(csv.values()), checkpoints)
    heads = [find_lm_head(path, config.tensor, config.allow_pickle) for path in config.paths]
    offset = [path for path, head in zip(config.paths, heads, strict=True) if head.time_kind == "offset"]
    if config.curvature is not None and not offset:
        raise UserError("--curvature is for heads whose hyperplanes have offsets, and none here has; leave it out")
    if config.curvature is None and offset:
        say(f"no Lorentz numbers for {', '.join(offset)}: they hold offsets and no curvature; give it by --curvature")
    names = ("remove_pcs", "pairs_sample", "exact", "block", "seed", "curvature")
    options = {name: getattr(config, name) for name in names}
    overlaps = [head_overlap.overlap(head, **options) for head in heads]
    lines = [{"head": path, **asdict(one)} for path, one in zip(config.paths, overlaps, strict=True)]
    widths = sorted({one.m for one in overlaps})
    if config.compare and len(widths) < 2:
        raise UserError(f"--compare needs heads of two widths or more, got {len(overlaps)} of width {widths[0]}")
    fits = {}
    if len(widths) > 1:
        fits = {name: head_overlap.compare(overlaps, name == "centred") for name in ("raw", "centred")}
    written: list[Path] = []
    if config.csv is not None:
        plain = [{k: v for k, v in without_nan(line).items() if not isinstance(v, list | dict)} for line in lines]
        with full_disk_is_one_line(config.csv.parent, "run it again"):
            write_text(config.csv, to_csv(plain))
        written.append(config.csv)
    if config.plot is not None:
        from hyptree.lab.figures.drawing import write_figure
        from hyptree.lab.figures.lm_head_figures import lm_heads

        written += write_figure(config.plot, lm_heads(overlaps, [_short(path) for path in config.paths], fits))
    if config.json:
        exponents = {name: fit.exponent for name, fit in fits.items()}
        numbers = {"heads": lines, "exponent": exponents, "fits": {name: vars(fit) for name, fit in fits.items()}}
        print(json.dumps(without_nan(numbers)))
        return
    columns = OVERLAP_COLUMNS | (LORENTZ_COLUMNS if any(one.num_spacelike for one in overlaps) else {})
    print("\n".join(show(lines, columns)))
    for name, fit in fits.items():
        interval = f", 95 % {fit.low:.3f} to {fit.high:.3f}" if math.isfinite(fit.low) else ", two points: no error"
        error = f" ± {fit.error:.3f}" if math.isfinite(fit.error) else ""
        print(f"{name} overlap² falls as m^{-fit.exponent:+.3f}{error}{interval}, {fit.num_points} heads; random: m^-1")
    print("\n".join(map(str, written)), end="\n" if written else "")


def llm_fit(config: LlmFitConfig) -> None:
    """Fit losses of language models by one exponent in the width and an offset per family and dataset."""
    from hyptree.lab.shared_exponent import fit_shared, read_losses, width_exponent
    from hyptree.tables import without_nan

    _require_figure(config.plot, {"the table of losses": config.table})
    points = read_losses(config.table)
    group = [(point["family"], point["dataset"]) for point in points]
    with as_user_error(str(config.table)):
        fit = fit_shared(
            [point["m"] for point in points],
            [point["loss"] for point in points],
            group,
            [point["model"] for point in points],
            config.draws,
            config.seed,
        )
    written: list[Path] = []
    if config.plot is not None:
        from hyptree.lab.figures.drawing import write_figure
        from hyptree.lab.figures.lm_head_figures import model_losses

        written = write_figure(config.plot, model_losses(points, fit))
    offsets = {" ".join(map(str, name)) if isinstance(name, tuple) else str(name): b for name, b in fit.offsets.items()}
    expected, error = width_exponent()
    if config.json:
        values = {k: v for k, v in vars(fit).items() if isinstance(v, float)} | {"num_points": fit.num_points}
        chinchilla = {"exponent": expected, "error": error}
        print(json.dumps(without_nan({**values, "offsets": offsets, "chinchilla": chinchilla})))
        return
    print(f"exponent {fit.exponent:.4f} ± {fit.error:.4f}, 95 % over models {fit.low:.3f} to {fit.high:.3f}")
    print(f"scale {fit.scale:.4g}, mean squared residual {fit.mean_square:.3g}, {fit.num_points} points")
    for name, value in offsets.items():
        print(f"offset {value:.3f}  {name}")
    print(f"Chinchilla's exponent in parameters, in width: {expected:.2f} ± {error:.2f}")
    print("\n".join(map(str, written)), end="\n" if written else "")


def _require_figure(plot: Path | None, others: dict[str, Path]) -> None:
    """Raise before any work if a figure cannot be drawn, or would be written over something else."""
    if plot is not None:
        require("matplotlib", "plot", asked_by="--plot")
        from hyptree.lab.figures.drawing import figure_files, require_apart

        require_apart(figure_files(plot), others)


def _short(path: str) -> str:
    """The last part of a path that says something."""
    parts = [part for part in Path(path).parts if part not in ("model.safetensors", "model", "/")]
    return parts[-1].removesuffix(".gguf").removesuffix(".safetensors") if parts else path
