"""Curvature as a value or as a parameter: ``c > 0``, the sectional curvature is ``-c`` (``+c`` on a sphere)."""

import math
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hyptree.geometry.core.registry import check_curvature

# Beside the modules and not in them: neither belongs into a copy or a pickle.
_SAVED: "weakref.WeakKeyDictionary[Curvature, weakref.ref[dict[str, Any]]]" = weakref.WeakKeyDictionary()
_LOADED: "weakref.WeakKeyDictionary[Curvature, tuple[list[str], list[str] | None]]" = weakref.WeakKeyDictionary()
"""The missing keys of a call of ``load_state_dict``, and our names among them; None once the call has one of them."""


def bounded_curvature(log_c: Tensor, low: float, high: float) -> Tensor:
    """``c`` between two bounds of a logarithm that a module learns under a name of its own; no gradient beyond them."""
    return log_c.clamp(math.log(low), math.log(high)).exp()


class Curvature(nn.Module):
    """A positive number, or a tensor of them, that may be learned. Calling it gives ``c``.

    The raw parameter is ``log c`` (float32, no weight decay in :func:`hyptree.optim.param_groups`), or, with bounds, a
    sigmoid between their logarithms. The value you pass is the value used: ``Curvature(1.0)() == 1.0``.

    Layers that share a curvature (or the manifold that holds it) have one parameter, and a ``state_dict`` holds it
    once, under the first of its names, the one that ``named_parameters`` gives: safetensors refuses tensors that share
    memory. Loading fills it from any of its names, and misses it only if all are absent.

    Args:
        init: positive float, or tensor of shape such as (heads, 1, 1).
        learnable: make it a parameter; otherwise a float stays a float (nothing moves between devices).
        min: lower bound of a learned curvature. max: upper bound.
    """

    CURVATURE_PARAMETERS: ClassVar = ("raw",)

    def __init__(
        self, init: float | Tensor = 1.0, learnable: bool = False, min: float | None = None, max: float | None = None
    ):
        super().__init__()
        check_curvature(init)
        if isinstance(init, Tensor):
            values, device = init.detach().double(), init.device
        else:  # on the CPU even inside `torch.device("meta")`: what cannot be read cannot be kept
            values, device = torch.tensor(float(init), dtype=torch.float64, device="cpu"), torch.get_default_device()
        can_read = not values.is_meta
        if can_read and not bool((values > 0).all() & torch.isfinite(values).all()):
            raise ValueError(f"curvature: c must be positive and finite (the sectional curvature is -c), got {init}")
        if (min is None) != (max is None):
            raise ValueError(
                "curvature: give both bounds or none; to leave one side open use a very small or large one"
            )
        if min is not None and max is not None:
            is_inside = not can_read or bool(((values > min) & (values < max)).all())
            if not (is_inside and 0 < min < max):
                raise ValueError(f"curvature: expected 0 < min < c < max, got min={min}, c={init}, max={max}")
        self.learnable, self.min, self.max = learnable, min, max
        self.shape = values.shape
        if learnable:  # a single number as (1,): fully_shard takes no parameter without an axis
            self._start = self._inverse(values).float().reshape(values.shape or (1,))
            self.raw = nn.Parameter(self._start.to(device, copy=True))
        elif isinstance(init, Tensor):
            self.register_buffer("value", init.detach().clone().float())
        else:
            self.value = float(init)

    def _inverse(self, c: Tensor) -> Tensor:
        if self.min is None or self.max is None:
            return c.log()
        low, high = math.log(self.min), math.log(self.max)
        return torch.logit((c.log() - low) / (high - low))

    def reset_parameters(self) -> None:
        """Gives a learned curvature its first value again: after ``to_empty`` of a model built on the meta device."""
        if self.learnable:
            with torch.no_grad():
                self.raw.copy_(self._start)

    def forward(self) -> Tensor | float:
        if not self.learnable:
            return self.value
        raw: Tensor = self.raw
        if hasattr(raw, "full_tensor"):  # sharded, and asked for outside the forward pass: all processes ask together
            raw = raw.full_tensor()
        if self.min is None or self.max is None:
            return raw.exp().reshape(self.shape)
        low, high = math.log(self.min), math.log(self.max)
        return (low + (high - low) * raw.sigmoid()).exp().reshape(self.shape)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        saved = _SAVED.get(self)
        if saved is not None and saved() is destination:
            return  # under another name already
        try:
            _SAVED[self] = weakref.ref(destination)
        except TypeError:  # a plain dict of the caller's: with every name, as torch does
            _SAVED.pop(self, None)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        before = len(missing_keys)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        call, absent = _LOADED.get(self, (None, None))
        absent = absent if call is missing_keys else []
        own = missing_keys[before:]
        is_missing = absent is not None and bool(own)  # under each of its names so far
        if not is_missing:
            for key in (absent or []) + own:
                missing_keys.remove(key)
        _LOADED[self] = missing_keys, (absent or []) + own if is_missing else None

    def extra_repr(self) -> str:
        if self.learnable and hasattr(self.raw, "full_tensor"):
            return "learnable, sharded"  # one process must not wait for the others to print itself
        c = self()
        if isinstance(c, Tensor) and (c.numel() != 1 or c.is_meta):
            shown = f"{tuple(c.shape)}"
        else:
            shown = f"{c.item() if isinstance(c, Tensor) else c:.4g}"
        return f"c={shown}" + (", learnable" if self.learnable else "")


def curvature_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The raw curvature parameters of a model, for a learning rate or a clipping of their own.

    A module that learns one under a name of its own says so: ``CURVATURE_PARAMETERS = ("log_c",)``.
    """
    for module in model.modules():
        for name in getattr(module, "CURVATURE_PARAMETERS", ()):
            if (parameter := module._parameters.get(name)) is not None:
                yield parameter
