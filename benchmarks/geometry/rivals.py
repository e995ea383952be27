"""geoopt and HypLL as contenders: their coordinates, their calls, and how to read their answers.

geoopt's Lorentz takes ambient coordinates with the time first and ``k = 1/c``; HypLL knows the ball alone. Neither is
needed to run: what is not installed is reported as absent.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Skipped

Prepare = Callable[..., Sequence[Tensor]]


def _given(*inputs: Tensor) -> Sequence[Tensor]:
    return inputs


def _same(out: Tensor) -> Tensor:
    return out


@dataclass(frozen=True)
class Rival:
    """A rival's way to compute an operation.

    Args:
        make: gives the function that is timed; imports the library.
        prepare: from our inputs to its inputs; not timed, differentiable.
        read: from its output to ours; not timed, differentiable.
        peak_elements: elements of the largest temporary, to leave out what would not fit in memory.
    """

    make: Callable[[], Callable[..., Tensor]]
    prepare: Prepare = _given
    read: Callable[[Tensor], Tensor] = _same
    peak_elements: int = 0


def library(name: str) -> ModuleType:
    """The imported rival, or the word that it is not there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own deprecations
            return import_module(name)
    except ImportError as error:
        raise Skipped("absent", f"{name} is not installed") from error


# ------------------------------------------------------------------------------------------------------------- geoopt


