"""``hyptree bench tokens``: does clustering the tokens of a ViT cost less than it saves, and how fast beside rivals.

Two tables. Clustering: from distances, or from features, to labels, ours on every backend, scipy, fastcluster, the
scikit-learn loop of the method's authors, ToMe's matching; as shares of a block of the model. Models: images per second
of the plain model, with ATC and with ToMe at equal token counts. This module imports torch only when it runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.session import Emit, session
from benchmarks.tokens.options import TARGETS, Target, TokensOptions
from hyptree.tables import markdown_head, markdown_row

if TYPE_CHECKING:
    from benchmarks.harness import Result, Sample

PACKAGES = ("hyptree", "torch", "timm", "triton", "scipy", "fastcluster", "scikit-learn")
OURS = ("torch", "triton")


def run(options: TokensOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 1 if an answer of ours is wrong or a target is missed, else 0."""
    from hyptree import machine

    seed = secrets.randbelow(2**31) if options.seed is None else options.seed

    with session(options, stream) as emit:
        head = machine.header(options.device, PACKAGES)
        emit(
            {"kind": "header", **head, **options.settings(), "seed": seed, "command": options.command()},
            [*machine.machine_lines(head), *_about(options, seed)],
        )
        measured: list[dict[str, Any]] = []
        code = 0
        for table in options.tables:
            code |= (_clustering if table == "clustering" else _models)(options, seed, emit, measured)
        return code | _judge(options, emit, measured)


def _about(options: TokensOptions, seed: int) -> list[str]:
    precision = {"autocast": "bfloat16 by autocast", "bf16": "bfloat16"}[options.precision]
    precision = precision if options.device == "cuda" else "float32"
    return [
        f"run       {options.command()}",
        f"          seed {seed}, {options.clock} clock, {options.repeats} interleaved rounds, medians; "
        f"{options.model} in {precision}, distances in float32",
        "features  64 numbers a token: Gaussian noise on a grid four times coarser than the tokens', interpolated "
        "bilinearly, plus 0.2 of noise",
        "right     labels equal those of the torch backend, else there is no time; libraries may differ in 2 % of the "
        "images (ties)",
    ]


def _sample(options: TokensOptions) -> Sample:
    """Seconds per call: kernels on a CUDA device by its own clock, models and libraries by the clock on the wall."""
    from benchmarks import harness
    from benchmarks.tokens.cases import WholeCall

    if options.device == "cpu":
        return harness.cpu_sample if options.clock == "cpu" else harness.wall_sample

    def sample(call: harness.Run, number: int) -> float:
        if isinstance(call, WholeCall):
            return harness.synced_sample(call, max(number, call.in_a_row))
        return harness.cuda_sample(call, number)

    return sample


# ---------------------------------------------------------------------------------------------------------- clustering

_CLUSTERING = (
    "B", "N", "keep", "linkage", "torch", "triton", "scipy", "fastcluster", "sklearn loop", "ToMe", "block", "model",
    "ours / block", "ours / ToMe", "ours / sklearn",
)  # fmt: skip


def _clustering(options: TokensOptions, seed: int, emit: Emit, measured: list[dict[str, Any]]) -> int:
    """One row for each batch, number of tokens, keep rate and linkage."""
    from benchmarks import harness
    from benchmarks.tokens.cases import MOST_DISTANCES, cluster_name, clustering_contenders, num_kept

    ours = "triton" if options.device == "cuda" else "torch"
    emit(
        {"kind": "table", "name": "clustering"},
        [
            "",
            f"milliseconds for a batch; ours from distances / from features; ratios: {ours}, from features to labels "
            "(of sklearn: from distances)",
            *markdown_head(_CLUSTERING),
        ],
    )
    failed = False
    for tokens in options.tokens:
        for batch in options.batches:
            if options.device == "cpu" and batch * tokens**2 > MOST_DISTANCES:
                millions = batch * tokens**2 / 1e6
                why = f"{batch} x {tokens} tokens skipped: {millions:.0f} M distances are too many for a CPU"
                emit({"kind": "skipped", "batch": batch, "tokens": tokens, "why": why}, [why])
                continue
            contenders = clustering_contenders(options, batch, tokens, seed)
            by_name = {r.name: r for r in harness.compare(contenders, _sample(options), options.repeats, 0.0)}
            failed |= any(r.status in ("wrong", "failed") for name, r in by_name.items() if _is_ours(name))
            for keep in options.keeps:
                for linkage in options.linkages:
                    row = {
                        f"{who} {start}": by_name[name]
                        for who in (*OURS, "scipy", "fastcluster", "sklearn")
                        for start in ("D", "features")
                        if (name := cluster_name(linkage, keep, who, start)) in by_name
                    }
                    row |= {"tome": by_name[f"tome {keep:g}"], "block": by_name["block"], "model": by_name["forward"]}
                    ratios = _ratios(row, ours)
                    line = {"kind": "clustering", "batch": batch, "tokens": tokens, "keep": keep, "linkage": linkage}
                    line |= {"k": num_kept(tokens, keep), **_numbers(row), "ratios": ratios}
                    measured.append(line)
                    emit(line, [_clustering_row(line, row, ratios, ours), *_notes(row, OURS)])
    return 1 if failed else 0


