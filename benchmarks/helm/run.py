"""``hyptree bench helm``: what hyperbolic language models cost beside Euclidean ones of equal shape.

Two tables. Step: forward and backward of a batch, a HELM and its twin in turns, with time, peak memory and the least
time that an H200 could take. Decode: tokens per second at a given context by the latent cache, by the full cache and by
the twin, and the bytes of each cache. ``--profile`` adds the kernels of both. This module
imports torch only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.helm.options import HelmOptions
from benchmarks.session import Emit, session
from hyptree.errors import require
from hyptree.tables import markdown_row

if TYPE_CHECKING:
    from benchmarks.harness import Built, Result, Sample
    from benchmarks.helm.cases import DecodingStep, Setting, TrainingStep
    from benchmarks.options import Mode
    from hyptree.lm.config import HelmConfig

MEMORY_TARGET = 1.15
"""Peak memory of a step beside that of the twin."""
CACHE_TARGET = 5.0
"""How many times the bytes of the latent cache the full one takes, at least."""
STEPS_PER_SAMPLE = 5


def run(options: HelmOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 1 if one of ours fails, is wrong or misses a target of the GPU, else 0."""
    with session(options, stream) as emit:
        require("transformers", "lm").logging.set_verbosity_error()
        from hyptree import machine

        configs = list(_configs(options))
        head = machine.header(options.device, ("hyptree", "torch", "transformers", "triton"))
        about = f"{options.dtype}, {options.clock} clock, medians of {options.repeats} interleaved rounds"
        emit({"kind": "header", **head, **options.settings()}, [*machine.machine_lines(head), f"measured  {about}"])
        tables = {"step": _steps, "decode": _decoding}
        return max([tables[section](options, configs, emit) for section in options.sections], default=0)


def _configs(options: HelmOptions) -> Iterator[tuple[str, HelmConfig]]:
    from hyptree.lm.presets import preset

    for name in options.presets:
        for vocab in options.vocab:
            sizes = {"max_position_embeddings": max(options.length, options.context + 256)}
            config = preset(name, **sizes, **({"vocab_size": vocab} if vocab else {}))
            yield name, config


def step_target(config: HelmConfig) -> float:
    """How many times the twin's time a step may take, compiled on the GPU."""
    if config.variant == "mice":
        return 1.15
    return 1.2 if config.vocab_size <= 16384 and config.hidden_size < 1024 else 1.1


def _steps(options: HelmOptions, configs: Sequence[tuple[str, HelmConfig]], emit: Emit) -> int:
    from benchmarks.helm import cases
    from benchmarks.helm import tables as report

    step = "forward, backward and AdamW" if options.optimizer else "forward and backward"
    title = f"{step}, {options.batch} x {options.length} tokens; ratios are ours / twin; "
    title += f"MiB {_memory(options)}"
    columns = "preset|vocabulary|M parameters|mode|ours ms|twin ms|ratio|expected ms|kernels|host us"
    columns += "|ours MiB|twin MiB|ratio|target"
    report.head(emit, "step", title, columns)
    setting, code, later = cases.Setting(options.device, options.dtype), 0, report.Later()
    for name, config in configs:
        ids = cases.tokens(config, options.batch, options.length, options.device)
        models = _models(options, config, setting)
        for mode in options.modes:
            makers = _training(models, ids, setting, mode, options.optimizer)
            code |= _step(options, name, config, mode, makers, emit, later)
        del models
        _free(options)
    later.emit(emit)
    return code


def _memory(options: HelmOptions) -> str:
    """What the column of memory is."""
    if options.device == "cpu":
        return "are weights and what is kept for the backward pass"
    graphs = "; with graphs, of those that record them, whose memory the others run in"
    graphs = graphs if "graphs" in options.modes else ""
    return f"are weights and the most that a step allocates{graphs}"


Contenders = dict[str, "Callable[[], Any]"]


def _training(models: dict[str, Any], ids: Any, setting: Setting, mode: Mode, optimizer: bool = False) -> Contenders:
    from benchmarks.helm import cases
    from hyptree.lm.twins import attend_plainly

    def make(model: Any) -> Callable[[], TrainingStep]:
        return lambda: cases.TrainingStep(_given(model), ids, setting, mode, optimizer)

    if not isinstance(models["twin"], Exception):  # the strongest rival: without it transformers builds a mask
        attend_plainly(models["twin"])
    return {who: make(model) for who, model in models.items()}


