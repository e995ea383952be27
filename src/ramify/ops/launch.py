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

_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any, grid: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int], settings: Mapping[str, Any]
) -> None:
    """``kernel[grid](*tensors, *numbers, **settings)``.

    Args:
        tensors: on one device, the kernel's first parameters. numbers: integers, the parameters after them.
        settings: the kernel's constants, all the parameters that are left, and options such as ``num_warps``.
    """
    # A form for aligned pointers must not get others: rare, and left to Triton, as is its interpreter.
    if not hasattr(kernel, "device_caches") or any(x.data_ptr() % ALIGNED for x in tensors):
        kernel[tuple(grid)](*tensors, *numbers, **settings)
        return
    key = (
        kernel, tensors[0].device.index, *[x.dtype for x in tensors], *[_form(x) for x in numbers], *settings.values(),
    )  # fmt: skip
    found = _COMPILED.get(key)
    if found is None:
        compiled = kernel[tuple(grid)](*tensors, *numbers, **settings)
        constants = kernel.arg_names[len(tensors) + len(numbers) :]
        _COMPILED[key] = compiled, tuple(settings[name] for name in constants)
        return
    compiled, rest = found
    compiled[(*grid, 1, 1)[:3]](*tensors, *numbers, *rest)


def _form(number: int) -> int:
    """Numbers that Triton compiles alike have the same form: one, multiples of 16, others, and those beyond 32 bits."""
    return (number == 1) + 2 * (number % ALIGNED == 0) + 4 * (number >= 2**31)
