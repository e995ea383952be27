"""What a clustering model did with one picture, in plain arrays: the one place that knows the model's own type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BlockClusters", "can_cluster", "read_clusters"]


@dataclass(frozen=True)
class BlockClusters:
    """The soft clusters of one block for one picture, all heads."""

    stage: int
    """From 1."""
    block: int
    """From 1, within its stage."""
    patch: np.ndarray
    """(heads, H, W, M): how much each patch belongs to each centre of its window; sums to 1 over M."""
    window_of: np.ndarray
    """(H, W): which window each patch lies in, from 0."""
    window: np.ndarray | None
    """(heads, S, K): how much each of the S windows belongs to each centre of the window level; None without one."""
    centres: np.ndarray | None
    """(heads, K, D): centres of the window level as Lorentz points (space components); None unless it is hyperbolic."""
    patch_centres: np.ndarray | None
    """(heads, S * M, D): centres of the patch level, mapped to the same space as the window level maps its windows."""
    c: float | None
    """The window level has curvature ``-c``; None unless it is hyperbolic."""

    @property
    def num_heads(self) -> int:
        return len(self.patch)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the map of patches."""
        return self.patch.shape[1], self.patch.shape[2]

    @property
    def has_groups(self) -> bool:
        """Whether windows are told apart: a window level with several centres and several windows."""
        return self.window is not None and self.window.shape[1] > 1 and self.window.shape[2] > 1

    @property
    def gathers_windows(self) -> bool:
        """Whether there are fewer groups than windows, so that some windows must share one."""
        return self.window is not None and 1 < self.window.shape[2] < self.window.shape[1]

    @cached_property
    def patch_cluster(self) -> np.ndarray:
        """(heads, H, W): the cluster each patch belongs to most, numbered ``window * M + centre``."""
        return self.window_of * self.patch.shape[-1] + self.patch.argmax(-1)

    @cached_property
    def window_cluster(self) -> np.ndarray | None:
        """(heads, H, W): the window-level cluster each patch's window belongs to most."""
        return None if self.window is None else self.window.argmax(-1)[:, self.window_of]

    def patch_levels(self, head: int) -> np.ndarray:
        """(S * M, H, W) soft masks of the patch clusters of one head; they sum to 1 at every patch."""
        h, w, m = self.patch.shape[1:]
        num_windows = int(self.window_of.max()) + 1
        masks = np.zeros((num_windows, m, h, w), np.float32)
        y, x = np.indices((h, w))
        masks[self.window_of, :, y, x] = self.patch[head]
        return masks.reshape(num_windows * m, h, w)

    def window_levels(self, head: int) -> np.ndarray:
        """(K, H, W) soft masks of the window-level clusters of one head; they sum to 1 at every patch."""
        if self.window is None:
            raise ValueError(f"stage {self.stage}, block {self.block} has no window level")
        return np.moveaxis(self.window[head][self.window_of], -1, 0)


def can_cluster(model: Any) -> bool:
    """Whether the model says how it clustered, by a method ``assignments``."""
    return callable(getattr(model, "assignments", None))


def read_clusters(model: Any, x: Tensor) -> list[list[BlockClusters]]:
    """The clusters of every block for every picture of a batch, outer list over pictures.

    Args:
        model: has ``assignments(x)``, as HCFormer.
        x: (B, 3, H, W) as the model wants it, normalised.
    """
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            assignments = model.assignments(x)
    finally:
        model.train(was_training)
    pictures: list[list[BlockClusters]] = [[] for _ in range(len(x))]
    for item in assignments:
        for clusters, one in zip(pictures, _split(item), strict=True):
            clusters.append(one)
    return pictures


def _split(item: Any) -> list[BlockClusters]:
    """What HCFormer says of one block (``hyptree.nn.cluster.mixer.ClusterAssignment``), picture by picture."""
    import torch

    from hyptree.geometry import lorentz
    from hyptree.geometry.core.numerics import cap_norm

    (height, width), (rows, columns) = item.windows.size, item.windows.grid
    (tall, wide), (top, left) = item.windows.window, item.windows.offset
    y, x = (np.arange(height) + top) // tall, (np.arange(width) + left) // wide
    window_of = y[:, None] * columns + x[None, :]
    patch = _array(item.patch)
    num_pictures, num_heads = patch.shape[:2]
    window = centres = patch_centres = None
    if item.window is not None:
        window = _array(item.window).reshape(num_pictures, num_heads, rows * columns, -1)
    if item.curvature is not None:
        # A window is the mean of its patches, clipped and mapped to the hyperboloid. A patch-level centre is the mean
        # of fewer patches: the same map gives it a place among the windows.
        longest = torch.linalg.vector_norm(item.window_points.float(), dim=-1).max().clamp_min(1.0)
        tangent = cap_norm(item.patch_centres.float().flatten(2, 4), float(longest))
        patch_centres = _array(lorentz.expmap0(tangent, item.curvature))
        centres = _array(item.lorentz_centres())
    return [
        BlockClusters(
            stage=item.stage + 1,
            block=item.block + 1,
            patch=patch[b],
            window_of=window_of,
            window=None if window is None else window[b],
            centres=None if centres is None else centres[b],
            patch_centres=None if patch_centres is None else patch_centres[b],
            c=item.curvature,
        )
        for b in range(num_pictures)
    ]


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