def _models(options: HelmOptions, config: HelmConfig, setting: Setting) -> dict[str, Any]:
    """Ours and its twin; where one cannot be built, the reason."""
    from benchmarks.helm import cases

    experts = options.twin_experts
    if experts == "auto":
        experts = "grouped_mm" if options.dtype == "bf16" and options.device == "cuda" else "hyptree"
    makers = {
        "ours": lambda: cases.make_helm(config, setting),
        "twin": lambda: cases.make_twin(config, setting, experts),
    }
    models: dict[str, Any] = {}
    for who, maker in makers.items():
        try:
            models[who] = maker()
        except Exception as error:  # the other one is still measured
            models[who] = error
    return models


def _given(model: Any) -> Any:
    if isinstance(model, Exception):
        raise model
    return model


def _step(
    options: HelmOptions,
    name: str,
    config: HelmConfig,
    mode: str,
    makers: Contenders,
    emit: Emit,
    later: Callable[..., None],
) -> int:
    from benchmarks import launches
    from benchmarks.helm import tables as report
    from benchmarks.helm import work as helm_work

    results, steps = _compare(options, makers)
    ours, twin = results["ours"], results["twin"]
    peaks = {who: step.peak_bytes for who, step in steps.items()}
    asked = {who: launches.measure(step, options.device, peaks[who]) for who, step in steps.items()}
    work = helm_work.step_work(config, options.batch, options.length)
    expected = sum(item.seconds for item in work) if options.device == "cuda" else None
    time, memory = report.ratio(ours, twin), report.quotient(peaks.get("ours"), peaks.get("twin"))
    target = step_target(config) if options.device == "cuda" and mode != "eager" else None
    verdicts = [] if target is None else [report.verdict(time, target), report.verdict(memory, MEMORY_TARGET)]
    breaks = {who: step.graph_breaks for who, step in steps.items()}
    count = {who: sum(p.numel() for p in step.model.parameters()) for who, step in steps.items()}
    line = {"kind": "step", "preset": name, "vocab": config.vocab_size, "mode": mode, "batch": options.batch}
    line |= {"length": options.length, "dtype": options.dtype, "expected_seconds": expected, "parameters": count}
    line |= {"peak_bytes": peaks, "time_ratio": time, "memory_ratio": memory, "target": target}
    line |= {"memory_target": MEMORY_TARGET if target else None, "contenders": report.entries(results)}
    line |= {"launches": {who: counted.as_dict() for who, counted in asked.items()}}
    line |= {"work_seconds": {item.name: item.seconds for item in work}, "graph_breaks": breaks}
    met = report.within(time, target) and (memory is None or report.within(memory, MEMORY_TARGET))
    line |= {"target_met": None if target is None else met}
    way = f"{mode} ({', '.join(map(str, breaks.values()))} graph breaks)" if any(breaks.values()) else mode
    cells = [name, config.vocab_size, f"{count.get('ours', count.get('twin', 0)) / 1e6:.1f}", way]
    cells += [report.time_cell(ours), report.time_cell(twin), report.number(time)]
    cells += [report.number(expected and expected * 1e3), *report.asked_cells(asked)]
    cells += [report.number(b and b / 2**20, 0) for b in (peaks.get("ours"), peaks.get("twin"))]
    emit(line, [markdown_row([*cells, report.number(memory), ", ".join(verdicts)])])
    if options.profile and mode != "graphs":
        report.profiles(options, f"{name}, vocabulary {config.vocab_size}, {mode}", steps, later)
        if expected:
            report.expectation(work, later)
    return 0 if ours.status == "ok" and line["target_met"] in (None, True) else 1


def _decoding(options: HelmOptions, configs: Sequence[tuple[str, HelmConfig]], emit: Emit) -> int:
    from benchmarks import launches
    from benchmarks.helm import cases
    from benchmarks.helm import tables as report
    from benchmarks.helm import work as helm_work
    from hyptree.lm.ambient import constant_weights

    title = f"decoding, {options.decode_batch} sequences, {options.context} tokens in a static cache"
    columns = "preset|mode|who|tokens/s|ms per step|expected ms|kernels|host us|MiB cache|bytes per token|target"
    report.head(emit, "decode", title, columns)
    setting, code, later = cases.Setting(options.device, options.dtype), 0, report.Later()
    element = 2 if options.dtype == "bf16" else 4
    for name, config in configs:
        ids = cases.tokens(config, options.decode_batch, options.context + 1, options.device)
        models = _models(options, config, setting)
        for mode in options.modes:
            writers = _writers(models)
            with ExitStack() as stack:  # as generate does: from the prompt of each to the last step
                for model in writers.values():
                    if not isinstance(model, Exception):
                        stack.enter_context(constant_weights(model))
                results, steps = _compare(options, _decoders(writers, ids, setting, mode))
                asked = {who: launches.measure(step, options.device) for who, step in steps.items()}
            sizes = {who: step.cache_bytes() for who, step in steps.items()}
            verdicts, met = _decode_targets(results, sizes, options.device == "cuda" and mode != "eager")
            for who, result in results.items():
                size = sizes.get(who)
                work = helm_work.decode_work(config, options.decode_batch, size or 0, element)
                expected = sum(item.seconds for item in work) if options.device == "cuda" and size else None
                per_token = size and size / options.decode_batch / options.context
                speed = options.decode_batch / result.median if result.seconds else None
                line = {"kind": "decode", "preset": name, "vocab": config.vocab_size, "mode": mode, "who": who}
                line |= {"batch": options.decode_batch, "context": options.context, "dtype": options.dtype}
                line |= {"tokens_per_second": speed, "expected_seconds": expected, "cache_bytes": size}
                line |= {"contenders": report.entries({who: result}), "target_met": met if who == "latent" else None}
                counted = asked.get(who, launches.Launches())
                line |= {"launches": counted.as_dict()}
                cells = [name, mode, who, report.number(speed, 0), report.time_cell(result)]
                cells += [report.number(expected and expected * 1e3), *counted.cells()[:2]]
                cells += [report.number(size and size / 2**20, 1), report.number(per_token, 0)]
                emit(line, [markdown_row([*cells, verdicts if who == "latent" else ""])])
            if options.profile and mode != "graphs":
                report.profiles(options, f"{name}, decoding, {mode}", steps, later)
            ok = all(result.status == "ok" for who, result in results.items() if who != "twin")
            code |= 0 if ok and met in (None, True) else 1
        del models
        _free(options)
    later.emit(emit)
    return code


