"""The Hi-Mapper benchmark: what it counts, its ratio of times, its exit code, and what it says to a mistake."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("timm")

from benchmarks import himapper as bench
from benchmarks import launches
from benchmarks.himapper import HiMapperOptions
from hyptree.cli import main

SHAPE = {"models": ("test_vit", "test_resnet"), "size": 160, "batch": 2, "num_leaves": 8, "depth": 3, "width": 16}
SMALL = SHAPE | {"repeats": 2, "threads": 1, "clock": "cpu", "modes": ("eager",)}


def lines_of(**changes: object) -> tuple[int, list[dict]]:
    stream = io.StringIO()
    code = bench.run(HiMapperOptions(**{**SMALL, "json": True, **changes}), stream)
    return code, [json.loads(line) for line in stream.getvalue().splitlines()]


def test_multiplications_are_counted_as_written_down():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 5, 4, 4, bias=False), nn.Linear(5, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            f = self.conv(x).flatten(2).mT[:, None]  # (1, 1, 64, 5)
            return self.head(nn.functional.scaled_dot_product_attention(f, f, f).mean(2))

    # 64 places of 5 x 48 products, queries times keys and weights times values 64 x 64 x 5 each, 5 x 7 in the head
    assert bench.count_macs(Net(), 32) == 64 * 5 * 48 + 2 * 64 * 64 * 5 + 35


def test_cost_of_the_design_at_its_own_size():
    """The table of the design, for the two backbones that the limits are about: at most 2 % more parameters."""
    sizes = {"num_leaves": 32, "depth": 4, "width": 128, "size": 224}
    code, lines = lines_of(tables=("cost",), models=("resnet50", "deit_small_patch16_224"), **sizes)
    assert code == 0 and [line["kind"] for line in lines] == ["header", "table", "cost", "cost"]
    for line in lines[2:]:
        parameters, macs = line["design"]
        assert line["met"] and 0.9 * parameters < line["added_parameters"] / 1e6 <= 1.02 * parameters
        assert line["added_macs"] / 1e6 <= 1.02 * macs
        assert line["added_macs"] < 0.015 * line["macs"]
    assert lines[2]["parameters"] == 25_557_032 and lines[2]["macs"] == pytest.approx(4.09e9, rel=0.005)


def test_more_parameters_than_designed_is_an_exit_code(monkeypatch):
    monkeypatch.setitem(bench.DESIGNED, "test_vit", (0.001, 1))
    code, lines = lines_of(tables=("cost",), models=("test_vit",), num_leaves=32, depth=4, width=128, size=224)
    assert code == 1 and lines[-1]["met"] is False


def test_speed_lines_and_file(tmp_path: Path):
    out = tmp_path / "new" / "lines.jsonl"
    code, lines = lines_of(tables=("speed",), out=out)
    assert code == 0 and lines == [json.loads(line) for line in out.read_text().splitlines()]
    rows = [line for line in lines if line["kind"] == "speed"]
    assert [(row["model"], row["pass"]) for row in rows] == [
        (name, f"{kind}, eager") for name in SMALL["models"] for kind in ("inference", "training")
    ]
    for row in rows:
        assert len(row["plain_seconds"]) == len(row["wrapped_seconds"]) == 2
        assert row["low"] <= row["high"] and row["met"] and row["limit"] is None
        assert (row["error"] is None) == row["pass"].startswith("training")
        assert row["error"] is None or row["error"] < 1e-4  # a fresh wrapped model gives the plain one's logits


def test_a_wrapped_model_that_is_not_the_plain_one_has_no_time(monkeypatch):
    real = bench._create

    def broken(*arguments):
        plain, wrapped = real(*arguments)
        nn.init.normal_(wrapped.encode.out_proj.weight)
        return plain, wrapped

    monkeypatch.setattr(bench, "_create", broken)
    code, lines = lines_of(tables=("speed",), models=("test_vit",))
    assert code == 1 and "is beyond" in next(line for line in lines if "inference" in line.get("pass", ""))["failed"]


def test_the_limit_is_for_compiled_inference_on_a_gpu(monkeypatch):
    from benchmarks.harness import Result
    from benchmarks.launches import Launches

    actual: list[dict] = []
    results = [Result("plain", seconds=[1.0, 1.0]), Result("wrapped", seconds=[1.06, 1.06])]

    def report(what: str, device: str, calls: int) -> int:
        asked = {"plain": Launches(30, 1e-4, 2**20), "wrapped": Launches(40, 2e-4, 2**21)}
        return bench._report(
            HiMapperOptions(device=device), lambda line, text: actual.append(line | {"text": text[0]}), "resnet50",
            what, calls, results, asked,
        )  # fmt: skip

    codes = [
        report("inference, graphs", "cuda", 1),
        report("inference, compiled", "cuda", 10),
        report("inference, compiled", "cpu", 0),
        report("training, compiled", "cuda", 1),
    ]
    assert codes == [1, 1, 0, 0] and [line["limit"] for line in actual] == [1.05, 1.05, None, None]
    assert [line["calls"] for line in actual] == [1, 10, None, 1] and actual[0]["ratio"] == pytest.approx(1.06)
    assert actual[0]["launches"]["wrapped"]["host_seconds"] == 2e-4
    assert actual[0]["text"].endswith("| 30; 40 | 100; 200 | 1; 2 |")
    assert ["MISSED" in line["text"] for line in actual] == [True, True, False, False]


def test_a_gpu_is_waited_for_after_one_call_and_after_several(monkeypatch):
    waits: list[int] = []
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(calls)))
    cuda = HiMapperOptions(device="cuda")
    assert bench._calls(cuda, "inference") == (1, 10) and bench._calls(cuda, "training") == (1,)
    assert bench._calls(HiMapperOptions(), "inference") == (0,)
    for number in bench._calls(cuda, "inference"):
        assert bench._sample(cuda, number)(lambda: calls.append(0), 99) > 0  # whatever number a short call would get
    assert waits == [0, 1, 1, 11]
    assert 0 < launches.host_seconds(lambda: calls.append(0), 5, torch.cuda.synchronize) < 1 and waits[4:] == [
        11,
        12,
        13,
        14,
        15,
        16,
    ]


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]):
    flags = [
        "--models",
        "test_vit",
        "--size",
        "160",
        "--batch",
        "2",
        "--num-leaves",
        "8",
        "--depth",
        "3",
        "--width",
        "16",
    ]
    assert main(["bench", "himapper", *flags, "--repeats", "2", "--threads", "1", "--modes", "eager"]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["backbone", "---", "test_vit", "backbone", "---", "test_vit", "test_vit"]


def test_defaults_follow_the_device():
    cuda = HiMapperOptions(device="cuda")
    assert (cuda.batch, cuda.dtype, cuda.size) == (128, "bfloat16", 224)
    assert cuda.models == ("deit_small_patch16_224", "resnet50") and "graphs" in cuda.modes
    assert (HiMapperOptions().batch, HiMapperOptions().dtype) == (8, "float32")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "resnet5o"], "resnet5o"),
        (["--num-leaves", "20"], "num_leaves must be a positive multiple"),
        (["--models", "crossvit_tiny_240", "--size", "240"], "forward_features gives a list"),
        (["--models", "deit_tiny_patch16_224", "--size", "64"], "Input height (64) doesn't match model (224)"),
        (["--repeats", "1"], "repeats must be 2 or more"),
        (["--tables", "cots"], "--tables must be one of cost, speed, got 'cots'"),
        (["--device", "cuda", "--clock", "cpu"], "clock cpu"),
        (["--no-guards"], "add --passes inference"),
    ],
)
def test_bad_input_is_one_line(flags, words, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "himapper", "--models", "test_vit", "--size", "32", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("hyptree: error: ") and words in error


@pytest.mark.slow
def test_compiled_models_are_timed_too():
    code, lines = lines_of(tables=("speed",), models=("test_vit",), modes=("eager", "compiled"))
    rows = [line for line in lines if line["kind"] == "speed"]
    assert code == 0 and [row["pass"] for row in rows] == [
        f"{kind}, {way}" for way in ("eager", "compiled") for kind in ("inference", "training")
    ]
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.parametrize("mode", ["compiled", "graphs"])
def test_guards_are_left_out_for_both(mode, monkeypatch):
    inputs = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: inputs.append(how) or model)
    bench.in_mode(torch.nn.Identity(), mode, HiMapperOptions(guards=False, passes=("inference",)))
    assert inputs[0]["options"]["guard_filter_fn"] is torch.compiler.skip_all_guards_unsafe
    assert inputs[0]["options"].get("triton.cudagraphs", False) == (mode == "graphs") and "mode" not in inputs[0]
    bench.in_mode(torch.nn.Identity(), mode, HiMapperOptions())
    assert inputs[1] == {"dynamic": False, "mode": "reduce-overhead" if mode == "graphs" else None}
