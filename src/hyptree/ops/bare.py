"""Whether a fused operation may read the weight of a layer in place of calling the layer.

Anything that stands at a layer has to run: a hook, a parametrisation, an adapter around it, quantised, sharded or
offloaded weights. So there is one question, asked by every fused operation in the same way, and the answer is yes for
a bare layer alone.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

Layer = TypeVar("Layer", bound=nn.Module)

_READABLE: set[type[nn.Module]] = {nn.Linear}
_logger = logging.getLogger(__name__)
_reported: set[tuple[str, str]] = set()


def readable(kind: type[Layer]) -> type[Layer]:
    """Mark a class of layers as one whose ``forward`` follows from its parameters: a fused operation knows it."""
    _READABLE.add(kind)
    return kind


def is_bare(layer: nn.Module, kind: type[nn.Module] | None = None) -> bool:
    """Whether calling ``layer`` does nothing but its class's ``forward``, with plain tensors as parameters.

    False for subclasses (parametrised and wrapped layers are such), for layers with hooks of their own or under global
    ones, with a ``forward`` put on the object (as accelerate does for offloaded weights), and with parameters that are
    tensors of another class (quantised, sharded). With ``kind`` also for layers of any other class, for an operation
    that knows no other.
    """
    if (type(layer) not in _READABLE if kind is None else type(layer) is not kind) or not is_free(layer):
        return False
    return all(
        weight is None or type(weight) in (nn.Parameter, Tensor, FakeTensor) for weight in layer._parameters.values()
    )


def is_free(layer: nn.Module) -> bool:
    """Whether nothing stands around the ``forward`` of a layer: no hook, its own or global, and no ``forward`` of the
    object's own. Then a method of it may be called in place of the layer.
    """
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    return "forward" not in layer.__dict__ and (
        torch.compiler.is_compiling() or not torch_module._has_any_global_hook()
    )


def report_unfused(operation: str, layer: nn.Module) -> None:
    """Say, once for each operation and class, that ``layer`` is called by itself where a kernel would have read it."""
    key = operation, type(layer).__name__
    if torch.compiler.is_compiling() or key in _reported:
        return
    _reported.add(key)
    _logger.warning("%s: a %s with hooks, adapters or weights of another kind is called as it is, not fused", *key)
