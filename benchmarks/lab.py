"""``hyptree bench lab``: the batched engine of the superposition lab against one model at a time by autograd.

Both train the same kind of models in the same rounds; the numbers are model-steps per second. Before the clock starts,
both train the same models on the same samples and must agree. This module imports torch only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from benchmarks.options import ClockOptions
from benchmarks.session import Emit, session
from hyptree.tables import markdown_head

if TYPE_CHECKING:
    from hyptree.lab.engine import Engine
    from hyptree.lab.sweeps.grid import Grid

TARGETS = {"cpu": 4.0, "cuda": 50.0}
"""How many times the loop's model-steps per second the engine must reach."""

TOLERANCE = 1e-4
"""Largest relative difference of a loss after the steps that are compared."""


@dataclass
class LabOptions(ClockOptions):
    QUICK: ClassVar[Mapping[str, Any]] = {
        "n": 24,
        "batch": 16,
        "m": (3, 5),
        "alpha": (0.0, 1.0),
        "seeds": 2,
        "repeats": 2,
    }

    n: int = 256
    """Features."""
    batch: int = 256
    """Samples per step."""
    m: tuple[int, ...] = (5, 8, 18, 28, 44)
    """Widths."""
    alpha: tuple[float, ...] = (0.0, 0.5, 1.0, 1.25, 1.5, 1.75, 2.0)
    """Exponents of the feature frequencies."""
    gamma: tuple[float, ...] = (-1.0, 0.2)
    """Decays."""
    seeds: int = 2
    """Starts per setting; with the defaults 140 models."""
    compared_steps: int = 5
    """Steps after which engine and loop must agree."""
    threads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grid()

    def grid(self) -> Grid:
        """What is trained."""
        from hyptree.lab.sweeps.grid import Grid

        return Grid(
            n=self.n, m=self.m, alpha=self.alpha, gamma=self.gamma, seeds=self.seeds, batch=self.batch, bias_init="zero"
        )


def run(options: LabOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 1 if the engine is wrong or misses its target, else 0."""
    from benchmarks import harness
    from hyptree import machine

    with session(options, stream) as emit:
        head = machine.header(options.device, ("hyptree", "torch"))
        grid = options.grid()
        count = len(grid.models())
        about = f"{count} models, n {grid.n}, batch {grid.batch}, m {', '.join(map(str, grid.m))}, float32"
        timing = f"{options.clock} clock, {options.repeats} interleaved rounds after {harness.WARMUP} warm-up calls"
        emit(
            {"kind": "header", **head, **options.settings(), "num_models": count},
            [*machine.machine_lines(head), f"measured  {about}; {timing}"],
        )
        return _measure(options, grid, emit)


def _measure(options: LabOptions, grid: Grid, emit: Emit) -> int:
    import torch

    from benchmarks import harness
    from hyptree.lab.engine import Engine

    engine = Engine(grid, options.device)
    run_loop, loop_steps = _loop(grid, options.device)
    per_call = {"loop": loop_steps, "engine": len(engine.models)}

    def sample(call: Callable[[], object], number: int) -> float:
        if options.device == "cpu":
            return (harness.cpu_sample if options.clock == "cpu" else harness.wall_sample)(call, number)

        def finished() -> None:
            for _ in range(number):
                call()
            torch.cuda.synchronize()

        torch.cuda.synchronize()
        return harness.wall_sample(finished, 1) / number

    contenders = [
        harness.Contender("loop", lambda: harness.Built(run_loop, None)),
        harness.Contender(
            "engine", lambda: harness.Built(engine.advance, _disagreement(grid, options.device, options.compared_steps))
        ),
    ]
    loop, ours = harness.compare(contenders, sample, options.repeats, TOLERANCE)
    rates = {r.name: per_call[r.name] / r.median if r.seconds else None for r in (loop, ours)}
    target = TARGETS[options.device]
    times = harness.ratio(loop, ours)
    scale = per_call["engine"] / per_call["loop"]
    speedup = times.value * scale if times else None
    met = speedup is not None and (options.quick or speedup >= target)
    judged = "not judged at these sizes" if options.quick else "met" if met else "MISSED"
    lines = ["", *markdown_head(["contender", "model-steps per second", "loss differs by"])]
    for result in (loop, ours):
        rate = rates[result.name]
        error = "" if result.error is None else f"{result.error:.0e}"
        lines.append(f"| {result.name} | {f'{rate:,.0f}' if rate else f'{result.status}: {result.note}'} | {error} |")
    if times and speedup is not None:
        verdict = f"engine / loop: {speedup:.1f} (quartiles {times.low * scale:.1f} to {times.high * scale:.1f})"
        lines.append(f"{verdict}, target {target:g}: {judged}")
    emit(
        {"kind": "result", "model_steps_per_second": rates, "speedup": speedup, "target": target, "met": met}
        | {"error": ours.error, "status": {r.name: r.status for r in (loop, ours)}},
        lines,
    )
    return 0 if met else 1


def _loop(grid: Grid, device: str) -> tuple[Callable[[], object], int]:
    """A call that trains one model per width for a step, each on samples of its own; and how many models these are."""
    import torch

    from hyptree.lab import definition
    from hyptree.lab.theory import frequencies

    models = [model for model in grid.models() if model.seed == grid.seed and model.gamma == grid.gamma[0]]
    some = [next(model for model in models if model.m == m) for m in grid.m]
    generator = torch.Generator(device).manual_seed(0)
    loops = []
    for model in some:
        W, b = (tensor.to(device) for tensor in definition.initial(model, grid.bias_init))
        p = torch.from_numpy(frequencies(grid.n, model.alpha, model.density, grid.dist)).float().to(device)
        loops.append((definition.Loop(definition.ToyModel(W, b), grid, model.gamma), p))

    def call() -> None:
        for loop, p in loops:
            chance = torch.rand(grid.batch, grid.n, generator=generator, device=device)
            value = torch.rand(grid.batch, grid.n, generator=generator, device=device)
            loop.step((chance < p) * value * 2)

    return call, len(loops)


def _disagreement(grid: Grid, device: str, steps: int) -> float:
    """Largest relative difference between the losses of engine and loop over some steps on the same samples."""
    import torch

    from benchmarks import harness
    from hyptree.lab import definition
    from hyptree.lab.engine import Engine

    engine: Engine = Engine(grid, device)
    losses = torch.stack([_wanted(engine.advance(with_loss=True)) for _ in range(steps)])  # (steps, models)
    worst, place = 0.0, 0
    for bucket in engine.buckets:
        for i, model in enumerate(bucket.models):
            if model.seed == grid.seed:
                W, b = (tensor.to(device) for tensor in definition.initial(model, grid.bias_init))
                loop = definition.Loop(definition.ToyModel(W, b), grid, model.gamma)
                expected = []
                for step in range(steps):
                    x = engine.sampler.draw(step).dense(bucket.groups[i], grid.n)
                    expected.append(loop.step(torch.cat([x, x.new_zeros(grid.batch - len(x), grid.n)])))
                worst = max(worst, harness.relative_error(losses[:, place], torch.stack(expected)))
            place += 1
    return worst


def _wanted(loss: Any) -> Any:
    assert loss is not None
    return loss
