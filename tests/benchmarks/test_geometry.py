"""The benchmark: times are times, errors are errors, and what cannot run says so. Sizes are tiny."""

from __future__ import annotations

import io
import itertools
import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.geometry import cases, definitions, maker, points, steps
from benchmarks.geometry import run as geometry
from benchmarks.geometry import tables as report
from benchmarks.options import GeometryOptions
from hyptree.cli import main
from hyptree.errors import UserError
from tests.benchmarks.words import options_of


class Clock:
    """Stands for the module ``time`` inside the harness: time passes when a contender says so, on any machine."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.worked

    def work(self, seconds: float, waiting: float = 0.0) -> None:
        self.now += seconds + waiting
        self.worked += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(harness, "time", fake)
    return fake


def contender(name: str, work: Callable[[], None], error: float | None = None) -> harness.Contender:
    return harness.Contender(name, lambda: harness.Built(work, error))


def lines_of(options: GeometryOptions) -> tuple[int, list[dict]]:
    stream = io.StringIO()
    code = geometry.run(options, stream)
    return code, [json.loads(line) for line in stream.getvalue().splitlines()]


# ------------------------------------------------------------------------------------------------------------ harness


def test_times_and_ratio(clock: Clock):
    loads = itertools.cycle([0.0, 0.0, 0.0, 5.0])  # others use the machine now and then
    ways = [contender("a", lambda: clock.work(0.012)), contender("b", lambda: clock.work(0.003, next(loads)))]
    slow, fast = harness.compare(ways, harness.wall_sample, 9, 1.0)
    assert slow.seconds == pytest.approx([0.012] * 9)
    assert fast.median == pytest.approx(0.003)
    ratio = harness.ratio(slow, fast)
    assert ratio is not None and ratio.value == pytest.approx(4.0)


def test_ratio_is_of_medians_and_spread_of_rounds():
    a = harness.Result("a", seconds=[2.0, 4.0, 6.0, 20.0, 8.0])
    b = harness.Result("b", seconds=[1.0, 2.0, 3.0, 10.0, 2.0])
    ratio = harness.ratio(a, b)
    assert ratio == harness.Ratio(6.0 / 2.0, 2.0, 2.0)  # the load of the fourth round hits both alike
    assert harness.ratio(a, harness.Result("absent")) is None


def test_cpu_clock_does_not_count_waiting(clock: Clock):
    (result,) = harness.compare([contender("a", lambda: clock.work(0.01, waiting=1.0))], harness.cpu_sample, 2, 1.0)
    assert result.seconds == pytest.approx([0.01, 0.01])


def test_real_clocks():
    x = torch.randn(200, 200)
    for sample in (harness.wall_sample, harness.cpu_sample):
        (result,) = harness.compare([contender("a", lambda: x @ x)], sample, 2, 1.0)
        assert 1e-6 < result.median < 1.0


def test_rounds_are_interleaved(clock: Clock):
    calls: list[str] = []
    ways = [contender(n, lambda n=n: (calls.append(n), clock.work(0.003))) for n in "abc"]
    harness.compare(ways, harness.wall_sample, 6, 1.0)
    timed = calls[-18:]
    for i in range(0, 18, 3):
        assert sorted(timed[i : i + 3]) == ["a", "b", "c"]
    assert {timed[i] for i in range(0, 18, 3)} == {"a", "b", "c"}  # nobody always goes first


def test_short_calls_are_repeated_within_a_sample(clock: Clock):
    calls: list[int] = []
    (result,) = harness.compare(
        [contender("tiny", lambda: (calls.append(1), clock.work(1e-5)))], harness.wall_sample, 2, 1.0
    )
    assert result.seconds == pytest.approx([1e-5, 1e-5])
    assert 400 <= len(calls) < 450  # two samples of 2 ms, and the warm-up


def test_long_calls_sit_out(clock: Clock):
    ways = [contender("long", lambda: clock.work(0.5)), contender("short", lambda: clock.work(0.01))]
    long, short = harness.compare(ways, harness.wall_sample, 8, 1.0)
    assert len(long.seconds) == 5 and len(short.seconds) == 8


@pytest.mark.parametrize("error", [0.5, math.inf, math.nan])
def test_a_wrong_answer_has_no_time(error: float, clock: Clock):
    ways = [contender("w", lambda: clock.work(1e-3), error), contender("r", lambda: clock.work(1e-3), 1e-3)]
    wrong, right = harness.compare(ways, harness.wall_sample, 2, 0.01)
    assert wrong.status == "wrong" and not wrong.seconds and math.isnan(wrong.median)
    assert right.status == "ok" and right.seconds


def test_a_contender_that_breaks_ends_nothing(clock: Clock):
    def broken() -> harness.Built:
        raise RuntimeError("no kernel\nlong story")

    def absent() -> harness.Built:
        raise harness.Skipped("absent", "x is not installed")

    ways = [harness.Contender("b", broken), harness.Contender("a", absent), contender("c", lambda: clock.work(1e-3))]
    results = harness.compare(ways, harness.wall_sample, 2, 1.0)
    assert [r.status for r in results] == ["failed", "absent", "ok"]
    assert results[0].note == "RuntimeError: no kernel"


def test_relative_error():
    exact = torch.tensor([1.0, -3.0, 0.0], dtype=torch.float64)
    assert harness.relative_error(exact.clone(), exact) == 0.0
    # The mean size is 4/3: the third entry counts relative to it, the second relative to itself.
    assert harness.relative_error(exact + torch.tensor([0, 0.3, 0]), exact) == pytest.approx(0.1)
    assert harness.relative_error(exact + torch.tensor([0, 0, 0.4]), exact) == pytest.approx(0.3)
    assert harness.relative_error(torch.full((3,), math.nan), exact) == math.inf
    assert harness.relative_error(torch.ones(2), exact) == math.inf


def test_floor_is_the_larger_of_data_and_arithmetic(monkeypatch: pytest.MonkeyPatch):
    floor = harness.Floor("cpu", torch.float32, harness.wall_sample)
    monkeypatch.setattr(floor, "bandwidth", lambda num_bytes: 1e9)
    monkeypatch.setattr(floor, "peak", lambda: 1e10)
    assert floor.seconds(2_000_000, 0) == pytest.approx(2e-3)
    assert floor.seconds(2_000_000, 10**8) == pytest.approx(1e-2)


def test_measured_floor_is_plausible():
    floor = harness.Floor("cpu", torch.float32, harness.wall_sample)
    assert 1e7 < floor.bandwidth(10**6) < 1e13
    assert 1e7 < floor.peak() < 1e14


# -------------------------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize("name", cases.OPERATIONS)
def test_every_operation_is_right(name: str):
    """Ours and every rival agree with the textbook, forward and gradient, on fresh inputs (nothing is timed)."""
    make = cases.Maker("cpu", torch.float64, seed=torch.randint(2**31, ()).item(), quick=True, compile=False)
    actual = {cases.OURS: 0, cases.GEOOPT: 0, cases.HYPLL: 0}
    for case in cases.OPERATIONS[name](make):
        for way in case.contenders:
            if way.name not in actual:
                continue
            try:
                built = way.build()
            except harness.Skipped:
                continue
            assert built.error is not None and built.error < 1e-9, (case.op, case.kind, way.name)
            actual[way.name] += 1
    assert actual[cases.OURS] >= 2


def test_a_wrong_convention_is_found(monkeypatch: pytest.MonkeyPatch):
    """Had we mixed up c and 1/c, no time would be printed, and the exit code would say so."""
    monkeypatch.setattr(points.lorentz, "logmap0", lambda x, c: x * torch.asinh(x.norm(dim=-1, keepdim=True) / c))
    code, lines = lines_of(GeometryOptions(ops=("lorentz.logmap0",), quick=True, compile=False, repeats=2, json=True))
    ours = lines[1]["contenders"][0]
    assert code == 1
    assert ours["name"] == "ours" and ours["status"] == "wrong" and ours["median"] is None


@pytest.mark.parametrize("model", ["lorentz", "poincare"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_judged_by_the_best_that_its_dtype_holds(model: str, dtype: torch.dtype, seed: int):
    """In bfloat16 rounding the exact step is most of its error; only what comes on top is anybody's fault."""
    make = cases.Maker("cpu", dtype, seed, quick=True, compile=False)
    x = make.points(200, 8) if model == "lorentz" else make.ball_points(200, 8)
    grad = make.normal(200, 8)
    step = definitions.lorentz_adam if model == "lorentz" else definitions.poincare_adam
    truth = step(x.double(), grad.double(), 0.1, cases.C)
    rounded = truth.to(dtype)
    assert steps.step_error(rounded, truth, x) == 0
    if dtype == torch.bfloat16:  # the reason for the rule: no bfloat16 table can do better than this
        assert harness.relative_error(rounded - x.double(), truth - x) > 0.05
    # Mistakes are not hidden by it: no step, the opposite step, curvature 1/c, one entry off by a number or two.
    wrong = step(x.double(), grad.double(), 0.1, 1 / cases.C).to(dtype)
    assert min(steps.step_error(x, truth, x), steps.step_error((2 * x - truth).to(dtype), truth, x)) > 0.5
    assert steps.step_error(wrong, truth, x) > 0.2
    next_one = rounded.clone()
    next_one[7, 3] *= 1 + 2 * torch.finfo(dtype).eps
    assert steps.step_error(next_one, truth, x) > 0
    assert steps.step_error(torch.full_like(x, math.nan), truth, x) == math.inf


