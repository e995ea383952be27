"""Which experts read a token, with which weights, and how their loads are kept equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.lm.ambient import mark_static
from hyptree.ops.rounding import wide

GATES = ("sigmoid", "softmax", "softmax_raw")
RULES = ("sign", "proportional")


class Route(NamedTuple):
    """What a gate says about B sequences of N tokens."""

    experts: Tensor
    """(B, N, k) int64, the chosen ones, best first."""
    weight: Tensor
    """(B, N, k) in float32 at least, what the chosen ones count."""
    counts: Tensor
    """(B, E) int64, how many tokens of a sequence chose an expert."""
    aux_loss: Tensor | None
    """(), what an uneven load costs; None in evaluation or if it costs nothing."""


def balance_loss(log_scores: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """``sum_i f_i P_i``, the mean over sequences; 1 where all experts have the same load and the same scores.

    ``f_i = E / (k N) count_i``, and ``P_i`` is the mean over tokens of ``s_i / sum s``.

    Args:
        log_scores: (B, N, E), log s. counts: (B, E).
    """
    num_tokens, num_experts = log_scores.shape[-2:]
    share = counts.to(log_scores.dtype) * (num_experts / (top_k * num_tokens))
    return (share * log_scores.softmax(-1).mean(-2)).sum(-1).mean()


def balance_step(counts: Tensor, rule: str = "sign") -> Tensor:
    """Where the bias of each expert goes, and how far per unit of rate: (..., E) counts -> (..., E) float32.

    "sign": one up where the load is below the mean, one down where it is above. "proportional": what is missing to an
    equal share of the load. Zero where nothing was counted.
    """
    load = counts.double()
    total = load.sum(-1, keepdim=True)
    missing = (total / counts.shape[-1] - load) / total.clamp(min=1)
    return (missing.sign() if rule == "sign" else missing).float()


class Gate(nn.Module):
    """Choose k of E experts for every token by ``s_j = act(x . e_j)``; the weights are those of the chosen, normalised.

    The choice is made by ``s_j + b_j``, the weights by ``s_j`` alone: b is no parameter but a float32 buffer,
    ``balance_bias``, which :func:`update_biases` moves after an optimiser step such that loads become equal. Computed
    in float32 at least. With k = 1 a normalised weight is always 1, and only the balance loss trains the gate.

    Counts of choices are summed from update to update while training. They are no buffer, since DistributedDataParallel
    would overwrite them by those of its first process. Checkpointing counts each step twice, which no rule notices.

    Args:
        in_features: n, space components of the tokens. num_experts: E. top_k: k.
        kind: "sigmoid"; "softmax" over all experts; "softmax_raw", the same without normalising over the chosen.
        route_scale: factor of all weights.
        rate: step of the bias. rule: "sign" or "proportional", see :func:`balance_step`.
        loss: factor of the balance loss.

    Shape:
        space (B, N, n) -> Route
    """

    balance_bias: Tensor

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int,
        kind: str = "sigmoid",
        route_scale: float = 1.0,
        rate: float = 1e-3,
        rule: str = "sign",
        loss: float = 1e-4,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if kind not in GATES:
            raise ValueError(f"Gate: kind must be one of {', '.join(GATES)}, got {kind!r}")
        if rule not in RULES:
            raise ValueError(f"Gate: rule must be one of {', '.join(RULES)}, got {rule!r}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"Gate: top_k must be between 1 and the {num_experts} experts, got {top_k}")
        self.in_features, self.num_experts, self.top_k, self.kind = in_features, num_experts, top_k, kind
        self.route_scale, self.rate, self.rule, self.loss = route_scale, rate, rule, loss
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, device=device, dtype=dtype))
        self.register_buffer("balance_bias", torch.zeros(num_experts, device=device, dtype=torch.float32))
        self.counts = self._no_counts()
        mark_static(self.counts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the experts' directions as Xavier uniform does; no bias."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.balance_bias)

    def _no_counts(self) -> Tensor:
        return torch.zeros(self.num_experts, dtype=torch.int64, device=self.balance_bias.device)

    def forward(self, space: Tensor) -> Route:
        x = wide(space)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x, self.weight.to(x.dtype))
        log_scores = F.logsigmoid(logits) if self.kind == "sigmoid" else logits.log_softmax(-1)
        with torch.no_grad():
            index = (log_scores.exp() + self.balance_bias).topk(self.top_k, dim=-1).indices
            experts = torch.arange(self.num_experts, device=index.device)
            counts = (index.unsqueeze(-1) == experts).sum((-3, -2))  # (B, E)
        chosen = log_scores.gather(-1, index)
        # A softmax of logarithms normalises without dividing by a sum that may be zero.
        weight = chosen.exp() if self.kind == "softmax_raw" else chosen.softmax(-1)
        if not self.training:
            return Route(index, weight * self.route_scale, counts, None)
        if self.counts.device != counts.device:  # built without memory, filled elsewhere
            self.counts = self._no_counts()
        self.counts.add_(counts.sum(0))
        aux_loss = self.loss * balance_loss(log_scores, counts, self.top_k) if self.loss else None
        return Route(index, weight * self.route_scale, counts, aux_loss)

    def update_bias(self) -> None:
        """Move the bias towards equal loads by what was counted since the last call, in all processes together."""
        update_biases([self])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gate:
        bias = self.balance_bias
        super()._apply(fn, recurse)
        if self.balance_bias.dtype != torch.float32:  # steps of 1e-3 would be lost in half precision
            self.balance_bias = bias.to(self.balance_bias.device)
        if self.counts.device != self.balance_bias.device:
            self.counts = self._no_counts()
            mark_static(self.counts)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_experts={self.num_experts}, top_k={self.top_k}, kind={self.kind}"


@torch.no_grad()
def update_biases(gates: Iterable[Gate]) -> None:
    """Move the biases of ``gates`` by their counts, summed over processes in one message, and begin to count anew.

    Call it after an optimiser step, in every process. The host waits for nothing.
    """
    gates = list(gates)
    if not gates:
        return
    counts = torch.cat([gate.counts.to(gate.balance_bias.device) for gate in gates])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(counts)
    for gate, own in zip(gates, counts.split([gate.num_experts for gate in gates]), strict=True):
        gate.balance_bias += gate.rate * balance_step(own, gate.rule)
        gate.counts.zero_()


def gates_of(model: nn.Module) -> list[Gate]:
    """The gates of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, Gate)]
