"""Putting adapters on a model: ``attach``, for encoders of ``load_encoder`` and for bare models of both libraries."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyptree.errors import UserError
from hyptree.vlm.adapters.adapter import AdapterConfig
from hyptree.vlm.adapters.container import CHILD, AdapterContainer, AdapterSet, container_of
from hyptree.vlm.adapters.handle import AdapterHandle


def attach(model: Any, config: AdapterConfig, name: str = "default") -> AdapterHandle:
    """Put a fresh adapter on a model, in place, make it the active one and freeze everything else.

    Layers are found by their structure (``hyptree.vlm.adapters.structure``). The model keeps its classes, its forward
    pass and the keys of its state dict; the adapter's parameters are added below ``hyptree_adapters``, so that
    optimizers, DDP and ``.to()`` see them. A base checkpoint can be loaded before and after.

    Args:
        model: an ``Encoder``, or a bare model.
        config: which adapter, and where: ``ScaleAdapterConfig``, ``LoraConfig``, ``DiagonalConfig``,
            ``OrthogonalConfig``, ``FullConfig``.
        name: of the adapter; a model carries several, of which one is active.

    Raises:
        UserError: nothing in the model fits, or the name is taken.
    """
    module = bare_model(model)
    if not isinstance(config, AdapterConfig):
        raise UserError(f"config must be an adapter's configuration such as ScaleAdapterConfig(), got {config!r}")
    if not name or "." in name or hasattr(nn.ModuleDict, name):  # it becomes the name of a child module
        raise UserError(f"an adapter's name must be a word without a dot that torch does not use, got {name!r}")
    container = container_of(module)
    if container is not None and name in container.sets:
        raise UserError(f"the model has an adapter {name!r} already; give another name, or delete it first")
    if container is not None and container.merged is not None:
        raise UserError(
            f"adapter {container.merged!r} is merged into the model; call unmerge() before attaching another"
        )
    new = AdapterSet(module, config)  # may raise, and then nothing has changed
    if container is None:
        container = AdapterContainer(module)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        module.add_module(CHILD, container)
        container.guard = module.register_load_state_dict_pre_hook(_refuse_while_merged)
    container.add(module, name, new)
    handle = AdapterHandle(module, name, None if model is module else model)
    handle.set_adapter(name)
    return handle


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
    container = container_of(module)
    if container is not None and container.merged is not None:
        raise UserError(
            f"adapter {container.merged!r} is merged into the weights that would be overwritten; call unmerge() first, "
            "or merge_and_unload() to be done with it"
        )