@pytest.mark.parametrize("name", ["lorentz.adam", "poincare.adam"])
def test_bfloat16_steps_are_rounded_correctly(name: str):
    """What ``--dtype bf16`` measures of ours is right to the last bit of nearly every entry."""
    make = cases.Maker("cpu", torch.bfloat16, seed=torch.randint(2**31, ()).item(), quick=True, compile=False)
    errors = [c.build().error for case in cases.OPERATIONS[name](make) for c in case.contenders if c.name == cases.OURS]
    assert len(errors) == 2 and max(errors) < 1e-3


def test_too_large_a_rival_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(maker.os, "sysconf", lambda name: 10)  # a machine with 100 bytes
    _, lines = lines_of(
        GeometryOptions(ops=("lorentz.pairwise_exact",), quick=True, compile=False, repeats=2, json=True)
    )
    by_name = {c["name"]: c for c in lines[1]["contenders"]}
    assert by_name["geoopt"]["status"] == "skipped" and "GiB" in by_name["geoopt"]["note"]
    assert by_name["ours"]["status"] == "ok"


# ------------------------------------------------------------------------------------------------------------- output


def test_json_lines_and_file(tmp_path: Path):
    out = tmp_path / "new" / "bench.jsonl"
    options = GeometryOptions(ops=("lorentz.dist",), quick=True, compile=False, repeats=2, json=True, out=out, seed=7)
    code, lines = lines_of(options)
    assert code == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    head, forward, backward = lines
    assert head["kind"] == "header" and head["seed"] == 7 and head["versions"]["torch"] == torch.__version__
    assert head["command"].startswith("hyptree bench geometry --ops lorentz.dist")
    assert (forward["op"], forward["pass"], backward["pass"]) == ("lorentz.dist", "forward", "backward")
    by_name = {c["name"]: c for c in forward["contenders"]}
    assert set(by_name) == {"ours", "geoopt", "HypLL", "twin"}
    assert by_name["ours"]["median"] > 0 and by_name["ours"]["error"] < 1e-6 and by_name["ours"]["rounds"] == 2
    assert by_name["twin"]["ratio"] == 1.0 and by_name["twin"]["error"] is None
    assert by_name["HypLL"]["status"] == "absent"  # it has no Lorentz model
    assert forward["floor"] > 0 and forward["target_met"] is None
    geometry.run(options, io.StringIO())
    assert len(out.read_text().splitlines()) == 6  # appended


