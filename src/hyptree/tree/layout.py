"""Where the nodes of a tree go: Sarkar's embedding in the Poincaré disk, a radial layout of it, geodesics between."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hyptree.tree.core import Tree

# Rounding a disk coordinate at hyperbolic radius r moves the point by about exp(r) * 1e-16 / 2: 5e-4 at 30, 0.1 at 35.
AUTO_RADIUS, MAX_RADIUS = 30.0, 35.0


# ---------------------------------------------------------------------- Sarkar
def largest_tau(tree: Tree, radius: float = AUTO_RADIUS) -> float:
    """The longest edge for which ``sarkar`` keeps every node within this hyperbolic radius of the origin."""
    reach = int(tree.depth.max()) + (len(tree.roots) > 1)
    return radius / max(reach, 1)


def sarkar(tree: Tree, tau: float | None = None) -> np.ndarray:
    """Points in the Poincaré disk (curvature -1) with every edge exactly ``tau`` long, (n, 2) float64.

    Sarkar's construction: the root at the origin, and around each node its neighbours in equal angles. As tau grows,
    distances over tau approach tree distances. The roots of a forest sit around the origin, tau away from it.

    Each node is placed in polar coordinates by solving the triangle origin, parent, child, so nothing is lost near the
    boundary until the final (x, y), where float64 ends at radius 35 or so: ``depth * tau`` must stay below that.

    Args:
        tau: edge length. By default ``largest_tau()``, which puts the deepest node at radius 30, where rounding still
            moves points by less than 1e-3. A tau that does not fit in float64 is an error, never a silent clamp.
    """
    best = largest_tau(tree)
    if tau is None:
        tau = best
    limit = largest_tau(tree, MAX_RADIUS)
    if not 0 < tau <= limit:
        raise ValueError(
            f"tau must be positive and at most {limit:.6g} for a tree of depth {tree.depth.max()} in float64, "
            f"got {tau:g}; tau=None takes {best:.6g}"
        )
    n = tree.num_nodes
    radius, angle, back = [0.0] * n, [0.0] * n, [0.0] * n  # back: from the way to the origin to the way to the parent
    sinh_t, cosh_t = math.sinh(tau), math.cosh(tau)
    num_children = tree.num_children.tolist()
    by_parent, start = (part.tolist() for part in tree._by_parent)
    if len(tree.roots) > 1:
        for k, root in enumerate(tree.roots.tolist()):
            radius[root], angle[root] = tau, 2 * math.pi * k / len(tree.roots)
    # One node at a time with plain floats: linear whatever the shape, where levels of numpy would crawl on a path.
    for node in tree.order("preorder").tolist():
        count, r, phi = num_children[node], radius[node], angle[node]
        if not count:
            continue
        family = by_parent[start[node] : start[node] + count]
        if r == 0.0:
            for k, child in enumerate(family):
                radius[child], angle[child] = tau, phi + 2 * math.pi * k / count
            continue
        sinh_r, cosh_r = math.sinh(r), math.cosh(r)
        # A root of a forest has nobody above it, but leaves the way to the origin free as if it had.
        for k, child in enumerate(family, 1):
            turn = back[node] + 2 * math.pi * k / (count + 1)
            sin_turn, cos_turn = math.sin(turn), math.cos(turn)
            half = math.sinh((r - tau) / 2) ** 2 + sinh_r * sinh_t * math.sin(turn / 2) ** 2
            radius[child] = 2 * math.asinh(math.sqrt(half))
            angle[child] = phi + math.atan2(sinh_t * sin_turn, sinh_r * cosh_t - cosh_r * sinh_t * cos_turn)
            # Seen from the child the triangle has the other handedness, hence the sign.
            back[child] = -math.atan2(sinh_r * sin_turn, cosh_r * sinh_t - sinh_r * cosh_t * cos_turn)
    size = np.tanh(np.array(radius) / 2)
    direction = np.array(angle)
    return np.stack([size * np.cos(direction), size * np.sin(direction)], 1)


# ---------------------------------------------------------------------- pictures
def radial(tree: Tree, rim: float = 0.95) -> np.ndarray:
    """Points for a picture: equal angles for the leaves, hyperbolic radius by depth up to the rim, (n, 2)."""
    turn = 2 * np.pi / tree.num_leaves
    middle = first_leaf(tree) + (tree.num_leaves_below - 1) / 2
    level = tree.depth + (len(tree.roots) > 1)
    radius = np.tanh(np.arctanh(rim) * level / max(level.max(), 1))
    return np.stack([radius * np.cos(turn * middle), radius * np.sin(turn * middle)], 1)


def first_leaf(tree: Tree) -> np.ndarray:
    """Place of each node's first leaf, where the leaves stand in a row and what belongs together side by side, (n,)."""
    return np.cumsum(tree.is_leaf[tree.order("preorder")])[tree._position] - tree.is_leaf


def geodesic(p: np.ndarray, q: np.ndarray, num_points: int) -> np.ndarray:
    """Points along the disk's geodesics from p to q, (E, 2), (E, 2) -> (E, num_points, 2)."""
    a, b = (v[:, 0] + 1j * v[:, 1] for v in (p, q))
    step = (b - a) / (1 - a.conj() * b)  # q seen from p
    size = np.minimum(np.abs(step), 1 - 1e-15)
    part = np.tanh(np.linspace(0, 1, num_points) * np.arctanh(size)[:, None])  # (E, num_points)
    z = np.where(size > 0, step / np.where(size > 0, size, 1), 0)[:, None] * part
    z = (z + a[:, None]) / (1 + a.conj()[:, None] * z)
    return np.stack([z.real, z.imag], -1)


def flat_points(points: np.ndarray, c: float | None) -> tuple[np.ndarray, float]:
    """(n, 2) places on the Poincaré disk (on the plane where ``c`` is None), and the share of squared length they keep.

    Two dimensions are shown as they are, exactly. More are flattened: the direction from the origin is that of the
    first two principal axes of the tangent vectors at the origin, the distance from the origin is kept. So radii are
    true and angles are a projection.

    Args:
        points: (n, d) space components of Lorentz points of curvature ``-c``, or points of flat space.
    """
    import torch

    from hyptree.geometry import lorentz

    v = np.asarray(points, np.float64)
    if c is not None:
        v = lorentz.logmap0(torch.from_numpy(v), c).numpy() * c**0.5  # lengths are now those of curvature -1
    direction, kept = np.pad(v, ((0, 0), (0, max(0, 2 - v.shape[1])))), 1.0
    if v.shape[1] > 2:
        direction = v @ main_axes(v).T
        kept = float((direction**2).sum() / max((v**2).sum(), 1e-300))
    return (direction if c is None else on_disk(direction, np.linalg.norm(v, axis=1, keepdims=True))), kept


def on_disk(direction: np.ndarray, length: np.ndarray) -> np.ndarray:
    """(n, 2) places on the Poincaré disk in these directions, at hyperbolic distances (n, 1) from its centre."""
    return direction / np.maximum(np.linalg.norm(direction, axis=1, keepdims=True), 1e-300) * np.tanh(length / 2)


def main_axes(v: np.ndarray) -> np.ndarray:
    """(2, d) the principal axes of vectors (n, d), the second one zero where there is only one."""
    axes = np.linalg.svd(v, full_matrices=False)[2][:2]
    for axis in axes:  # the sign of an axis is free: make it the same each time
        axis *= np.sign(axis[np.abs(axis).argmax()]) or 1.0
    return axes if len(axes) > 1 else np.vstack([axes, np.zeros_like(axes)])
