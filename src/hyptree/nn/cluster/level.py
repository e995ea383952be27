"""One level of clustering as matrix products: similarities, assignments, aggregation, and the learned parts of a level.

With points ``x``, values ``v``, centres ``c`` and value centres ``u`` (their averages on a grid)::

    A_ij = softmax_j(alpha D(x_i, c_j) + b_ij)           D: cosine, or minus the Lorentz distance
    u'_j = (u_j + sum_i A_ij v_i) / (1 + sum_i A_ij)     aggregate
    g_i  = sum_j A_ij u'_j                               dispatch

Both sums are matrix products over all windows and heads at once; no (N, M, d) tensor exists. Assignments are kept as
(..., M, N), centres first: a softmax over the last of two axes is slow where there are few centres. Similarities follow
autocast, assignments and their sums are float32 at least.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import suggest
from hyptree.geometry import Lorentz, lorentz
from hyptree.geometry.core.numerics import cap_norm
from hyptree.nn.cluster.windows import Size
from hyptree.ops.rounding import wide

Geometry = Literal["euclidean", "hyperbolic"]
GEOMETRIES = ("euclidean", "hyperbolic")
ASSIGNMENTS = ("soft", "hard")


def require_choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``; the message suggests the nearest."""
    if value not in choices:
        hint = suggest(str(value), choices) or f"expected one of {', '.join(choices)}"
        raise ValueError(f"{where}: {name} {value!r} is unknown; {hint}")


# ----------------------------------------------------------------------------------------------- one level, functional


