"""The adapters that a model carries: a child module of the model, which holds their parameters and their state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyptree.errors import UserError, require_known
from hyptree.vlm.adapters.adapter import AdapterConfig
from hyptree.vlm.adapters.base import CHILD, own_weight
from hyptree.vlm.adapters.embedding import AdaptedEmbedding, embedding_points
from hyptree.vlm.adapters.group import AdaptedGroup, one_pass
from hyptree.vlm.adapters.intercept import intercept, release
from hyptree.vlm.adapters.structure import Site, attachment_points, enclosing


class AdapterSet(nn.Module):
    """One named adapter: its groups of weights, or its embeddings."""

    def __init__(self, model: nn.Module, config: AdapterConfig):
        super().__init__()
        self.config = config
        self.groups = nn.ModuleDict()
        self.embeddings = nn.ModuleDict()
        self.group_of: dict[str, tuple[str, Site]] = {}
        self.around: dict[str, str] = {}  # by group: the module whose forward pass runs all of its layers
        if config.where == "embedding":
            for point in embedding_points(model, config.towers):
                self.embeddings[point.tower] = AdaptedEmbedding(point, config)
            return
        by_kind: dict[tuple[Any, ...], list[Site]] = {}
        for site in attachment_points(model, config.targets, config.towers, config.layers):
            by_kind.setdefault((site.tower, site.slot_shape, site.base.dtype, site.device), []).append(site)
        for (tower, (rows, columns), *_), sites in by_kind.items():
            name = f"{tower}_{rows}x{columns}"
            while name in self.groups:
                name += "_"
            self.groups[name] = AdaptedGroup(sites, config)
            self.around[name] = enclosing(model, sites)
            self.group_of |= {site.name: (name, site) for site in sites}

    def all_groups(self) -> Iterator[AdaptedGroup]:
        """The groups of weights."""
        for group in self.groups.values():
            assert isinstance(group, AdaptedGroup)
            yield group

    def all_embeddings(self) -> Iterator[AdaptedEmbedding]:
        """The adapters of embeddings."""
        for embedding in self.embeddings.values():
            assert isinstance(embedding, AdaptedEmbedding)
            yield embedding

    def adapted_shapes(self) -> list[tuple[str, list[int]]]:
        """Name and shape of every adapted weight, sorted: what a saved adapter is compared by."""
        shapes = [(site.name, list(site.base.shape)) for group in self.all_groups() for site in group.sites]
        shapes += [(f"{e.point.tower}:embedding", [e.point.width]) for e in self.all_embeddings()]
        return sorted(shapes)

    def weight(self, name: str) -> Tensor | None:
        """The adapted weight of this name; None where this adapter leaves it alone."""
        place = self.group_of.get(name)
        return place and self.groups[place[0]].weight(place[1])  # type: ignore[operator]


class AdapterContainer(nn.Module):
    """All adapters of a model; one is ``active``, or none; one may be ``merged`` into the weights."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.sets = nn.ModuleDict()
        self.active: str | None = None
        self.merged: str | None = None
        self.enabled = True  # False within disable_adapter()
        self.guard: RemovableHandle | None = None
        self.was_trained = {name: p.requires_grad for name, p in model.named_parameters()}
        self._sources: dict[str, Site] = {}
        self._outputs: dict[str, RemovableHandle | None] = {}
        self._passes: set[str] = set()
        self._before_merge: list[tuple[nn.Module, str, Tensor]] = []
        self.register_load_state_dict_post_hook(_adapters_may_be_missing)

    def __getitem__(self, name: str) -> AdapterSet:
        require_known("the model has no adapter {!r}", [name], self.sets)
        adapter = self.sets[name]
        assert isinstance(adapter, AdapterSet)
        return adapter

    def require_unmerged(self, then: str, name: str | None = None) -> None:
        """Raise where an adapter, other than the one of this name, is merged into the weights."""
        if self.merged not in (None, name):
            raise UserError(f"adapter {self.merged!r} is merged into the model; call unmerge() {then}")

    def current(self) -> AdapterSet | None:
        """The adapter that forward passes use."""
        if not self.enabled or self.merged is not None or self.active is None:
            return None
        return self.sets[self.active]  # type: ignore[return-value]

    # What stands in the place of a weight, a forward pass and an output, as partials that are copied with the model.
    def _weight(self, site: Site) -> Tensor:
        """The weight that a layer uses now: the active adapter's, or else the base."""
        current = self.current()
        adapted = None if current is None else current.weight(site.name)
        return site.base if adapted is None else adapted

    def _pass(self, around: str) -> AbstractContextManager[None]:
        """What a module's forward pass runs in: the active adapter's weights for the layers inside."""
        current = self.current()
        names = [] if current is None else [group for group, name in current.around.items() if name == around]
        return one_pass([current.groups[group] for group in names])  # type: ignore[union-attr, misc]

    def _output(self, tower: str, *args: Any) -> Any:
        """The active adapter's view of a tower's embeddings: the last of the arguments, as in a forward hook."""
        output, current = args[-1], self.current()
        if current is None or tower not in current.embeddings:
            return output
        adapter = current.embeddings[tower]
        return (adapter(output[0]), *output[1:]) if isinstance(output, tuple) else adapter(output)

    def add(self, model: nn.Module, name: str, new: AdapterSet) -> None:
        """Put an adapter on the model."""
        self.sets[name] = new
        for group in new.all_groups():
            for site in group.sites:
                if site.name not in self._sources:
                    self._sources[site.name] = site
                    intercept(site.module, site.attribute, partial(self._weight, site))
        for around in set(new.around.values()) - self._passes:
            self._passes.add(around)
            intercept(model.get_submodule(around), "forward", partial(self._pass, around))
        for embedding in new.all_embeddings():
            point = embedding.point
            if point.tower not in self._outputs:
                output = partial(self._output, point.tower)
                if point.name:
                    self._outputs[point.tower] = point.module.register_forward_hook(output)
                else:
                    intercept(model, "encode_text", output)
                    self._outputs[point.tower] = None

    def remove(self, model: nn.Module, name: str) -> None:
        """Take an adapter away; layers that no other one uses become what they were."""
        del self.sets[name]
        needed = {weight for other in self.sets for weight in self[other].group_of}
        for weight in [weight for weight in self._sources if weight not in needed]:
            site = self._sources.pop(weight)
            release(site.module, site.attribute)
        for around in self._passes - {module for other in self.sets for module in self[other].around.values()}:
            self._passes.remove(around)
            release(model.get_submodule(around), "forward")
        towers = {tower for other in self.sets for tower in self[other].embeddings}
        for tower in [tower for tower in self._outputs if tower not in towers]:
            hook = self._outputs.pop(tower)
            if hook is None:
                release(model, "encode_text")
            else:
                hook.remove()
        if self.active == name:
            self.active = None

    @torch.no_grad()
    def merge(self, name: str) -> None:
        """Write the adapted weights of an adapter into the model; the base is kept to come back to."""
        chosen = self[name]
        bases = [site.base for _, site in chosen.group_of.values()]
        bases += [e.point.weight for e in chosen.all_embeddings() if e.point.projection is not None]
        if any(base.is_meta for base in bases):
            raise UserError("an adapter cannot be merged into offloaded weights; bring the model into memory first")
        written: list[tuple[nn.Module, str, Tensor]] = []
        for group in chosen.all_groups():
            written += [(s.module, s.attribute, w) for s, w in zip(group.sites, group.merged(), strict=True)]
        for embedding in chosen.all_embeddings():
            weights = embedding.merged()
            assert embedding.point.projection is not None
            written += [(embedding.point.projection[0], attribute, w) for attribute, w in weights.items()]
        self._before_merge = [(m, attribute, own_weight(m, attribute).clone()) for m, attribute, _ in written]
        for module, attribute, weight in written:
            own_weight(module, attribute).copy_(weight)
        self.merged = name

    @torch.no_grad()
    def unmerge(self) -> None:
        """Write the base weights back, bit for bit."""
        for module, attribute, weight in self._before_merge:
            own_weight(module, attribute).copy_(weight)
        self._before_merge, self.merged = [], None


def container_of(model: nn.Module) -> AdapterContainer | None:
    """What holds the adapters of a model; None where it has none."""
    child = model._modules.get(CHILD)
    return child if isinstance(child, AdapterContainer) else None


def adapter_tower(name: str) -> str | None:
    """text or image, for the name of an adapter's parameter in its model; None for a parameter of the model itself."""
    parts = name.split(".")  # hyptree_adapters.sets.NAME.groups.text_512x512... or ....embeddings.text...
    return parts[4].split("_")[0] if parts[0] == CHILD else None


def adapter_state(model: nn.Module) -> str:
    """Says which adapter forward passes of a model use, and how it is configured; empty where they use the base."""
    container = container_of(model)
    current = container and container.current()
    return f"{container.active} {current.config}" if container and current else ""


def _adapters_may_be_missing(container: nn.Module, keys: Any) -> None:
    """A base checkpoint holds no adapter: then it is loaded, and the adapters stay as they are."""
    own = {f"{CHILD}.{name}" for name in container.state_dict()}
    missing = {key for key in keys.missing_keys if any(key.endswith(name) for name in own)}
    if own and len(missing) == len(own):
        keys.missing_keys[:] = [key for key in keys.missing_keys if key not in missing]
