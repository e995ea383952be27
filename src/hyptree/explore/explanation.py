"""``hyptree.explain``: the hierarchy a model found in one picture, as a Tree from coarse to fine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyptree.data.pictures.single import default_size, fit, model_input, read_picture
from hyptree.errors import UserError
from hyptree.evaluate.pictures.superpixels import enlarge
from hyptree.models.clusters import BlockClusters, can_cluster, read_clusters
from hyptree.tree import Tree


def explain(
    model: Any,
    image: Any,
    *,
    stage: int | str | None = None,
    block: int | None = None,
    head: int | None = None,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Tree:
    """The tree a model made of a picture: the whole, its groups of windows, their clusters of patches.

    ``support`` (nodes, H, W) says where on the model's input each node lies: the leaves are the model's own soft
    assignments, a parent is the sum of its children, and the whole is 1 everywhere. A cluster hangs under the coarser
    one it overlaps most. ``embedding`` are points of the hyperbolic space the window level works in: its centres for
    the groups, and for a cluster of patches its centre, mapped as the model maps a window. Where a block has no such
    space it is Sarkar's layout on the Poincaré disk.

    A model of another kind takes part by a method ``explain_tree(x, **options) -> Tree`` that is given the prepared
    picture (1, 3, H, W); so does one with such a part inside, as a segmenter on a Hi-Mapper.

    Args:
        image: a path, a PIL image, or a uint8 array or tensor (H, W, 3) or (3, H, W).
        stage: from 1; ``"all"`` nests the clusters of all stages, those of the last one on top. By default the last
            stage that gathers its windows in fewer groups.
        block: from 1, within the stage; by default its last.
        head: from 0; by default the head whose assignments are the most decided (lowest entropy).
        size: pixels of the model's input; by default what ``model.pretrained_cfg`` says.
        mean, std: normalisation; by default of ``model.pretrained_cfg``.
    """
    # The model's own, or that of the first module inside that has one.
    parts = model.modules() if hasattr(model, "modules") else (model,)
    hook = next((part.explain_tree for part in parts if callable(getattr(part, "explain_tree", None))), None)
    if hook is None and not can_cluster(model):
        raise UserError(
            f"{type(model).__name__} cannot be explained: it has neither assignments() as HCFormer nor explain_tree(); "
            "give a model that clusters, e.g. hcformer_nano"
        )
    picture = fit(read_picture(image), size or default_size(model))
    x = model_input(model, [picture], mean, std)
    if hook is not None:
        options = {"stage": stage, "block": block, "head": head}
        return hook(x, **{name: value for name, value in options.items() if value is not None})
    (clusters,) = read_clusters(model, x)
    if stage == "all":
        if block is not None:
            raise UserError(f'stage="all" takes the last block of every stage, leave block={block} out')
        return stages_tree(clusters, head, size=picture.shape[:2])
    chosen = choose_block(clusters, stage, block)
    return block_tree(chosen, choose_head(chosen, head), size=picture.shape[:2])


def choose_block(clusters: Sequence[BlockClusters], stage: int | str | None, block: int | None) -> BlockClusters:
    """The block that is meant; by default the last of the last stage that has fewer groups than windows."""
    stages = sorted({one.stage for one in clusters})
    if stage is None:
        stage = max((one.stage for one in clusters if one.gathers_windows), default=stages[0])
    if stage not in stages:
        raise UserError(f'stage must be from {stages[0]} to {stages[-1]}, or "all", got {stage!r}')
    inside = [one for one in clusters if one.stage == stage]
    if block is None:
        return inside[-1]
    for one in inside:
        if one.block == block:
            return one
    raise UserError(f"block must be from 1 to {len(inside)} in stage {stage}, got {block}")


def choose_head(block: BlockClusters, head: int | None) -> int:
    """The head that is meant; by default the one with the lowest mean entropy of its patches' assignments."""
    if head is None:
        p = np.maximum(block.patch, 1e-12)
        return int((-p * np.log(p)).sum(-1).mean((1, 2)).argmin())
    if not 0 <= head < block.num_heads:
        raise UserError(f"head must be from 0 to {block.num_heads - 1}, got {head}")
    return head


