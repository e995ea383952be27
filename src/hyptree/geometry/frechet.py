"""The Fréchet mean: the point with the smallest weighted sum of squared distances.

Found by Riemannian steps with a step length that cannot overshoot, differentiated by the implicit function theorem, so
the backward pass costs one small linear solve whatever the number of iterations.
"""

import torch
from torch import Tensor

from hyptree.geometry import lorentz, poincare, sphere
from hyptree.geometry.core.debug import can_read_values
from hyptree.geometry.core.numerics import dot, root, strict_matmul, unit, zcot, zcoth
from hyptree.geometry.manifold import Euclidean, Lorentz, Manifold, Poincare, Product, Sphere
from hyptree.geometry.sets import points_and_weights

_EXACT_SOLVE_UP_TO = 512


def frechet_mean(
    x: Tensor,
    weights: Tensor | None = None,
    manifold: Manifold | None = None,
    *,
    max_iterations: int = 64,
    implicit: bool = True,
) -> Tensor:
    """Weighted Fréchet mean over the second-last axis: (..., N, n) -> (..., n).

    Args:
        weights: (..., N), not negative; all ones if None.
        manifold: ``Lorentz()`` if None.
        max_iterations: stops earlier where every mean has converged; traced or vmapped code cannot look, and runs 24.
        implicit: differentiate at the solution (exact up to 512 dimensions; beyond, the Hessian is replaced by its
            diagonal). False unrolls the iteration, which is slow and meant for checks.
    """
    manifold = Lorentz() if manifold is None else manifold
    if isinstance(manifold, Product):
        parts = zip(manifold.parts, manifold._split(x), strict=True)
        each = [frechet_mean(xi, weights, p, max_iterations=max_iterations, implicit=implicit) for p, xi in parts]
        return torch.cat(each, -1)
    if isinstance(manifold, Euclidean):
        return manifold.centroid(x, weights)
    if isinstance(manifold, Poincare):
        assert manifold.curvature is not None
        inside = Lorentz(manifold.curvature)
        lifted = poincare.to_lorentz(x, manifold.c)
        mean = frechet_mean(lifted, weights, inside, max_iterations=max_iterations, implicit=implicit)
        return poincare.from_lorentz(mean, manifold.c)
    if not isinstance(manifold, (Lorentz, Sphere)):
        raise ValueError(f"frechet_mean: expected a manifold of hyptree.geometry, got {type(manifold).__name__}")

    dtype = x.dtype
    compute = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    points, w = points_and_weights("frechet_mean", x.to(compute), None if weights is None else weights.to(compute))
    total = w.sum(-2, keepdim=True)
    w = w / torch.where(total > 0, total, 1.0)
    start = manifold.centroid(points, w.squeeze(-1)).unsqueeze(-2)
    if not implicit:
        return _iterate(start, points, w, manifold, max_iterations).squeeze(-2).to(dtype)
    with torch.no_grad():
        mean = _iterate(start, points, w, manifold, max_iterations)
        hessian = _hessian(mean, points, w, manifold)
    # One Newton step from the (constant) solution: its value is the solution, its derivative the implicit one.
    mean = _newton_step(mean, _mean_log(mean, points, w, manifold)[0], hessian, manifold)
    return mean.squeeze(-2).to(dtype)


def _mean_log(mean: Tensor, points: Tensor, w: Tensor, manifold: Manifold) -> tuple[Tensor, Tensor, Tensor]:
    """Mean tangent vector to the points (..., 1, n); the tangent vectors; ``y coth y`` of each (..., N, 1)."""
    logs = manifold.logmap(mean, points)
    # The length of each tangent vector as its distance, which is right where the norm of the vector is not.
    y = root(manifold.c) * manifold.dist(mean, points).unsqueeze(-1)
    stretch = zcot(y.clamp_max(3.1)) if isinstance(manifold, Sphere) else zcoth(y)
    return (w * logs).sum(-2, keepdim=True), logs, stretch


def _iterate(mean: Tensor, points: Tensor, w: Tensor, manifold: Manifold, max_iterations: int) -> Tensor:
    eps = torch.finfo(points.dtype).eps
    may_look = can_read_values(points, w)
    for _ in range(max_iterations if may_look else min(max_iterations, 24)):
        step, _, stretch = _mean_log(mean, points, w, manifold)
        # On a sphere distances bend the other way (y cot y <= 1): the plain step 1 is the safe one there.
        rate = torch.ones_like(step[..., :1])
        if not isinstance(manifold, Sphere):
            rate = 1 / (w * stretch).sum(-2, keepdim=True).clamp_min(1.0)
        mean = manifold.expmap(mean, rate * step)
        if may_look:
            reach = 1 / root(manifold.c) + manifold.dist(mean, points).amax(-1)
            if bool((manifold.norm(mean, step).squeeze(-1) <= 4 * eps * reach).all()):
                break
    return mean


def _hessian(mean: Tensor, points: Tensor, w: Tensor, manifold: Manifold) -> Tensor:
    """Minus the derivative of the mean tangent vector at the solution (..., n, n), as a map of coordinates."""
    _, logs, stretch = _mean_log(mean, points, w, manifold)
    length = manifold.norm(mean, logs).unsqueeze(-1)
    u = unit(logs, length)
    n = points.shape[-1]
    along = w * (1 - stretch)  # stretch across the geodesic is y coth y, along it 1
    eye = torch.eye(n, dtype=points.dtype, device=points.device)
    covector = u if isinstance(manifold, Sphere) else u - mean * (dot(mean, u) / _sqtime(mean, manifold))
    return (w * stretch).sum(-2).unsqueeze(-1) * eye + strict_matmul((along * u).mT, covector)


def _sqtime(mean: Tensor, manifold: Manifold) -> Tensor:
    return lorentz.time(mean, manifold.c).unsqueeze(-1).square()


def _newton_step(mean: Tensor, force: Tensor, hessian: Tensor, manifold: Manifold) -> Tensor:
    """``mean + H^-1 force``: at a solution the coordinate derivative of the force is ``-H``."""
    if mean.shape[-1] <= _EXACT_SOLVE_UP_TO:
        step = torch.linalg.solve(hessian, force.mT).mT
    else:
        step = force / hessian.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    if isinstance(manifold, Sphere):
        return sphere.project(mean + step, manifold.c)
    return mean + step
