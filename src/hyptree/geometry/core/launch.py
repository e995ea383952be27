"""Launches of a kernel without asking Triton every time which of its compiled forms is meant.

Triton answers that in Python, argument by argument, which takes the host longer than a kernel over a few thousand rows
runs. Here a key of a few numbers finds what the first launch compiled. That takes addresses in place of tensors, of
which Triton would otherwise ask the driver one by one whether the GPU can read them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes, and the divisor of numbers, that Triton compiles a form of its own for."""

_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}
"""The compiled form, its last arguments, and the kernel, whose number in the key stays its own as long as it lives."""


def launch(
    kernel: Any, grid: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int], settings: Mapping[str, Any]
) -> None:
    """``kernel[grid](*tensors, *numbers, **settings)`` on the device of the tensors.

    Args:
        tensors: on one device, the kernel's first parameters. numbers: integers, the parameters after them.
        settings: the kernel's constants, all the parameters that are left, and options such as ``num_warps``.
    """
    pointers = [x.data_ptr() for x in tensors]
    index = tensors[0].device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(kernel, grid, tensors, numbers, settings)
    # The kernel by its number: its own hash is a lock and a hash of its source. Triton compiles numbers that are one,
    # multiples of 16, others, and those beyond 32 bits apart. With a tensor on a CPU nothing was launched before.
    place = (
        id(kernel),
        index,
        *settings.values(),
        *[x.dtype for x in tensors],
        *[x.is_cuda for x in tensors],
        *[(number == 1) + 2 * (number % ALIGNED == 0) + 4 * (not -(2**31) <= number < 2**31) for number in numbers],
    )
    is_aligned = functools.reduce(operator.or_, pointers) % ALIGNED == 0
    cached = _COMPILED.get(place)
    # a form for aligned pointers must not get others: these are left to Triton, as is its interpreter
    if cached is not None and is_aligned:
        compiled, rest, _ = cached
        compiled[(*grid, 1, 1)[:3]](*pointers, *numbers, *rest, stream=_stream_of()(index))
        return
    compiled = kernel[tuple(grid)](*tensors, *numbers, **settings)
    if is_aligned and hasattr(kernel, "device_caches"):
        constants = kernel.arg_names[len(tensors) + len(numbers) :]
        _COMPILED[place] = compiled, tuple(settings[name] for name in constants), kernel


@functools.cache
def _stream_of() -> Callable[[int], int]:
    """What gives a device's current stream, as Triton asks for it."""
    from triton.runtime import driver

    current: Callable[[int], int] = driver.active.get_current_stream
    return current