def _is_ours(name: str) -> bool:
    return any(f" {backend} " in name for backend in OURS)


def _ratios(row: Mapping[str, Result], ours: str) -> dict[str, float]:
    """Ratios of median times: ours to rivals and to a block, from features to labels; each backend to the loop."""
    from benchmarks.harness import ratio

    pairs = [(f"{ours} features", other) for other in ("block", "tome")]
    pairs += [(f"{backend} D", "sklearn") for backend in OURS]
    ratios = {f"{a} / {b}": ratio(row[a], row[f"{b} D" if b == "sklearn" else b]) for a, b in pairs}
    return {name: value.value for name, value in ratios.items() if value is not None}


def _numbers(row: Mapping[str, Result]) -> dict[str, Any]:
    """Median seconds of everybody who took part, and why the others did not."""
    return {
        "seconds": {name: result.median for name, result in row.items() if result.seconds},
        "without": {name: f"{r.status}: {r.note}" for name, r in row.items() if not r.seconds},
    }


def _clustering_row(line: dict[str, Any], row: Mapping[str, Result], ratios: Mapping[str, float], ours: str) -> str:
    cells = [str(line["batch"]), str(line["tokens"]), f"{line['keep']:g}", line["linkage"]]
    cells += [" / ".join(_milliseconds(row[f"{backend} {start}"]) for start in ("D", "features")) for backend in OURS]
    cells += [_milliseconds(row[f"{library} D"]) for library in ("scipy", "fastcluster", "sklearn")]
    cells += [_milliseconds(row[name]) for name in ("tome", "block", "model")]
    cells += [_ratio(ratios.get(name)) for name in (f"{ours} features / block", f"{ours} features / tome")]
    return markdown_row([*cells, _ratio(ratios.get(f"{ours} D / sklearn"))])


# -------------------------------------------------------------------------------------------------------------- models


def _models(options: TokensOptions, seed: int, emit: Emit, measured: list[dict[str, Any]]) -> int:
    """One row for each batch, number of tokens, mode and model: the plain model and the reduced ones."""
    from benchmarks import harness, launches
    from benchmarks.tokens.cases import create_vit, model_contenders, modes_of
    from hyptree.tokens.schedule import KeepRate, default_layers

    names = ["plain", *(f"atc {linkage}" for linkage in options.linkages), "tome"]
    depth = len(create_vit(options, options.tokens[0], seed).blocks)  # type: ignore[arg-type]
    layers, keep = default_layers(depth), options.keeps[0]
    columns = ["B", "N", "tokens left", "mode", "model", "images/s", "of plain", "ms", *launches.HEAD]
    emit(
        {"kind": "table", "name": "models", "layers": layers, "keep": keep},
        ["", f"{options.model}, keep {keep:g} at blocks {', '.join(map(str, layers))}", *markdown_head(columns)],
    )
    failed = False
    for tokens in options.tokens:
        counts = KeepRate(layers, keep).counts(tokens)
        for batch in options.batches:
            contenders, asked = model_contenders(options, batch, tokens, seed, counts, layers)
            by_name = {r.name: r for r in harness.compare(contenders, _sample(options), options.repeats, 0.0)}
            for mode in modes_of(options):
                row = {name: by_name[f"{name}, {mode}"] for name in names}
                failed |= any(r.status in ("wrong", "failed") for r in row.values())
                line: dict[str, Any] = {"kind": "models", "batch": batch, "tokens": tokens, "keep": keep}
                line |= {"left": counts, "mode": mode, **_numbers(row)}
                counted = {name: asked.get(f"{name}, {mode}", launches.Launches()) for name in names}
                line["launches"] = {name: each.as_dict() for name, each in counted.items()}
                line["images_per_second"] = {name: batch / seconds for name, seconds in line["seconds"].items()}
                measured += [
                    {**line, "linkage": linkage, "ratios": _against(row, linkage)} for linkage in options.linkages
                ]
                line["ratios"] = {linkage: _against(row, linkage) for linkage in options.linkages}
                where = [str(batch), str(tokens), " ".join(map(str, counts)), mode]
                rows = [[*where, name, *_speed(batch, row[name], row["plain"]), *counted[name].cells()] for name in row]
                emit(line, [*map(markdown_row, rows), *_notes(row, names)])
    return 1 if failed else 0


