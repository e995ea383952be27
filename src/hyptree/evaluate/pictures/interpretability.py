"""Interpretability in numbers: a model's clusters against masks, beside a grid, SLIC and k-means of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from hyptree.data.sample import IGNORE
from hyptree.errors import UserError
from hyptree.evaluate.pictures.superpixels import (
    TOLERANCE,
    SuperpixelScores,
    enlarge,
    grid_clusters,
    kmeans_clusters,
    mean_scores,
    slic_clusters,
    superpixel_scores,
)
from hyptree.tables import aligned

BATCH = 64


@dataclass(frozen=True)
class ClusterMap:
    """The hard clusters of one block, head and level for a batch of pictures."""

    stage: int
    block: int
    head: int
    level: Literal["patch", "window"]
    maps: np.ndarray
    """(B, H, W) integers, on the pixels of the model's input."""
    grid: tuple[int, int]
    """Height and width of the map of patches they come from."""

    @property
    def name(self) -> str:
        what = "clusters" if self.level == "patch" else "groups of windows"
        return f"stage {self.stage}, block {self.block}, {what}"


def cluster_maps(
    model: Any,
    images: Sequence[np.ndarray],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> list[ClusterMap]:
    """Which cluster every pixel of images (H, W, 3), all of one size, belongs to most, by block, head and level."""
    from hyptree.data.pictures.single import model_input
    from hyptree.models.clusters import can_cluster, read_clusters

    if not can_cluster(model):
        raise UserError(f"{type(model).__name__} does not cluster: it has no assignments(); try hcformer_nano")
    height, width = images[0].shape[:2]
    pictures = read_clusters(model, model_input(model, images, mean, std))
    cluster_maps_of = []
    for k, block in enumerate(pictures[0]):
        for head in range(block.num_heads):
            same = [one[k] for one in pictures]
            maps = [enlarge(one.patch_cluster[head], height, width) for one in same]
            cluster_maps_of.append(ClusterMap(block.stage, block.block, head, "patch", np.stack(maps), block.size))
            if block.has_groups:
                groups = [one.window_cluster for one in same]
                maps = [enlarge(group[head], height, width) for group in groups if group is not None]
                cluster_maps_of.append(ClusterMap(block.stage, block.block, head, "window", np.stack(maps), block.size))
    return cluster_maps_of


def interpretability_table(
    model: Any,
    dataset: Any,
    *,
    rival: Any = None,
    rival_name: str = "",
    num_images: int = 64,
    target: Literal["semantic", "parts"] = "semantic",
    by_head: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    tolerance: int = TOLERANCE,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows of scores for every block and level of the model, and for its rivals at the same number of clusters.

    Each row has ``method``, ``stage``, ``block``, ``head`` (None for the mean over heads), ``level``, ``rival`` (True
    for those that are compared with) and the fields of ``SuperpixelScores``. Rivals follow the rows they are for: a
    grid of equal rectangles, SLIC, and k-means of the rival's features, with as many clusters as the model made on
    average over pictures.

    Args:
        dataset: gives samples with ``image`` and the target (``hyptree.data.sample``); pictures enter at their size.
        rival: a timm model whose features are clustered by k-means; the map nearest in size to the block's is used.
        num_images: the first so many samples that have the target.
        target: which masks of the sample are the regions.
        by_head: a row for every head instead of their mean.
    """
    images, regions = _labelled(dataset, num_images, target)
    scores: dict[tuple[Any, ...], list[SuperpixelScores]] = {}
    grids: dict[tuple[Any, ...], tuple[int, int]] = {}
    names: dict[tuple[Any, ...], str] = {}
    for start in range(0, len(images), BATCH):
        for one in cluster_maps(model, images[start : start + BATCH], mean, std):
            key = (one.stage, one.block, one.level, one.head if by_head else None)
            grids[key], names[key] = one.grid, one.name
            scores.setdefault(key, []).extend(
                superpixel_scores(clusters, regions[start + k], tolerance) for k, clusters in enumerate(one.maps)
            )
    features = _features(rival, images, mean, std) if rival is not None else None
    rows: list[dict[str, Any]] = []
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for key, of_map in scores.items():
        stage, block, level, head = key
        place = {"stage": stage, "block": block, "head": head, "level": level}
        name = names[key] + ("" if head is None else f", head {head}")
        mean_score = mean_scores(of_map)
        rows.append({"method": name, "rival": False, **place, **asdict(mean_score)})
        wanted = max(1, round(mean_score.num_clusters))
        for method in ("grid", "SLIC", *(["k-means"] if features is not None else [])):
            about = (method, wanted, grids[key] if method == "k-means" else None)
            if about not in known:  # heads and blocks with the same number share their rivals
                height, width = images[0].shape[:2]
                if method == "grid":
                    others = [grid_clusters(height, width, wanted)] * len(images)
                elif method == "SLIC":
                    others = [slic_clusters(image, wanted) for image in images]
                else:
                    nearest = [min(maps, key=lambda m: abs(m.shape[-1] - grids[key][1])) for maps in features or ()]
                    others = [kmeans_clusters(own, wanted, height, width, seed) for own in nearest]
                pairs = zip(others, regions, strict=True)
                known[about] = asdict(mean_scores([superpixel_scores(*pair, tolerance) for pair in pairs]))
            called = f"k-means of {rival_name or type(rival).__name__}" if method == "k-means" else method
            rows.append({"method": called, "rival": True, **place, **known[about]})
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as lines for a terminal, in columns."""
    head = ("", "clusters", "ASA", "boundary recall", "under-segm.", "purity")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        figures = (row["asa"], row["boundary_recall"], row["undersegmentation"], row["purity"])
        name = f"  {row['method']}" if row["rival"] else str(row["method"])
        lines.append((name, f"{row['num_clusters']:.1f}", *(f"{value:.3f}" for value in figures)))
    return "\n".join(aligned(lines))


def _labelled(dataset: Any, num_images: int, target: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pictures (H, W, 3) and their regions (H, W), of the first samples that have them."""
    if num_images < 1:
        raise ValueError(f"num_images must be 1 or more, got {num_images}")
    images, regions = [], []
    for index in range(len(dataset)):
        sample = dataset[index]
        mask = getattr(sample, target)
        if mask is None or bool((mask == IGNORE).all()):
            continue
        images.append(np.ascontiguousarray(sample.image.permute(1, 2, 0).numpy()))
        regions.append(mask.numpy().astype(np.int64))
        if len(images) == num_images:
            break
    if not images:
        raise UserError(
            f"no picture of {type(dataset).__name__} has {target} masks; clusters need masks to be measured"
        )
    if len({image.shape for image in images}) > 1:
        raise UserError("the pictures have different sizes; give a dataset whose pictures share one, e.g. the world")
    return images, regions


def _features(
    rival: Any, images: Sequence[np.ndarray], mean: Sequence[float] | None, std: Sequence[float] | None
) -> list[list[np.ndarray]]:
    """For each picture the rival's feature maps (D, h, w)."""
    import torch

    from hyptree.data.pictures.single import model_input

    if not hasattr(rival, "forward_intermediates"):
        raise UserError(f"{type(rival).__name__} gives no intermediate features; choose a model of timm as rival")
    rival.eval()
    features: list[list[np.ndarray]] = []
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        with torch.no_grad():
            maps = rival.forward_intermediates(model_input(rival, batch, mean, std), intermediates_only=True)
        features += [[one[k].float().cpu().numpy() for one in maps] for k in range(len(batch))]
    return features
