"""Cosine distances between the tokens of each image, in float32 whatever the features are.

``cosine_distance`` is the operation; ``reference`` holds its definition, ``triton`` its kernel, which is registered as
``hyptree::cosine_distance``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hyptree.ops.backend import choose, needs_operator, operator
from hyptree.ops.cosine import reference

__all__ = ["cosine_distance", "reference"]


def cosine_distance(features: Tensor, backend: str = "auto") -> Tensor:
    """``1 - cos`` of the angle between any two tokens of an image: (..., N, D) -> (..., N, N) in [0, 2].

    Symmetric to the last bit and 0 on the diagonal; float32 for every input but float64. In float32 each value is a
    whole multiple of 2^-24, so that float64 sums of them (average linkage) are exact. No gradient.

    Args:
        features: of any floating dtype; a zero feature has distance 1 to all others.
        backend: "auto", "torch" or "triton" (CUDA, not float64). Their last bits may differ.
    """
    if features.dim() < 2 or not features.is_floating_point():
        kind = f"{str(features.dtype).removeprefix('torch.')} of shape {tuple(features.shape)}"
        raise ValueError(f"cosine_distance: expected floating-point features (..., N, D), got {kind}")
    unsupported = "features are float64, the kernel needs float32" if features.dtype == torch.float64 else None
    if choose(backend, features, unsupported) == "torch":
        return reference.cosine_distance(features)
    batch = features.detach().reshape(-1, *features.shape[-2:])
    distance = _operator(batch) if needs_operator(batch) else _launch(batch)
    return distance.view(*features.shape[:-1], features.shape[-2])


def _launch(features: Tensor) -> Tensor:
    from hyptree.ops.cosine import triton

    return triton.cosine_distance(features)


_operator = operator("cosine_distance", _launch)
