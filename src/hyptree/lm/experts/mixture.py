"""MICE, a mixture of curvature experts: SwiGLU networks on hyperboloids of their own, met again on that of the model.

An expert of curvature ``-K`` takes a point of the model's hyperboloid (``-c``) to its own, which multiplies it by
``a = sqrt(c / K)``, goes through ``h = silu(W1 x + b1) * (W3 x + b3)`` and ``u = W2 lift_K(h) + b2``, and comes back by
``1 / a``. Taken back to the model's hyperboloid already, the hidden point is ``h / a``, and what is left of K is

    h / a = silu(a (W1 x + b1 / a)) * (W3 x + b3 / a)    and    u / a = W2 lift_c(h / a) + b2 / a:

an ordinary network of the model's curvature with other biases, whose gate has a temperature. So the weights stay as
they are, the factor enters where silu reads its row anyway, and its gradient needs no pass over weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry.core.numerics import sqnorm
from hyptree.lm.ambient import GainFactors, WeightCache, aligned, lift_padded, padded_width
from hyptree.lm.experts.grouped import dispatch, grouped_linear, unpermute
from hyptree.lm.experts.routing import Gate, Order, sort_by_expert
from hyptree.lm.fused import experts as fused_experts
from hyptree.ops import pack_weight
from hyptree.ops.merge_points.reference import merge
from hyptree.ops.rounding import wide

if TYPE_CHECKING:
    from hyptree.lm.config import HelmConfig

CURVATURE_BOUNDS = (1e-2, 1e2)
_MARKS: dict[str, dict[str, Any]] = {
    "log_curvature": {"_no_weight_decay": True, "_lr_scale": 0.1},
    "bias_in": {"_no_weight_decay": True},
    "bias_out": {"_no_weight_decay": True},
}
"""What parameters say about themselves to optimisers (``hyptree.train.optimizer.build.param_groups``)."""


class ExpertStack(nn.Module):
    """E networks of one shape, their weights on top of each other; every one takes lifted points to points.

    Args:
        num_experts: E. features: n, space components of the model's points. hidden: space components inside.
        c: the model's curvature is -c.
        curvature: E initial K of curvatures -K that are learned, as ``log K``, within ``CURVATURE_BOUNDS``; or a float
            that stays.
        bias: learn biases.
        norm: give all hidden points the norm ``1 / sqrt(c)`` on their own hyperboloid, so that the curvature alone
            tells how far out they are.
        eps: of that norm.
    """

    log_curvature: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        features: int,
        hidden: int,
        c: float = 1.0,
        curvature: float | Sequence[float] = 1.0,
        bias: bool = True,
        norm: bool = False,
        eps: float = 1e-6,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.gain_factors = GainFactors()
        self.num_experts, self.features, self.hidden = num_experts, features, hidden
        self.c, self.initial, self.norm, self.eps = c, curvature, norm, eps
        self.inner = padded_width(hidden, bias)
        factory = {"device": device, "dtype": dtype}
        self.weight_in = nn.Parameter(torch.empty(num_experts, 2, hidden, features, **factory))  # W1, W3
        self.time_in = nn.Parameter(torch.empty(num_experts, 2, hidden, **factory))
        self.weight_out = nn.Parameter(torch.empty(num_experts, features, hidden, **factory))  # W2
        self.time_out = nn.Parameter(torch.empty(num_experts, features, **factory))
        self.bias_in = nn.Parameter(torch.empty(num_experts, 2, hidden, **factory)) if bias else None
        self.bias_out = nn.Parameter(torch.empty(num_experts, features, **factory)) if bias else None
        is_learned = not isinstance(curvature, int | float)
        self.log_curvature = nn.Parameter(torch.empty(num_experts, **factory)) if is_learned else None
        self._weight_cache = WeightCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each map as if alone, Xavier uniform with gain sqrt(2) over weight and time, times ``gain_factors``."""
        for weight, time in ((self.weight_in, self.time_in), (self.weight_out, self.time_out)):
            bound = math.sqrt(2.0) * math.sqrt(6.0 / (self.hidden + self.features + 1))
            for parameter, gain in ((weight, self.gain_factors.weight), (time, self.gain_factors.time)):
                nn.init.uniform_(parameter, -gain * bound, gain * bound)
        for bias in (self.bias_in, self.bias_out):
            if bias is not None:
                nn.init.zeros_(bias)
        log_k = self.log_curvature
        # transformers marks what it has loaded, and lets only the functions of nn.init see that.
        if log_k is not None and not getattr(log_k, "_is_hf_initialized", False):
            with torch.no_grad():
                log_k.copy_(torch.tensor(self.initial, device=log_k.device, dtype=torch.float64).log())

    def curvature(self) -> Tensor | float:
        """K of every expert, whose curvature is -K: (E,), in float32 at least, or the float they share."""
        if self.log_curvature is None:
            return float(self.initial)  # type: ignore[arg-type]
        low, high = CURVATURE_BOUNDS
        return wide(self.log_curvature).clamp(math.log(low), math.log(high)).exp()

    def ratio(self) -> Tensor | None:
        """``a = sqrt(c / K)`` of every expert (E,), or None where it is 1."""
        k = self.curvature()
        if isinstance(k, Tensor):
            return (self.c / k).sqrt()
        return None if k == self.c else wide(self.time_out).new_full((self.num_experts,), math.sqrt(self.c / k))

    def folded(self, dtype: torch.dtype, width: int, divide: tuple[bool, bool] = (True, True)) -> tuple[Tensor, Tensor]:
        """All maps as matrices for lifted rows of ``width`` columns, the biases divided by ``a``.

        Args:
            divide: whether the biases of the first and of the second map are; not those that will meet ``1 / a``.

        Returns:
            (E, 2 inner, width): gate above up, each with zero rows behind where a lift will write time and one.
            (E, aligned(n), inner): out, the last rows zero.
        """
        num, a = self.num_experts, self.ratio()
        bias_in, bias_out = (
            _divide(bias, a) if asked else bias
            for bias, asked in zip((self.bias_in, self.bias_out), divide, strict=True)
        )
        layout = pack_weight.Layout(2 * num, self.hidden, self.inner, 1, width)
        full_in = _pack(self.weight_in, self.time_in, bias_in, layout, dtype)
        layout = pack_weight.Layout(num, self.features, aligned(self.features), 1, self.inner)
        full_out = _pack(self.weight_out, self.time_out, bias_out, layout, dtype)
        return full_in.unflatten(0, (num, -1)), full_out.unflatten(0, (num, -1))

    def matrices(
        self, dtype: torch.dtype, width: int, divide: tuple[bool, bool] = (True, True)
    ) -> tuple[Tensor, Tensor]:
        """:meth:`folded`, once where no weight changes."""
        key = (dtype, width, divide)
        return self._weight_cache.get(key, lambda: self.folded(*key))

    @property
    def sizes(self) -> fused_experts.Sizes:
        """What kernels have to know."""
        return fused_experts.Sizes(self.features, self.hidden, float(self.c), self.bias_in is not None)

    def fits(self, rows: Tensor) -> bool:
        """Whether kernels run this stack on rows like these."""
        return not self.norm and fused_experts.fits(rows, self.inner)

    def stacked(self, rows: Tensor, divide: bool = False) -> fused_experts.Stack:
        """The matrices and factors that kernels take for rows like these.

        Args:
            divide: divide the first biases by ``a``, for rows that several experts read.
        """
        return fused_experts.Stack(*self.matrices(rows.dtype, rows.shape[-1], (divide, False)), self.ratio())

    def lift_hidden(self, both: Tensor, a: Tensor | None) -> Tensor:
        """``[h, t, 1, 0, ...]`` with ``h = silu(a gate) * up``, on the model's hyperboloid.

        Args:
            both: (..., 2 inner), gate and up, zero where time and one will be.
            a: broadcasts against (..., 1), or None for 1.
        """
        gate, up = both.chunk(2, -1)  # before widening: so the two gradients meet in the dtype of the product
        h = F.silu(wide(gate) if a is None else a * wide(gate)) * wide(up)
        if self.norm:
            scale = torch.rsqrt(self.c * (sqnorm(h) + self.hidden * self.eps))
            h = h * (scale if a is None else scale / a)
        return lift_padded(h, self.hidden, both.dtype, self.c, self.bias_in is not None)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows sorted by expert, each through its own: lifted (S, width), ends (E,) -> points (S, n)."""
        weight_in, weight_out = self.matrices(rows.dtype, rows.shape[-1])
        a = self.ratio()
        if a is not None:
            places = torch.arange(rows.shape[0], dtype=ends.dtype, device=ends.device)
            expert = torch.bucketize(places, ends, right=True)
            # A sum over experts and no indexing, whose gradient would be added in any order, by atomics.
            a = (F.one_hot(expert, self.num_experts) * a).sum(-1, keepdim=True)  # (S, 1)
        lifted = self.lift_hidden(grouped_linear(rows, weight_in, ends), a)
        return self._crop(grouped_linear(lifted, weight_out, ends))

    def every(self, rows: Tensor) -> list[Tensor]:
        """All rows through every expert, the first map of all as one product: lifted (T, width) -> E points (T, n)."""
        weight_in, weight_out = self.matrices(rows.dtype, rows.shape[-1])
        both = F.linear(rows, weight_in.flatten(0, 1)).unflatten(-1, (self.num_experts, -1))  # (T, E, 2 inner)
        a = self.ratio()
        lifted = self.lift_hidden(both, None if a is None else a[:, None])  # (T, E, inner)
        return [self._crop(F.linear(h, w)) for h, w in zip(lifted.unbind(1), weight_out.unbind(0), strict=True)]

    def _crop(self, points: Tensor) -> Tensor:
        return points if points.shape[-1] == self.features else points[..., : self.features]

    def _mark(self) -> None:
        for name, says in _MARKS.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter.__dict__.update(says)

    # Copies, loading and sharding put other parameters in place, which must say the same.
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _MARKS:
            self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertStack:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def extra_repr(self) -> str:
        kind = "learned" if self.log_curvature is not None else f"{self.initial:g}"
        return f"{self.num_experts}, features={self.features}, hidden={self.hidden}, curvature={kind}"


def _divide(bias: Tensor | None, a: Tensor | None) -> Tensor | None:
    return bias if bias is None or a is None else bias / a.view(-1, *(1,) * (bias.dim() - 1))


def _pack(weight: Tensor, time: Tensor, bias: Tensor | None, layout: pack_weight.Layout, dtype: torch.dtype) -> Tensor:
    """``[W, w_t, b, 0]`` of all experts, zero rows below each: (groups padded_rows, width), one launch on a GPU."""
    flat = None if bias is None else bias.flatten()
    return pack_weight.pack_weight(weight.reshape(-1, weight.shape[-1]), time.flatten(), flat, layout, dtype)


class Mice(nn.Module):
    """Mixture of curvature experts: some always on, k chosen for every token, merged as a Lorentz centroid.

    Choices are sorted by expert on the device; two grouped products run all experts; rows come back by a permutation
    and are summed in a fixed order. No token is dropped, and the order of experts does not matter.

    Shape:
        lifted (B, N, width) -> points (B, N, n), balance loss () or None
    """

    def __init__(self, config: HelmConfig, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.c, num_routed, num_shared = config.curvature, config.n_routed_experts, config.n_shared_experts
        is_learned = config.expert_curvature == "learned"
        low, high = config.expert_curvature_range
        spread = [low + (high - low) * i / max(num_routed - 1, 1) for i in range(num_routed)]
        sizes = (config.hidden_size, config.moe_intermediate_size, config.curvature)
        options: dict[str, Any] = {
            "bias": config.ffn_bias,
            "norm": config.expert_norm,
            "eps": config.rms_norm_eps,
            **factory,
        }
        self.gate = Gate(
            config.hidden_size,
            num_routed,
            config.num_experts_per_tok,
            config.gate,
            config.route_scale,
            rate=config.balance_rate,
            rule=config.balance_rule,
            loss=config.balance_loss,
            **factory,
        )
        self.routed = ExpertStack(num_routed, *sizes, curvature=spread if is_learned else 1.0, **options)
        own: float | list[float] = config.curvature
        if config.shared_curvature:
            own = [config.curvature] * num_shared if is_learned else 1.0
        self.shared = ExpertStack(num_shared, *sizes, curvature=own, **options) if num_shared else None

    def forward(self, lifted: Tensor, space: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        space = lifted[..., : self.routed.features] if space is None else space
        route = self.gate(space.reshape(-1, *space.shape[-2:]))
        rows, top_k = lifted.flatten(0, -2), self.gate.top_k
        plan = sort_by_expert(route.experts.flatten(0, -2), route.counts.sum(0))
        if self.routed.fits(rows):
            always = self.shared.stacked(rows, divide=True) if self.shared is not None else None
            own, sizes, weight = self.routed.stacked(rows), self.routed.sizes, route.weight.flatten(0, -2)
            out = fused_experts.mice(rows, weight, route.experts, plan.inverse, plan.ends, own, always, sizes)
            return out.view(space.shape), route.aux_loss
        routed = self.run(rows, plan).unflatten(0, (-1, top_k))  # (T, k, n)
        shared = self.shared.every(rows) if self.shared is not None else []
        out = merge(shared, routed, route.weight.flatten(0, -2), self.c)
        return out.to(lifted.dtype).view(space.shape), route.aux_loss

    def run(self, rows: Tensor, plan: Order) -> Tensor:
        """Every row through the experts it chose: lifted (T, width) -> points (T k, n), best choice first."""
        dispatched = dispatch(rows, plan.order, plan.inverse, self.gate.top_k)
        return unpermute(self.routed(dispatched, plan.ends), plan.order, plan.inverse)
