"""The benchmark of kernels one by one: what it finds, what it says of a wrong kernel, and where it stops."""

from __future__ import annotations

import dataclasses
import io
import json
import pkgutil
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hyptree.ops
from benchmarks.harness import Result
from benchmarks.kernels import check as kernel_check
from benchmarks.kernels import resources as kernel_resources
from benchmarks.kernels import run as kernels
from benchmarks.kernels import tables
from benchmarks.kernels.cases import CUTS, MAPS, MLP_RATIOS, Draw, Job, Work
from benchmarks.kernels.language import JOBS
from benchmarks.kernels.options import OPS, KernelOptions
from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.ops import backend
from tests.benchmarks.words import options_of

pytest.importorskip("triton")

interpreter = pytest.mark.skipif(not backend.interpreted(), reason="kernels run on the GPU here, this test on a CPU")


def outcome(*ops: str, **settings: Any) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and JSON lines of a quick run without compilation."""
    stream = io.StringIO()
    common: dict[str, Any] = {"quick": True, "compiled": False, "repeats": 2, "threads": 1, "json": True}
    code = kernels.run(KernelOptions(ops=ops, **{**common, **settings}), stream)
    return code, [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_operation_takes_part() -> None:
    folders = {actual.name for actual in pkgutil.iter_modules(hyptree.ops.__path__) if actual.ispkg}
    both_levels = {"cluster_patch", "cluster_window"}  # kernels of one operation
    assert set(OPS) == folders - {"cluster_map"} | both_levels and tuple(JOBS) == OPS
    for quick in (True, False):  # on meta, nothing is drawn
        assert [name for name in OPS if not list(JOBS[name](Draw("meta", 0, quick)))] == []


@interpreter
def test_right_kernels_are_right_and_timed_beside_their_definitions() -> None:
    code, lines = outcome("centroid", "lorentz_mlr", "cosine", seed=3)
    assert code == 0
    head, cases = lines[0], [line for line in lines if line["kind"] == "case"]
    assert head["seed"] == 3 and head["command"].startswith("hyptree bench kernels --ops centroid lorentz_mlr cosine")
    assert [(line["op"], line["form"], line["pass"]) for line in cases] == [
        ("lorentz_mlr", "epilogue", "forward"), ("lorentz_mlr", "epilogue", "backward"),
        ("lorentz_mlr", "whole head", "forward"), ("lorentz_mlr", "whole head", "backward"),
        ("centroid", "tiny", "forward"), ("centroid", "tiny", "backward"), ("cosine", "", "forward"),
    ]  # fmt: skip
    for line in cases:
        assert line["verdict"] == "right" and 0 < line["error"] < 1e-6 and line["floor"] > 0
        times = {entry["name"]: entry for entry in line["contenders"]}
        assert times["eager"]["median"] > 0 and times["kernel"]["status"] == "ok"


@interpreter
@pytest.mark.slow
def test_all_operations_are_right() -> None:
    code, lines = outcome()
    assert code == 0 and {line["verdict"] for line in lines if line["kind"] == "case"} == {"right"}
    assert {line["op"] for line in lines if line["kind"] == "summary"} == set(OPS)


@interpreter
@pytest.mark.parametrize("fault", ["one number", "a row nobody writes"])
def test_a_wrong_kernel_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyptree.ops.centroid import triton

    right = triton.forward

    def wrong(mean: Tensor, d: int, width: int, c: float) -> Tensor:
        out = right(mean, d, width, c)
        if fault == "one number":
            out[0, 1] += 0.5
            return out
        held = torch.empty_like(out)  # the benchmark fills it with NaN
        held[1:] = out[1:]
        return held

    monkeypatch.setattr(triton, "forward", wrong)
    code, lines = outcome("centroid", "cosine")
    verdicts = {(line["op"], line["pass"]): line["verdict"] for line in lines if line["kind"] == "case"}
    assert code == 1 and verdicts["centroid", "forward"] == "WRONG in result 0"
    assert verdicts["centroid", "backward"] == verdicts["cosine", "forward"] == "right"


@interpreter
def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyptree.ops.lorentz_mlr import triton

    right = triton.backward
    monkeypatch.setattr(triton, "backward", lambda *x: (right(*x)[0], *(1.01 * part for part in right(*x)[1:])))
    code, lines = outcome("lorentz_mlr")
    verdicts = [line["verdict"] for line in lines if line["kind"] == "case" and line["pass"] == "backward"]
    assert code == 1 and all(verdict.startswith("WRONG in gradient") for verdict in verdicts) and len(verdicts) == 2


@interpreter
def test_a_kernel_that_fails_is_one_line_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hyptree.ops.cosine import triton

    def broken(features: Tensor) -> Tensor:
        raise RuntimeError("out of resource: shared memory\nand a second line")

    monkeypatch.setattr(triton, "cosine_distance", broken)
    flags = ["--quick", "--no-compiled", "--repeats", "2", "--threads", "1", "--ops", "cosine", "centroid"]
    assert main(["bench", "kernels", *flags]) == 1
    text = capsys.readouterr().out
    assert "  cosine (2,9,16) float32 forward, kernel: RuntimeError: out of resource: shared memory\n" in text
    assert "second line" not in text and text.count("| right") == 2


def test_an_input_that_cannot_be_drawn_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Work:
        raise torch.OutOfMemoryError("tried to allocate 3 TiB\nmore")

    monkeypatch.setitem(JOBS, "cosine", lambda draw: iter([Job("cosine", "huge", "(9)", torch.float32, broken)]))
    code, lines = outcome("cosine")
    assert code == 1
    assert lines[1] == {"kind": "failed", "job": "cosine huge (9) float32",
                        "note": "OutOfMemoryError: tried to allocate 3 TiB"}  # fmt: skip


def test_without_an_interpreter_the_definition_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "interpreted", lambda: False)
    code, lines = outcome("merge")
    assert code == 0 and {line["verdict"] for line in lines if line["kind"] == "case"} == {"absent"}


def test_the_time_limit_names_what_is_missing() -> None:
    stream = io.StringIO()
    options = KernelOptions(ops=("merge", "cosine"), quick=True, time_limit=1e-9, repeats=2, threads=1)
    assert kernels.run(options, stream) == 0
    text = stream.getvalue()
    assert "the time limit of 1e-09 s was reached; missing: cosine (2,9,16) float32, merge (2,9,16)->4 float32" in text
    assert "for these: hyptree bench kernels --ops cosine merge --repeats 2 --threads 1 --quick" in text


def test_after_a_lost_device_the_other_operations_get_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    popen = subprocess.Popen

    def start(words: list[str], **settings: Any) -> subprocess.Popen[str]:
        started.append(words)
        return popen([sys.executable, "-c", "print('from the child')"], **settings)

    monkeypatch.setattr(subprocess, "Popen", start)
    options, stream = KernelOptions(ops=("cosine", "merge", "swiglu"), quick=True, seed=1, threads=1), io.StringIO()
    bench = kernels._Bench(options, lambda line, text: print(*text, sep="\n", file=stream), stream)
    jobs = bench._jobs("meta")  # swiglu twice, cosine, merge
    assert bench._go_on_elsewhere(jobs[0], jobs[1:]) == 1
    assert started[0][1:8] == ["-m", "hyptree", "bench", "kernels", "--ops", "cosine", "merge"]
    text = stream.getvalue()
    assert "the device is lost after swiglu tiny (4,8) float32" in text and text.endswith("from the child\n")


def test_one_bad_place_among_many_is_seen() -> None:
    expected = torch.randn(1000, 1000, dtype=torch.float64)
    actual = expected.float()
    assert not kernel_check.error_of(actual, expected, "x").beyond(torch.float32)
    actual[3, 4] += 0.1
    error = kernel_check.error_of(actual, expected, "x")
    assert error.norm < 2e-4 and error.beyond(torch.float32)
    actual[3, 4] = torch.nan
    assert kernel_check.error_of(actual, expected, "x").beyond(torch.bfloat16)
    index = torch.arange(9)
    assert kernel_check.error_of(index + (index == 2), index, "x").beyond(torch.bfloat16)
    assert not kernel_check.error_of(index, index, "x").beyond(torch.float32)


def test_shapes_of_hcformer_are_those_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    import hyptree.models  # noqa: F401
    from hyptree.ops.cluster_map import kernels, reference

    seen: list[Any] = []

    def spy(both: Tensor, alpha: Tensor, bias: Tensor | None, cut: Any) -> Any:
        seen.append(cut)
        return reference.cluster_patch(both, alpha, bias, cut)

    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "cluster_patch", spy)
    monkeypatch.setattr(kernels, "cluster_window", reference.cluster_window)
    for size in ("nano", "medium"):
        seen.clear()
        model = timm.create_model(f"hcformer_{size}").eval()
        with torch.no_grad():
            model(torch.zeros(1, 3, 224, 224))
        assert list(dict.fromkeys(seen)) == [CUTS[f"{size} stage {stage}"] for stage in (1, 2, 3, 4)]
    for place, (height, width, dim) in enumerate(MAPS.values()):  # of the medium model, the last one
        cut, mlp = list(CUTS.values())[4 + place], model.stages[place].blocks[0].mlp
        assert (cut.height, cut.width) == (height, width) and mlp.fc1.in_features == dim
        assert mlp.fc1.out_features == dim * list(MLP_RATIOS.values())[place]


def test_launches_are_recorded_without_a_device() -> None:
    jobs = {job.name: job for jobs_of in JOBS.values() for job in jobs_of(Draw("meta", 0))}
    actual = kernel_resources.launches(jobs["pairwise_lorentz softmax (8,2048,2048,128) float32"].make())
    names = [getattr(one.kernel, "__name__", None) or one.kernel.fn.__name__ for one in actual]
    # an interpreter starts the second of them twice
    assert list(dict.fromkeys(names)) == ["_rows_kernel", "_joint_kernel", "_means_kernel", "_pairs_grad_kernel"]
    built = actual[1].settings["BM"] * actual[1].settings["BN"] * actual[1].settings["TILES"]
    assert actual[1].grid == (8 * 2048 * 2048 // built,) and actual[1].dtypes[0] == torch.float32
    for name, kernel in (
        ("read resnet50 (128,49,128)", "_read_tree_kernel"),
        ("encode (128,128)", "_encode_tree_kernel"),
    ):
        (only,) = kernel_resources.launches(jobs[f"tree_reader {name} bfloat16"].make())
        assert kernel in (getattr(only.kernel, "__name__", None), getattr(only.kernel, "fn", only.kernel).__name__)
    one = kernel_resources.Resources("x", 1, 4, 168, 0, 40_000)
    assert one.resident == 3  # 65536 registers hold three programs of 4 warps with 168 each
    assert kernel_resources.Resources("x", 1, 4, 32, 0, 240_000).resident == 0


@pytest.mark.slow
def test_resources_are_found_without_a_gpu(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "hyptree", "bench", "kernels", "--resources", "--ops", "lorentz_mlr", "--json"]
    import os

    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = {line["kernel"]: line for line in lines if line["kind"] == "resources"}
    assert set(kinds) == {"times", "logits", "logits_grad"}
    assert all(line["spilled"] == 0 and line["resident"] >= 1 and line["registers"] > 16 for line in kinds.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--quick", "--ops", "swiglou"], "unknown kernel 'swiglou'; did you mean 'swiglu'?"),
        (["--quick", "--repeats", "1"], "repeats must be 2 or more"),
        (["--quick", "--time-limit", "-3"], "time-limit must be 0 (none) or more seconds, got -3"),
        (["--device", "cpu"], "device cpu has the tiny sizes alone: add --quick"),
        (["--quick", "--threads", "-1"], "threads must be 0"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *flags]) == 2
    assert words in capsys.readouterr().err


@interpreter
def test_resources_need_a_compiler() -> None:
    with pytest.raises(UserError, match="unset it"):
        kernels.run(KernelOptions(resources=True, ops=("centroid",)), io.StringIO())


def test_the_command_can_be_given_again() -> None:
    options = KernelOptions(ops=("pairwise",), device="cuda", compiled=False, time_limit=300.0)
    assert options.command() == "hyptree bench kernels --ops pairwise --no-compiled --time-limit 300.0 --device cuda"
    assert options_of(shlex.split(options.command())) == options
    assert options.names() == ["pairwise_lorentz", "pairwise_poincare"]
    assert KernelOptions(ops=("merge",), quick=True).names() == ["merge"]


@pytest.mark.parametrize(("seconds", "words"), [(1.1e-4, "2.8 of its bytes' time, 3 wanted: met"), (2e-4, "MISSED")])
def test_what_is_promised_of_bytes_is_measured_by_bytes_alone(seconds: float, words: str) -> None:
    softmax = next(job for job in JOBS["pairwise_lorentz"](Draw("meta", 0)) if "softmax" in job.name)
    work = dataclasses.replace(softmax.make(), most_of_bytes=3.0)
    times = {name: Result(name, status="ok", seconds=[value]) for name, value in (("kernel", seconds), ("eager", 1e-3))}
    line = tables.Line(softmax, "forward", times, None, False, 1e-3, 4e-5, 1, 1, work, True)  # arithmetic: 1e-3
    assert line.verdict().endswith(words)
