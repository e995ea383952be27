"""How a layer comes to use another weight: its class gets a property, and its parameters stay where they are.

The base weight keeps its name and its place in ``module._parameters``, so state dicts, checkpoints and ``.to()`` see
the model that they know. Reading ``layer.weight`` goes through the property.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

MARK = "_hyptree_weights"
_OUTPUT = "_hyptree_text_output"


def intercept(module: nn.Module, attribute: str, source: Any) -> None:
    """From now on ``module.attribute`` is ``source.read()``."""
    sources = module.__dict__.setdefault(MARK, {})
    sources[attribute] = source
    module.__class__ = _class_with(_original(module), tuple(sorted(sources)), _OUTPUT in module.__dict__)


def release(module: nn.Module, attribute: str) -> None:
    """Undo ``intercept``; the class is the original one when nothing else is intercepted."""
    sources = module.__dict__[MARK]
    del sources[attribute]
    module.__class__ = _class_with(_original(module), tuple(sorted(sources)), _OUTPUT in module.__dict__)
    if not sources:
        del module.__dict__[MARK]


def intercept_text(model: nn.Module, transform: Any) -> None:
    """From now on ``model.encode_text`` gives what ``transform`` makes of the embeddings before they are normalised."""
    model.__dict__[_OUTPUT] = transform
    model.__class__ = _class_with(_original(model), tuple(sorted(model.__dict__.get(MARK, {}))), True)


def release_text(model: nn.Module) -> None:
    """Undo ``intercept_text``."""
    del model.__dict__[_OUTPUT]
    model.__class__ = _class_with(_original(model), tuple(sorted(model.__dict__.get(MARK, {}))), False)


def _original(module: nn.Module) -> Any:
    return getattr(type(module), "_hyptree_original", type(module))


@cache
def _class_with(original: Any, attributes: tuple[str, ...], text: bool) -> Any:
    if not attributes and not text:
        return original
    members: dict[str, Any] = {name: property(_getter(name)) for name in attributes}
    if text:
        members["encode_text"] = _encode_text(original)
    return type(original.__name__, (original,), {**members, "_hyptree_original": original, "__module__": __name__})


def _getter(name: str) -> Any:
    def weight(self: nn.Module) -> Tensor:
        try:
            return self.__dict__[MARK][name].read()
        except AttributeError as error:  # torch would look no further and silently give the base weight
            raise RuntimeError(f"the adapter of {name} failed: {error}") from error

    return weight


def _encode_text(original: Any) -> Any:
    def encode_text(self: nn.Module, text: Any, normalize: bool = False, *args: Any, **options: Any) -> Tensor:
        features = self.__dict__[_OUTPUT](original.encode_text(self, text, False, *args, **options))
        return F.normalize(features, dim=-1) if normalize else features

    return encode_text
