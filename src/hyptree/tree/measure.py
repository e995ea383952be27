"""Numbers about a tree: distortion, Gromov delta, Dasgupta cost, purity, agreement with masks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hyptree.tree.arrays import as_array, max_below

if TYPE_CHECKING:
    from hyptree.tree.core import Tree

CHUNK = 1 << 20  # pairs handled at once: bounds memory, not results


class Distortion(NamedTuple):
    """How a metric bends the tree's: ``average`` and ``worst`` are 0 and 1 for a perfect fit."""

    average: float
    worst: float
    scale: float
    num_pairs: int
    exact: bool


class GromovDelta(NamedTuple):
    """``delta``, and ``relative = 2 delta / diameter`` in [0, 1], with the method that found it."""

    delta: float
    relative: float
    diameter: float
    method: str


class MaskAgreement(NamedTuple):
    """Mean best IoU over the masks, (M,) best IoU of each and the (M,) node that reached it."""

    mean: float
    iou: np.ndarray
    node: np.ndarray


# ---------------------------------------------------------------------- distortion
def distortion(
    tree: Tree,
    distances: Any = None,
    *,
    embedding: Any = None,
    manifold: Any = None,
    metric: str = "edges",
    scale: float | str = 1.0,
    pairs: Any = None,
    num_samples: int | None = None,
    seed: int = 0,
) -> Distortion:
    """How far a metric on the nodes is from the tree's own, over pairs of nodes.

    With ratios r = d / (scale * d_tree): ``average`` is the mean of |r - 1|, ``worst`` is max r / min r (the usual
    worst-case distortion, free of scale). Pairs at tree distance 0 or in different trees do not count.

    Args:
        distances: (n, n) over all nodes or (num_leaves, num_leaves) over leaves. Without it, the distances of
            ``embedding`` on ``manifold``, by default the tree's own.
        metric: of the tree, "edges" or "height".
        scale: length of one tree unit in the other metric, or "best": the one with the smallest average.
        pairs: (P, 2) nodes to compare (places in leaf order if ``distances`` is over leaves). By default all pairs
            up to two million of them, else a random million.
        num_samples: number of random pairs instead.
    """
    measure, nodes = _other_metric(tree, distances, embedding, manifold)
    i, j, exact = _choose_pairs(len(nodes), pairs, num_samples, seed)
    ratios = []
    for at in range(0, len(i), CHUNK):
        a, b = i[at : at + CHUNK], j[at : at + CHUNK]
        own = tree.distance(nodes[a], nodes[b], metric=metric)
        use = np.isfinite(own) & (own > 0)
        ratios.append(measure(a[use], b[use]) / own[use])
    ratio = np.concatenate(ratios) if ratios else np.empty(0)
    if not len(ratio):
        raise ValueError("there is no pair to compare: every pair is at tree distance 0 or in different trees")
    if np.isnan(ratio).any():
        raise ValueError("the metric gives NaN for some pair of nodes; points must lie inside their manifold")
    if isinstance(scale, str):
        if scale != "best":
            raise ValueError(f'scale must be a positive number or "best", got {scale!r}')
        scale = _best_scale(ratio)
    elif not scale > 0:
        raise ValueError(f'scale must be a positive number or "best", got {scale}')
    low = ratio.min()
    worst = float(ratio.max() / low) if low > 0 else float("inf")
    return Distortion(float(np.abs(ratio / scale - 1).mean()), worst, float(scale), len(ratio), exact)


def _other_metric(
    tree: Tree, distances: Any, embedding: Any, manifold: Any
) -> tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], np.ndarray]:
    """A function of two arrays of places, and the node at each place."""
    if distances is not None:
        if embedding is not None or manifold is not None:
            raise ValueError("give distances, or an embedding with its manifold, not both")
        D = as_array(distances)
        if D.shape == (tree.num_nodes,) * 2:
            nodes = np.arange(tree.num_nodes)
        elif D.shape == (tree.num_leaves,) * 2:
            nodes = tree.leaves()
        else:
            raise ValueError(
                f"distances have shape {D.shape}, expected ({tree.num_nodes}, {tree.num_nodes}) over nodes "
                f"or ({tree.num_leaves}, {tree.num_leaves}) over leaves"
            )
        return (lambda a, b: D[a, b]), nodes
    if embedding is None:
        embedding, manifold = tree.embedding, tree.manifold if manifold is None else manifold
    if embedding is None:
        raise ValueError("nothing to compare with: give distances=, embedding=, or a tree that has an embedding")
    points = as_array(embedding)
    if len(points) != tree.num_nodes:
        raise ValueError(f"embedding has {len(points)} rows, expected one for each of {tree.num_nodes} nodes")
    dist = _distance_function(manifold)
    return (lambda a, b: dist(points[a], points[b])), np.arange(tree.num_nodes)


