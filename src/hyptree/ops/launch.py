"""Launches of a kernel without asking Triton every time which of its compiled forms is meant.

Triton answers that in Python, argument by argument, which takes the host longer than a kernel over a few thousand rows
runs. Here a key of a few numbers finds what the first launch compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

ALIGNED = 16
"""Bytes, and the divisor of numbers, that Triton compiles a form of its own for."""

_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}
"""The compiled form, its last arguments, and the kernel, whose number in the key stays its own as long as it lives."""


def launch(
    kernel: Any, grid: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int], settings: Mapping[str, Any]
) -> None:
    """``kernel[grid](*tensors, *numbers, **settings)``.

    Args:
        tensors: on one device, the kernel's first parameters. numbers: integers, the parameters after them.
        settings: the kernel's constants, all the parameters that are left, and options such as ``num_warps``.
    """
    # by its number: a kernel's own hash is a lock and a hash of its source
    key = [id(kernel), tensors[0].device.index, *settings.values()]
    is_aligned = hasattr(kernel, "device_caches")
    for x in tensors:
        key.append(x.dtype)
        if x.data_ptr() % ALIGNED:
            is_aligned = False
    for number in numbers:  # Triton compiles one, multiples of 16, other numbers, and those beyond 32 bits apart
        key.append((number == 1) + 2 * (number % ALIGNED == 0) + 4 * (number >= 2**31))
    if not is_aligned:  # a form for aligned pointers must not get others: left to Triton, as is its interpreter
        kernel[tuple(grid)](*tensors, *numbers, **settings)
        return
    cached = _COMPILED.get(place := tuple(key))
    if cached is None:
        compiled = kernel[tuple(grid)](*tensors, *numbers, **settings)
        constants = kernel.arg_names[len(tensors) + len(numbers) :]
        _COMPILED[place] = compiled, tuple(settings[name] for name in constants), kernel
        return
    compiled, rest, _ = cached
    compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *rest)
