"""``hyptree bench kernels``: every kernel of ``hyptree.ops`` held to its definition and timed beside it, one by one."""

from __future__ import annotations

import gc
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TextIO

import torch
import torch._functorch.config

from benchmarks import harness
from benchmarks.kernels import resources as kernel_resources
from benchmarks.kernels import tables
from benchmarks.kernels.cases import C, Draw, Job
from benchmarks.kernels.check import KERNEL, Trial
from benchmarks.kernels.language import JOBS
from benchmarks.kernels.options import KernelOptions
from benchmarks.kernels.tables import Line
from benchmarks.session import Emit, session
from hyptree import machine
from hyptree.errors import UserError

PACKAGES = ("hyptree", "torch", "triton")


def run(options: KernelOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 1 if a kernel is wrong or fails, else 0.

    Args:
        stream: where the table or the JSON lines go, standard output by default.
    """
    stream = stream or sys.stdout
    with session(options, stream) as emit:
        bench = _Bench(options, emit, stream)
        return bench.resources() if options.resources else bench.run()


class _Bench:
    """One run: jobs in their order, each in its turn drawn, checked, timed and printed."""

    def __init__(self, options: KernelOptions, emit: Emit, stream: TextIO):
        self.options, self.emit, self.stream = options, emit, stream
        self.begin = time.monotonic()
        self.seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
        self.sample = harness.cuda_sample if options.device == "cuda" else harness.wall_sample
        self.floors = {dtype: _Floor(options.device, dtype, self.sample) for dtype in (torch.float32, torch.bfloat16)}
        self.code = 0

    def run(self) -> int:
        options, on_gpu = self.options, self.options.device == "cuda"
        torch.manual_seed(self.seed)
        head = machine.header(options.device, PACKAGES) | {"device": options.device, "c": C, "seed": self.seed}
        head |= {"repeats": options.repeats, "warmup": harness.WARMUP, "command": options.command()}
        head["clock"] = "device clock with a cold L2" if on_gpu else "wall clock"
        self.emit({"kind": "header", **head}, [*tables.header_lines(head), "", *tables.table_head()])
        jobs = self._jobs(options.device)
        lines: list[Line] = []
        missing: list[Job] = []
        is_lost = False
        with torch._functorch.config.patch(donated_buffer=False):  # a compiled backward that can be run again
            for place, job in enumerate(jobs):
                if self._is_late():
                    missing = jobs[place:]
                    break
                try:
                    for line in self._measure(job):
                        lines.append(line)
                        self.emit(line.as_json(), [line.row()])
                except Exception as error:  # nobody is there to ask: say it and go on
                    self._say(job.name, error)
                gc.collect()
                if on_gpu and (is_lost := _device_is_lost()):
                    missing = jobs[place + 1 :]
                    break
        summaries = tables.summaries(lines)
        for summary in summaries:
            self.emit(summary.as_json(), ([""] if summary is summaries[0] else []) + [summary.text()])
        if is_lost:
            return self._go_on_elsewhere(jobs[len(jobs) - len(missing) - 1], missing)
        if missing:
            self._name(missing, f"the time limit of {options.time_limit:g} s was reached")
        return self.code

    def resources(self) -> int:
        """The table of registers and shared memory, at the shapes of a GPU; gives 1 if a kernel cannot start."""
        head = machine.header("cpu", PACKAGES) | {"command": self.options.command()}
        lines = [*machine.machine_lines(head), f"run       {self.options.command()}", "compiled  for sm_90", ""]
        self.emit({"kind": "header", **head}, [*lines, *tables.resources_head()])
        jobs, seen = self._jobs("meta"), set()
        for place, job in enumerate(jobs):
            if self._is_late():
                self._name(jobs[place:], f"the time limit of {self.options.time_limit:g} s was reached")
                break
            try:
                for one in kernel_resources.of_job(job):
                    if (job.form, job.shape, job.dtype, one) in seen:  # two forms may share a kernel
                        continue
                    seen.add((job.form, job.shape, job.dtype, one))
                    names = {"op": job.op, "form": job.form, "shape": job.shape, "dtype": str(job.dtype)}
                    self.emit({"kind": "resources", **names, **one.as_dict()}, [tables.resources_row(job, one)])
                    self.code = self.code or int(one.resident == 0)
            except UserError:
                raise
            except Exception as error:
                self._say(job.name, error)
        return self.code

    def _jobs(self, device: str) -> list[Job]:
        draw = Draw(device, self.seed, self.options.quick)
        return [job for name in self.options.names() for job in JOBS[name](draw)]

    def _measure(self, job: Job) -> Iterator[Line]:
        options = self.options
        torch.compiler.reset()  # no limit on recompilations is reached, no memory of earlier jobs kept
        trial = Trial(job.make(), job.dtype, options.device, options.compiled)
        for kind in trial.passes:
            results = harness.compare(trial.contenders(kind), self.sample, options.repeats, math.inf)
            num_bytes, flops = trial.num_bytes(kind), trial.work.flops * (1 if kind == "forward" else 2)
            error = trial.errors.get(f"{KERNEL} {kind}")
            floor = self.floors[job.dtype]
            line = Line(
                job, kind, {result.name: result for result in results}, error,
                error is not None and error.beyond(job.dtype), floor.seconds(num_bytes, flops),
                floor.seconds(num_bytes, 0), num_bytes, flops, trial.work, options.device == "cuda",
            )  # fmt: skip
            self.code = 1 if line.is_wrong or line.has_failed else self.code
            yield line
            for result in results:
                if result.status == "failed":
                    self._print(f"  {job.name} {kind}, {result.name}: {result.note}")

    def _is_late(self) -> bool:
        return 0 < self.options.time_limit < time.monotonic() - self.begin

    def _say(self, name: str, error: Exception) -> None:
        """An error of a whole job in one line."""
        line = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {line[0] if line else ''}"[:300]
        self.emit({"kind": "failed", "job": name, "note": text}, [f"  {name}: failed, {text}"])
        self.code = 1

    def _name(self, missing: Sequence[Job], why: str) -> None:
        names = [job.name for job in missing]
        text = f"{why}; missing: {', '.join(names)}"
        again = replace(self.options, ops=tuple(dict.fromkeys(job.op for job in missing)), time_limit=0.0).command()
        self.emit({"kind": "missing", "why": why, "jobs": names, "command": again}, ["", text, f"for these: {again}"])

    def _print(self, text: str) -> None:
        if not self.options.json:
            print(text, file=self.stream, flush=True)

    def _go_on_elsewhere(self, culprit: Job, missing: Sequence[Job]) -> int:
        """A fault of a kernel takes the process's device with it: the other operations get a process of their own."""
        same = [job for job in missing if job.op == culprit.op]
        self._name([culprit, *same], f"the device is lost after {culprit.name}")
        rest = tuple(dict.fromkeys(job.op for job in missing if job.op != culprit.op))
        if rest and not self._is_late():
            left = self.options.time_limit and self.options.time_limit - (time.monotonic() - self.begin)
            options = replace(self.options, ops=rest, time_limit=max(left, 0.0), seed=self.seed)
            words = [sys.executable, "-m", "hyptree", "bench", "kernels", *options.flags()]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    print(line, end="", file=self.stream, flush=True)
        return 1


class _Floor(harness.Floor):
    """The floor of kernels that multiply float32 as three TF32 products: a third of that peak, if it is more."""

    def peak(self) -> float:
        if self._peak is None:
            plain = super().peak()
            if self.device == "cuda" and self.dtype == torch.float32:
                held = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("high")
                self._peak = None
                plain = max(plain, super().peak() / 3)
                torch.set_float32_matmul_precision(held)
            self._peak = plain
        return self._peak


def _device_is_lost() -> bool:
    """Whether a kernel has broken the device for this process: every call fails from then on."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return True
    return False
