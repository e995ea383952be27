"""The throughput tables of ``hyptree bench hcformer``: contenders, what each must equal, and the targets.

Ours in every mode, the authors' order of operations, timm's rivals and the floor, timed in the same rounds. The
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

from benchmarks import harness, launches
from benchmarks.hcformer.options import HCFormerOptions
from benchmarks.hcformer.published import PublishedHCFormer
from benchmarks.hcformer.work import floor
from benchmarks.session import Emit
from hyptree.errors import UserError
from hyptree.models.convs import Stem
from hyptree.models.hcformer.model import HCFormer

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest relative distance of logits, and of the stem's gradient, from plain torch in float32."""


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
ORDER = ("eager", "graphs", "compiled", "published")
"""Modes in the order of their worth: where time is short, the others are left out."""


@dataclass
class Runner:
    """One model in one mode: how to call it, and what it must answer."""

    name: str
    mode: str
    """Of ``ModeOptions``, or which published order of operations, eager."""
    model: nn.Module
    reference: dict[str, Tensor] | None

    @property
    def label(self) -> str:
        return f"{self.name}, {self.mode}"


Asked = dict[tuple[str, str], launches.Launches]
"""What a runner asks of the host and the memory of a GPU, by its label and pass."""


def run(options: HCFormerOptions, emit: Emit) -> int:
    """Print a table for inference and one for training, then the targets; gives 1 if one is missed or ours is wrong."""
    begin = time.monotonic()
    torch.compiler.reset()
    x = torch.randn(options.batch, 3, options.size, options.size, device=options.device)
    runners = list(_runners(options, x))
    by_worth = sorted(runners, key=_worth)
    by_kind: dict[str, dict[str, harness.Result]] = {}
    asked: Asked = {}
    for kind, until in (("inference", 0.4), ("training", 1.0)):
        end = begin + until * options.time_limit if options.time_limit else None
        contenders = [harness.Contender(r.label, _builder(r, kind, x, options, end, emit, asked)) for r in by_worth]
        results = harness.compare(contenders, clock(options), options.repeats, TOLERANCE[options.dtype], end)
        by_kind[kind] = {result.name: result for result in results}
        _print(kind, runners, results, asked, options, emit)
    failed = [r for of_kind in by_kind.values() for r in of_kind.values() if r.status in ("failed", "wrong")]
    code = int(any(r.name.startswith("hcformer") for r in failed))
    return code | _judge(by_kind, asked, options, emit)


def _worth(runner: Runner) -> tuple[int, bool]:
    """Both sides of a mode after each other, so that there is something to compare."""
    place = ORDER.index(runner.mode) if runner.mode in ORDER else len(ORDER)
    return place, runner.name.startswith("hcformer")


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
            for mode in options.modes:
                yield Runner(name, mode, create(name, options), None)
            continue
        if options.published and isinstance(first.stages[0].downsample, Stem):  # of the paper's sizes
            plain = create(name, options, mixer_norm=False)
            assert isinstance(plain, HCFormer)
            yield Runner(name, "published", PublishedHCFormer(plain, pads=False), _reference(plain, x))
            yield Runner(name, "published with its padding", PublishedHCFormer(plain), None)
        reference = _reference(first, x)
        for mode in options.modes:
            model = create(name, options)
            assert isinstance(model, HCFormer)
            model.set_grad_checkpointing("mlp" if options.recompute_mlp else False)
            yield Runner(name, mode, model, reference)


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


def _autocast(options: HCFormerOptions) -> torch.autocast:
    return torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.dtype == "bfloat16")


