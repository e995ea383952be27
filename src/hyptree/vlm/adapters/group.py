"""Adapted weights of one shape in one tower, computed together once per forward pass and handed out one by one.

The first layer that asks makes all of them (for the scale adapter: one batched product and one copy); the others find
theirs ready. What is kept is thrown away as soon as it could be wrong:

* when a forward pass of the tower begins (a hook) and when a backward pass has come through;
* when a parameter or the layer's own base weight was written to; when gradients, inference mode or autocast are
  switched.

The operation keeps nothing that autograd frees and computes what it needs again in its backward pass. So several
backward passes may go through one forward pass of the weights (two losses, blocks computed again by checkpointing), as
they may with ordinary parameters. Within ``torch.compile`` each layer computes its own weight, and the compiler fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hyptree.vlm.adapters.adapter import AdapterConfig, SlotStack, StackAdapter
from hyptree.vlm.adapters.structure import Site


@dataclass
class _CachedWeights:
    """Adapted weights with all that they depend on; ``bases`` and ``weights`` in the order of the sites."""

    key: tuple[Any, ...]
    bases: list[tuple[Any, ...]]
    weights: Sequence[Tensor]


class AdaptedGroup(nn.Module):
    """The parameters of one adapter for the weights of one shape in one tower.

    Attributes:
        sites: the weights, in order.
        adapter: the parameters, stacked over all parts of all sites.
    """

    def __init__(self, sites: list[Site], config: AdapterConfig):
        super().__init__()
        self.sites = sites
        slots = [(site, slot) for site in sites for slot in site.slots]
        base = sites[0].base
        self.stack: SlotStack = SlotStack(
            names=tuple(f"{site.name}:{slot.target}" for site, slot in slots),
            targets=tuple(slot.target for _, slot in slots),
            layers=tuple(site.layer for site, _ in slots),
            shape=sites[0].slot_shape,
            tower=sites[0].tower,
            dtype=torch.promote_types(base.dtype, torch.float32),  # small steps vanish in half precision
            device=base.device,
        )
        self.adapter: StackAdapter = config.build(self.stack)
        # open_clip reads the dtype of its activations off a weight of the MLP, which autocast must not change.
        self.follows_autocast = "mlp" not in self.stack.targets
        self._number = {site.name: i for i, site in enumerate(sites)}
        self._first = dict(zip(self._number, accumulate((len(site.slots) for site in sites), initial=0), strict=False))
        self._cached: _CachedWeights | None = None
        self._arranged: tuple[tuple[Any, ...], Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What is kept belongs to a pass, and tensors with a history cannot be copied.
        return {**self.__dict__, "_cached": None, "_arranged": None}

    def forget(self) -> None:
        """Throws away the weights that are kept for the running pass."""
        self._cached = None

    def refresh(self) -> None:
        """Throws away everything that is kept, also what was read from the base weights."""
        self._cached = self._arranged = None

    def weight(self, site: Site) -> Tensor:
        """The adapted weight of a site, as its layer uses it now."""
        base = site.base
        if torch.compiler.is_compiling() or base.requires_grad:
            return self.computed(site)
        key = self._key(base)
        number = self._number[site.name]
        cached = self._cached
        if cached is None or cached.key != key or cached.bases[number] != _stamp(base):
            cached = self._cached = self._compute(key)
        return cached.weights[number]

    def computed(self, site: Site) -> Tensor:
        """The adapted weight of one site by itself, by ordinary autograd, also for a base that is trained."""
        base = site.base
        first = self._first[site.name]
        values = self.adapter.per_slot(self.adapter.values(), first, first + len(site.slots))
        with torch.autocast(base.device.type, enabled=False):
            parts = torch.stack([base[slot.start : slot.stop] for slot in site.slots])
            adapted = self.adapter.adapted(values, self.adapter.arranged(parts))
        return _joined(site, adapted, base)

    @torch.no_grad()
    def merged(self) -> list[Tensor]:
        """The adapted weights of all sites in the dtype of the base, bit for bit those of a pass without autocast."""
        with torch.autocast(self.stack.device.type, enabled=False), torch.autocast("cpu", enabled=False):
            return [weight.clone() for weight in self._compute(self._key(self.sites[0].base)).weights]

    def _key(self, base: Tensor) -> tuple[Any, ...]:
        kind = base.device.type
        dtype = base.dtype
        if self.follows_autocast and dtype == torch.float32 and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        stamps = tuple(_stamp(value) for value in self.adapter.values())
        return dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), stamps

    def _compute(self, key: tuple[Any, ...]) -> _CachedWeights:
        bases = [_stamp(site.base) for site in self.sites]
        values = self.adapter.values()
        arranged = self._arrange(key[0], bases)
        if torch.is_grad_enabled() and any(value.requires_grad for value in values):
            weights = _AdaptedWeights.apply(self, arranged, *values)
        else:
            weights = self.split(self.stacked(values, arranged))
        return _CachedWeights(key, bases, weights)

    def _arrange(self, dtype: torch.dtype, bases: list[tuple[Any, ...]]) -> Tensor:
        """The base weights in the layout and dtype of the product; made again only when one of them has changed."""
        key = (dtype, *bases)
        if self._arranged is None or self._arranged[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                parts = [site.base[slot.start : slot.stop] for site in self.sites for slot in site.slots]
                arranged = self.adapter.arranged(torch.stack(parts).to(dtype))
            self._arranged = (key, arranged)
        return self._arranged[1]

    def stacked(self, values: Sequence[Tensor], arranged: Tensor) -> Tensor:
        """(slots, rows, columns) adapted; the dtype has been chosen, so autocast is kept out."""
        with torch.autocast(arranged.device.type, enabled=False):
            return self.adapter.adapted(self.adapter.per_slot(values, 0, len(self.stack.names)), arranged)

    def split(self, stacked: Tensor) -> tuple[Tensor, ...]:
        """The weights of the sites, views where all of their rows are adapted."""
        counts = [len(site.slots) for site in self.sites]
        parts = zip(self.sites, stacked.split(counts), strict=True)
        return tuple(_joined(site, part, site.base) for site, part in parts)


class _AdaptedWeights(torch.autograd.Function):
    """All adapted weights of a group; see the module's docstring for why it saves nothing."""

    @staticmethod
    def forward(ctx: Any, group: AdaptedGroup, arranged: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.arranged, ctx.values = group, arranged, values
        ctx.stamps = [_stamp(value) for value in values]
        return group.split(group.stacked(values, arranged))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        group: AdaptedGroup = ctx.group
        group.forget()
        if [_stamp(value) for value in ctx.values] != ctx.stamps:
            raise RuntimeError(
                "an adapter parameter was modified between the forward and the backward pass; run the optimizer after "
                "backward()"
            )
        dtype, device = ctx.arranged.dtype, ctx.arranged.device
        zero: Tensor | None = None
        parts: list[Tensor] = []
        for site, gradient in zip(group.sites, gradients, strict=True):
            for slot in site.slots:
                if gradient is None:
                    zero = torch.zeros(group.stack.shape, dtype=dtype, device=device) if zero is None else zero
                    parts.append(zero)
                else:
                    parts.append(gradient[slot.start : slot.stop])
        with torch.enable_grad():
            values = [value.detach().requires_grad_(value.requires_grad) for value in ctx.values]
            stacked = group.stacked(values, ctx.arranged)
        trained = [value for value in values if value.requires_grad]
        grads = iter(torch.autograd.grad(stacked, trained, torch.stack(parts)))
        return None, None, *(next(grads) if value.requires_grad else None for value in values)


def _joined(site: Site, adapted: Tensor, base: Tensor) -> Tensor:
    """The weight of a site from its adapted parts (parts, rows, columns) and, between them, rows of the base."""
    if site.is_covered:
        return adapted.flatten(0, 1)
    pieces: list[Tensor] = []
    end = 0
    for slot, part in zip(site.slots, adapted, strict=True):
        if slot.start > end:
            pieces.append(base[end : slot.start].to(adapted.dtype))
        pieces.append(part)
        end = slot.stop
    if end < base.shape[0]:
        pieces.append(base[end:].to(adapted.dtype))
    return torch.cat(pieces)


def _stamp(tensor: Tensor) -> tuple[Any, ...]:
    """Changes when a tensor is written to, moved, or replaced."""
    version = -1 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.device
