"""Poincaré distances between all points of two sets: values, softmax, the nearest point; forward and backward.

A point of the ball is a direction and a radius as every other, so the kernels are those of
``hyptree.ops.pairwise_lorentz`` with another way from a stored row to its radius.
"""

from __future__ import annotations

from functools import partial

from hyptree.geometry import poincare
from hyptree.ops.pairwise_lorentz import dist_in, nearest_in, softmax_in

__all__ = ["distance_softmax", "nearest", "pairwise_dist"]

pairwise_dist = partial(dist_in, poincare)
"""As :func:`hyptree.ops.pairwise_lorentz.pairwise_dist`; a row outside the ball is moved into it."""

distance_softmax = partial(softmax_in, poincare)
"""As :func:`hyptree.ops.pairwise_lorentz.distance_softmax`."""

nearest = partial(nearest_in, poincare)
"""As :func:`hyptree.ops.pairwise_lorentz.nearest`."""
