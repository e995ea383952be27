"""Makes the picture and the tables of HELM on Wikipedia: ``python docs/helm_figures.py RUNS``.

RUNS holds the runs of benchmarks/language.sh, ``helm-0`` to ``helm-2`` and ``llama-0`` to ``llama-2``.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hyptree.runs import RunFolder
from hyptree.tables import markdown_head, markdown_row, spread

FOLDER = Path(__file__).parent / "img"
PICTURES = ("helm_wiki",)
MODELS = {"helm": ("HELM", "#3b6fb6"), "llama": ("Llama", "#d9772b")}
"""Folder to name and colour."""
RATIOS = {"CUDA graphs": 1.07, "eager": 1.38}
"""Time of HELM forward and backward in those of its Llama, measured alone (8192 words, commit 754c822)."""
WINDOW = 100
"""Steps before a validation over which the training loss is averaged."""

Run = list[dict[str, Any]]


def read_runs(folder: Path) -> dict[str, list[Run]]:
    """Rows of the runs of each model, in the order of their seeds."""
    return {model: [RunFolder(run).read_metrics() for run in sorted(folder.glob(f"{model}-*"))] for model in MODELS}


def curve(run: Run, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of a run."""
    rows = [(row["step"], row["loss"]) for row in run if row["split"] == split]
    steps, losses = np.array(rows, float).T
    return steps, losses


def perplexity_at(run: Run, step: float) -> float:
    """Validation perplexity after a step, between two validations on a straight line of the loss; NaN outside."""
    return math.exp(np.interp(step, *curve(run, "val"), left=math.nan, right=math.nan))


def training_loss(run: Run, step: float) -> float:
    """Mean of the training loss over the ``WINDOW`` steps before ``step``."""
    steps, losses = curve(run, "train")
    return float(losses[(steps > step - WINDOW) & (steps <= step)].mean())


def epochs_table(runs: dict[str, list[Run]]) -> list[str]:
    """Perplexity and training loss at each validation, and the best perplexity of each run."""
    lines = markdown_head(("after step", "HELM", "Llama", "HELM, training loss", "Llama, training loss"))
    for step in curve(runs["helm"][0], "val")[0]:
        perplexities = [spread([perplexity_at(run, step) for run in runs[model]], 1) for model in MODELS]
        losses = [spread([training_loss(run, step) for run in runs[model]], 3) for model in MODELS]
        lines.append(markdown_row((f"{step:,.0f}", *perplexities, *losses)))
    best = [spread([math.exp(curve(run, "val")[1].min()) for run in runs[model]], 1) for model in MODELS]
    return [*lines, markdown_row(("best of a run", *best, "", ""))]


def times_table(runs: dict[str, list[Run]]) -> list[str]:
    """HELM after N steps beside Llama after as many as it takes in the same time."""
    names = [f"Llama after {ratio:g} N ({mode})" for mode, ratio in RATIOS.items()]
    lines = markdown_head(("N", "HELM after N", "Llama after N", *names))
    for step in curve(runs["helm"][0], "val")[0]:
        cells = [spread([perplexity_at(run, step) for run in runs["helm"]], 1)]
        for ratio in (1.0, *RATIOS.values()):
            values = [perplexity_at(run, ratio * step) for run in runs["llama"]]
            cells.append("" if math.isnan(values[0]) else spread(values, 1))
        lines.append(markdown_row((f"{step:,.0f}", *cells)))
    return lines


def draw(runs: dict[str, list[Run]], path: Path) -> None:
    """Losses at equal steps, and validation perplexity at equal time."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, times = figure.subplots(1, 2)
    for model, (name, colour) in MODELS.items():
        for seed, run in enumerate(runs[model]):
            label = {"train": f"{name}, training", "val": f"{name}, validation"} if seed == 0 else {}
            losses.plot(*curve(run, "train"), color=colour, linewidth=0.7, alpha=0.7, label=label.get("train"))
            losses.plot(*curve(run, "val"), "o-", color=colour, linewidth=2.2, markersize=4, label=label.get("val"))
    losses.set(xlabel="step", ylabel="loss per token", ylim=(3.0, 6.0))
    losses.set_title("equal steps, three seeds each", fontsize=11)

    lines = [("llama", 1.0, "-", "Llama")]
    lines += [("helm", ratio, dash, f"HELM, a step {ratio:g} times as long ({mode})")
              for (mode, ratio), dash in zip(RATIOS.items(), ("-", "--"), strict=True)]  # fmt: skip
    for model, ratio, dash, said in lines:
        colour = MODELS[model][1]
        steps = curve(runs[model][0], "val")[0]
        values = np.exp([curve(run, "val")[1] for run in runs[model]])  # (seeds, validations)
        times.plot(ratio * steps, values.mean(0), dash, marker="o", color=colour, markersize=4, label=said)
        times.fill_between(ratio * steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    times.set(xlabel="time, in steps of the Llama", ylabel="validation perplexity", yscale="log")
    ticks = (70, 80, 100, 150, 200, 280)
    times.set_yticks(ticks, [str(tick) for tick in ticks])
    times.minorticks_off()
    times.set_title("equal time by steps measured alone, mean and range", fontsize=11)
    for ax in (losses, times):
        ax.legend(fontsize=8)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Software": None})


def main(folder: Path | str, out: Path = FOLDER) -> None:
    runs = read_runs(Path(folder))
    print("\n".join([*epochs_table(runs), "", *times_table(runs)]))
    draw(runs, out / f"{PICTURES[0]}.png")


if __name__ == "__main__":
    main(sys.argv[1])