def _builder(
    runner: Runner,
    kind: str,
    x: Tensor,
    options: HCFormerOptions,
    end: float | None,
    emit: Emit,
    asked: Asked,
) -> Callable[[], harness.Built]:
    def build() -> harness.Built:
        begin = time.monotonic()
        rounds = (0.15 if options.device == "cpu" else 0.03) * options.time_limit  # what timing takes when all is ready
        if end is not None and begin > end - rounds:
            raise harness.Skipped("skipped", "no time left")
        mode: Any = runner.mode if runner.mode in options.modes else "eager"
        module = launches.in_mode(runner.model, mode)
        call = inference(module, x, options) if kind == "inference" else step(module, x, options)
        call, peak = launches.marked(call, mode), None
        if options.device == "cuda":
            peak = launches.peak_bytes(call, runner.model, mode)
        elif kind == "training" and mode == "eager":
            peak = saved_bytes(runner.model, x, options)
        error = None
        if runner.reference is not None:  # before it is timed, and on few pictures where that is slow
            seen = _answers(module if options.device == "cuda" else runner.model, x, _autocast(options), (kind,))
            error = distance(seen[kind], runner.reference[kind])
        asked[runner.label, kind] = launches.measure(call, options.device, peak)
        result = call()
        if not (isinstance(result, Tensor) and bool(torch.isfinite(result).all())):
            error = float("nan")
        took = time.monotonic() - begin
        line = {
            "kind": "ready",
            "model": runner.name,
            "mode": runner.mode,
            "pass": kind,
            "seconds": took,
            "error": error,
        }
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
    optimizer = launches.adamw(model) if options.optimizer else None

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
    asked: Asked,
    options: HCFormerOptions,
    emit: Emit,
) -> None:
    held = "weights and the most that a step allocates" if options.device == "cuda" else "what a step keeps"
    with_adamw = " with AdamW" if options.optimizer and kind == "training" else ""
    title = f"{kind}{with_adamw}: pictures per second, {options.size} px, batch {options.batch}, {options.dtype}"
    title += f"; MiB: {held}"
    columns = ["model", "mode", "M parameters", "images/s", "ms", *launches.HEAD, "error"]
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
        counted = asked.get((runner.label, kind), launches.Launches())
        speed = options.batch / result.median if result.seconds else None
        line = {"kind": "throughput", "pass": kind, "model": runner.name, "mode": runner.mode, "parameters": count}
        line |= {"batch": options.batch, "size": options.size, "images_per_second": speed, "seconds": result.seconds}
        line |= {"launches": counted.as_dict(), "error": result.error, "status": result.status, "note": result.note}
        cells = [f"{result.status}: {result.note}", "", "", "", "", ""]
        if speed is not None:
            error = "" if result.error is None else f"{result.error:.0e}"
            cells = [f"{speed:,.1f}", f"{result.median * 1e3:.1f}", *counted.cells(), error]
        emit(line, ["| " + " | ".join([runner.name, runner.mode, f"{count / 1e6:.2f}", *cells]) + " |"])
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
                    f"| {seconds * 1e3:.1f} | | | | |"
                ],
            )


def _judge(
    by_kind: dict[str, dict[str, harness.Result]],
    asked: Asked,
    options: HCFormerOptions,
    emit: Emit,
) -> int:
    """One line per target of this device, for our fastest mode that keeps to it; eager alone on a CPU."""
    code = 0

    def gib_of(label: str, kind: str) -> float:
        return (asked[label, kind].peak_bytes or 0) / 2**30

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
            light = {label: r for label, r in ours.items() if gib_of(label, target.kind) < target.most_gib}
            ours = light or ours
        if not ours or options.batch != TARGET_BATCH[options.device]:
            continue
        best = min(ours, key=lambda label: ours[label].median)
        gib = gib_of(best, target.kind)
        if target.rival is None:
            value, spread, wanted = options.batch / ours[best].median, "", f"{target.least:,.0f} images/s"
        else:
            name = target.rival if ", " in target.rival else f"{target.rival}, {best.rpartition(', ')[2]}"
            rival = results.get(name)
            times = None if rival is None else harness.ratio(rival, ours[best])
            if times is None:
                continue
            value, wanted = times.value, f"{target.least:g} times {name}"
            spread = f" (quartiles {times.low:.2f} to {times.high:.2f})"
        met = value >= target.least
        words = f"{best}, {target.kind}: {value:,.2f}{spread}, wanted {wanted}"
        if target.most_gib is not None:
            met = met and gib < target.most_gib
            words += f" below {target.most_gib:g} GiB, has {gib:.2f}"
        line = {"kind": "target", "pass": target.kind, "ours": best, "rival": target.rival, "value": value}
        emit(line | {"least": target.least, "gib": gib, "met": met}, [f"{words}: {'met' if met else 'MISSED'}"])
        code |= int(not met)
    return code
