"""Hierarchical classification in the manner of BREEDS: is the coarse class found when fine and coarse names compete?

The classes of a dataset hang on a tree (WordNet for Tiny-ImageNet, the groups of the built-in world). A cut through it
gives the coarse classes. Four ways to find one are compared, because each alone misleads: by coarse names only, by the
best fine class below, by cosine among all names, and by the radial chain among all names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hyptree.errors import UserError
from hyptree.geometry import lorentz
from hyptree.vlm.clip.contrast import similarity
from hyptree.vlm.radial.retrieval import TEMPLATE, class_embeddings, hierarchical_retrieval

if TYPE_CHECKING:
    from hyptree.tree import Tree


@dataclass(frozen=True)
class CoarseClasses:
    """Coarse classes above fine ones, by their names."""

    fine: tuple[str, ...]
    coarse: tuple[str, ...]
    kept: np.ndarray
    """(F,) labels in the dataset of the fine classes that are kept."""
    coarse_of: np.ndarray
    """(F,) coarse class of each fine class."""


def words_of(label: str) -> str:
    """A readable name: ``guinea_pig.n.02`` -> ``guinea pig``."""
    return re.sub(r"\.[nvasr]\.\d+$", "", label).replace("_", " ")


def coarse_classes(tree: Tree, num_classes: int, cut: int | Sequence[str], *, min_fine: int = 1) -> CoarseClasses:
    """The coarse classes of a cut through the tree of a dataset.

    Args:
        tree: its first ``num_classes`` nodes are the classes, in order.
        cut: the depth of the coarse nodes (the root has depth 0; a class that is not deeper stands for itself), or the
            labels of the coarse nodes; then a class belongs to the nearest of them above it, and one below none of
            them is left out.
        min_fine: coarse classes with fewer fine ones are left out.
    """
    if tree.label is None:
        raise ValueError("the tree of the classes needs labels")
    lines = [[i, *tree.ancestors(i).tolist()] for i in range(num_classes)]  # from each class up to the root
    if isinstance(cut, int):
        home = [line[max(0, len(line) - 1 - cut)] for line in lines]
    else:
        wanted = {tree.find(label) for label in cut}
        home = [next((node for node in line if node in wanted), -1) for line in lines]
    sizes = {node: home.count(node) for node in set(home)}
    kept = [i for i in range(num_classes) if home[i] >= 0 and sizes[home[i]] >= min_fine]
    # By name, not by node: what is told apart are words, and WordNet has two nodes called food.
    names = [words_of(tree.label[home[i]]) for i in kept]
    coarse = list(dict.fromkeys(names))
    if len(coarse) < 2:
        raise UserError(f"the cut {cut!r} leaves {len(coarse)} coarse classes; cut the tree of classes elsewhere")
    return CoarseClasses(
        fine=tuple(words_of(tree.label[i]) for i in kept),
        coarse=tuple(coarse),
        kept=np.array(kept),
        coarse_of=np.array([coarse.index(name) for name in names]),
    )


def coarse_recall(
    images: Tensor,
    labels: Any,
    classes: CoarseClasses,
    encode: Callable[[list[str]], Tensor],
    *,
    template: str = TEMPLATE,
    ks: Sequence[int] = (1, 5),
    radius: str = "chord",
    c: float | None = None,
) -> dict[str, dict[str, float]]:
    """Recall at k of the coarse class of each picture, four ways.

    ``names``: among the coarse names, by cosine. ``leaves``: coarse classes in the order of their best fine class.
    ``pool``: the coarse name among all names, by cosine. ``radial``: the coarse name among the first k of the chain of
    :func:`hierarchical_retrieval` over all names, general first.

    Args:
        images: (n, d). labels: (n,) classes of the dataset; pictures of classes that were left out are skipped.
        c: curvature of a hyperbolic encoder, which gives tangent vectors at the origin: names are compared by distance
            then and their radius is that of the hyperboloid.

    Returns:
        way -> ``R@k`` -> share of pictures; also ``chance`` -> the same for a random order of the coarse names.
    """
    label = np.asarray(labels)
    place = np.full(int(max(label.max(), classes.kept.max())) + 1, -1)
    place[classes.kept] = np.arange(len(classes.kept))
    fine_label = place[label]
    images = lifted(images[torch.from_numpy(fine_label >= 0)].float(), c)
    truth = torch.from_numpy(classes.coarse_of[fine_label[fine_label >= 0]]).to(images.device)
    if not len(images):
        raise UserError("no picture belongs to the coarse classes; cut the tree of classes elsewhere")

    def embed(names: Sequence[str]) -> Tensor:
        distinct = list(dict.fromkeys(names))  # two synsets may share a name, and a class may be its own coarse class
        rows = lifted(class_embeddings(encode, distinct, (template,), normalize=c is None), c)
        return rows[[distinct.index(name) for name in names]].to(images)

    coarse, fine = embed(classes.coarse), embed(classes.fine)
    by_coarse, by_fine = similarity(images, coarse, c), similarity(images, fine, c)  # (n, C), (n, F)
    home = torch.from_numpy(classes.coarse_of).to(images.device)
    best_leaf = torch.full_like(by_coarse, -torch.inf).scatter_reduce(1, home.expand_as(by_fine), by_fine, "amax")
    with torch.no_grad():
        root = encode([""])[0].to(images)
    pool = list(dict.fromkeys([*classes.coarse, *classes.fine]))
    pool_rows = embed(pool)
    away = radius if c is None else lorentz.dist0(pool_rows, c)
    chains = hierarchical_retrieval(images, pool_rows, pool, root, radius=away, c=c)
    name_index = torch.tensor([pool.index(name) for name in classes.coarse], device=images.device)
    top_pool = similarity(images, pool_rows, c).topk(min(max(ks), len(pool)), 1).indices == name_index[truth][:, None]
    recall: dict[str, dict[str, float]] = {"names": {}, "leaves": {}, "pool": {}, "radial": {}, "chance": {}}
    answers = [classes.coarse[i] for i in truth.tolist()]
    for k in ks:
        for way, scores in (("names", by_coarse), ("leaves", best_leaf)):
            top = scores.topk(min(k, len(coarse)), 1).indices
            recall[way][f"R@{k}"] = float((top == truth[:, None]).any(1).double().mean())
        recall["pool"][f"R@{k}"] = float(top_pool[:, :k].any(1).double().mean())
        hits = [answer in chain[:k] for answer, chain in zip(answers, chains, strict=True)]
        recall["radial"][f"R@{k}"] = float(np.mean(hits))
        recall["chance"][f"R@{k}"] = min(1.0, k / len(coarse))
    return recall


def lifted(rows: Tensor, c: float | None) -> Tensor:
    """Points of the hyperboloid for a hyperbolic encoder's embeddings, others as they are."""
    return rows if c is None else lorentz.expmap0(rows, c)
