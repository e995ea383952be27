"""How well clusters of pixels follow the regions people drew: the measures of superpixels, and tables of rivals.

All measures read one table, how many pixels cluster k shares with region c, made by a single ``bincount``. Pixels whose
region is ``IGNORE`` count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hyptree.data.sample import IGNORE
from hyptree.errors import require

TOLERANCE = 2
"""Pixels by which a boundary may be missed and still counts as found."""


@dataclass(frozen=True)
class SuperpixelScores:
    """Agreement of a map of clusters with a map of regions; all but the error are better when higher."""

    num_clusters: float
    """Clusters that hold at least one pixel: more clusters score better everywhere, compare at equal numbers."""
    asa: float
    """Achievable segmentation accuracy: pixels that are right if each cluster takes its commonest region."""
    boundary_recall: float
    """Share of the regions' boundary pixels with a cluster boundary within the tolerance; NaN where there are none."""
    undersegmentation: float
    """How much clusters leak over regions, by Neubert and Protzel (2012): the sum over regions S and clusters P that
    touch S of min(|P inside S|, |P outside S|), over the number of pixels. 0 is perfect."""
    purity: float
    """Share of the commonest region in a cluster, every cluster counting the same (weighted by size it is ``asa``)."""


def contingency(clusters: Any, regions: Any) -> np.ndarray:
    """Pixels that each cluster shares with each region, (K, C) int64, over clusters and regions that occur."""
    predicted, truth = _maps(clusters, regions)
    kept = truth != IGNORE
    if not kept.any():
        raise ValueError(f"every pixel of the regions is {IGNORE} (ignored), nothing can be compared")
    _, k = np.unique(predicted[kept], return_inverse=True)
    _, c = np.unique(truth[kept], return_inverse=True)
    shape = int(k.max()) + 1, int(c.max()) + 1
    return np.bincount(k * shape[1] + c, minlength=shape[0] * shape[1]).reshape(shape)


def _maps(clusters: Any, regions: Any) -> tuple[np.ndarray, np.ndarray]:
    predicted, truth = np.asarray(clusters), np.asarray(regions)
    for name, label_map in (("clusters", predicted), ("regions", truth)):
        if label_map.ndim != 2 or not np.issubdtype(label_map.dtype, np.integer):
            raise ValueError(f"{name} must be an (H, W) map of integers, got {label_map.shape} of {label_map.dtype}")
    if predicted.shape != truth.shape:
        raise ValueError(f"clusters are {predicted.shape}, regions are {truth.shape}; resize one of them first")
    return predicted, truth


def boundary_mask(labels: Any, ignore: int | None = None) -> np.ndarray:
    """Pixels that differ from their right or their lower neighbour, (H, W) bool.

    The label ``ignore`` makes no boundary, neither towards itself nor towards others.
    """
    at = np.asarray(labels)
    is_boundary = np.zeros(at.shape, bool)
    right, down = at[:, :-1] != at[:, 1:], at[:-1] != at[1:]
    if ignore is not None:
        away = at == ignore
        right &= ~(away[:, :-1] | away[:, 1:])
        down &= ~(away[:-1] | away[1:])
    is_boundary[:, :-1] |= right
    is_boundary[:-1] |= down
    return is_boundary


def boundary_recall(clusters: Any, regions: Any, tolerance: int = TOLERANCE) -> float:
    """Share of the regions' boundary pixels that have a cluster boundary pixel nearby; NaN without boundaries.

    Nearby is at most ``tolerance`` pixels away along each axis (a square of 2 t + 1 pixels).
    """
    predicted, truth = _maps(clusters, regions)
    if tolerance < 0:
        raise ValueError(f"tolerance must be 0 pixels or more, got {tolerance}")
    wanted = boundary_mask(truth, IGNORE)
    if not wanted.any():
        return float("nan")
    near = np.pad(boundary_mask(predicted), tolerance)
    for axis in (0, 1):  # a square is widened one axis at a time
        size = near.shape[axis] - 2 * tolerance
        near = np.logical_or.reduce([near.take(range(k, k + size), axis) for k in range(2 * tolerance + 1)])
    return float(near[wanted].mean())


