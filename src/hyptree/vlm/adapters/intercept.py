"""How a layer comes to use another weight: its class gets a property, and its parameters stay where they are.

The base weight keeps its name and its place in ``module._parameters``, so state dicts, checkpoints and ``.to()`` see
the model that they know. Reading ``layer.weight`` goes through the property.
"""

from __future__ import annotations

import sys
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import UserError

MARK = "_hyptree_sources"
METHODS = ("forward", "encode_text")
_WRITERS = {"merge", "unmerge", "_restore_weights"}
"""Functions of peft that read a weight to write it back."""


def intercept(module: nn.Module, name: str, source: Any) -> None:
    """From now on something else stands at ``module.name``.

    A weight: ``source()`` instead. ``forward``: run within ``source()``. ``encode_text``: what ``source`` makes of the
    embeddings before they are normalised.
    """
    module.__dict__.setdefault(MARK, {})[name] = source
    module.__class__ = _class_with(_original(module), tuple(sorted(module.__dict__[MARK])))


def release(module: nn.Module, name: str) -> None:
    """Undo ``intercept``; the class is the original one when nothing else is intercepted."""
    sources = module.__dict__[MARK]
    del sources[name]
    module.__class__ = _class_with(_original(module), tuple(sorted(sources)))
    if not sources:
        del module.__dict__[MARK]


def _original(module: nn.Module) -> Any:
    return getattr(type(module), "_hyptree_original", type(module))


@cache
def _class_with(original: Any, names: tuple[str, ...]) -> Any:
    if not names:
        return original
    weights = [name for name in names if name not in METHODS]
    members: dict[str, Any] = {name: property(_getter(name)) for name in weights}
    # A class that no module holds is made again by whoever copies or unpickles.
    members["__reduce_ex__"] = lambda self, protocol: (_instance, (original, names), self.__getstate__())
    if weights:
        members["register_parameter"] = _register_parameter(original, weights)
    if "forward" in names:
        members["forward"] = _forward(original)
    if "encode_text" in names:
        members["encode_text"] = _encode_text(original)
    return type(original.__name__, (original,), {**members, "_hyptree_original": original, "__module__": __name__})


def _instance(original: Any, names: tuple[str, ...]) -> nn.Module:
    cls = _class_with(original, names)
    return cls.__new__(cls)


def _getter(name: str) -> Any:
    def weight(self: nn.Module) -> Tensor | None:
        base = self._parameters[name]
        if base is None or base.is_meta:  # offloaded: there is nothing to compute with
            return base
        if not torch.compiler.is_compiling():
            # Two libraries read a layer's weight to write it back: what is computed must not become the base.
            caller = sys._getframe(1)
            package, verb = caller.f_globals.get("__name__", "").split(".")[0], caller.f_code.co_name
            if package == "accelerate":
                return base
            if package == "peft" and (verb in _WRITERS or verb.endswith("_init")):
                raise UserError(
                    f"peft's {verb} would write to a {name} that an adapter of hyptree computes, and be lost: use "
                    "handle.merge_and_unload() before it, or put the two on different layers"
                )
        try:
            return self.__dict__[MARK][name]()
        except AttributeError as error:  # torch would look no further and silently give the base weight
            raise RuntimeError(f"the adapter of {name} failed: {error}") from error

    return weight


def _register_parameter(original: Any, weights: list[str]) -> Any:
    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if name in weights and type(param) is not nn.Parameter:
            raise UserError(
                f"{name} has an adapter of hyptree and cannot become a {type(param).__name__}: quantise the model "
                "after handle.merge_and_unload()"
            )
        original.register_parameter(self, name, param)

    return register_parameter


def _forward(original: Any) -> Any:
    @wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        source = self.__dict__.get(MARK, {}).get("forward")  # None where a library called the method after release
        if source is None or torch.compiler.is_compiling():
            return original.forward(self, *args, **options)
        with source():
            return original.forward(self, *args, **options)

    return forward


def _encode_text(original: Any) -> Any:
    def encode_text(self: nn.Module, text: Any, normalize: bool = False, *args: Any, **options: Any) -> Tensor:
        features = self.__dict__[MARK]["encode_text"](original.encode_text(self, text, False, *args, **options))
        return F.normalize(features, dim=-1) if normalize else features

    return encode_text