def inverse_length(x: Tensor) -> Tensor:
    """``1 / |x|`` of every row in float32 at least: (..., d) -> (..., 1); finite for a zero row."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide(x[:0]).dtype)
    return 1 / length.clamp_min(1e-6)


def cosine_similarity(centres: Tensor, x: Tensor, alpha: Tensor | float = 1.0) -> Tensor:
    """Cosines of all pairs, times ``alpha``: (..., M, d), (..., N, d) -> (..., M, N)."""
    directions = centres * (alpha * inverse_length(centres)).to(centres.dtype)
    # The points outnumber the centres: their lengths are divided out of the product where that is the smaller tensor.
    if centres.shape[-2] <= x.shape[-1]:
        return (directions @ x.mT) * inverse_length(x).mT
    return directions @ (x * inverse_length(x).to(x.dtype)).mT


def hyperbolic_similarity(centres: Tensor, x: Tensor, manifold: Lorentz, clip: float = 1.0) -> Tensor:
    """Minus the Lorentz distance of all pairs of tangent vectors: (..., M, d), (..., N, d) -> (..., M, N).

    Vectors longer than ``clip`` are shortened to it before they are mapped to the hyperboloid.
    """
    c = manifold.c
    tangent = torch.cat([wide(centres), wide(x)], -2)
    points = lorentz.expmap0(cap_norm(tangent, clip), c)
    of_centres, of_x = points.split([centres.shape[-2], x.shape[-2]], -2)
    return -lorentz.pairwise_dist(of_centres, of_x, c, mode="matmul")


def soft_assignment(logits: Tensor) -> Tensor:
    """Softmax over the centres, float32 at least: (..., M, N), columns sum to one."""
    return wide(logits).softmax(-2)


def hard_assignment(logits: Tensor) -> Tensor:
    """Each point belongs to its best centre alone, with the weight ``sigmoid(logit)``, as in Context Cluster.

    The weight carries the gradient; which centre is best has none.
    """
    logits = wide(logits)
    best = logits.argmax(-2, keepdim=True)
    return torch.zeros_like(logits).scatter(-2, best, logits.gather(-2, best).sigmoid())


def cluster_mix(assign: Tensor, values: Tensor, value_centres: Tensor, inside: Tensor | None = None) -> Tensor:
    """Aggregate values at the centres and hand them back: (..., M, N), (..., N, d), (..., M, d) -> (..., N, d).

    Args:
        assign: not negative. inside: (..., 1, N), False for points that do not exist.
    """
    counted = assign if inside is None else assign * inside
    mass = counted.sum(-1, keepdim=True)  # (..., M, 1)
    weight = assign.to(values.dtype)
    gathered = (weight if inside is None else counted.to(values.dtype)) @ values
    return weight.mT @ ((value_centres + gathered) / (1 + mass)).to(values.dtype)


# ------------------------------------------------------------------------------------------------------------- modules


class PositionBias(nn.Module):
    """A learned number for every window, head, patch of the window and centre; other sizes by linear interpolation.

    The parameter has the layout in which it is added to the similarities, so at the size it was made for it costs
    nothing. For another size the grid of windows, the inside of a window and the grid of centres are resized
    separately: the meaning of a centre's index changes from window to window, so there is nothing to interpolate
    across an edge. In evaluation without gradients this is done once per size.

    Shape:
        (windows, heads, M, N)
    """

    def __init__(self, num_heads: int, grid: Size, window: Size, centres: Size, **factory: Any):
        super().__init__()
        self.num_heads, self.shape = num_heads, (grid, window, centres)
        (ny, nx), (wy, wx), (my, mx) = self.shape
        self.bias = nn.Parameter(torch.zeros(ny * nx, num_heads, my * mx, wy * wx, **factory))
        self._cache: dict[tuple[Any, ...], Tensor] = {}

    def reset_parameters(self) -> None:
        """Set all biases to zero."""
        nn.init.zeros_(self.bias)

    def forward(self, grid: Size, window: Size, centres: Size) -> Tensor:
        wanted = (grid, window, centres)
        if wanted == self.shape:
            return self.bias
        # Nothing is kept where the parameter may change unseen, needs a gradient, or stands for something else (a
        # compiler's or a functional transform's tensor).
        keep = not (self.training or torch.is_grad_enabled() or torch.compiler.is_compiling())
        if not keep or type(self.bias) is not nn.Parameter or self.bias.is_inference():
            return self._resized(wanted)
        key = (wanted, self.bias._version, self.bias.data_ptr(), self.bias.device, self.bias.dtype)
        if key not in self._cache:
            if len(self._cache) >= 8:
                self._cache.clear()
            with torch.inference_mode(False), torch.no_grad():  # a tensor that may be used anywhere later
                self._cache[key] = self._resized(wanted)
        return self._cache[key]

    def _resized(self, wanted: tuple[Size, Size, Size]) -> Tensor:
        (ny, nx), (wy, wx), (my, mx) = self.shape
        full = self.bias.reshape(ny, nx, self.num_heads, my, mx, wy, wx)
        for axis, old, new in zip((0, 5, 3), self.shape, wanted, strict=True):
            if old != new:
                last = full.movedim((axis, axis + 1), (-2, -1))
                flat = last.reshape(1, -1, *old)
                resized = F.interpolate(flat, new, mode="bilinear", align_corners=False)
                full = resized.reshape(*last.shape[:-2], *new).movedim((-2, -1), (axis, axis + 1))
        return full.flatten(5, 6).flatten(3, 4).flatten(0, 1)

    def train(self, mode: bool = True) -> PositionBias:
        """Sets the mode and forgets resized biases."""
        self._cache.clear()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    def extra_repr(self) -> str:
        (grid, window, centres) = self.shape
        return f"heads={self.num_heads}, grid={grid}, window={window}, centres={centres}"


class ClusterLevel(nn.Module):
    """One level of clustering with its learned temperature, position bias and geometry.

    Shape:
        points, values (B, S, H, N, d), centres, value centres (B, S, H, M, d) -> mixed (B, S, H, N, d), assignment
        (B, S, H, M, N)
    """

    def __init__(
        self,
        num_heads: int,
        grid: Size,
        window: Size,
        centres: Size,
        geometry: Geometry,
        assignment: Literal["soft", "hard"],
        position_bias: bool,
        curvature: float,
        learnable_curvature: bool,
        alpha: float,
        clip: float,
        is_single: bool,
        **factory: Any,
    ):
        """As in :class:`~hyptree.nn.ClusterMixer`; ``is_single`` says that there is one centre at any size.

        Every soft assignment is then one: there is nothing to learn, and a parameter without gradient would stop
        distributed training.
        """
        super().__init__()
        self.is_hard, self.clip, self.initial_alpha = assignment == "hard", clip, alpha
        self.manifold: Lorentz | None = None
        self.alpha: nn.Parameter | None = None
        self.beta: nn.Parameter | None = None
        self.position: PositionBias | None = None
        is_trivial = is_single and not self.is_hard
        if geometry == "hyperbolic":
            place = factory.get("device") or torch.get_default_device()
            with torch.device("cpu"):  # the curvature is checked by its value, which a meta device does not have
                self.manifold = Lorentz(curvature, learnable=learnable_curvature and not is_trivial)
            self.manifold.to(place)
        if is_trivial:
            return
        self.alpha = nn.Parameter(torch.tensor(float(alpha), **factory))
        if self.is_hard:
            self.beta = nn.Parameter(torch.zeros((), **factory))
        if position_bias:
            self.position = PositionBias(num_heads, grid, window, centres, **factory)

    def reset_parameters(self) -> None:
        """Set temperature and offset back and the position bias to zero."""
        if self.alpha is not None:
            nn.init.constant_(self.alpha, self.initial_alpha)
        if self.beta is not None:
            nn.init.zeros_(self.beta)
        if self.position is not None:
            self.position.reset_parameters()

    def forward(
        self,
        points: Tensor,
        values: Tensor,
        centres: Tensor,
        value_centres: Tensor,
        layout: tuple[Size, Size, Size],
        inside: Tensor | None = None,
        reached: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mixed values and the assignment.

        Args:
            layout: grid of windows, window, grid of centres. inside: (S, 1, 1, N), False for padding.
            reached: (S, 1, M, 1) boolean, False for centres that average nothing.
        """
        if self.alpha is None:
            assign = torch.ones_like(wide(points[..., :1])).mT
        else:
            assign = self._assign(points, centres, layout, reached)
        return cluster_mix(assign, values, value_centres, inside), assign

    def _assign(
        self, points: Tensor, centres: Tensor, layout: tuple[Size, Size, Size], reached: Tensor | None
    ) -> Tensor:
        assert self.alpha is not None
        if self.manifold is None:
            logits = cosine_similarity(centres, points, self.alpha)
        else:
            logits = self.alpha * hyperbolic_similarity(centres, points, self.manifold, self.clip)
        if self.position is not None:
            logits = logits + self.position(*layout)
        if self.beta is not None:
            logits = logits + self.beta
        if reached is not None:
            logits = logits.masked_fill(~reached, float("-inf"))
        return hard_assignment(logits) if self.is_hard else soft_assignment(logits)
