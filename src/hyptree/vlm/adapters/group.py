"""Adapted weights of one shape in one tower: all of them at once for a forward pass of the tower, or one by itself.

Nothing outlives a pass. While the module around all adapted layers of the tower runs its ``forward``, their weights
are made together (for the scale adapter: one batched product and two copies) and handed out; they are gone when it
returns. A layer that is asked for its weight outside of such a pass computes its own: called alone, in blocks that
checkpointing runs again, within ``torch.compile`` (where the compiler fuses), or where weights come and go by
themselves (offloaded ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hyptree.vlm.adapters.adapter import AdapterConfig, SlotStack, StackAdapter
from hyptree.vlm.adapters.structure import Site


@dataclass(frozen=True)
class _Pass:
    """The weights of a group, by name of their site, while its tower runs; ``uses`` as by ``_uses`` when it began."""

    dtype: torch.dtype
    uses: int
    weights: dict[str, Tensor]


_running: ContextVar[Mapping[Any, _Pass]] = ContextVar("passes that are running in this thread", default={})  # noqa: B039


@contextmanager
def one_pass(groups: Iterable[AdaptedGroup]) -> Iterator[None]:
    """Within, the layers of these groups use weights that are computed now, all together."""
    token = _running.set({**_running.get(), **{group: group.new_pass() for group in groups if group.is_batched()}})
    try:
        yield
    finally:
        _running.reset(token)


class AdaptedGroup(nn.Module):
    """The parameters of one adapter for the weights of one shape in one tower, stacked over all parts of its sites."""

    def __init__(self, sites: list[Site], config: AdapterConfig):
        super().__init__()
        self.sites = sites
        slots = [(site, slot) for site in sites for slot in site.slots]
        self.stack: SlotStack = SlotStack(
            names=tuple(f"{site.name}:{slot.target}" for site, slot in slots),
            targets=tuple(slot.target for _, slot in slots),
            layers=tuple(site.layer for site, _ in slots),
            shape=sites[0].slot_shape,
            tower=sites[0].tower,
            dtype=torch.promote_types(sites[0].base.dtype, torch.float32),  # small steps vanish in half precision
            device=sites[0].device,
        )
        self.adapter: StackAdapter = config.build(self.stack)
        # open_clip reads the dtype of its activations off a weight of the MLP, which autocast must not change.
        self.follows_autocast = "mlp" not in self.stack.targets
        starts = accumulate((len(site.slots) for site in sites), initial=0)
        self._first = {site.name: start for site, start in zip(sites, starts, strict=False)}

    def weight(self, site: Site) -> Tensor:
        """The adapted weight of a site, as its layer uses it now."""
        running = None if torch.compiler.is_compiling() else _running.get().get(self)
        if running is None or running.dtype != self._dtype(site.base) or _uses() > running.uses:
            return self.computed(site)
        return running.weights[site.name]

    def computed(self, site: Site) -> Tensor:
        """The adapted weight of one site by itself, by ordinary autograd.

        What autograd saves for it is kept from the hooks of others: blocks that are computed again by checkpointing
        save as much as those whose weights came from the pass.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._weights([site])[0]
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            return self._weights([site])[0]

    @torch.no_grad()
    def merged(self) -> list[Tensor]:
        """The adapted weights of all sites in the dtype of the base, bit for bit those of a pass without autocast."""
        with torch.autocast(self.stack.device.type, enabled=False), torch.autocast("cpu", enabled=False):
            return [weight.clone() for weight in self._weights(self.sites)]

    def is_batched(self) -> bool:
        """Whether all weights are there when a pass begins, and no layer changes its own as it runs."""
        return all(
            type(site.base) is nn.Parameter
            and not site.base.is_meta
            and "forward" not in site.module.__dict__
            and not site.module._forward_pre_hooks
            for site in self.sites
        )

    def new_pass(self) -> _Pass:
        """The weights of all sites as they are now."""
        weights = zip(self.sites, self._weights(self.sites), strict=True)
        return _Pass(self._dtype(self.sites[0].base), _uses(), {site.name: weight for site, weight in weights})

    def _dtype(self, base: Tensor) -> torch.dtype:
        if self.follows_autocast and base.dtype == torch.float32 and torch.is_autocast_enabled(base.device.type):
            return torch.get_autocast_dtype(base.device.type)
        return base.dtype

    def _weights(self, sites: Sequence[Site]) -> list[Tensor]:
        """The adapted weights of sites that follow one another."""
        parts = torch.stack([site.base[slot.start : slot.stop] for site in sites for slot in site.slots])
        parts = parts.to(self._dtype(parts))
        with torch.autocast(parts.device.type, enabled=False):
            adapted = self.adapter(parts, self._first[sites[0].name])
        split = adapted.split([len(site.slots) for site in sites])
        return [_joined(site, part) for site, part in zip(sites, split, strict=True)]


def _uses() -> int:
    """How much may be done with a tensor that is made now; one that is made for more serves for less."""
    return 0 if torch.is_inference_mode_enabled() else 1 + torch.is_grad_enabled()


def _joined(site: Site, adapted: Tensor) -> Tensor:
    """The weight of a site from its adapted parts (parts, rows, columns) and, between them, rows of the base."""
    base, end = site.base, 0
    if len(adapted) * adapted.shape[1] == base.shape[0]:  # all of its rows
        return adapted.flatten(0, 1)
    pieces: list[Tensor] = []
    for slot, part in zip(site.slots, adapted, strict=True):
        if slot.start > end:
            pieces.append(base[end : slot.start].to(adapted.dtype))
        pieces.append(part)
        end = slot.stop
    if end < base.shape[0]:
        pieces.append(base[end:].to(adapted.dtype))
    return torch.cat(pieces)
