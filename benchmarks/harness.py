"""Times contenders against each other: the same rounds for all, errors first, and the floor that the machine sets.

Everybody runs once per round, in rotating order, so that whatever else the machine does hits all alike; the numbers are
medians over rounds. A contender whose error is beyond the tolerance is marked wrong and has no time.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from benchmarks.turns import turn

Run = Callable[[], object]
Status = Literal["ok", "wrong", "failed", "absent", "skipped"]

_SAMPLE = 2e-3  # seconds: a sample repeats a short call until it lasts this long
_LONG_CALL = 0.3  # seconds: a call that takes longer sits out after _LONG_ROUNDS rounds
_LONG_ROUNDS = 5
WARMUP = 3
_GPU_CYCLES = 2_000_000_000  # per second, about


@dataclass(frozen=True)
class Built:
    """A contender that is ready: what to time, and its error (None where there is nothing to compare with)."""

    run: Run
    error: float | None


class Skipped(Exception):
    """Raised while a contender is built: it is not installed, has no such operation, or would need too much memory."""

    def __init__(self, status: Status, note: str):
        super().__init__(note)
        self.status, self.note = status, note


@dataclass(frozen=True)
class Contender:
    """One way to compute a case; ``build`` prepares, compiles and checks it."""

    name: str
    build: Callable[[], Built]


@dataclass
class Result:
    """Seconds per call, one entry per round, and the error; without times, ``status`` and ``note`` say why."""

    name: str
    status: Status = "ok"
    note: str = ""
    error: float | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else math.nan


@dataclass(frozen=True)
class Ratio:
    """Ratio of medians, and the quartiles of the ratios within each round."""

    value: float
    low: float
    high: float


def ratio(a: Result, b: Result) -> Ratio | None:
    """How many times as long ``a`` takes as ``b``; None if one of them has no times."""
    if not a.seconds or not b.seconds:
        return None
    rounds = [x / y for x, y in zip(a.seconds, b.seconds, strict=False)]
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else rounds * 3
    return Ratio(a.median / b.median, low, high)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Largest ``|out - reference| / max(|reference|, its mean)``; infinite for a NaN or a different shape."""
    if out.shape != reference.shape:
        return math.inf
    exact = reference.double()
    if exact.numel() == 0:
        return 0.0
    size = exact.abs()
    floor = size.mean().clamp_min(torch.finfo(torch.float64).tiny)
    error = ((out.double() - exact).abs() / torch.maximum(size, floor)).max().item()
    return math.inf if math.isnan(error) else error


Sample = Callable[[Run, int], float]
"""Seconds per call, measured over the given number of calls."""


def compare(
    contenders: Sequence[Contender], sample: Sample, repeats: int, tolerance: float, deadline: float | None = None
) -> list[Result]:
    """Build and check all contenders, then time the right ones in ``repeats`` rounds.

    Args:
        deadline: no round after the first starts later than this, in seconds of ``time.monotonic()``.
    """
    results, running = [], []
    for contender in contenders:
        result = Result(contender.name)
        results.append(result)
        try:
            built = contender.build()
            result.error = built.error
            if built.error is not None and not built.error <= tolerance:
                result.status, result.note = "wrong", f"error {built.error:.1e} is beyond {tolerance:.0e}"
                continue
            built.run()
            once = sample(built.run, 1)
            if once < _LONG_CALL:  # a long one is warm after its first calls
                for _ in range(WARMUP - 2):
                    built.run()
                once = min(sample(built.run, 1) for _ in range(2))
        except Skipped as reason:
            result.status, result.note = reason.status, reason.note
        except Exception as error:  # a rival that breaks must not end the run; ours shows up as failed
            lines = str(error).strip().splitlines()
            result.status, result.note = "failed", f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
        else:
            number = max(1, math.ceil(_SAMPLE / max(once, 1e-7)))
            rounds = repeats if once < _LONG_CALL else min(repeats, _LONG_ROUNDS)
            running.append((result, built.run, number, rounds))

    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with turn():
            for i in range(repeats):
                if i and deadline is not None and time.monotonic() > deadline:
                    break
                for k in range(len(running)):
                    result, run, number, rounds = running[(i + k) % len(running)]
                    if i < rounds:
                        result.seconds.append(sample(run, number))
    finally:
        if collecting:
            gc.enable()
    return results


def wall_sample(run: Run, number: int) -> float:
    """Time on the clock, for a CPU that does nothing else."""
    start = time.perf_counter()
    for _ in range(number):
        run()
    return (time.perf_counter() - start) / number


def cpu_sample(run: Run, number: int) -> float:
    """Time that the CPU spent on this process, all its threads together: for a machine that others use as well."""
    start = time.process_time()
    for _ in range(number):
        run()
    return (time.process_time() - start) / number


def cuda_sample(run: Run, number: int) -> float:
    """Time on the device of single calls with a cold L2 cache, the median of several.

    The device first waits for as long as the host needs to queue the call, as it does behind the work of a model. So
    this is the time of the kernels; what Python needs to launch them is not in it.
    """
    scratch = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    number = min(number, 10)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(number)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    wait = min(int((time.perf_counter() - begin) * 1.5 * _GPU_CYCLES), _GPU_CYCLES // 20)
    for start, stop in events:
        scratch.zero_()
        torch.cuda._sleep(wait)
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3


def synced_sample(run: Run, number: int) -> float:
    """Time on the clock until a CUDA device is done, launches included: what a user waits for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(number):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / number


class Floor:
    """The least time that data and arithmetic can take on this machine, measured now.

    Bandwidth is that of a copy of about the same size (small data lives in caches), the peak that of a square product.
    """

    def __init__(self, device: str, dtype: torch.dtype, sample: Sample):
        self.device, self.dtype, self.sample = device, dtype, sample
        self._bandwidth: dict[int, float] = {}
        self._peak: float | None = None

    def seconds(self, num_bytes: int, flops: int) -> float:
        """``max(bytes / bandwidth, flops / peak)``."""
        return max(num_bytes / self.bandwidth(num_bytes), flops / self.peak() if flops else 0.0)

    def bandwidth(self, num_bytes: int) -> float:
        """Bytes per second, read and written, of a copy that moves about ``num_bytes``."""
        size = 2 ** min(30, max(16, round(math.log2(max(num_bytes, 1)))))
        if size not in self._bandwidth:
            source = torch.zeros(size // 2, dtype=torch.int8, device=self.device)
            target = torch.empty_like(source)
            self._bandwidth[size] = size / self._best(lambda: target.copy_(source))
        return self._bandwidth[size]

    def peak(self) -> float:
        """Floating-point operations per second of a square matrix product."""
        if self._peak is None:
            n = 4096 if self.device == "cuda" else 1024
            a = torch.randn(n, n, device=self.device).to(self.dtype)
            self._peak = 2 * n**3 / self._best(lambda: a @ a)
        return self._peak

    def _best(self, run: Run) -> float:
        for _ in range(WARMUP):
            run()
        once = self.sample(run, 1)
        number = max(1, math.ceil(_SAMPLE / max(once, 1e-7)))
        return min(self.sample(run, number) for _ in range(7))
