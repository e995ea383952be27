"""The adapters that ``hyptree.vlm.attach`` knows, one file each; ``adapter.py`` says what an adapter is.

A new one is a configuration with ``method`` and ``build``, a ``StackAdapter``, and a line in ``METHODS``.
"""

from __future__ import annotations

from hyptree.vlm.adapters.adapter import AdapterConfig
from hyptree.vlm.adapters.kinds.diagonal import DiagonalConfig
from hyptree.vlm.adapters.kinds.full import FullConfig
from hyptree.vlm.adapters.kinds.lora import LoraConfig
from hyptree.vlm.adapters.kinds.orthogonal import OrthogonalConfig
from hyptree.vlm.adapters.kinds.scale import ScaleAdapterConfig

METHODS: dict[str, type[AdapterConfig]] = {
    config.method: config for config in (ScaleAdapterConfig, LoraConfig, DiagonalConfig, OrthogonalConfig, FullConfig)
}
"""Configurations by the name that files and commands call them."""

__all__ = [
    "METHODS",
    "AdapterConfig",
    "DiagonalConfig",
    "FullConfig",
    "LoraConfig",
    "OrthogonalConfig",
    "ScaleAdapterConfig",
]
