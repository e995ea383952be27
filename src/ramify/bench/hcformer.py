"""``ramify bench hcformer``: does the cost per patch stay the same on large pictures, and how fast is it beside rivals.

Two tables. Growth: time and memory per patch from the smallest to the largest picture with windows of fixed size
(``scaling="fold"``) and about the same number of patches per batch. Throughput: pictures per second of HCFormer and of
timm's models, inference and training, eager and compiled. ``python -m ramify.bench.hcformer`` is the same without the
command line's dependencies. This module imports torch only when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from ramify.bench.session import Emit, parse_options, session
from ramify.errors import UserError, exit_code

if TYPE_CHECKING:
    import torch

RIVALS = ("swin_tiny_patch4_window7_224", "convnext_tiny", "resnet50")
GROWTH_LIMIT = 1.3
"""Time and memory per patch may grow by this factor from the smallest to the largest picture."""


@dataclass
class HCFormerOptions:
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    tables: tuple[Literal["growth", "throughput"], ...] = ("growth", "throughput")
    """What to measure."""
    models: tuple[str, ...] = ("hcformer_nano", "hcformer_medium", *RIVALS)
    """timm names for the throughput table."""
    growth_model: str = "hcformer_nano"
    """Model of the growth table."""
    sizes: tuple[int, ...] = (224, 448, 896)
    """Picture sizes of the growth table, in pixels, smallest first."""
    patches: int = 50176
    """Patches (4 x 4 pixels) per batch of the growth table, about; one picture of 896 px by default."""
    batch: int = 0
    """Pictures per batch of the throughput table; 0 for 128 on cuda and 8 on cpu."""
    size: int = 224
    """Picture size of the throughput table."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 means autocast."""
    compile: bool = False
    """Also run everything in the throughput table through torch.compile."""
    repeats: int = 5
    """Rounds; in each round every contender is timed once."""
    clock: Literal["wall", "cpu"] = "wall"
    """`cpu` counts CPU time instead, for a machine that others use as well. Not for cuda."""
    threads: int = 0
    """CPU threads; 0 for all cores."""
    json: bool = False
    """Print JSON lines instead of tables."""
    out: Path | None = None
    """File that the JSON lines are appended to, beside what is printed."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("device", self.device, ("cpu", "cuda")),
            ("dtype", self.dtype, ("float32", "bfloat16")),
            ("clock", self.clock, ("wall", "cpu")),
        ):
            if value not in choices:
                raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if unknown := set(self.tables) - {"growth", "throughput"}:
            raise UserError(f"tables are growth and throughput, got {', '.join(sorted(unknown))}")
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or min(self.sizes) < 4:
            raise UserError(f"sizes must grow and be 4 or more, got {self.sizes}")
        if self.repeats < 2:
            raise UserError(f"repeats must be 2 or more, got {self.repeats}; a spread needs two rounds")
        if self.clock == "cpu" and self.device == "cuda":
            raise UserError("clock cpu does not see what the GPU does; use --clock wall with --device cuda")


def run(options: HCFormerOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 1 if growth is beyond the limit or one of ours fails, else 0."""
    from ramify import machine

    with session(options, stream) as emit:
        head = machine.header(options.device, ("ramify", "torch", "timm", "triton"))
        settings = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "out"}
        where = ", ".join(f"{key} {value}" for key, value in head["machine"].items() if key != "threads")
        versions = ", ".join(f"{key} {value}" for key, value in head["versions"].items() if value)
        num_threads = head["machine"]["threads"]
        about = f"{options.dtype}, {num_threads} threads, {options.clock} clock, {options.repeats} rounds"
        emit(
            {"kind": "header", **head, **settings},
            [f"machine   {where}", f"versions  {versions}, commit {head['commit']}", f"measured  {about}"],
        )
        code = 0
        for table in options.tables:
            code |= (_growth if table == "growth" else _throughput)(options, emit)
        return code