def block_tree(block: BlockClusters, head: int, size: tuple[int, int] | None = None) -> Tree:
    """The tree of one block and head: picture > groups of windows > clusters of patches.

    Supports are given at ``size``, by default that of the block's own map of patches.
    """
    fine = block.patch_levels(head)
    num_centres = block.patch.shape[-1]
    fine_names = [f"patches {k // num_centres}.{k % num_centres}" for k in range(len(fine))]
    if not block.has_groups:
        tree, _ = nested_tree([fine], [fine_names], size)
        return tree.replace(embedding=_sarkar(tree), manifold="poincare")
    coarse = block.window_levels(head)
    tree, origin = nested_tree([coarse, fine], [[f"group {j}" for j in range(len(coarse))], fine_names], size)
    if block.centres is None or block.patch_centres is None or block.c is None:
        return tree.replace(embedding=_sarkar(tree), manifold="poincare")

    from hyptree.geometry import Lorentz

    points = np.zeros((tree.num_nodes, block.centres.shape[-1]))  # the whole picture is the origin
    groups, leaves = np.flatnonzero(tree.depth == 1), np.flatnonzero(tree.depth == 2)
    points[groups] = block.centres[head][origin[groups]]
    points[leaves] = block.patch_centres[head][origin[leaves]]
    return tree.replace(embedding=points, manifold=Lorentz(block.c))


def stages_tree(
    clusters: Sequence[BlockClusters], head: int | None = None, size: tuple[int, int] | None = None
) -> Tree:
    """The clusters of every stage's last block in one tree, the last stage on top, the first at the leaves."""
    last = {one.stage: one for one in clusters}
    if head is not None:  # stages may have fewer heads than the one that has most: theirs is the last then
        choose_head(max(last.values(), key=lambda one: one.num_heads), head)
    order = [last[stage] for stage in sorted(last, reverse=True)]
    h, w = order[-1].size
    levels, names = [], []
    for one in order:
        own = one.patch_levels(choose_head(one, None if head is None else min(head, one.num_heads - 1)))
        levels.append(enlarge(own, h, w))
        names.append([f"stage {one.stage} cluster {k}" for k in range(len(own))])
    tree, _ = nested_tree(levels, names, size)
    return tree.replace(embedding=_sarkar(tree), manifold="poincare")


def nested_tree(
    levels: Sequence[np.ndarray], names: Sequence[Sequence[str]], size: tuple[int, int] | None = None
) -> tuple[Tree, np.ndarray]:
    """A tree of soft masks from coarse to fine, and which mask of its level each node is.

    A mask hangs under the mask of the level above that it overlaps most (sum of products). Supports are those of the
    leaves, summed upwards, so children always add up to their parent. Masks that are empty, or under which nothing
    hangs, have no node.

    Args:
        levels: (K_i, h, w) each, non-negative; the masks of the last level sum to 1 at every place.
        names: K_i names each.
        size: (height, width) to give the supports at.
    """
    h, w = levels[-1].shape[1:]
    flat = [np.asarray(level, np.float32).reshape(len(level), -1) for level in levels]
    parents = [np.zeros(len(flat[0]), np.int64)]
    parents += [(fine @ coarse.T).argmax(1) for coarse, fine in itertools.pairwise(flat)]
    support = flat[-1]
    alive = [support.sum(1) > 0]
    supports = [support]
    for level in range(len(flat) - 1, 0, -1):  # upwards: a parent is what its children cover
        above = np.zeros((len(flat[level - 1]), h * w), np.float32)
        np.add.at(above, parents[level][alive[0]], support[alive[0]])
        support = above
        supports.insert(0, above)
        alive.insert(0, np.isin(np.arange(len(above)), parents[level][alive[0]]))

    parent, label, origin, rows = [-1], ["picture"], [0], [supports[0].sum(0, keepdims=True)]
    number = np.zeros(1, np.int64)  # node of each mask of the level above
    for mine, over, living, called in zip(supports, parents, alive, names, strict=True):
        kept = np.flatnonzero(living)
        parent += number[over[kept]].tolist()
        label += [called[int(k)] for k in kept]
        origin += kept.tolist()
        rows.append(mine[kept])
        start = len(parent) - len(kept)
        number = np.full(len(mine), -1)
        number[kept] = np.arange(start, start + len(kept))
    masks = np.concatenate(rows).clip(0, 1).reshape(-1, h, w)
    tree = Tree(parent, support=masks if size is None else enlarge(masks, *size), label=label)
    return tree.replace(height=len(levels) - tree.depth), np.array(origin)


def _sarkar(tree: Tree) -> np.ndarray:
    return tree.sarkar(1.0) if tree.num_nodes > 1 else np.zeros((1, 2))
