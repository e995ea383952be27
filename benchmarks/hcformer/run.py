"""``hyptree bench hcformer``: does the cost per patch stay the same on large pictures, how fast is it beside rivals.

Three tables. Growth: time and memory per patch from the smallest to the largest picture with windows of fixed size
(``scaling="fold"``) and about the same number of patches per batch. Throughput: pictures per second of HCFormer in
every mode, of its authors' order of operations, of timm's models and of the floor, inference and training. Work:
what a GPU would have to do, counted without one. This module imports torch only when it runs.
"""

from __future__ import annotations

from typing import TextIO

from benchmarks.hcformer.options import HCFormerOptions
from benchmarks.session import Emit, session

GROWTH_LIMIT = 1.3
"""Time and memory per patch may grow by this factor from the smallest to the largest picture."""


def run(options: HCFormerOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 1 if a limit or target is missed or one of ours fails, else 0."""
    from hyptree import machine

    with session(options, stream) as emit:
        head = machine.header(options.device, ("hyptree", "torch", "timm", "triton"))
        where = ", ".join(f"{key} {value}" for key, value in head["machine"].items() if key != "threads")
        versions = ", ".join(f"{key} {value}" for key, value in head["versions"].items() if value)
        num_threads = head["machine"]["threads"]
        about = f"{options.dtype}, {num_threads} threads, {options.clock} clock, {options.repeats} rounds"
        emit(
            {"kind": "header", **head, **options.settings()},
            [f"machine   {where}", f"versions  {versions}, commit {head['commit']}", f"measured  {about}"],
        )
        code = 0
        for table in options.tables:
            code |= {"growth": _growth, "throughput": _throughput, "work": _work}[table](options, emit)
        return code


def _growth(options: HCFormerOptions, emit: Emit) -> int:
    import torch

    from benchmarks import harness
    from benchmarks.hcformer import speed as hcformer_speed

    emit(
        {"kind": "table", "name": "growth"},
        ["", f"{options.growth_model}, windows of fixed size, forward and backward, per patch", _GROWTH_HEAD, _rule(5)],
    )
    first: dict[str, float] = {}
    worst = 0.0
    for size in options.sizes:
        patches = (size // 4) ** 2
        batch = max(1, round(options.patches / patches))
        model = hcformer_speed.create(options.growth_model, options, scaling="fold")
        x = torch.randn(batch, 3, size, size, device=options.device)
        step = hcformer_speed.step(model, x, options)
        name, sample = f"{options.growth_model} at {size} px", hcformer_speed.clock(options)
        contender = harness.Contender(name, lambda step=step: harness.Built(step, None))  # type: ignore[misc]
        (result,) = harness.compare([contender], sample, options.repeats, 0.0)
        if result.status != "ok":
            raise RuntimeError(f"{name}: {result.note}")
        kept = hcformer_speed.saved_bytes(model, x, options)
        now = {"time": result.median / (batch * patches), "memory": kept / (batch * patches)}
        first = first or now
        ratios = {key: now[key] / first[key] for key in now}
        worst = max(worst, *ratios.values())
        line = {"kind": "growth", "size": size, "batch": batch, "seconds_per_patch": now["time"]}
        line |= {"bytes_per_patch": now["memory"], "time_ratio": ratios["time"], "memory_ratio": ratios["memory"]}
        emit(
            line,
            [
                f"| {size:>8} | {batch:>5} | {now['time'] * 1e6:>12.3f} | {now['memory'] / 1024:>16.2f} "
                f"| {ratios['time']:>5.2f} / {ratios['memory']:.2f} |"
            ],
        )
    met = options.quick or worst <= GROWTH_LIMIT
    judged = "not judged at these sizes" if options.quick else "met" if met else "MISSED"
    verdict = f"largest ratio {worst:.2f}, limit {GROWTH_LIMIT}: {judged}"
    emit({"kind": "growth_result", "worst": worst, "limit": GROWTH_LIMIT, "met": met}, [verdict])
    return 0 if met else 1


_GROWTH_HEAD = "| size, px | batch | us per patch | KiB kept per patch | time / memory ratio |"


def _rule(columns: int) -> str:
    return "|" + " --- |" * columns


def _throughput(options: HCFormerOptions, emit: Emit) -> int:
    from benchmarks.hcformer import speed as hcformer_speed

    return hcformer_speed.run(options, emit)


def _work(options: HCFormerOptions, emit: Emit) -> int:
    """What a GPU has to do, counted without one: kernels of an eager pass with our own, bytes, products."""
    from benchmarks.hcformer import work

    columns = ["model", "pass", "kernels", "GB", "TFLOP", "GiB kept", "kernels, ms", "host, ms", "images/s, expected"]
    title = f"expected of an H200, not measured: bfloat16, batch {options.batch}, {options.size} px, eager with kernels"
    emit({"kind": "table", "name": "work"}, ["", title, "", "| " + " | ".join(columns) + " |", _rule(len(columns))])
    for name in options.models:
        for training in (False, True):
            cost = work.measure_cost(name, options.batch, options.size, training)
            kind = "training" if training else "inference"
            host, speed = cost.kernels * work.LAUNCH, options.batch / cost.seconds
            line = {"kind": "work", "model": name, "pass": kind, "kernels": cost.kernels, "bytes": cost.bytes}
            line |= {"flops": cost.flops, "on_device": cost.on_device, "host": host, "images_per_second": speed}
            line |= {"saved_bytes": cost.saved_bytes}
            cells = [name, kind, cost.kernels, f"{cost.bytes / 1e9:.1f}", f"{cost.flops / 1e12:.2f}"]
            cells += [f"{cost.saved_bytes / 2**30:.1f}" if training else ""]
            cells += [f"{cost.on_device * 1e3:.1f}", f"{host * 1e3:.1f}", f"{speed:,.0f}"]
            emit(line, ["| " + " | ".join(map(str, cells)) + " |"])
    return 0
