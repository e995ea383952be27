"""Putting adapters on a model: ``attach``, and the handle it gives, with PEFT's verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.vlm.adapters.adapter import AdapterConfig
from hyptree.vlm.adapters.container import CHILD, AdapterContainer, AdapterSet, container_of
from hyptree.vlm.adapters.embedding import AdaptedEmbedding
from hyptree.vlm.adapters.group import AdaptedGroup


def attach(model: Any, config: AdapterConfig, name: str = "default") -> AdapterHandle:
    """Put a fresh adapter on a model, in place, make it the active one and freeze everything else.

    Layers are found by their structure (``hyptree.vlm.adapters.structure``). The model keeps its classes, its forward
    pass and the keys of its state dict; the adapter's parameters are added below ``hyptree_adapters``, so that
    optimizers, DDP and ``.to()`` see them. A base checkpoint can be loaded before and after.

    Args:
        model: an ``Encoder``, or a bare model of open_clip or transformers.
        config: which adapter, and where: ``ScaleAdapterConfig``, ``LoraConfig``, ``DiagonalConfig``,
            ``OrthogonalConfig``, ``FullConfig``.
        name: of the adapter; a model carries several, of which one is active.

    Raises:
        UserError: nothing in the model fits, or the name is taken.
    """
    module = bare_model(model)
    if not isinstance(config, AdapterConfig):
        raise UserError(f"config must be an adapter's configuration such as ScaleAdapterConfig(), got {config!r}")
    return put_on(model, name, lambda: AdapterSet(module, config))


def put_on(model: Any, name: str, build: Callable[[], AdapterSet]) -> AdapterHandle:
    """The same with the adapter that ``build`` makes; where that raises, nothing has changed."""
    module = bare_model(model)
    if not name or "." in name or hasattr(nn.ModuleDict, name):  # it becomes the name of a child module
        raise UserError(f"an adapter's name must be a word without a dot that torch does not use, got {name!r}")
    container = container_of(module)
    if container is not None:
        if name in container.sets:
            raise UserError(f"the model has an adapter {name!r} already; give another name, or delete it first")
        container.require_unmerged("before attaching another")
    new = build()
    if container is None:
        container = AdapterContainer(module)
        module.requires_grad_(False)
        module.add_module(CHILD, container)
        container.guard = module.register_load_state_dict_pre_hook(_refuse_while_merged)
    container.add(module, name, new)
    return AdapterHandle(module, name, None if model is module else model).set_adapter(name)


def handle_of(model: Any, name: str | None = None) -> AdapterHandle:
    """The handle of a model that carries an adapter, such as a copy: of the named adapter, or of the active one."""
    module = bare_model(model)
    container = container_of(module)
    if container is None:
        raise UserError(f"{type(module).__name__} carries no adapter; use attach(model, config)")
    name = name or container.active or next(iter(container.sets))
    container[name]  # raises where there is none
    return AdapterHandle(module, name, None if model is module else model)


def bare_model(model: Any) -> nn.Module:
    """The module of an ``Encoder``, or the module itself."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        raise UserError(f"expected a model or an encoder of load_encoder, got {type(model).__name__}")
    return module


def _refuse_while_merged(module: nn.Module, *args: Any) -> None:
    if (container := container_of(module)) is not None and container.merged is not None:
        raise UserError(
            f"adapter {container.merged!r} is merged into the weights that would be overwritten; call unmerge() first, "
            "or merge_and_unload() to be done with it"
        )


