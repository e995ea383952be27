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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry.core.curvature import bounded_curvature
from hyptree.geometry.core.numerics import sqnorm
from hyptree.lm.ambient import GainFactors, WeightCache, aligned, padded_width
from hyptree.lm.experts.routing import Gate
from hyptree.ops import pack_weight
from hyptree.ops.bare import readable
from hyptree.ops.experts import Sizes, Stack, mix_experts
from hyptree.ops.experts.grouped import grouped_linear, sort_by_expert
from hyptree.ops.rounding import wide

if TYPE_CHECKING:
    from hyptree.lm.config import HelmConfig

CURVATURE_BOUNDS = (1e-2, 1e2)


@readable
class ExpertStack(nn.Module):
    """E networks of one shape, their weights on top of each other; every one takes points to points.

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

    PARAMETER_MARKS: ClassVar = {"log_curvature": (True, 0.1), "bias_in": (True, 1.0), "bias_out": (True, 1.0)}
    """For optimisers: spared weight decay, and the share of the learning rate."""
    CURVATURE_PARAMETERS: ClassVar = ("log_curvature",)
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
        return bounded_curvature(wide(self.log_curvature), *CURVATURE_BOUNDS)

    def ratio(self) -> Tensor | None:
        """``a = sqrt(c / K)`` of every expert (E,), or None where it is 1."""
        k = self.curvature()
        if isinstance(k, Tensor):
            return (self.c / k).sqrt()
        return None if k == self.c else wide(self.time_out).new_full((self.num_experts,), math.sqrt(self.c / k))

    def stacked(self, dtype: torch.dtype, width: int, divide: bool = False) -> Stack:
        """What kernels read of a bare stack: its maps as matrices for lifted rows of ``width`` columns, and ``a``.

        Gate above up, each with zero rows behind where a lift will write time and one; zero rows behind those of the
        second map too.

        Args:
            divide: divide the first biases by ``a``, for rows that several experts read; else rows bring ``1 / a``.
        """
        num, inner, a = self.num_experts, padded_width(self.hidden, self.bias_in is not None), self.ratio()

        def pack(weight: Tensor, time: Tensor, bias: Tensor | None, rows: tuple[int, int, int], width: int) -> Tensor:
            flat, layout = None if bias is None else bias.flatten(), pack_weight.Layout(*rows, 1, width)
            full = pack_weight.pack_weight(weight.reshape(-1, weight.shape[-1]), time.flatten(), flat, layout, dtype)
            return full.unflatten(0, (num, -1))

        def make() -> tuple[Tensor, Tensor]:
            bias: Tensor | None = self.bias_in
            n = self.features
            if divide and bias is not None and a is not None:
                bias = bias / a[:, None, None]
            first = pack(self.weight_in, self.time_in, bias, (2 * num, self.hidden, inner), width)
            return first, pack(self.weight_out, self.time_out, self.bias_out, (num, n, aligned(n)), inner)

        return Stack(*self._weight_cache.get((dtype, width, divide), make), a)

    def forward(self, s: Tensor, ends: Tensor | None = None) -> Tensor:
        """Points sorted by expert, each through its own: (S, n), (E,) -> (S, n).

        Without ``ends`` all points through every expert: (T, n) -> (E, T, n).
        """
        num, count, dtype, a = self.num_experts, s.shape[0], s.dtype, self.ratio()
        rows, stops = s, ends
        if stops is None:
            rows = s.expand(num, -1, -1).flatten(0, 1)
            stops = count * torch.arange(1, num + 1, device=s.device, dtype=torch.int32)
        places = torch.arange(rows.shape[0], dtype=stops.dtype, device=s.device)
        # Sums over experts and no indexing, whose gradient would be added in any order, by atomics.
        member = F.one_hot(torch.bucketize(places, stops, right=True), num).to(wide(s).dtype)  # (S, E)
        unit = member if a is None else member / a
        factor = None if a is None else (member * a).sum(-1, keepdim=True)  # (S, 1)

        def linear(x: Tensor, weight: Tensor, time: Tensor, bias: Tensor | None) -> Tensor:
            t = member * torch.sqrt(sqnorm(wide(x)) + 1 / self.c)  # (S, E), the time in the column of its expert
            out = grouped_linear(x, weight.to(dtype), stops) + t.to(dtype) @ time.to(dtype)
            return out if bias is None else out + unit.to(dtype) @ bias.to(dtype)

        bias = None if self.bias_in is None else self.bias_in.flatten(1)
        gate, up = linear(rows, self.weight_in.flatten(1, 2), self.time_in.flatten(1), bias).chunk(2, -1)
        h = F.silu(wide(gate) if factor is None else factor * wide(gate)) * wide(up)
        if self.norm:
            scale = torch.rsqrt(self.c * (sqnorm(h) + self.hidden * self.eps))
            h = h * (scale if factor is None else scale / factor)
        out = linear(h.to(dtype), self.weight_out, self.time_out, self.bias_out)
        return out if ends is not None else out.unflatten(0, (num, count))

    def extra_repr(self) -> str:
        kind = "learned" if self.log_curvature is not None else f"{self.initial:g}"
        return f"{self.num_experts}, features={self.features}, hidden={self.hidden}, curvature={kind}"


class Mice(nn.Module):
    """Mixture of curvature experts: some always on, k chosen for every token, merged as a Lorentz centroid.

    Choices are sorted by expert on the device; two grouped products run all experts; rows come back by a permutation
    and are summed in a fixed order. No token is dropped, and the order of experts does not matter.

    Shape:
        points (B, N, n), or these lifted, (B, N, width) -> points (B, N, n), balance loss () or None
    """

    def __init__(self, config: HelmConfig, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        num_routed, num_shared, self.has_norm = config.n_routed_experts, config.n_shared_experts, config.expert_norm
        self.sizes = Sizes(config.hidden_size, config.moe_intermediate_size, float(config.curvature), config.ffn_bias)
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

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        space = rows[..., : self.sizes.features]
        route = self.gate(space.reshape(-1, *space.shape[-2:]))
        chosen, weight = route.experts.flatten(0, -2), route.weight.flatten(0, -2)
        plan = sort_by_expert(chosen, route.counts.sum(0))
        out = mix_experts(
            rows.flatten(0, -2), weight, chosen, plan, self.routed, self.shared, self.sizes, self.has_norm
        )
        return out.view(space.shape), route.aux_loss
