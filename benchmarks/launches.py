"""How models run in each mode, and what a call asks of the host and of the memory of a GPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.options import Mode
from benchmarks.turns import turn

HEAD = ("kernels", "host us", "MiB")
"""Columns of :meth:`Launches.cells`."""
_FEW = 64
"""Compiled forms of one function that are kept: a benchmark runs several models of a class in several modes."""


def in_mode(model: Any, mode: Mode) -> Any:
    """The model as ``mode`` runs it, as users ask for it."""
    if mode == "eager":
        return model
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _FEW)
    return torch.compile(model, dynamic=False, mode="reduce-overhead" if mode == "graphs" else None)


def marked(call: Callable[[], Any], mode: Mode) -> Callable[[], Any]:
    """The call, told to the compiler's graphs as a new step, which may overwrite the last one's results."""
    if mode != "graphs":
        return call

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return step


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Fused AdamW that hardly moves the model, with its state, which is there in every step but the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


@dataclass(frozen=True)
class Launches:
    """What one call asks for; None where there is no GPU."""

    kernels: float | None = None
    """Kernels on the device, copies included."""
    host_seconds: float | None = None
    """Until the call returns, on a device that is idle: checks, bookkeeping and launches."""
    peak_bytes: int | None = None
    """Weights, and the most that the call allocates."""

    def cells(self) -> list[str]:
        """For a table with the columns ``HEAD``."""
        kernels, host, memory = self.kernels, self.host_seconds, self.peak_bytes
        return [
            "" if kernels is None else f"{kernels:.0f}",
            "" if host is None else f"{1e6 * host:.0f}",
            "" if memory is None else f"{memory / 2**20:,.0f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """For a JSON line."""
        return asdict(self)


def measure(call: Callable[[], object], device: str, peak: int | None = None) -> Launches:
    """Count what a warm call asks for; ``peak`` was seen before."""
    if device != "cuda":
        return Launches(peak_bytes=peak)
    with turn():
        return Launches(num_kernels(call), host_seconds(call), peak)


def num_kernels(call: Callable[[], object], steps: int = 3) -> float:
    """Kernels and copies that one call starts on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    return sum(event.count for event in recorded.key_averages() if event.self_device_time_total > 0) / steps


def host_seconds(
    call: Callable[[], object], rounds: int = 11, synchronize: Callable[[], None] = torch.cuda.synchronize
) -> float:
    """Median seconds until a call returns that found the device idle."""
    seconds = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    synchronize()
    return statistics.median(seconds)


def peak_bytes(call: Callable[[], object], model: nn.Module, mode: Mode) -> int:
    """Weights, and the most that a call allocates on a GPU beside what was there before, other models included.

    Without graphs, of a call that is warm. Graphs allocate in their first calls alone, which warm up and record, and
    from a pool of their own, so there this has to be the first that is called: the most of three calls counts, or what
    the pool grew by where the allocator did not see them.
    """
    first = mode == "graphs"
    if not first:
        call()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, pools = torch.cuda.memory_allocated(), _in_pools() if first else 0
    for _ in range(3 if first else 1):
        call()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    if first and most == 0:
        most = _in_pools() - pools
    return most + own_bytes(model)


def _in_pools() -> int:
    """Bytes that CUDA graphs hold in pools of their own."""
    snapshot = torch.cuda.memory_snapshot()
    return sum(part["total_size"] for part in snapshot if tuple(part["segment_pool_id"]) != (0, 0))


def own_bytes(model: nn.Module) -> int:
    """Of weights and buffers."""
    return sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))