def superpixel_scores(clusters: Any, regions: Any, tolerance: int = TOLERANCE) -> SuperpixelScores:
    """All measures of a map of clusters (H, W), in any numbering, against one of regions."""
    table = contingency(clusters, regions)
    size, largest, total = table.sum(1), table.max(1), int(table.sum())
    leak = np.minimum(table, size[:, None] - table).sum()  # clusters that do not touch a region add min(0, ...) = 0
    return SuperpixelScores(
        num_clusters=float(len(table)),
        asa=float(largest.sum() / total),
        boundary_recall=boundary_recall(clusters, regions, tolerance),
        undersegmentation=float(leak / total),
        purity=float((largest / size).mean()),
    )


def mean_scores(scores: Sequence[SuperpixelScores]) -> SuperpixelScores:
    """The mean over pictures of each measure; pictures without boundaries stay out of the boundary recall."""
    if not scores:
        raise ValueError("no scores to average, expected one for each picture")
    means = {}
    for field in fields(SuperpixelScores):
        values = np.array([getattr(score, field.name) for score in scores])
        known = values[~np.isnan(values)]
        means[field.name] = float(known.mean()) if len(known) else float("nan")
    return SuperpixelScores(**means)


# ---- rivals ----------------------------------------------------------------------------------------------------------


def grid_clusters(height: int, width: int, num_clusters: int) -> np.ndarray:
    """The picture cut into about ``num_clusters`` equal rectangles, as square as can be, (H, W).

    Knows nothing of the picture: what a clustering is worth is what it has above this.
    """
    if num_clusters < 1:
        raise ValueError(f"num_clusters must be 1 or more, got {num_clusters}")
    ideal = np.sqrt(num_clusters * height / width)
    pairs = [(r, max(1, round(num_clusters / r))) for r in {max(1, int(ideal)), int(ideal) + 1}]
    rows, columns = min(pairs, key=lambda pair: (abs(pair[0] * pair[1] - num_clusters), abs(pair[0] - ideal)))
    rows, columns = min(rows, height), min(columns, width)
    y, x = np.arange(height) * rows // height, np.arange(width) * columns // width
    return y[:, None] * columns + x[None, :]


def slic_clusters(image: Any, num_clusters: int, compactness: float = 10.0) -> np.ndarray:
    """SLIC superpixels of an (H, W, 3) uint8 picture, (H, W).

    SLIC gives another number than it is asked for, mostly fewer. What to ask for is found by bisection, in at most ten
    trials, and the answer whose number is nearest to ``num_clusters`` is taken.
    """
    slic = require("skimage.segmentation", "eval").slic
    best, best_miss = None, 0
    low, high, asked = 0, 0, num_clusters  # low gave too few, high too many (0: not known yet)
    for _ in range(10):
        segments = np.asarray(slic(np.asarray(image), n_segments=asked, compactness=compactness, start_label=0))
        miss = len(np.unique(segments)) - num_clusters
        if best is None or abs(miss) < abs(best_miss):
            best, best_miss = segments, miss
        if miss < 0:
            low = asked
        else:
            high = asked
        step = 2 * asked if not high else (low + high) // 2
        if miss == 0 or step in (low, high) or step > segments.size:
            break
        asked = max(1, step)
    assert best is not None
    return best


def kmeans_clusters(features: Any, num_clusters: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """k-means of one picture's (D, h, w) features, each place standing for its square of the picture, (H, W)."""
    cluster = require("sklearn.cluster", "eval")
    maps = np.asarray(features, np.float32)
    points = maps.reshape(len(maps), -1).T  # (h w, D)
    wanted = min(num_clusters, len(np.unique(points, axis=0)))
    kmeans = cluster.MiniBatchKMeans(wanted, random_state=seed, n_init=1, batch_size=max(1024, len(points)))
    return enlarge(kmeans.fit_predict(points).reshape(maps.shape[1:]), height, width)


def enlarge(labels: Any, height: int, width: int) -> np.ndarray:
    """Maps (..., h, w) of labels or shares on (H, W) pixels: each pixel takes the place whose square it lies in."""
    at = np.asarray(labels)
    y = np.arange(height) * at.shape[-2] // height
    x = np.arange(width) * at.shape[-1] // width
    return at[..., y[:, None], x[None, :]]