def _writers(models: dict[str, Any]) -> dict[str, Any]:
    """One model per way to cache: ours has two if its attention is latent."""
    ours = models["ours"]
    caches = ("latent", "full") if getattr(getattr(ours, "config", None), "variant", "") == "mice" else ("ours",)
    return {**{cache: _with_cache(ours, cache) for cache in caches}, "twin": models["twin"]}


def _decoders(writers: dict[str, Any], ids: Any, setting: Setting, mode: Mode) -> Contenders:
    from benchmarks.helm import cases

    def make(model: Any, cache: str) -> Callable[[], DecodingStep]:
        def build() -> DecodingStep:
            if cache in ("latent", "full"):
                _given(model).config.cache_mode = cache
            return cases.DecodingStep(_given(model), ids, setting, mode)

        return build

    return {who: make(model, who) for who, model in writers.items()}


def _with_cache(model: Any, cache: str) -> Any:
    """The model with a way to cache of its own; the weights are shared."""
    if cache != "full":
        return model
    import copy

    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def _decode_targets(results: dict[str, Result], sizes: dict[str, float], has_target: bool) -> tuple[str, bool | None]:
    """The latent cache beside the full one: what is printed, and whether it is small and fast enough."""
    from benchmarks.helm import tables as report

    if "latent" not in results:
        return "", None
    fewer, slower = (
        report.quotient(sizes.get("full"), sizes.get("latent")),
        report.ratio(results["latent"], results["full"]),
    )
    text = f"{report.number(fewer, 1)}x fewer bytes, {report.number(slower)}x the time of full"
    if not has_target:
        return text, None
    met = fewer is not None and fewer >= CACHE_TARGET and report.within(slower, 1.0)
    return f"{text}: {'met' if met else 'MISSED'}", met


def _compare(options: HelmOptions, makers: Contenders) -> tuple[dict[str, Result], dict[str, Any]]:
    """Time all in turns; gives results, and the calls of those that ran, both by name."""
    import torch

    from benchmarks import harness
    from benchmarks.helm import cases

    torch.compiler.reset()
    steps: dict[str, Any] = {}

    def contender(who: str, make: Callable[[], Any]) -> harness.Contender:
        def build() -> Built:
            torch._dynamo.utils.counters.clear()
            step = make()
            if isinstance(step, cases.TrainingStep):
                step.see_peak()
            error = step.error()
            step.graph_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
            steps[who] = step
            return harness.Built(step, error)

        return harness.Contender(who, build)

    tolerance = cases.Setting(options.device, options.dtype).tolerance
    contenders = [contender(who, make) for who, make in makers.items()]
    results = harness.compare(contenders, _sample(options), options.repeats, tolerance)
    return {r.name: r for r in results}, {r.name: steps[r.name] for r in results if r.status == "ok"}


def _sample(options: HelmOptions) -> Sample:
    from benchmarks import harness

    if options.device == "cuda":
        if options.clock == "device":
            return harness.cuda_sample
        # As in training the host runs ahead of the device; it is waited for once in several steps.
        return lambda call, number: harness.synced_sample(call, max(number, STEPS_PER_SAMPLE))
    return harness.cpu_sample if options.clock == "cpu" else harness.wall_sample


def _free(options: HelmOptions) -> None:
    import gc

    import torch

    torch.compiler.reset()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
