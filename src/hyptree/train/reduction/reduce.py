"""What a vision transformer loses and gains with fewer tokens: accuracy, images per second, FLOPs, tokens per layer.

``reduce(settings)`` measures one model under several methods and keep rates, off the shelf, and writes a table, a plot
and a page. What is measured is kept: the same call goes on after any stop.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch

from hyptree.devices import cpu_threads
from hyptree.errors import UserError
from hyptree.evaluate.tokens.reduction_rows import PLAIN, Results, Row, measure, patched_as, vit_flops
from hyptree.progress import progress_bar
from hyptree.train.reduction.subject import ReducedModel, load_subject
from hyptree.train.run.settings import ReduceSettings

if TYPE_CHECKING:
    from hyptree.explore.draw.reduced_pictures import Shown

__all__ = ["Results", "Row", "measure", "reduce", "vit_flops"]


def reduce(settings: ReduceSettings) -> Results:
    """Everything that ``hyptree reduce`` does: measure what is missing, draw, write, print.

    Raises:
        UserError: something the user can repair; what was measured before is kept.
    """
    from hyptree.data.pictures.single import read_picture
    from hyptree.explore.pages.reduction import text_table, write_report
    from hyptree.tokens.methods import find_method

    for method in settings.method:
        find_method(method)
    pictures = [(path.name, read_picture(path)) for path in settings.image]
    with cpu_threads(settings.threads or torch.get_num_threads()):
        subject = load_subject(settings)
        results = _measure_all(settings, subject)
        shown = [
            reduce_picture(subject, name, picture, settings, results.about["layers"]) for name, picture in pictures
        ]
    page = write_report(results, shown, settings.out)
    if settings.json:
        print(json.dumps(asdict(results)))
    else:
        print("\n".join(["", text_table(results), "", *results.about["notes"], *results.machine, str(page)]))
    return results


def wanted_rows(settings: ReduceSettings) -> list[tuple[str, str, float]]:
    """Method, linkage and keep of every row, the plain model first."""
    ways = [(way, kind) for way in settings.method for kind in (settings.linkage if way == "atc" else ("",))]
    return [(PLAIN, "", 1.0), *((way, kind, keep) for way, kind in ways for keep in settings.keep)]


def _measure_all(settings: ReduceSettings, subject: ReducedModel) -> Results:
    """All rows, those of an earlier call read instead of measured; each is kept as soon as it is there."""
    from hyptree.machine import describe

    about = subject.about(settings)
    path = settings.out / "results.json"
    before = Results.read(path) if path.is_file() and not settings.overwrite else None
    if before is not None and before.about != about:
        differing = [key for key in about if before.about.get(key) != about[key]]
        key = next((key for key in differing if key not in ("weights", "notes")), "weights")  # a hash tells little
        raise UserError(
            f"{settings.out} holds results with another {key} ({before.about.get(key)}, now {about.get(key)}); "
            "give another --out, or --overwrite to replace them"
        )
    settings.out.mkdir(parents=True, exist_ok=True)
    results = Results(about, describe(), [] if before is None else before.rows)
    wanted = wanted_rows(settings)
    x = None
    stream = sys.stderr if settings.json else sys.stdout
    with progress_bar("reduce", len(wanted), stream=stream, every=0) as shown:
        for row in wanted:
            measured = results.find(*row)
            if measured is None:
                x = subject.timed_input(settings.batch_size or 1, settings.seed) if x is None else x
                measured = measure(subject, x, *row, about["layers"], repeats=settings.repeats or 1, seed=settings.seed)
                results.rows.append(measured)
                results.write(path)
            shown.advance(note=_format(measured))
    # In the order that was asked for; rows of earlier calls come last.
    asked = [measured for row in wanted if (measured := results.find(*row)) is not None]
    results.rows = asked + [row for row in results.rows if row not in asked]
    results.write(path)
    return results


def reduce_picture(
    subject: ReducedModel, name: str, picture: np.ndarray, settings: ReduceSettings, layers: Sequence[int]
) -> Shown:
    """What every reduction makes of one picture, and the dendrograms of atc at the keep rate nearest to a half."""
    from hyptree.data.pictures.single import fit
    from hyptree.explore.draw.reduced_pictures import Drawing, LayerTree, Shown

    picture = fit(picture, subject.data.size)
    x = subject.normalised(torch.from_numpy(picture.copy()).permute(2, 0, 1)[None])
    drawings, trees, trees_of = [], [], None
    chosen = min(
        (row for row in wanted_rows(settings) if row[0] == "atc"), key=lambda row: abs(row[2] - 0.5), default=None
    )
    for row in wanted_rows(settings)[1:]:
        with patched_as(subject.model, *row, layers, trace=True, seed=settings.seed) as handle:
            with torch.no_grad():
                subject.model(x)
            sources = [source[0].cpu().numpy() for source in handle.sources]
            drawings.append(Drawing(f"{row[0]} {row[1]}".strip(), row[2], sources))
            if row == chosen:
                before = [np.arange(len(sources[0])), *sources[:-1]]
                counts = [len(np.unique(source)) for source in (before[0], *sources)]
                trees = [
                    LayerTree(layer, np.asarray(handle.dendrogram(layer).linkage(0)), leaf, count)
                    for layer, leaf, (came, count) in zip(layers, before, itertools.pairwise(counts), strict=True)
                    if count < came
                ]
                trees_of = drawings[-1] if trees else None
    side = math.isqrt(drawings[0].sources[0].size)  # the picture was cut to a square
    return Shown(name, picture, (side, side), tuple(layers), drawings, trees, trees_of)


def _format(row: Row) -> str:
    top1 = "" if row.top1 is None else f", top-1 {row.top1:.2%}"
    return (
        f"{row.name} keep {row.keep:g}: {' '.join(map(str, row.tokens))} tokens, {row.cost} GFLOPs, "
        f"{row.images_per_second:,.1f} images/s ({row.speedup:.2f}x){top1}"
    )
