"""The hyperbolic radius of embeddings, and a loss that holds it.

Lifted to a Poincaré ball by exp0, an embedding z lies at distance ``2 |z|`` from the origin, for every curvature:
radius is twice the norm, no more and no less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hyptree.errors import UserError


def radius(embeddings: Tensor) -> Tensor:
    """``2 |z|`` (...) of embeddings (..., d): their distance to the origin once lifted, for every curvature."""
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    return 2 * torch.linalg.vector_norm(embeddings, dim=-1, dtype=wide)


class RadiusLoss(nn.Module):
    """``weight`` times the mean of ``(2 |z| - target)^2``, over embeddings that are not normalised.

    Heads that compare by cosine never see norms; this is how to train them. The target is the radius to hold, such as
    the mean before tuning.
    """

    def __init__(self, target: float, weight: float = 1.0):
        super().__init__()
        if not target >= 0:
            raise UserError(f"target must be a radius of 0 or more, got {target}")
        self.target, self.weight = float(target), float(weight)

    def forward(self, embeddings: Tensor) -> Tensor:
        """A scalar from embeddings (..., d)."""
        return self.weight * (radius(embeddings) - self.target).square().mean()

    def extra_repr(self) -> str:
        return f"target={self.target}, weight={self.weight}"


def radius_summary(embeddings: Tensor) -> dict[str, Any]:
    """Count, and mean, standard deviation, least, median and largest of norm and radius, of embeddings (n, d)."""
    norms = torch.linalg.vector_norm(embeddings.detach().double().cpu(), dim=-1)
    if not len(norms):
        raise UserError("a radius report needs at least one text or picture, got none")
    sizes = {"mean": norms.mean(), "sd": norms.std(correction=0), "min": norms.min()}
    norm = {key: float(value) for key, value in {**sizes, "median": norms.median(), "max": norms.max()}.items()}
    return {"count": len(norms), "norm": norm, "radius": {key: 2 * value for key, value in norm.items()}}


def radius_table(report: dict[str, Any]) -> list[str]:
    """The report as lines of a table."""
    lines = ["| of    | when   |    n | norm              | radius = 2 norm   | range             |"]
    lines.append("| ----- | ------ | ---: | ----------------- | ----------------- | ----------------- |")
    for kind in ("text", "image"):
        for when, summary in report.get(kind, {}).items():
            norm, spread = summary["norm"], summary["radius"]
            cells = [f"{value['mean']:.4f} ± {value['sd']:.4f}" for value in (norm, spread)]
            cells.append(f"{spread['min']:.3f} to {spread['max']:.3f}")
            line = " | ".join(f"{cell:<17}" for cell in cells)
            lines.append(f"| {kind:<5} | {when:<6} | {summary['count']:>4} | {line} |")
    return lines