class AdapterHandle:
    """What ``attach`` returns: the adapter ``name`` of the bare ``model``, with the ``encoder`` it was given, if any.

    A copy of the model carries copies of its adapters; ``handle_of(copy)`` gives their handle.
    """

    def __init__(self, model: nn.Module, name: str, encoder: Any = None):
        self.model, self.name, self.encoder = model, name, encoder

    def __repr__(self) -> str:
        if not self.is_attached:
            return f"AdapterHandle({type(self.model).__name__}, {self.name!r}, detached)"
        state = "merged" if self.merged else "active" if self.active == self.name else "inactive"
        method, count = self.config.method, self.num_parameters()
        return f"AdapterHandle({type(self.model).__name__}, {self.name!r}, {method}, {count:,} parameters, {state})"

    @property
    def is_attached(self) -> bool:
        """Whether the model still carries this adapter."""
        container = container_of(self.model)
        return container is not None and self.name in container.sets

    @property
    def _container(self) -> AdapterContainer:
        container = container_of(self.model)
        if container is None or self.name not in container.sets:
            raise UserError(f"adapter {self.name!r} is no longer attached; use attach(model, config)")
        return container

    @property
    def _set(self) -> AdapterSet:
        return self._container[self.name]

    @property
    def config(self) -> AdapterConfig:
        """What the adapter was made from."""
        return self._set.config

    # ------------------------------------------------------------------ parameters
    def parameters(self) -> Iterator[nn.Parameter]:
        """The trainable parameters of this adapter; give them to the optimizer."""
        return self._set.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with names."""
        return self._set.named_parameters()

    def num_parameters(self) -> int:
        """How many numbers the adapter trains."""
        return sum(parameter.numel() for parameter in self.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """The adapter's tensors alone."""
        return self._set.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the adapter's tensors, all of them."""
        self._set.load_state_dict(state)

    def print_trainable_parameters(self) -> None:
        """Prints how many parameters of the model are trained, as PEFT does."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in self.model.parameters())
        print(f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}")

    def describe(self) -> list[dict[str, Any]]:
        """One line per stack of adapted matrices: tower, shape, targets, layers, how many, parameters."""
        parts: list[AdaptedGroup | AdaptedEmbedding] = [*self._set.all_groups(), *self._set.all_embeddings()]
        return [
            {
                "tower": part.stack.tower,
                "shape": list(part.stack.shape),
                "targets": list(dict.fromkeys(part.stack.targets)),
                "layers": sorted(set(part.stack.layers)),
                "matrices": len(part.stack.names),
                "parameters": sum(p.numel() for p in part.parameters()),
            }
            for part in parts
        ]

    # ------------------------------------------------------------------ several adapters
    @property
    def adapters(self) -> list[str]:
        """Names of all adapters of the model."""
        return list(self._container.sets)

    @property
    def active(self) -> str | None:
        """Name of the adapter that forward passes use."""
        return self._container.active

    def set_adapter(self, name: str) -> AdapterHandle:
        """Make an adapter the active one and the only one that is trained; gives its handle."""
        container = self._container
        container[name]  # raises where there is none
        container.require_unmerged("before switching", name)
        for other in container.sets:
            container[other].requires_grad_(other == name)
        container.active = name
        return AdapterHandle(self.model, name, self.encoder)

    def delete_adapter(self, name: str) -> None:
        """Take an adapter away for good; with the last one the model is what it was before."""
        container = self._container
        container[name]
        if container.merged == name:
            container.unmerge()
        container.remove(self.model, name)
        if not container.sets:
            self._unload(container)
        elif container.active is None and container.merged is None:
            AdapterHandle(self.model, next(iter(container.sets))).set_adapter(next(iter(container.sets)))

    def detach(self) -> nn.Module:
        """Take this adapter away, without a trace in the weights; gives the model."""
        self.delete_adapter(self.name)
        return self.model

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Within, the model computes with its base weights."""
        container = self._container
        before, merged = container.enabled, container.merged
        if merged is not None:
            container.unmerge()
        container.enabled = False
        try:
            yield
        finally:
            container.enabled = before
            if merged is not None:
                container.merge(merged)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Within, forward passes use this adapter, whichever is the active one."""
        container = self._container
        container.require_unmerged("first", self.name)
        before, container.active = container.active, self.name
        try:
            yield
        finally:
            container.active = before

    # ------------------------------------------------------------------ into the weights
    @property
    def merged(self) -> bool:
        """Whether this adapter is merged into the weights now."""
        return self.is_attached and self._container.merged == self.name

    def merge(self) -> None:
        """Write the adapted weights into the model: it then costs what the bare model costs.

        Exact: they are the weights that passes without autocast have used. The base is kept for ``unmerge``.

        Raises:
            UserError: an adapter of embeddings with a cap, or without a projection to go into.
        """
        container = self._container
        container.require_unmerged("first", self.name)
        if container.merged is None:
            container.merge(self.name)

    def unmerge(self) -> None:
        """Write the base weights back, bit for bit."""
        if not self.merged:
            raise UserError(f"adapter {self.name!r} is not merged; call merge() first")
        self._container.unmerge()

    def merge_and_unload(self) -> nn.Module:
        """Merge this adapter, drop all of them, and give the bare model, of its own classes, with the new weights."""
        self.merge()
        container = self._container
        container._before_merge, container.merged = [], None
        for name in list(container.sets):
            container.remove(self.model, name)
        self._unload(container)
        return self.model

    def _unload(self, container: AdapterContainer) -> None:
        del self.model._modules[CHILD]
        if container.guard is not None:
            container.guard.remove()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(container.was_trained.get(name, True))

    # ------------------------------------------------------------------ files
    def save(self, folder: Path | str, dtype: torch.dtype | None = None) -> Path:
        """Write ``adapter.safetensors`` and ``adapter.json``; with ``torch.float16`` they take half the size."""
        from hyptree.vlm.adapters.store import save_adapter

        return save_adapter(self, folder, dtype)

    save_pretrained = save

    @classmethod
    def load(cls, model: Any, folder: Path | str, name: str | None = None) -> AdapterHandle:
        """Attach what ``save`` wrote to a model as ``attach`` takes it; by default under the name it was saved with."""
        from hyptree.vlm.adapters.store import load_adapter

        return load_adapter(model, folder, name)

    # ------------------------------------------------------------------ radius
    def radius_report(self, texts: Sequence[str] | Tensor | None = None, images: Any = None) -> dict[str, Any]:
        """Norms and hyperbolic radii (2 |z|, for every curvature) of embeddings, before and after this adapter.

        Texts and images are strings and pictures if ``attach`` was given an ``Encoder``, else what the bare one takes.
        For ``text`` and ``image`` there is what ``hyptree.vlm.radii.radius_summary`` gives for the base (``before``)
        and the adapted model (``after``). ``hyptree.vlm.radii.radius_table`` makes lines for people of it.
        """
        from hyptree.vlm.radii import radius_summary

        if texts is None and images is None:
            raise UserError("a radius report needs texts, images or both")
        report: dict[str, Any] = {"adapter": self.name, "note": "radius = 2 * norm, for every curvature"}
        for kind, inputs in (("text", texts), ("image", images)):
            if inputs is None:
                continue
            report[kind] = {}
            for when in ("before", "after"):
                with torch.no_grad(), self.disable_adapter() if when == "before" else self._in_use():
                    report[kind][when] = radius_summary(self._encode(kind, inputs))
        return report

    def _encode(self, kind: str, inputs: Any) -> Tensor:
        from hyptree.vlm.encoders.transformers import features_of

        if self.encoder is not None:
            return getattr(self.encoder, "encode_text" if kind == "text" else "encode_images")(inputs)
        bare = type(self.model).__name__
        if not isinstance(inputs, Tensor):
            raise UserError(
                f"the handle knows the bare {bare} only, which has no tokenizer: give prepared {kind} tensors, or "
                "attach to load_encoder(...) for strings and pictures"
            )
        names = (f"encode_{kind}", f"get_{kind}_features")
        method = next((getattr(self.model, name) for name in names if hasattr(self.model, name)), None)
        if method is None:
            raise UserError(f"{bare} has neither {names[0]} nor {names[1]}; attach to load_encoder(...)")
        return features_of(method(inputs))
