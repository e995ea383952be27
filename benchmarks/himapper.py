"""``hyptree bench himapper``: what Hi-Mapper adds to a backbone, in parameters, in arithmetic and in time.

Two tables. Cost: parameters and multiplications that the plug-in adds for one picture, beside those of our design.
Speed: the plain and the wrapped model timed in the same rounds, inference and a training step with the plug-in's
losses, eager against eager and compiled against compiled. On a GPU inference has two rows, which ask different things:
one call at a time, with a wait for the device after each, is what one batch waits for and has the host's work in it;
several calls in a row are the time per batch of steady inference, where the host works ahead.
Imports torch only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO

from benchmarks.options import ClockOptions, Mode, ModeOptions
from benchmarks.session import Emit, session
from hyptree.errors import UserError
from hyptree.tables import markdown_head, markdown_row

if TYPE_CHECKING:
    import torch

    from benchmarks.harness import Result
    from benchmarks.launches import Launches

DESIGNED = {
    "resnet50": (1.89, 49),
    "deit_tiny_patch16_224": (1.17, 45),
    "deit_small_patch16_224": (1.25, 50),
    "deit_base_patch16_224": (1.40, 60),
    "swin_tiny_patch4_window7_224": (1.40, 41),
    "swin_small_patch4_window7_224": (1.40, 41),
}
"""Million parameters and million multiplications that our design (N = 32, L = 4, w = 128) adds at 224 px."""
PARAMETER_LIMIT = 1.02
"""Added parameters may be this many times those of the design."""
TIME_LIMIT = 1.05
"""The wrapped model's forward pass may take this many times the plain one's, both compiled, on a GPU."""
IN_A_ROW = 10
"""Calls between two waits for the device, for the time of steady inference."""
IDENTITY = 1e-3
"""Largest relative difference between the logits of a fresh wrapped model and the plain one's."""


@dataclass
class HiMapperOptions(ModeOptions, ClockOptions):
    QUICK: ClassVar[Mapping[str, Any]] = {
        "models": ("test_vit",), "batch": 2, "size": 160, "num_leaves": 8, "depth": 3, "width": 16, "repeats": 2,
        "modes": ("eager",),
    }  # fmt: skip

    tables: tuple[Literal["cost", "speed"], ...] = ("cost", "speed")
    """What to measure."""
    models: tuple[str, ...] = ("deit_small_patch16_224", "resnet50")
    """timm names of backbones."""
    batch: int = 0
    """Pictures per batch; 0 for 128 on cuda and 8 on cpu."""
    size: int = 224
    """Picture size in pixels."""
    num_leaves: int = 32
    """Leaves of the tree."""
    depth: int = 4
    """Levels of the tree."""
    width: int = 128
    """Width of the plug-in."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 means autocast; auto takes it on cuda, and float32 on cpu."""
    passes: tuple[Literal["inference", "training"], ...] = ("inference", "training")
    """Which passes to time."""
    guards: bool = True
    """Let compiled models look before each call whether anything about them has changed, weight by weight; without,
    both are called as a server would that never changes them (inference alone)."""
    channels_last: bool = False
    """Keep pictures and kernels in channels-last order."""
    repeats: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch < 0 or self.size < 32:
            raise UserError(f"batch must be 0 or more and size 32 or more, got {self.batch} and {self.size}")
        if not self.guards and "training" in self.passes:
            raise UserError("without guards no compiled model can tell training from inference; add --passes inference")
        if self.dtype == "auto":
            self.dtype = "bfloat16" if self.device == "cuda" else "float32"
        self.batch = self.batch or (128 if self.device == "cuda" else 8)