def ambient(c: float, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Points with their time in front."""
    return tuple(torch.cat([(1 / c + (x * x).sum(-1, keepdim=True)).sqrt(), x], -1) for x in inputs)


def tangent0(v: Tensor) -> tuple[Tensor]:
    """A tangent vector at the origin with its time, zero, in front."""
    return (torch.cat([torch.zeros_like(v[..., :1]), v], -1),)


def tangent(c: float, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A point and a tangent vector at it, both with their time in front."""
    (point,) = ambient(c, x)
    return point, torch.cat([(x * v).sum(-1, keepdim=True) / point[..., :1], v], -1)


def transported(c: float, x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two points and a tangent vector at the first, all with their time in front."""
    return (*ambient(c, x, y), tangent(c, x, v)[1])


def space(out: Tensor) -> Tensor:
    """Without the time."""
    return out[..., 1:]


def geoopt_lorentz(c: float, dtype: torch.dtype, device: str, exact: bool = False) -> Any:
    return library("geoopt").Lorentz(k=torch.tensor(1 / c, dtype=dtype)).to(device)


def geoopt_poincare(c: float, dtype: torch.dtype, device: str, exact: bool = False) -> Any:
    geoopt = library("geoopt")
    kind = geoopt.PoincareBallExact if exact else geoopt.PoincareBall
    return kind(c=torch.tensor(c, dtype=dtype)).to(device)


def geoopt_method(manifold: Callable[[], Any], name: str, **options: Any) -> Callable[[], Callable[..., Tensor]]:
    """The method ``name`` of the manifold."""

    def make() -> Callable[..., Tensor]:
        return functools.partial(getattr(manifold(), name), **options)

    return make


def geoopt_pairwise(manifold: Callable[[], Any]) -> Callable[[], Callable[..., Tensor]]:
    """All distances, by broadcasting: geoopt has no other way."""

    def make() -> Callable[..., Tensor]:
        dist = manifold().dist
        return lambda x, y: dist(x.unsqueeze(-2), y.unsqueeze(-3))

    return make


def geoopt_adam(
    manifold: Any, points: Sequence[Tensor], grads: Sequence[Tensor], lr: float
) -> tuple[Any, list[Tensor]]:
    """Its optimiser and the parameters, in its coordinates."""
    geoopt = library("geoopt")
    params = [geoopt.ManifoldParameter(x.clone(), manifold=manifold) for x in points]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    return geoopt.optim.RiemannianAdam(params, lr=lr), params


# -------------------------------------------------------------------------------------------------------------- HypLL


def hypll_ball(c: float, dtype: torch.dtype, device: str) -> Any:
    library("hypll")
    ball = import_module("hypll.manifolds.poincare_ball")
    curvature = torch.tensor(
        c, dtype=dtype, device=device
    )  # its own parameter is float32, and a softplus is in between
    return ball.PoincareBall(ball.Curvature(constraining_strategy=lambda _: curvature))


def hypll_method(ball: Callable[[], Any], name: str) -> Callable[[], Callable[..., Tensor]]:
    """The method ``name`` of its manifold on points."""

    def make() -> Callable[..., Tensor]:
        manifold, tensors = ball(), import_module("hypll.tensors")
        method = getattr(manifold, name)

        def call(*inputs: Tensor) -> Tensor:
            out = method(*(tensors.ManifoldTensor(x, manifold) for x in inputs))
            return out if isinstance(out, Tensor) else out.tensor

        return call

    return make


def hypll_expmap0(ball: Callable[[], Any]) -> Callable[[], Callable[..., Tensor]]:
    def make() -> Callable[..., Tensor]:
        manifold, tensors = ball(), import_module("hypll.tensors")
        return lambda v: manifold.expmap(tensors.TangentTensor(v, manifold=manifold)).tensor

    return make


def hypll_expmap(ball: Callable[[], Any]) -> Callable[[], Callable[..., Tensor]]:
    def make() -> Callable[..., Tensor]:
        manifold, tensors = ball(), import_module("hypll.tensors")

        def call(x: Tensor, v: Tensor) -> Tensor:
            point = tensors.ManifoldTensor(x, manifold)
            moved: Tensor = manifold.expmap(tensors.TangentTensor(v, point, manifold)).tensor
            return moved

        return call

    return make


def hypll_logmap0(ball: Callable[[], Any]) -> Callable[[], Callable[..., Tensor]]:
    def make() -> Callable[..., Tensor]:
        manifold, tensors = ball(), import_module("hypll.tensors")
        return lambda x: manifold.logmap(None, tensors.ManifoldTensor(x, manifold)).tensor

    return make


def hypll_centroid(ball: Callable[[], Any]) -> Callable[[], Callable[..., Tensor]]:
    def make() -> Callable[..., Tensor]:
        manifold, tensors = ball(), import_module("hypll.tensors")
        return lambda x, w: (
            manifold.midpoint(tensors.ManifoldTensor(x, manifold), batch_dim=x.dim() - 2, w=w.unsqueeze(-1)).tensor
        )

    return make


def hypll_planes(ball: Callable[[], Any], name: str) -> Callable[[], Callable[..., Tensor]]:
    """``hyperplane_dists`` (its MLR) or ``fully_connected``; its normals are columns, so the weight is transposed."""

    def make() -> Callable[..., Tensor]:
        manifold, tensors = ball(), import_module("hypll.tensors")
        euclidean = import_module("hypll.manifolds.euclidean").Euclidean()
        method = getattr(manifold, name)

        def call(x: Tensor, z: Tensor, offset: Tensor) -> Tensor:
            normals = tensors.ManifoldTensor(z, euclidean, man_dim=0)
            out = method(tensors.ManifoldTensor(x, manifold), normals, offset)
            return out if isinstance(out, Tensor) else out.tensor

        return call

    return make


def hypll_mlp(ball: Callable[[], Any]) -> Callable[[], Callable[..., Tensor]]:
    """Its fully connected layers with ReLU on tangent vectors at the origin between them."""

    def make() -> Callable[..., Tensor]:
        layer, up, down = hypll_planes(ball, "fully_connected")(), hypll_expmap0(ball)(), hypll_logmap0(ball)()

        def call(x: Tensor, *parameters: Tensor) -> Tensor:
            for first in range(0, len(parameters), 2):
                x = layer(up(down(x).relu()) if first else x, *parameters[first : first + 2])
            return x

        return call

    return make


def transposed_weights(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    return x, *(p.mT.contiguous() if p.dim() == 2 else p for p in parameters)


def hypll_adam(ball: Any, points: Sequence[Tensor], grads: Sequence[Tensor], lr: float) -> tuple[Any, list[Tensor]]:
    """Its optimiser and the tensors that it updates."""
    tensors, optim = import_module("hypll.tensors"), import_module("hypll.optim")
    params = [tensors.ManifoldParameter(x.clone(), ball, man_dim=-1) for x in points]
    for p, g in zip(params, grads, strict=True):
        p.tensor.grad = g.clone()
    return optim.RiemannianAdam(params, lr=lr), [p.tensor for p in params]
