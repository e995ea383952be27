"""The throughput tables of ``hyptree bench hcformer``: contenders, what each must equal, and the targets.

Ours in every way they run, the authors' order of operations, timm's rivals and the floor, timed in the same rounds. The
factors of residual branches are set to one first: with 1e-5, as fresh models have it, every answer would be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.hcformer.options import RIVAL_WAYS, HCFormerOptions
from benchmarks.hcformer.published import PublishedHCFormer
from benchmarks.hcformer.work import floor
from benchmarks.session import Emit
from hyptree.errors import UserError
from hyptree.models.convs import Stem
from hyptree.models.hcformer.model import HCFormer

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest relative distance of logits, and of the stem's gradient, from plain torch in float32."""
GIB = 2**30


@dataclass(frozen=True)
class Target:
    """What one of ours must reach: a number of pictures per second, or a multiple of a rival's in the same mode."""

    device: str
    kind: str
    model: str
    rival: str | None
    least: float
    most_gib: float | None = None


PUBLISHED = "hcformer_nano, published"
SWIN = "swin_tiny_patch4_window7_224"
TARGETS = (
    Target("cpu", "inference", "hcformer_nano", PUBLISHED, 2.0),
    Target("cpu", "training", "hcformer_nano", PUBLISHED, 2.0),
    Target("cuda", "inference", "hcformer_medium", SWIN, 1.0),
    Target("cuda", "training", "hcformer_medium", SWIN, 1.0, 10.0),
    Target("cuda", "inference", "hcformer_nano", None, 14_000),
    Target("cuda", "training", "hcformer_nano", None, 5_000),
)
TARGET_BATCH = {"cpu": 32, "cuda": 128}
ORDER = ("kernels", "graphs", "published", "eager", "compiled", "graphs+mlp", "kernels+mlp", "compiled+mlp")
"""Ways in the order of their worth, after the eager rivals: where time is short, the others are left out."""


@dataclass
class Runner:
    """One model in one way: how to call it, and what was seen while it was made ready."""

    name: str
    way: str
    model: nn.Module
    reference: dict[str, Tensor] | None
    gib: float | None = None

    @property
    def label(self) -> str:
        return f"{self.name}, {self.way}"


def run(options: HCFormerOptions, emit: Emit) -> int:
    """Print a table for inference and one for training, then the targets; gives 1 if one is missed or ours is wrong."""
    begin = time.monotonic()
    x = torch.randn(options.batch, 3, options.size, options.size, device=options.device)
    runners = list(_runners(options, x))
    by_worth = sorted(runners, key=_worth)
    by_kind: dict[str, dict[str, harness.Result]] = {}
    memory: dict[tuple[str, str], float | None] = {}
    for kind, until in (("inference", 0.4), ("training", 1.0)):
        end = begin + until * options.time_limit if options.time_limit else None
        contenders = [harness.Contender(r.label, _builder(r, kind, x, options, end, emit, memory)) for r in by_worth]
        results = harness.compare(contenders, clock(options), options.repeats, TOLERANCE[options.dtype], end)
        by_kind[kind] = {result.name: result for result in results}
        _print(kind, runners, results, memory, options, emit)
    failed = [r for of_kind in by_kind.values() for r in of_kind.values() if r.status in ("failed", "wrong")]
    code = int(any(r.name.startswith("hcformer") for r in failed))
    return code | _judge(by_kind, memory, options, emit)


def _worth(runner: Runner) -> int:
    if not runner.name.startswith("hcformer") and runner.way in ("eager", "graphs"):
        return -1
    return ORDER.index(runner.way) if runner.way in ORDER else len(ORDER)


# ---------------------------------------------------------------------------------------------------------- contenders


def create(name: str, options: HCFormerOptions, **arguments: Any) -> nn.Module:
    """A model of timm's with the same weights every time, all its branches awake."""
    import hyptree.models  # registers HCFormer

    assert hyptree.models.HCFormer is not None
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, num_classes=1000, **arguments)
    except RuntimeError as error:  # timm: unknown model
        raise UserError(f"{error}; see timm.list_models()") from error
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LayerScale):
                module.gamma.fill_(1.0)
        for key, parameter in model.named_parameters():
            if key.endswith("position.bias"):
                parameter.normal_(std=0.5)
    return model.to(options.device)


