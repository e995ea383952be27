"""The adapters that ``hyptree.vlm.attach`` knows, in ``kinds``; ``adapter.py`` says what an adapter is.

A new one is a configuration with ``method`` and ``build``, a ``StackAdapter``, and a line in ``METHODS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hyptree.errors import require_known
from hyptree.vlm.adapters.adapter import AdapterConfig
from hyptree.vlm.adapters.kinds.lora import FullConfig, LoraConfig
from hyptree.vlm.adapters.kinds.orthogonal import OrthogonalConfig
from hyptree.vlm.adapters.kinds.scale import DiagonalConfig, ScaleAdapterConfig

METHODS: dict[str, type[AdapterConfig]] = {
    config.method: config for config in (ScaleAdapterConfig, LoraConfig, DiagonalConfig, OrthogonalConfig, FullConfig)
}
"""Configurations by the name that files and commands call them."""


def adapter_config(method: str, settings: Mapping[str, Any], where: str = "") -> AdapterConfig:
    """The configuration of a method by its name, from settings as JSON and YAML (``where``) hold them."""
    require_known("unknown adapter method {!r}", [method], METHODS)
    cls = METHODS[method]
    require_known(f"{where or cls.__name__} has no setting {{!r}}", settings, [field.name for field in fields(cls)])
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})


__all__ = [
    "METHODS",
    "AdapterConfig",
    "DiagonalConfig",
    "FullConfig",
    "LoraConfig",
    "OrthogonalConfig",
    "ScaleAdapterConfig",
    "adapter_config",
]
