"""Figures of real models as data: overlaps of their heads against width, and their losses against width. numpy alone.

Panels of :mod:`hyptree.lab.figures.panels`, so that the CSV beside a picture cannot disagree with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hyptree.lab.figures.panels import Panel, Series

if TYPE_CHECKING:
    from hyptree.lab.fits import PowerFit
    from hyptree.lab.lm_heads.overlap import LMHeadOverlap
    from hyptree.lab.shared_exponent import SharedFit

_ENOUGH = 400
"""Rows that fill the bins of a histogram."""


def lm_heads(overlaps: Sequence[LMHeadOverlap], names: Sequence[str], fits: Mapping[str, PowerFit]) -> list[Panel]:
    """Mean squared overlap against 1/m, raw and centred, beside what random directions have; norms of the rows.

    ``fits`` are the ``raw`` and ``centred`` power laws over the heads; empty where they have one width.
    """
    panel = Panel("mean squared overlap of rows", "1 / m", "overlap²", log="xy")
    x = [1 / one.m for one in overlaps]
    values = {"raw": [one.mso for one in overlaps], "centred": [one.mso_centred for one in overlaps]}
    for k, (name, y) in enumerate(values.items()):
        panel.series.append(Series(name, x, y, labels=names if k == 0 else None))
    ends = [min(x), max(x)] if len(set(x)) > 1 else [x[0] / 2, x[0] * 2]
    panel.series.append(Series("random, 1 / m", ends, ends, "dashed"))
    for name, fit in fits.items():
        y = [fit.scale * end**fit.exponent for end in ends]
        panel.series.append(Series(f"{name}: m^{-fit.exponent:+.2f}", ends, y, "dashed"))
    norms = Panel("norms of rows", "norm / mean norm", "density")
    for one, name in zip(overlaps, names, strict=True):
        if one.num < _ENOUGH:
            continue
        edges = np.array(one.norm_edges) / one.norm_mean
        density = np.array(one.norm_counts) / one.num / np.diff(edges)
        middle = (edges[1:] + edges[:-1]) / 2
        norms.series.append(Series(f"{name}, m = {one.m}", middle.tolist(), density.tolist(), "steps"))
    few = len(overlaps) - len(norms.series)
    norms.note = f"{few} head{'s' if few > 1 else ''} of fewer than {_ENOUGH} rows not drawn" if few else ""
    return [panel, norms] if norms.series else [panel]


def model_losses(points: Sequence[Mapping[str, Any]], fit: SharedFit) -> list[Panel]:
    """Losses of language models against width with the shared fit, and again with their offsets taken away."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for point in sorted(points, key=lambda point: float(point["m"])):
        groups.setdefault((point["family"], point["dataset"]), []).append(point)
    plain = Panel("loss against width", "m", "loss", log="x")
    above = Panel("loss above the offset of its family and dataset", "m", "loss - offset", log="xy")
    below = 0  # the offset: no place on a logarithmic axis, the left panel has these points
    for group, some in sorted(groups.items()):
        m, loss = ([float(point[name]) for point in some] for name in ("m", "loss"))
        name = ", ".join(group)
        plain.series.append(Series(name, m, loss, "line"))
        rest = [(width, value - fit.offsets[group]) for width, value in zip(m, loss, strict=True)]
        below += sum(value <= 0 for _, value in rest)
        rest = [(width, value) for width, value in rest if value > 0]
        above.series.append(Series(name, [width for width, _ in rest], [value for _, value in rest]))
    above.note = f"{below} point{'s' if below > 1 else ''} below the offset not drawn" if below else ""
    widths = np.geomspace(min(float(p["m"]) for p in points), max(float(p["m"]) for p in points), 30)
    curve = fit.scale * widths**-fit.exponent
    text = f"{fit.scale:.3g} m^-{fit.exponent:.3f}"
    above.series.append(Series(text, widths.tolist(), curve.tolist(), "dashed"))
    return [plain, above]