def _runners(options: HCFormerOptions, x: Tensor) -> Iterator[Runner]:
    for name in options.models:
        first = create(name, options)
        if not isinstance(first, HCFormer):
            for way in dict.fromkeys(RIVAL_WAYS.get(way, way) for way in options.ways):
                yield Runner(name, way, create(name, options), None)
            continue
        if options.published and isinstance(first.stages[0].downsample, Stem):  # of the paper's sizes
            plain = create(name, options, mixer_norm=False)
            assert isinstance(plain, HCFormer)
            yield Runner(name, "published", PublishedHCFormer(plain, pads=False), _reference(plain, x))
            yield Runner(name, "published with its padding", PublishedHCFormer(plain), None)
        reference = _reference(first, x)
        for way in options.ways:
            model = create(name, options)
            assert isinstance(model, HCFormer)
            if way == "eager":
                _plain_torch(model)
            model.set_grad_checkpointing("mlp" if way.endswith("+mlp") else False)
            yield Runner(name, way, model, reference)


def _plain_torch(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = "torch"  # type: ignore[assignment]


def _reference(model: HCFormer, x: Tensor) -> dict[str, Tensor]:
    """Logits and gradient of the stem for a few pictures, by plain torch in float32."""
    _plain_torch(model)
    return _answers(model, x, torch.autocast(x.device.type, enabled=False))


def _answers(model: nn.Module, x: Tensor, autocast: torch.autocast, kinds: tuple[str, ...] = ("inference", "training")):  # type: ignore[no-untyped-def]
    answers = {}
    few = x[:2] if x.device.type == "cpu" else x
    if "inference" in kinds:
        model.eval()
        with torch.inference_mode(), autocast:
            answers["inference"] = model(few).float()
    if "training" in kinds:
        model.train()
        with autocast:
            loss = model(few).float().square().mean()
        stem = next(p for p in model.parameters() if p.dim() == 4)
        (answers["training"],) = torch.autograd.grad(loss, stem)
    return answers


def _autocast(options: HCFormerOptions, cache: bool = True) -> torch.autocast:
    enabled = options.dtype == "bfloat16"
    return torch.autocast(options.device, dtype=torch.bfloat16, enabled=enabled, cache_enabled=cache)


def _builder(
    runner: Runner,
    kind: str,
    x: Tensor,
    options: HCFormerOptions,
    end: float | None,
    emit: Emit,
    memory: dict[tuple[str, str], float | None],
) -> Callable[[], harness.Built]:
    def build() -> harness.Built:
        begin = time.monotonic()
        rounds = (0.15 if options.device == "cpu" else 0.03) * options.time_limit  # what timing takes when all is ready
        if end is not None and begin > end - rounds:
            raise harness.Skipped("skipped", "no time left")
        module: Any = runner.model
        if runner.way.startswith("compiled"):
            torch.compiler.reset()
            module = torch.compile(runner.model)
        elif runner.way == "autotuned":
            torch.compiler.reset()
            module = torch.compile(runner.model, mode="max-autotune-no-cudagraphs")
        elif runner.way == "reduce-overhead":
            torch.compiler.reset()
            module = torch.compile(runner.model, mode="reduce-overhead")
        error = None
        if runner.reference is not None:  # before it is timed, and on few pictures where that is slow
            seen = _answers(module if options.device == "cuda" else runner.model, x, _autocast(options), (kind,))
            error = distance(seen[kind], runner.reference[kind])
        call = inference(module, x, options) if kind == "inference" else step(module, x, options)
        gib: float | None = None
        if runner.way.startswith("graphs"):
            call, gib = _captured(runner.model, kind, x, options)
        elif runner.way == "reduce-overhead":
            call = _marked(call)
        elif options.device == "cuda":
            call()
            gib = _peak(call, runner.model)[1]
        if options.device == "cpu" and kind == "training" and not runner.way.startswith("compiled"):
            gib = saved_bytes(runner.model, x, options) / GIB
        memory[runner.label, kind] = gib
        result = call()
        if not (isinstance(result, Tensor) and bool(torch.isfinite(result).all())):
            error = float("nan")
        took = time.monotonic() - begin
        line = {"kind": "ready", "model": runner.name, "way": runner.way, "pass": kind, "seconds": took, "error": error}
        emit(line, [f"  ready: {runner.label}, {kind}, after {took:.0f} s"])
        return harness.Built(call, error)

    return build


def distance(a: Tensor, b: Tensor) -> float:
    """``|a - b| / |b|`` over all numbers; infinite where ``a`` has a NaN."""
    error = ((a.double() - b.double()).norm() / b.double().norm()).item()
    return error if error == error else float("inf")


def inference(model: nn.Module, x: Tensor, options: HCFormerOptions) -> Callable[[], object]:
    """Logits of all pictures."""

    def call() -> object:
        model.eval()
        with torch.inference_mode(), _autocast(options):
            return model(x)

    return call


def step(model: nn.Module, x: Tensor, options: HCFormerOptions) -> Callable[[], object]:
    """Forward and backward, and AdamW where asked for; gradients are dropped, as by ``set_to_none``."""
    optimizer = _adamw(model, options)

    def call() -> object:
        model.train()
        with _autocast(options):
            loss = model(x).float().square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return call


def _adamw(model: nn.Module, options: HCFormerOptions) -> torch.optim.AdamW | None:
    if not options.optimizer:
        return None
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True, capturable=options.device == "cuda")