def run(options: HiMapperOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 1 if a limit is missed or a wrapped model is wrong, else 0."""
    from hyptree import machine

    with session(options, stream) as emit:
        head = machine.header(options.device, ("hyptree", "torch", "timm", "triton"))
        about = f"measured  {options.dtype}, {options.clock} clock, {options.repeats} rounds"
        emit({"kind": "header", **head, **options.settings()}, [*machine.machine_lines(head), about])
        code = 0
        for table in options.tables:
            code |= (_cost if table == "cost" else _speed)(options, emit)
        return code


# ---------------------------------------------------------------------------------------------------------------- cost


def _cost(options: HiMapperOptions, emit: Emit) -> int:
    columns = ["backbone", "M parameters", "GMAC", "added M", "design", "added MMAC", "design", "share of GMAC"]
    title = f"one picture of {options.size} px, N {options.num_leaves}, L {options.depth}, w {options.width}"
    emit({"kind": "table", "name": "cost"}, ["", title, *markdown_head(columns)])
    is_designed = (options.num_leaves, options.depth, options.width, options.size) == (32, 4, 128, 224)
    code = 0
    for name in options.models:
        plain, wrapped = _create(name, options, "cpu")
        counts = [sum(p.numel() for p in model.parameters()) for model in (plain, wrapped)]
        macs = [count_macs(model, options.size) for model in (plain, wrapped)]
        added = (counts[1] - counts[0]) / 1e6, (macs[1] - macs[0]) / 1e6
        design = DESIGNED.get(name) if is_designed else None
        met = design is None or added[0] <= PARAMETER_LIMIT * design[0]
        code |= not met
        cells = [name, f"{counts[0] / 1e6:.2f}", f"{macs[0] / 1e9:.2f}", f"{added[0]:.2f}"]
        cells += [f"{design[0]:.2f}" if design else "", f"{added[1]:.0f}", f"{design[1]}" if design else ""]
        cells += [f"{100 * added[1] * 1e6 / macs[0]:.1f} %" + ("" if met else " parameters MISSED")]
        emit(
            {"kind": "cost", "model": name, "parameters": counts[0], "macs": macs[0], "design": design, "met": met}
            | {"added_parameters": counts[1] - counts[0], "added_macs": macs[1] - macs[0]},
            [markdown_row(cells)],
        )
    return int(code)


def count_macs(model: torch.nn.Module, size: int) -> int:
    """Multiplications with addition of one picture in evaluation, counted by torch."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.zeros(1, 3, size, size, device=next(model.parameters()).device)
    # Fused attention is no product that the counter sees on every device.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(x)
    return counter.get_total_flops() // 2


# --------------------------------------------------------------------------------------------------------------- speed


def _speed(options: HiMapperOptions, emit: Emit) -> int:
    import torch

    from benchmarks import harness, launches

    columns = ["backbone", "pass", "calls in a row", "plain ms", "wrapped ms", "ratio", "quartiles", *launches.HEAD]
    title = (
        f"batch {options.batch}, {options.size} px; limit of the ratio {TIME_LIMIT}, for compiled inference on a GPU; "
        "kernels, host (until a call returns) and memory: of the plain model and the wrapped one"
    )
    emit({"kind": "table", "name": "speed"}, ["", title, *markdown_head(columns)])
    code = 0
    for name in options.models:
        plain, wrapped = _create(name, options, options.device)
        x = torch.randn(options.batch, 3, options.size, options.size, device=options.device)
        if options.channels_last:
            x = x.to(memory_format=torch.channels_last)
        for mode in options.modes:
            torch.compiler.reset()
            ready = [in_mode(model, mode, options) for model in (plain, wrapped)]
            for kind in options.passes:
                make = _inference if kind == "inference" else _training
                runs = [launches.marked(make(module, x, options), mode) for module in ready]
                asked: dict[str, launches.Launches] = {}
                expected = _logits(plain, x) if kind == "inference" else None
                contenders = [
                    _contender("plain", runs[0], plain, mode, None, asked, options),
                    _contender("wrapped", runs[1], wrapped, mode, (x, expected), asked, options),
                ]
                for calls in _calls(options, kind):
                    results = harness.compare(contenders, _sample(options, calls), options.repeats, IDENTITY)
                    code |= _report(options, emit, name, f"{kind}, {mode}", calls, results, asked)
    return int(code)


def _calls(options: HiMapperOptions, kind: str) -> tuple[int, ...]:
    """How many calls in a row are timed; 0 for as many as fill a sample, where no device works on its own."""
    if options.device != "cuda":
        return (0,)
    return (1, IN_A_ROW) if kind == "inference" else (1,)


def _report(
    options: HiMapperOptions,
    emit: Emit,
    name: str,
    what: str,
    calls: int,
    results: Sequence[Result],
    asked: Mapping[str, Launches],
) -> int:
    from benchmarks import harness

    plain, wrapped = results
    ratio = harness.ratio(wrapped, plain)
    line = {"kind": "speed", "model": name, "pass": what, "calls": calls or None}
    line |= {"batch": options.batch, "size": options.size}
    if ratio is None:
        bad = wrapped if not wrapped.seconds else plain
        failed = f"{bad.name} {bad.status}: {bad.note}"
        emit(line | {"failed": bad.note}, [markdown_row([name, what, str(calls or ""), failed, *[""] * 6])])
        return 1
    is_limited = what in ("inference, compiled", "inference, graphs")
    limit = TIME_LIMIT if is_limited and options.device == "cuda" else None
    met = limit is None or ratio.value <= limit
    verdict = "" if limit is None else " met" if met else " MISSED"
    cells = [name, what, str(calls or ""), f"{1e3 * plain.median:.3f}", f"{1e3 * wrapped.median:.3f}"]
    cells += [f"{ratio.value:.3f}{verdict}", f"{ratio.low:.3f} to {ratio.high:.3f}"]
    columns = zip(*(asked[result.name].cells() for result in results), strict=True)
    cells += ["; ".join(filter(None, both)) for both in columns]
    emit(
        line
        | {"plain_seconds": plain.seconds, "wrapped_seconds": wrapped.seconds, "ratio": ratio.value}
        | {"low": ratio.low, "high": ratio.high, "limit": limit, "met": met, "error": wrapped.error}
        | {"launches": {result.name: asked[result.name].as_dict() for result in results}},
        [markdown_row(cells)],
    )
    return 0 if met else 1


def _create(name: str, options: HiMapperOptions, device: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A backbone, and a copy of it with the plug-in."""
    import copy

    import timm
    import torch

    from hyptree.models import HiMapper

    torch.manual_seed(0)
    try:
        plain = timm.create_model(name, num_classes=1000)
    except RuntimeError as error:  # timm: unknown model
        raise UserError(f"{error}; see timm.list_models()") from error
    try:
        wrapped = HiMapper(copy.deepcopy(plain), options.num_leaves, options.depth, options.width)
        with torch.no_grad():  # a backbone that cannot be read, or not at this size, says so before anything is timed
            wrapped.eval()(torch.zeros(1, 3, options.size, options.size))
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"{name}: {error}") from error
    models = plain.to(device), wrapped.to(device)
    if options.channels_last:
        models = tuple(model.to(memory_format=torch.channels_last) for model in models)  # type: ignore[assignment]
    return models


def in_mode(model: torch.nn.Module, mode: Mode, options: HiMapperOptions) -> Any:
    """The model as ``mode`` runs it, with or without guards."""
    import torch
    import torch._inductor

    from benchmarks import launches

    if options.guards or mode == "eager":
        return launches.in_mode(model, mode)
    # A mode and options cannot be given together.
    settings = torch._inductor.list_mode_options("reduce-overhead") if mode == "graphs" else {}
    return torch.compile(model, options={**settings, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe})


def _logits(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of a few pictures, eager and in float32: what a fresh wrapped model must repeat."""
    import torch

    with torch.no_grad():
        output = model.eval()(x[:2])
    return output if isinstance(output, torch.Tensor) else output.logits


def _autocast(options: HiMapperOptions) -> torch.autocast:
    import torch

    return torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.dtype == "bfloat16")


def _inference(model: Any, x: torch.Tensor, options: HiMapperOptions) -> Callable[[], object]:
    import torch

    def call() -> object:
        with torch.inference_mode(), _autocast(options):
            return model(x)

    model.eval()
    return call


def _training(model: Any, x: torch.Tensor, options: HiMapperOptions) -> Callable[[], object]:
    import torch

    def call() -> object:
        with _autocast(options):
            output = model(x)
            is_plain = isinstance(output, torch.Tensor)
            loss = (output if is_plain else output.logits).float().square().mean()
            if not is_plain:
                loss = loss + output.losses["aux_total"]
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    model.train()
    return call


def _contender(
    name: str,
    call: Callable[[], object],
    model: torch.nn.Module,
    mode: Mode,
    check: tuple[Any, Any] | None,
    asked: dict[str, Launches],
    options: HiMapperOptions,
) -> Any:
    from benchmarks import harness, launches

    def build() -> harness.Built:
        if name not in asked:
            peak = launches.peak_bytes(call, model, mode) if options.device == "cuda" else None
            call()  # compiles
            asked[name] = launches.measure(call, options.device, peak)
        error = None
        if check is not None and check[1] is not None:
            is_training = model.training
            error = harness.relative_error(_logits(model, check[0]), check[1])
            model.train(is_training)
        return harness.Built(call, error)

    return harness.Contender(name, build)


def _sample(options: HiMapperOptions, calls: int) -> Any:
    """A clock; on a GPU one that waits for the device after so many calls."""
    from benchmarks import harness

    if options.device == "cuda":
        return lambda run, number: harness.synced_sample(run, calls)
    return harness.cpu_sample if options.clock == "cpu" else harness.wall_sample