def test_missing_rivals_are_reported(monkeypatch: pytest.MonkeyPatch):
    for name in [m for m in sys.modules if m.split(".")[0] in ("geoopt", "hypll")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "geoopt", None)  # import raises ModuleNotFoundError
    monkeypatch.setitem(sys.modules, "hypll", None)
    options = GeometryOptions(ops=("poincare.dist", "poincare.adam"), quick=True, compile=False, repeats=2, json=True)
    code, lines = lines_of(options)
    assert code == 0
    for line in lines[1:]:
        by_name = {c["name"]: c for c in line["contenders"]}
        assert by_name["geoopt"]["note"] == "geoopt is not installed", line
        assert by_name["HypLL"]["note"] == "hypll is not installed", line
        assert by_name["ours"]["status"] == "ok"


def test_table(capsys: pytest.CaptureFixture[str]):
    flags = ["--ops", "mobius_add", "--quick", "--no-compile", "--repeats", "2", "--threads", "1"]
    assert main(["bench", "geometry", *flags]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 3 and len({row.count("|") for row in rows}) == 1
    assert rows[1].split("|")[1].strip() == "poincare.mobius_add"
    assert f"torch {torch.__version__}" in text and "run       hyptree bench geometry --ops mobius_add" in text
    assert torch.get_num_threads() == 1


def test_target_is_judged_against_the_twin_as_called_and_beside_the_fastest():
    def result(name: str, seconds: float) -> harness.Result:
        return harness.Result(name, seconds=[seconds] * 3, error=0.0)

    case = cases.Case("op", "shape", "forward", "linear", [], 1, 1, target=1.5)
    for ours, called, fastest in (
        (1.4, "0.70 met", "1.40 met"),
        (1.6, "0.80 met", "1.60 MISSED"),
        (4.0, "2.00 MISSED", "4.00 MISSED"),
    ):
        results = [result("ours", 9.0), result("compiled", ours), result("twin", 2.0), result("twin compiled", 1.0)]
        cells = [cell.strip() for cell in report.table_row(case, results, 1.0).split("|")]
        assert cells[-4:-1] == ["1.5", called, fastest]
        line = report.json_case(case, results, 1.0, {})
        assert (line["to_twin_as_called"], line["to_fastest_twin"]) == (ours / 2, ours)
        assert line["target_met"] is ("met" in called) and line["target_met_beside_fastest"] is ("met" in fastest)


def test_kernels_are_judged_where_they_take_part():
    case = cases.Case("op", "shape", "forward", "cdist", [], 1, 1, target=1.0)
    times = {"ours": 9.0, "compiled": 4.0, "kernels": 1.5, "twin": 2.0}
    results = [harness.Result(name, seconds=[seconds] * 3, error=0.0) for name, seconds in times.items()]
    line = report.json_case(case, results, 1.0, {})
    assert line["to_twin_as_called"] == 0.75 and line["target_met"] is True
    cells = [cell.strip() for cell in report.table_row(case, results, 1.0).split("|")]
    assert cells[8] == "0.75 (0.00)" and cells[-3] == "0.75 met"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in cases.OPERATIONS if "pairwise" in name or "softmax" in name])