def _against(row: Mapping[str, Result], linkage: str) -> dict[str, float]:
    from benchmarks.harness import ratio

    ratios = {f"atc / {other}": ratio(row[f"atc {linkage}"], row[other]) for other in ("plain", "tome")}
    return {name: value.value for name, value in ratios.items() if value is not None}


def _speed(batch: int, result: Result, plain: Result) -> list[str]:
    """Images per second, the same as a multiple of the plain model's, and milliseconds."""
    from benchmarks.harness import ratio

    if not result.seconds:
        return [result.status, "", ""]
    times = ratio(plain, result)
    return [
        f"{batch / result.median:.4g}", "" if times is None else f"{times.value:.2f}", f"{1e3 * result.median:.3f}"
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ verdicts


def _judge(options: TokensOptions, emit: Emit, measured: Sequence[dict[str, Any]]) -> int:
    """Hold the rows against the targets of this device; 1 if one is missed."""
    missed = False
    emit({"kind": "table", "name": "targets"}, [""])
    for target in TARGETS:
        if target.device != options.device or target.table not in options.tables:
            continue
        values = _values(target, measured)
        worst = max(values, default=None)
        met = None if worst is None else worst <= target.at_most
        missed |= met is False
        verdict = "not measured" if met is None else "met" if met else "MISSED"
        size = f"{target.batch or 'any'} x {target.tokens}, keep {target.keep:g}, {target.linkage}"
        shown = "-" if worst is None else f"{worst:.3f}"
        text = (
            f"{target.name}  {target.measure}, {size}: {shown}, at most {target.at_most:.3g}: {verdict} ({target.why})"
        )
        emit(
            {"kind": "target", "name": target.name, "measure": target.measure, "case": size, "value": worst}
            | {"at_most": target.at_most, "met": met, "why": target.why},
            [text],
        )
    return 1 if missed else 0


def _values(target: Target, measured: Sequence[dict[str, Any]]) -> list[float]:
    """What was measured of this target: ratios as they are, times in milliseconds.

    Models count as CUDA graphs on a GPU, where eager ones measure how fast the host is, and eager on a CPU.
    """
    mode = "graphs" if target.device == "cuda" else "eager"
    rows = [
        line
        for line in measured
        if (line["kind"], line["tokens"], line["keep"], line["linkage"])
        == (target.table, target.tokens, target.keep, target.linkage)
        and target.batch in (0, line["batch"])
        and line.get("mode", mode) == mode
    ]
    if "/" in target.measure:
        return [line["ratios"][target.measure] for line in rows if target.measure in line["ratios"]]
    return [1e3 * line["seconds"][target.measure] for line in rows if target.measure in line["seconds"]]


def _milliseconds(result: Result) -> str:
    if result.seconds:
        return f"{result.median * 1e3:.3g}"
    if result.status == "skipped":
        return result.note.removesuffix(", judged by one image").removesuffix(" a call").replace("about ", "~")
    return "-" if result.status == "absent" else result.status


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _notes(row: Mapping[str, Result], names: Sequence[str]) -> list[str]:
    """A line for each of these that is wrong or broke."""
    bad = [r for name, r in row.items() if name.startswith(tuple(names)) and r.status in ("wrong", "failed")]
    return [f"  {result.name} {result.status}: {result.note}" for result in bad]
