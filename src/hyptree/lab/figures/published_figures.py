"""Figures that show the paper's exponents beside ours, as data. numpy alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyptree.lab.figures.panels import Panel, Row, Series, group_by, joined, part_of
from hyptree.lab.published import by_seeds, with_published


def published_series(fits: Sequence[Row]) -> list[Series]:
    """What the paper has for the settings of a panel against alpha; nothing where it has none of them."""
    # Once per setting, also where several parts have it.
    chosen = list({(fit["alpha"], fit["gamma"]): fit for fit in with_published(fits)}.values())
    x, y, error = ([fit[name] for fit in chosen] for name in ("alpha", "published", "published_error"))
    return [Series("published", x, y, "hollow", error)] if chosen else []


def published(rows: Sequence[Row], fits: Sequence[Row], norms: np.ndarray) -> list[Panel]:
    """Our exponents against those of the paper, setting by setting."""
    chosen = with_published(fits)
    if not chosen:
        return []
    panel = Panel("exponent, ours against published", "published exponent (one start)", "our exponent")
    for (_, gamma), some in group_by(chosen, "part", "gamma").items():
        name = joined(part_of(some[0], chosen, ("gamma",)), f"γ = {gamma:.3g}")
        panel.series.append(
            Series(
                name,
                [fit["published"] for fit in some],
                [fit["exponent"] for fit in some],
                error=[fit["seed_sd"] if by_seeds(fit) else fit["error"] for fit in some],
                labels=[f"α = {fit['alpha']:g}" for fit in some],
                x_error=[fit["published_error"] for fit in some],
            )
        )
    every = [fit[name] for fit in chosen for name in ("published", "exponent")]
    panel.series.append(Series("equal", [min(every), max(every)], [min(every), max(every)], "dashed"))
    kinds = {by_seeds(fit) for fit in chosen}
    ours = [text for is_by, text in ((False, "standard error"), (True, "deviation of one start")) if is_by in kinds]
    panel.note = f"bars across: standard error, where published; bars upwards: {' or '.join(ours)}"
    return [panel]