def _growth(options: HCFormerOptions, emit: Emit) -> int:
    import torch

    emit(
        {"kind": "table", "name": "growth"},
        ["", f"{options.growth_model}, windows of fixed size, forward and backward, per patch", _GROWTH_HEAD, _rule(5)],
    )
    first: dict[str, float] = {}
    worst = 0.0
    for size in options.sizes:
        patches = (size // 4) ** 2
        batch = max(1, round(options.patches / patches))
        model = _create(options.growth_model, options, scaling="fold")
        x = torch.randn(batch, 3, size, size, device=options.device)
        (seconds,) = _time([(options.growth_model, _step(model, x, options))], options)
        if isinstance(seconds, str):
            raise RuntimeError(f"{options.growth_model} at {size} px: {seconds}")
        now = {"time": seconds / (batch * patches), "memory": _memory(model, x, options) / (batch * patches)}
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
    met = worst <= GROWTH_LIMIT
    verdict = f"largest ratio {worst:.2f}, limit {GROWTH_LIMIT}: {'met' if met else 'MISSED'}"
    emit({"kind": "growth_result", "worst": worst, "limit": GROWTH_LIMIT, "met": met}, [verdict])
    return 0 if met else 1


_GROWTH_HEAD = "| size, px | batch | us per patch | KiB kept per patch | time / memory ratio |"


def _rule(columns: int) -> str:
    return "|" + " --- |" * columns


def _throughput(options: HCFormerOptions, emit: Emit) -> int:
    import torch

    batch = options.batch or (128 if options.device == "cuda" else 8)
    ways = ("eager", "compiled") if options.compile else ("eager",)
    heads = [f"{kind}, {way}" for way in ways for kind in ("inference", "training")]
    title = f"pictures per second, {options.size} px, batch {batch}"
    columns = ["model", "M parameters", *heads, "MiB kept"]
    emit({"kind": "table", "name": "throughput"}, ["", title, "| " + " | ".join(columns) + " |", _rule(len(columns))])
    x = torch.randn(batch, 3, options.size, options.size, device=options.device)
    code = 0
    for name in options.models:
        model = _create(name, options)
        speeds: dict[str, float | str] = {}
        for way in ways:
            torch.compiler.reset()
            module: Any = torch.compile(model) if way == "compiled" else model
            runs = [("inference", _inference(module, x, options)), ("training", _step(module, x, options))]
            for (kind, _), seconds in zip(runs, _time(runs, options), strict=True):
                speeds[f"{kind}, {way}"] = seconds if isinstance(seconds, str) else batch / seconds
        failed = [value for value in speeds.values() if isinstance(value, str)]
        if failed and name.startswith("hcformer"):
            code = 1
        kept = _memory(model, x, options)
        count = sum(p.numel() for p in model.parameters())
        cells = [value if isinstance(value, str) else f"{value:.1f}" for value in speeds.values()]
        emit(
            {"kind": "throughput", "model": name, "parameters": count, "batch": batch, "size": options.size}
            | {"images_per_second": speeds, "bytes_kept": kept},
            ["| " + " | ".join([name, f"{count / 1e6:.2f}", *cells, f"{kept / 2**20:.0f}"]) + " |"],
        )
    return code


def _create(name: str, options: HCFormerOptions, **arguments: Any) -> torch.nn.Module:
    import timm
    import torch

    import ramify.models  # registers HCFormer

    assert ramify.models.HCFormer is not None
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, num_classes=1000, **arguments)
    except RuntimeError as error:  # timm: unknown model
        raise UserError(f"{error}; see timm.list_models()") from error
    return model.to(options.device)


def _autocast(options: HCFormerOptions) -> torch.autocast:
    import torch

    return torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.dtype == "bfloat16")


def _inference(model: torch.nn.Module, x: torch.Tensor, options: HCFormerOptions) -> Callable[[], object]:
    import torch

    def call() -> object:
        model.eval()
        with torch.inference_mode(), _autocast(options):
            return model(x)

    return call


def _step(model: torch.nn.Module, x: torch.Tensor, options: HCFormerOptions) -> Callable[[], object]:
    def call() -> object:
        model.train()
        with _autocast(options):
            loss = model(x).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return call


def _time(runs: Sequence[tuple[str, Callable[[], object]]], options: HCFormerOptions) -> Iterator[float | str]:
    """Median seconds of each, timed in the same rounds; the reason where one fails or its result is not finite."""
    import torch

    from . import harness

    clocks: dict[str, harness.Sample] = {"cpu": harness.cpu_sample, "wall": harness.wall_sample}
    sample = harness.synced_sample if options.device == "cuda" else clocks[options.clock]

    def contender(name: str, call: Callable[[], object]) -> harness.Contender:
        def build() -> harness.Built:
            result = call()
            finite = isinstance(result, torch.Tensor) and bool(torch.isfinite(result).all())
            return harness.Built(call, 0.0 if finite else float("nan"))

        return harness.Contender(name, build)

    results = harness.compare([contender(*pair) for pair in runs], sample, options.repeats, 0.0)
    return iter([result.median if result.status == "ok" else f"{result.status}: {result.note}" for result in results])


def _memory(model: torch.nn.Module, x: torch.Tensor, options: HCFormerOptions) -> int:
    """Bytes that a training step keeps for its backward pass, beside the parameters and the pictures.

    Counted tensor by tensor, each storage once: the same number on every device and machine.
    """
    import torch

    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), _autocast(options):
        model(x).sum()
    return sum(kept.values())


def parse(argv: Sequence[str]) -> HCFormerOptions:
    """Options from the flags of the command, where its dependencies are not installed."""
    return parse_options(HCFormerOptions, "python -m ramify.bench.hcformer", __doc__, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command without the command line's dependencies; a mistake of the user is one line and exit code 2."""
    return exit_code(lambda: run(parse(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
