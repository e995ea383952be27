"""``hyptree bench launch``: what the host pays to start kernels, one by one and for a block of a model.

A small model waits for its host, not for its GPU, so this is a regression test of eager speed: microseconds of the host
per launch, and kernels and microseconds per block. Imports torch only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from benchmarks.options import BenchOptions
from benchmarks.session import session
from hyptree.tables import markdown_head, markdown_row

if TYPE_CHECKING:
    import torch

    from benchmarks.launches import Launches

IN_A_ROW = 200
"""Launches of a call whose time is divided by them."""


@dataclass
class LaunchOptions(BenchOptions):
    QUICK: ClassVar[Mapping[str, Any]] = {"model": "hcformer_pico", "preset": "helm-d-pico", "batch": 1, "length": 8}

    model: str = "hcformer_medium"
    """HCFormer whose blocks are called, one of each stage."""
    preset: str = "helm-d-115m-aligned"
    """HELM whose blocks are called."""
    batch: int = 8
    """Pictures, and sequences."""
    length: int = 256
    """Tokens of a sequence."""


def run(options: LaunchOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 0."""
    from hyptree import machine

    with session(options, stream) as emit:
        head = machine.header(options.device, ("hyptree", "torch", "timm", "transformers", "triton"))
        clock = "median until a call returns" + (", the device idle before" if options.device == "cuda" else "")
        about = f"measured  {clock}, its work included on a CPU" if options.device == "cpu" else f"measured  {clock}"
        emit({"kind": "header", **head, **options.settings()}, [*machine.machine_lines(head), about])
        emit({"kind": "table", "name": "launch"}, ["", *markdown_head(["what", "host us", "kernels", "us per kernel"])])
        for what, counted in _rows(options):
            seconds, kernels = counted.host_seconds or 0.0, counted.kernels
            cells = [what, f"{1e6 * seconds:.1f}", "", ""]
            if kernels is not None:
                cells[2:] = f"{kernels:.0f}", f"{1e6 * seconds / kernels:.1f}" if kernels else ""
            emit({"kind": "launch", "what": what, **counted.as_dict()}, [markdown_row(cells)])
    return 0


def _rows(options: LaunchOptions) -> Iterator[tuple[str, Launches]]:
    for what, call in _single(options):
        yield what, _times(_counted(_many(call), options), 1 / IN_A_ROW)
    yield from _hcformer(options)
    yield from _helm(options)


def _many(call: Callable[[], object]) -> Callable[[], object]:
    def many() -> None:
        for _ in range(IN_A_ROW):
            call()

    return many


def _counted(call: Callable[[], object], options: LaunchOptions) -> Launches:
    from benchmarks.launches import Launches, host_seconds, measure

    call()
    if options.device == "cuda":
        return measure(call, options.device)
    return Launches(host_seconds=host_seconds(call, options.repeats, lambda: None))


def _times(a: Launches, factor: float, minus: Launches | None = None) -> Launches:
    """``(a - minus) * factor``."""
    from benchmarks.launches import Launches

    def scaled(of: str) -> float | None:
        value, less = getattr(a, of), getattr(minus, of) if minus else 0.0
        return None if value is None else (value - less) * factor

    return Launches(scaled("kernels"), scaled("host_seconds"))


def _single(options: LaunchOptions) -> Iterator[tuple[str, Callable[[], object]]]:
    """One launch: of torch, of Triton, and of Triton by our shorter way."""
    import torch

    from hyptree.ops.backend import HAS_TRITON

    x = torch.zeros(1024, device=options.device)
    yield "torch, x.add_(1)", lambda: x.add_(1)
    if options.device != "cuda" or not HAS_TRITON:
        return
    from benchmarks.launch_kernel import add_one
    from hyptree.geometry.core.launch import launch

    settings = {"BLOCK": 1024, "num_warps": 4}
    yield "Triton, kernel[grid](...)", lambda: add_one[(1,)](x, 1024, **settings)
    yield "hyptree, launch", lambda: launch(add_one, (1,), (x,), (1024,), settings)


def _hcformer(options: LaunchOptions) -> Iterator[tuple[str, Launches]]:
    import timm
    import torch

    import hyptree.models  # registers HCFormer

    assert hyptree.models.HCFormer is not None
    model: Any = timm.create_model(options.model).to(options.device)
    inputs: dict[str, torch.Tensor] = {}
    hooks = [
        stage.blocks[0].register_forward_pre_hook(lambda _, args, key=f"stage {i + 1}": inputs.update({key: args[0]}))
        for i, stage in enumerate(model.stages)
    ]
    size = model.pretrained_cfg["input_size"][-1]
    with torch.no_grad():
        model(torch.randn(options.batch, 3, size, size, device=options.device))
    for hook in hooks:
        hook.remove()
    for (key, x), stage in zip(inputs.items(), model.stages, strict=True):
        for kind, call in _passes(stage.blocks[0], x, options):
            yield f"block of {options.model}, {key}, {kind}", _counted(call, options)


def _passes(block: Any, x: torch.Tensor, options: LaunchOptions) -> Iterator[tuple[str, Callable[[], object]]]:
    """A forward pass without gradients, and one forward and backward."""
    import torch

    leaf = x.detach().clone().requires_grad_()

    def output(x: torch.Tensor) -> Any:
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            return block(x)

    def inference() -> object:
        with torch.no_grad():
            return output(x)

    def training() -> object:
        out = output(leaf)
        return torch.autograd.grad(out, [leaf, *block.parameters()], torch.ones_like(out), allow_unused=True)

    return iter((("inference", inference), ("forward and backward", training)))


def _helm(options: LaunchOptions) -> Iterator[tuple[str, Launches]]:
    """A block is what two more layers cost, by half."""
    import torch

    from hyptree.errors import require

    require("transformers", "lm").logging.set_verbosity_error()
    from hyptree.lm.modeling import HelmForCausalLM
    from hyptree.lm.presets import preset

    counted: dict[str, list[Launches]] = {"inference": [], "forward and backward": []}
    for layers in (1, 3):
        config = preset(options.preset, num_hidden_layers=layers, vocab_size=64)
        model: Any = HelmForCausalLM(config)
        model.to(options.device)
        ids = torch.zeros(options.batch, options.length, dtype=torch.int64, device=options.device)

        def loss(model: Any = model, ids: torch.Tensor = ids) -> torch.Tensor:
            with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
                out: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return out

        @torch.no_grad()
        def inference(loss: Callable[[], torch.Tensor] = loss) -> object:
            return loss()

        def training(model: Any = model, loss: Callable[[], torch.Tensor] = loss) -> object:
            loss().backward()
            return model.zero_grad(set_to_none=True)

        counted["inference"].append(_counted(inference, options))
        counted["forward and backward"].append(_counted(training, options))
    for kind, (less, more) in counted.items():
        yield f"block of {options.preset}, {kind}", _times(more, 0.5, less)
