"""An embedded hierarchy: how good it is, what it looks like."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.errors import require_one_of
from hyptree.evaluate.hierarchy.reconstruction import cone_score, reconstruction
from hyptree.geometry import Euclidean, Lorentz, Manifold, Poincare, lorentz, poincare
from hyptree.tree import Tree
from hyptree.tree.layout import flat_points
from hyptree.vlm.radial.order import spearman


@dataclass
class Embedding:
    """Points (N, n) of the nodes of a hierarchy, their names and (P, 2) pairs, and the space."""

    points: Tensor
    names: list[str]
    pairs: Tensor
    manifold: Manifold
    loss: str = "distance"


def make_manifold(name: str, curvature: float) -> Manifold:
    """The space with this name."""
    require_one_of("manifold", name, ("lorentz", "poincare", "euclidean"))
    return Euclidean() if name == "euclidean" else (Lorentz if name == "lorentz" else Poincare)(curvature)


def sample_size(num_nodes: int, asked: int | None) -> int | None:
    """How many nodes to rank: what was asked, or all up to 20,000 nodes and 2,000 of more; None for all."""
    if asked is not None:
        return asked or None
    return None if num_nodes <= 20_000 else 2000


def measure(embedding: Embedding, *, num_samples: int | None = None, seed: int = 0) -> dict[str, Any]:
    """All numbers that say how good an embedding is, as a plain dictionary.

    With ``num_samples`` the ancestors of so many random nodes are ranked instead of all; ``is_sampled`` says so.
    """
    points, pairs, manifold = embedding.points, embedding.pairs, embedding.manifold
    ranks = reconstruction(points, pairs, manifold, num_samples=num_samples, seed=seed)
    radius = manifold.dist0(points.detach())
    result: dict[str, Any] = {
        "map": ranks.map,
        "mean_rank": ranks.mean_rank,
        "num_nodes": len(points),
        "num_pairs": len(pairs),
        "num_ranked_nodes": ranks.num_nodes,
        "num_ranked_pairs": ranks.num_pairs,
        "is_sampled": ranks.is_sampled,
    }
    if embedding.loss == "cones":
        by_cones = reconstruction(points, pairs, manifold, by="cones", num_samples=num_samples, seed=seed)
        scores = {"map": by_cones.map, "mean_rank": by_cones.mean_rank}
        scores |= cone_score(points, pairs, manifold, seed=seed)._asdict()
        result |= {f"cone_{key}": value for key, value in scores.items()}
    result |= _distortion(embedding)
    # Depth should grow outwards; the number of ancestors stands for depth in a DAG too.
    depth = torch.bincount(pairs[:, 0], minlength=len(points)).to(radius)
    result |= {
        "radius_mean": float(radius.mean()),
        "radius_max": float(radius.max()),
        "radius_depth_correlation": 0.0 if math.isnan(rho := spearman(radius.cpu(), depth.cpu())) else rho,
    }
    return result


def as_tree(embedding: Embedding) -> Tree:
    """The hierarchy as a ``Tree`` with the names as labels: of several parents the most specific one is kept."""
    pairs = embedding.pairs.cpu().numpy()
    if len(np.unique(pairs)) == len(embedding.names):
        return Tree.from_edges(pairs).relabel(embedding.names)
    raise ValueError("every node must be in some pair")


def _distortion(embedding: Embedding) -> dict[str, Any]:
    """How far the distances are from the edges of the tree, up to the best common scale."""
    points = embedding.points.detach().double().cpu().numpy()
    options: dict[str, Any] = {"scale": "best", "num_samples": None if len(points) <= 1500 else 200_000}
    bent = as_tree(embedding).distortion(embedding=points, manifold=embedding.manifold, **options)
    return {"distortion": bent.average, "distortion_worst": bent.worst, "distortion_scale": bent.scale}


def disk_points(embedding: Embedding) -> np.ndarray:
    """(N, 2) points of the Poincaré disk.

    In more dimensions each point keeps its distance from the origin, and its direction is what two principal axes show.
    """
    points, manifold = embedding.points.detach().double().cpu(), embedding.manifold
    if points.shape[1] == 2 and isinstance(manifold, Poincare):
        return (points * manifold.c**0.5).numpy()
    c = 1.0
    if isinstance(manifold, Euclidean):  # a picture only: the farthest point goes to radius 3
        points = lorentz.expmap0(points * (3 / points.norm(dim=1).max().clamp_min(1e-12)))
    else:
        c = float(manifold.c)
    if isinstance(manifold, Poincare):
        points = poincare.to_lorentz(points, c)
    return flat_points(points.numpy(), c)[0]


def disk_tree(embedding: Embedding, max_nodes: int) -> tuple[Tree, np.ndarray]:
    """The tree and its :func:`disk_points`; of more than ``max_nodes`` nodes those with the most descendants."""
    tree, points = as_tree(embedding), disk_points(embedding)
    if tree.num_nodes > max_nodes:
        keep = np.sort(np.argsort(-tree.subtree_sizes, kind="stable")[:max_nodes])
        tree, points = tree.take(keep), points[keep]
    return tree, points


def draw_disk(embedding: Embedding, path: Path | str, *, names: bool | int = 24, max_nodes: int = 3000) -> None:
    """Write a picture of the embedding on the Poincaré disk, with the edges of its tree.

    Of more than ``max_nodes`` nodes those with the most descendants are drawn.
    """
    n, dim = embedding.points.shape
    tree, points = disk_tree(embedding, max_nodes)
    title = f"{n:,} nodes, {type(embedding.manifold).__name__}, {dim} dimensions"
    if n > max_nodes:
        title += f", the {max_nodes:,} largest"
    if dim > 2:
        title += ", true radius, directions projected"
    tree.draw(path, layout=points, names=names, title=title)