def _marked(call: Callable[[], object]) -> Callable[[], object]:
    """The same, told to the compiler's graphs as a new step, so that they may overwrite the last one's results."""

    def marked() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return marked


def _captured(model: nn.Module, kind: str, x: Tensor, options: HCFormerOptions) -> tuple[Callable[[], object], float]:
    """The same as a CUDA graph, and the memory that it holds."""
    parameters = list(model.parameters())
    optimizer = _adamw(model, options)

    def once() -> Tensor:
        model.train(kind == "training")
        with torch.set_grad_enabled(kind == "training"), _autocast(options, cache=False):
            out = model(x)
            if kind == "inference":
                return out
            loss = out.float().square().mean()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        kept_alive.append(grads)
        if optimizer is not None:
            for parameter, gradient in zip(parameters, grads, strict=True):
                parameter.grad = gradient
            optimizer.step()
        return loss.detach()

    kept_alive: list[Any] = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
            kept_alive.clear()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()

    def capture() -> Tensor:
        with torch.cuda.graph(graph):
            return once()

    out, gib = _peak(capture, model)

    def call() -> object:
        graph.replay()
        return out

    return call, gib


def _peak(call: Callable[[], Any], model: nn.Module) -> tuple[Any, float]:
    """What ``call`` gives, and the largest memory it had on the GPU, in GiB with the model's own."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    own = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return out, (torch.cuda.max_memory_allocated() - before + own) / GIB


def saved_bytes(model: nn.Module, x: Tensor, options: HCFormerOptions) -> int:
    """Bytes that a training step keeps for its backward pass, beside the parameters and the pictures.

    Counted tensor by tensor, each storage once: the same number on every device and machine.
    """
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    bytes_of: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            bytes_of[storage.data_ptr()] = storage.nbytes()
        return t

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), _autocast(options):
        model(x).sum()
    return sum(bytes_of.values())


# --------------------------------------------------------------------------------------------------------- what is said


def clock(options: HCFormerOptions) -> harness.Sample:
    """How calls are timed on this device."""
    clocks: dict[str, harness.Sample] = {"cpu": harness.cpu_sample, "wall": harness.wall_sample}
    return harness.synced_sample if options.device == "cuda" else clocks[options.clock]


def _print(
    kind: str,
    runners: list[Runner],
    results: list[harness.Result],
    memory: dict[tuple[str, str], float | None],
    options: HCFormerOptions,
    emit: Emit,
) -> None:
    held = "peak GiB" if options.device == "cuda" else "GiB kept"
    with_adamw = " with AdamW" if options.optimizer and kind == "training" else ""
    title = f"{kind}{with_adamw}: pictures per second, {options.size} px, batch {options.batch}, {options.dtype}"
    columns = ["model", "way", "M parameters", "images/s", "ms", held, "error"]
    emit(
        {"kind": "table", "name": f"throughput, {kind}"},
        ["", title, "", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)],
    )
    by_label = {result.name: result for result in results}
    floors = harness.Floor(
        options.device, torch.bfloat16 if options.dtype == "bfloat16" else torch.float32, clock(options)
    )
    shown = set()
    for runner in runners:
        result = by_label[runner.label]
        count = sum(p.numel() for p in runner.model.parameters())
        gib = memory.get((runner.label, kind))
        speed = options.batch / result.median if result.seconds else None
        line = {"kind": "throughput", "pass": kind, "model": runner.name, "way": runner.way, "parameters": count}
        line |= {"batch": options.batch, "size": options.size, "images_per_second": speed, "seconds": result.seconds}
        line |= {"gib": gib, "error": result.error, "status": result.status, "note": result.note}
        cells = [f"{result.status}: {result.note}", "", "", ""]
        if speed is not None:
            error = "" if result.error is None else f"{result.error:.0e}"
            cells = [f"{speed:,.1f}", f"{result.median * 1e3:.1f}", "" if gib is None else f"{gib:.2f}", error]
        emit(line, ["| " + " | ".join([runner.name, runner.way, f"{count / 1e6:.2f}", *cells]) + " |"])
        if runner.name.startswith("hcformer") and runner.name not in shown:
            shown.add(runner.name)
            element = 2 if options.dtype == "bfloat16" else 4
            moved, flops = floor(runner.name, options.batch, options.size, element, kind == "training")
            seconds = floors.seconds(int(moved), int(flops))
            emit(
                {"kind": "floor", "pass": kind, "model": runner.name, "bytes": moved, "flops": flops}
                | {"bandwidth": floors.bandwidth(int(moved)), "peak": floors.peak(), "seconds": seconds},
                [
                    f"| {runner.name} | floor: {moved / 1e9:.2f} GB at {floors.bandwidth(int(moved)) / 1e9:.0f} GB/s, "
                    f"{flops / 1e9:.0f} GFLOP at {floors.peak() / 1e12:.2f} TFLOP/s | | {options.batch / seconds:,.1f} "
                    f"| {seconds * 1e3:.1f} | | |"
                ],
            )


def _judge(
    by_kind: dict[str, dict[str, harness.Result]],
    memory: dict[tuple[str, str], float | None],
    options: HCFormerOptions,
    emit: Emit,
) -> int:
    """One line per target of this device, for the fastest of our ways that keeps to it; eager ones alone on a CPU."""
    code = 0
    for target in TARGETS:
        results = by_kind[target.kind]
        ours = {
            label: result
            for label, result in results.items()
            if label.startswith(target.model + ", ") and "published" not in label and result.seconds
        }
        if target.device != options.device or not ours or options.size != 224:
            continue
        if options.device == "cpu":
            ours = {label: result for label, result in ours.items() if label.endswith("eager")}
        if target.most_gib is not None:
            light = {label: r for label, r in ours.items() if (memory[label, target.kind] or 0) < target.most_gib}
            ours = light or ours
        if not ours or options.batch != TARGET_BATCH[options.device]:
            continue
        best = min(ours, key=lambda label: ours[label].median)
        gib = memory[best, target.kind]
        if target.rival is None:
            value, spread, wanted = options.batch / ours[best].median, "", f"{target.least:,.0f} images/s"
        else:
            way = best.rpartition(", ")[2]
            name = target.rival if ", " in target.rival else f"{target.rival}, {RIVAL_WAYS.get(way, way)}"
            rival = results.get(name)
            times = None if rival is None else harness.ratio(rival, ours[best])
            if times is None:
                continue
            value, wanted = times.value, f"{target.least:g} times {name}"
            spread = f" (quartiles {times.low:.2f} to {times.high:.2f})"
        met = value >= target.least
        words = f"{best}, {target.kind}: {value:,.2f}{spread}, wanted {wanted}"
        if target.most_gib is not None and gib is not None:
            met = met and gib < target.most_gib
            words += f" below {target.most_gib:g} GiB, has {gib:.2f}"
        line = {"kind": "target", "pass": target.kind, "ours": best, "rival": target.rival, "value": value}
        emit(line | {"least": target.least, "gib": gib, "met": met}, [f"{words}: {'met' if met else 'MISSED'}"])
        code |= int(not met)
    return code