def test_kernels_are_right_on_a_gpu(name: str):
    make = cases.Maker("cuda", torch.float32, seed=torch.randint(2**31, ()).item(), quick=True, compile=False)
    errors = [c.build().error for case in cases.OPERATIONS[name](make) for c in case.contenders if c.name == "kernels"]
    assert len(errors) == 2 and all(error < 1e-4 for error in errors)


def check_compiled(options: GeometryOptions) -> None:
    code, lines = lines_of(options)
    assert code == 0
    for line in lines[1:]:
        by_name = {c["name"]: c for c in line["contenders"]}
        assert by_name["compiled"]["status"] == "ok" and by_name["compiled"]["error"] < 1e-4
        assert by_name["twin compiled"]["median"] > 0


def test_compiled_contenders_take_part(monkeypatch: pytest.MonkeyPatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda run, **options: compiled.append(options) or run)
    check_compiled(GeometryOptions(ops=("lorentz.logmap0",), quick=True, repeats=2, json=True))
    assert compiled == [{"fullgraph": True, "dynamic": False}] * 4  # ours and the twin, two passes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lorentz.mlr", "poincare.adam"])
def test_compiled_contenders_run(name: str):
    check_compiled(GeometryOptions(ops=(name,), quick=True, repeats=2, json=True))


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ops", "lorentz.dits"], ["unknown operation", "lorentz.dist"]),
        (["--device", "tpu"], ["device", "tpu"]),
        (["--dtype", "int8"], ["dtype", "int8"]),
        (["--repeats", "1"], ["repeats", "1"]),
        (["--threads", "-1"], ["threads", "-1"]),
        (["--clock", "cpu", "--device", "cuda"], ["clock", "cuda"]),
        (["--nonsense"], ["nonsense"]),
    ],
)
def test_bad_input_is_one_line(flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]):
    code = main(["bench", "geometry", *flags])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("\n") == 1 and captured.err.startswith("hyptree: error: ")
    for word in words:
        assert word in captured.err


CHURN = """
import resource
from benchmarks.options import GeometryOptions
from benchmarks.session import session
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.ones(2**21) for _ in range(6)]  # 48 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with session(GeometryOptions(device="cpu", threads=1)):
    faults()
    print(min(faults() for _ in range(10)))  # a busy system takes pages away now and then
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc")
def test_no_contender_pays_for_fresh_pages():
    """Outside a session most processes touch thousands of new pages per call, depending on what was freed before."""
    run = subprocess.run([sys.executable, "-c", CHURN], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 100


def test_no_cuda_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device"):
        geometry.run(GeometryOptions(device="cuda"))


def test_command_round_trips():
    options = GeometryOptions(
        ops=("mlr", "dist"),
        dtype="float64",
        threads=2,
        clock="cpu",
        compile=False,
        quick=True,
        out=Path("a b.jsonl"),
        seed=3,
    )
    assert options_of(shlex.split(options.command())) == options
    assert (
        options_of(["hyptree", "bench", "geometry"]) == GeometryOptions()
        and GeometryOptions().command() == "hyptree bench geometry"
    )


def test_words_choose_operations():
    assert geometry.choose([]) == list(cases.OPERATIONS)
    assert geometry.choose(["lorentz.expmap", "mobius"]) == ["lorentz.expmap", "poincare.mobius_add"]
    assert geometry.choose(["adam", "lorentz.dist"]) == ["lorentz.dist", "lorentz.adam", "poincare.adam"]