def _distance_function(manifold: Any) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Distance between rows in float64, of a manifold object or a name such as ``Poincare(c=0.5)``."""
    if manifold is None:
        raise ValueError('an embedding needs its manifold: an object with dist, or a name such as "poincare"')
    if isinstance(manifold, str):
        match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(?:c\s*=\s*)?([-+.\deE]+)?\s*\))?\s*", manifold)
        if match is None:
            raise ValueError(
                f'cannot read the manifold {manifold!r}, expected a name such as "poincare" or "Lorentz(c=0.5)"'
            )
        name, c = match[1].lower(), float(match[2] or 1.0)
        if not c > 0:
            raise ValueError(f"curvature c must be positive (it means -c), got {manifold!r}")
        if name == "euclidean":
            return lambda x, y: np.linalg.norm(x - y, axis=-1)
        if name == "poincare":
            return lambda x, y: poincare_distance(x, y, c)
        from hyptree import geometry  # brings torch

        known = {known.lower(): known for known in ("Lorentz", "Poincare", "Euclidean", "Sphere")}
        if name not in known:
            raise ValueError(f"unknown manifold {manifold!r}, expected one of {', '.join(known.values())}")
        manifold = getattr(geometry, known[name])(c)
    if not hasattr(manifold, "dist"):
        raise ValueError(f"a manifold must have dist(x, y), got {type(manifold).__name__}")
    import torch

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        a, b = (torch.from_numpy(np.array(v, np.float64)) for v in (x, y))
        return as_array(manifold.dist(a, b)).astype(np.float64)

    return torch.no_grad()(distance)


def poincare_distance(x: np.ndarray, y: np.ndarray, c: float = 1.0) -> np.ndarray:
    """Distance in the Poincaré ball of curvature -c, (..., D), (..., D) -> (...), in float64.

    ``(2/s) asinh(s |x - y| / sqrt((1 - c|x|^2)(1 - c|y|^2)))``, which keeps small distances exact.
    """
    s = np.sqrt(c)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    gap = [(1 - s * r) * (1 + s * r) for r in (np.linalg.norm(x, axis=-1), np.linalg.norm(y, axis=-1))]
    if any((r <= 0).any() for r in gap):
        raise ValueError(f"a point lies outside the Poincaré ball of radius {1 / s:g}")
    return 2 / s * np.arcsinh(s * np.linalg.norm(x - y, axis=-1) / np.sqrt(gap[0] * gap[1]))


def _choose_pairs(n: int, pairs: Any, num_samples: int | None, seed: int) -> tuple[np.ndarray, np.ndarray, bool]:
    if pairs is not None:
        array = as_array(pairs)
        if array.ndim != 2 or array.shape[1] != 2 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"pairs have shape {array.shape} and type {array.dtype}, expected (P, 2) integers")
        if array.size and not (array.min() >= 0 and array.max() < n):
            raise ValueError(f"pairs name {array.min()} to {array.max()}, expected 0 to {n - 1}")
        return array[:, 0], array[:, 1], False
    if n < 2:
        raise ValueError("there is no pair to compare in a tree of one node")
    if num_samples is None:
        if n * (n - 1) // 2 <= 2_000_000:
            i, j = np.triu_indices(n, 1)
            return i, j, True
        num_samples = 1_000_000
    rng = np.random.default_rng(seed)
    i = rng.integers(n, size=num_samples)
    return i, (i + rng.integers(1, n, size=num_samples)) % n, False


def _best_scale(ratio: np.ndarray) -> float:
    """The s > 0 with the smallest mean |r / s - 1|: 1/s is the median of 1/r weighted by r."""
    order = np.argsort(ratio)[::-1]  # 1/r ascending
    weight = np.cumsum(ratio[order])
    if not weight[-1] > 0:
        raise ValueError("all points coincide, no scale fits")
    return float(ratio[order[np.searchsorted(weight, weight[-1] / 2)]])


# ---------------------------------------------------------------------- Gromov delta
def gromov_delta(
    distances: Any, *, method: str = "auto", base: int = 0, num_samples: int = 1_000_000, seed: int = 0
) -> GromovDelta:
    """How far a metric is from a tree's (which has delta 0), by the four-point condition.

    For four points, order the three sums of opposite distances: delta is half the gap between the two largest.
    ``relative`` is 2 delta over the diameter.

    Args:
        distances: (n, n) symmetric.
        method: "exact", the maximum over all quadruples, O(n^4); "base", the maximum over triples with one fixed
            ``base`` point, O(n^3), between delta / 2 and delta; "sampled", the maximum over ``num_samples`` random
            quadruples, a lower bound; "auto", exact up to 100 points, base up to 800, then sampled.
    """
    D = as_array(distances).astype(np.float64)
    if D.ndim != 2 or D.shape[0] != D.shape[1] or not len(D):
        raise ValueError(f"distances have shape {D.shape}, expected (n, n)")
    if not np.isfinite(D).all():
        raise ValueError("distances must be finite")
    n = len(D)
    if np.abs(D - D.T).max() > 1e-6 * max(np.abs(D).max(), 1e-300):
        raise ValueError("distances must be symmetric")
    if method == "auto":
        method = "exact" if n <= 100 else "base" if n <= 800 else "sampled"
    if method == "exact":
        delta = max(_base_delta(D, w) for w in range(n))
    elif method == "base":
        if not 0 <= base < n:
            raise ValueError(f"base must be a point from 0 to {n - 1}, got {base}")
        delta = _base_delta(D, base)
    elif method == "sampled":
        delta, rng = 0.0, np.random.default_rng(seed)
        for at in range(0, num_samples, CHUNK):
            x, y, z, w = rng.integers(n, size=(4, min(CHUNK, num_samples - at)))
            sums = np.stack([D[x, y] + D[z, w], D[x, z] + D[y, w], D[x, w] + D[y, z]])
            sums.sort(axis=0)
            delta = max(delta, float((sums[2] - sums[1]).max()) / 2)
    else:
        raise ValueError(f'method must be "auto", "exact", "base" or "sampled", got {method!r}')
    diameter = float(D.max())
    return GromovDelta(delta, 2 * delta / diameter if diameter > 0 else 0.0, diameter, method)


def _base_delta(D: np.ndarray, w: int) -> float:
    """max over x, y, z of min((x|z), (z|y)) - (x|y), with Gromov products seen from w."""
    product = (D[w, :, None] + D[None, w, :] - D) / 2  # (n, n)
    reach = np.full_like(product, -np.inf)  # the max-min product of the matrix with itself
    scratch = np.empty_like(product)
    for row in product:
        np.maximum(reach, np.minimum(row[:, None], row[None, :], out=scratch), out=reach)
    return max(0.0, float((reach - product).max()))


# ---------------------------------------------------------------------- Dasgupta
def dasgupta_cost(tree: Tree, similarity: Any) -> float:
    """Dasgupta's cost: over pairs of leaves, similarity times the number of leaves below their common ancestor.

    Lower is better. Leaves of different trees of a forest meet in an imagined root above all.

    Args:
        similarity: over leaves in leaf order: (N, N) array or scipy sparse matrix, of which each unordered pair counts
            once with the mean of its two entries (the diagonal not at all), or edges ``(i, j, weight)`` /
            ``(i, j)`` as arrays, each of which counts once as it stands. O(N^2) for dense, O(edges) otherwise.
    """
    n = tree.num_leaves
    if isinstance(similarity, tuple):
        i, j, *rest = (as_array(part) for part in similarity)
        weight = np.asarray(rest[0], np.float64) if rest else np.ones(len(i))
        if len(rest) > 1 or not (i.ndim == 1 and i.shape == j.shape == weight.shape):
            raise ValueError("edges are (i, j) or (i, j, weight), arrays of one length")
        return _pair_cost(tree, i, j, weight)
    if hasattr(similarity, "tocoo"):  # any scipy sparse matrix
        if similarity.shape != (n, n):
            raise ValueError(f"similarity has shape {similarity.shape}, expected ({n}, {n}) over leaves")
        entries = similarity.tocoo()
        return _pair_cost(tree, entries.row, entries.col, entries.data.astype(np.float64) / 2)
    W = as_array(similarity)
    if W.shape != (n, n):
        raise ValueError(f"similarity has shape {W.shape}, expected ({n}, {n}) over leaves")
    rows = max(1, CHUNK // n)
    cost = 0.0
    for at in range(0, n, rows):
        block = W[at : at + rows].astype(np.float64) / 2
        i, j = np.divmod(np.arange(block.size), n)
        cost += _pair_cost(tree, i + at, j, block.ravel())
    return cost


def _pair_cost(tree: Tree, i: np.ndarray, j: np.ndarray, weight: np.ndarray) -> float:
    n = tree.num_leaves
    for end in (i, j):
        if not np.issubdtype(end.dtype, np.integer):
            raise ValueError(f"the ends of edges are leaf numbers, got {end.dtype}")
        if len(end) and not (end.min() >= 0 and end.max() < n):
            raise ValueError(f"edges name leaves {end.min()} to {end.max()}, expected 0 to {n - 1}")
    leaves = tree.leaves()
    below = np.append(tree.num_leaves_below, n)  # index -1, different trees: all leaves
    cost = 0.0
    for at in range(0, len(i), CHUNK):
        a, b, w = (part[at : at + CHUNK] for part in (i, j, weight))
        cost += float(np.sum(w * below[tree.lca(leaves[a], leaves[b])], where=a != b))
    return cost


# ---------------------------------------------------------------------- purity
def purity(tree: Tree, labels: Any, k: int | None = None, *, per_node: bool = False) -> Any:
    """How well the tree keeps classes together, in (0, 1].

    By default dendrogram purity, exact in O(n log n): over all pairs of leaves of one class, the mean share of that
    class among the leaves below their common ancestor. Leaves of different trees meet above all.

    Args:
        labels: (num_leaves,) class of each leaf, numbers or names.
        k: instead cuts into k clusters and gives the share of leaves in their cluster's largest class.
        per_node: instead gives, for every node, the share of the largest class among its leaves, (n,).
    """
    classes = as_array(labels)
    if classes.shape != (tree.num_leaves,):
        raise ValueError(f"labels have shape {classes.shape}, expected ({tree.num_leaves},), one per leaf")
    if k is not None and per_node:
        raise ValueError("give k or per_node, not both")
    _, classes = np.unique(classes, return_inverse=True)
    num_classes = int(classes.max()) + 1
    if k is not None:
        cluster = tree.cut(k)
        pair, count = np.unique(cluster * num_classes + classes, return_counts=True)
        best = np.zeros(cluster.max() + 1)
        np.maximum.at(best, pair // num_classes, count)
        return float(best.sum() / tree.num_leaves)

    # Leaves sorted by class, then by preorder. Within a class, the ancestors of neighbours are all the ancestors of
    # pairs; how many of the class are below one of them is the length of a run.
    n = tree.num_nodes
    leaves = tree.leaves()
    place = tree._position[leaves]
    order = np.lexsort((place, classes))
    leaf, group, place = leaves[order], classes[order], place[order]
    key = group * (n + 1) + place
    same = group[1:] == group[:-1]
    meet = np.full(len(leaf) + 1, -2)  # meet[i]: where leaf i - 1 and leaf i meet; -2 between classes
    meet[1:-1] = np.where(same, tree.lca(leaf[1:], leaf[:-1]), -2) if len(leaf) > 1 else -2

    inner = np.flatnonzero(meet > -2)
    pairs = np.unique(np.stack([group[inner], meet[inner]], 1), axis=0)
    kind, node = pairs[:, 0], pairs[:, 1]
    start = np.where(node < 0, 0, tree._position[node])
    stop = np.where(node < 0, n, start + tree.subtree_sizes[node])
    first = np.searchsorted(key, kind * (n + 1) + start)
    last = np.searchsorted(key, kind * (n + 1) + stop)
    count = last - first  # leaves of the class below the node

    if per_node:
        best = tree.is_leaf.astype(np.float64)
        real = node >= 0
        np.maximum.at(best, node[real], count[real])
        return max_below(tree.parent, best) / tree.num_leaves_below

    if not len(node):
        raise ValueError("dendrogram purity needs two leaves of one class, and every class has one leaf")
    share = count / np.where(node < 0, tree.num_leaves, tree.num_leaves_below[node])
    # A pair meets exactly at a node if it is below it but not below the next lower ancestor: sum C(count, 2) times
    # the share, less the share one ancestor up. That one is the deeper of the meetings at the two ends of the run.
    depth = np.append(tree.depth, [-2, -1])  # -2: no ancestor of this class; -1: the imagined root
    left, right = meet[first], meet[last]
    up = np.where(depth[left] >= depth[right], left, right)
    up_share = np.zeros(len(node))
    has_share = up > -2
    code = kind * (n + 1) + node + 1  # ascending, as pairs are
    up_share[has_share] = share[np.searchsorted(code, (kind * (n + 1) + up + 1)[has_share])]
    num_pairs = count * (count - 1) / 2
    sizes = np.bincount(group).astype(np.float64)
    return float((num_pairs * (share - up_share)).sum() / (sizes * (sizes - 1) / 2).sum())


# ---------------------------------------------------------------------- masks
def mask_agreement(tree: Tree, masks: Any, *, threshold: float | None = None) -> MaskAgreement:
    """For each mask the best IoU over the tree's nodes: did the tree find this region?

    A node covers its ``support`` if the tree has one, else the leaves below it, leaf i standing for place i of the
    flattened input. Soft values count as sum of minima over sum of maxima. Empty masks have IoU NaN and node -1 and
    stay out of the mean; of equal nodes the first wins.

    Args:
        masks: (M, ...) bool, or soft in [0, 1], each of the input's shape.
        threshold: makes the support hard first, at this value.
    """
    array = as_array(masks)
    soft = array.reshape(len(array), -1).astype(np.float64) if array.ndim > 1 else array
    num_places = tree.num_leaves if tree.support is None else int(np.prod(tree.support.shape[1:]))
    if soft.ndim != 2 or soft.shape[1] != num_places or not len(soft):
        what = "leaves" if tree.support is None else f"places of the support {tree.support.shape[1:]}"
        raise ValueError(f"masks have shape {array.shape}, expected (M, ...) with {num_places} places each, the {what}")
    if not ((soft >= 0) & (soft <= 1)).all():
        raise ValueError("masks must be bool, or soft values in [0, 1]")
    hard = ((soft == 0) | (soft == 1)).all(1)
    if tree.support is None:
        area = tree.num_leaves_below.astype(np.float64)
        line = np.zeros(tree.num_nodes)
        start = tree._position
        stop = start + tree.subtree_sizes
    else:
        cover = tree.support.reshape(tree.num_nodes, -1).astype(np.float64)
        if threshold is not None:
            cover = (cover >= threshold).astype(np.float64)
        area = cover.sum(1)
    iou, node = np.full(len(soft), np.nan), np.full(len(soft), -1)
    for m, mask in enumerate(soft):
        total = mask.sum()
        if not total:
            continue
        if tree.support is None:  # a subtree is a slice of the preorder
            line[start[tree.leaves()]] = mask
            run = np.append(0, np.cumsum(line))
            shared = run[stop] - run[start]
        else:
            shared = cover @ mask if hard[m] else np.minimum(cover, mask).sum(1)
        score = shared / (area + total - shared)
        node[m] = score.argmax()
        iou[m] = score[node[m]]
    if np.isnan(iou).all():
        raise ValueError("all masks are empty")
    return MaskAgreement(float(np.nanmean(iou)), iou, node)
