"""The HCFormer benchmark: its two tables, its JSON lines, its exit code, and what it says to a mistake."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from ramify.bench import hcformer as bench
from ramify.bench.hcformer import HCFormerOptions
from ramify.cli import main

SMALL = {"growth_model": "hcformer_pico", "repeats": 2, "threads": 1, "clock": "cpu"}


def test_growth_table_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "GROWTH_LIMIT", 1e9)  # times of small pictures on a busy machine mean nothing
    out = tmp_path / "new" / "lines.jsonl"
    stream = io.StringIO()
    options = HCFormerOptions(tables=("growth",), sizes=(64, 128), patches=1024, json=True, out=out, **SMALL)
    assert bench.run(options, stream) == 0
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines == [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header", "table", "growth", "growth", "growth_result"]
    small, large = lines[2:4]
    assert (small["batch"], large["batch"]) == (4, 1) and small["time_ratio"] == small["memory_ratio"] == 1.0
    assert 0.8 < large["memory_ratio"] < 1.3  # counted, not measured: linear growth holds at any size
    assert large["time_ratio"] == pytest.approx(large["seconds_per_patch"] / small["seconds_per_patch"])
    assert lines[0]["versions"]["torch"] == torch.__version__ and lines[0]["growth_model"] == "hcformer_pico"


def test_exit_code_says_that_growth_is_too_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "GROWTH_LIMIT", 0.5)
    stream = io.StringIO()
    assert bench.run(HCFormerOptions(tables=("growth",), sizes=(64,), patches=256, **SMALL), stream) == 1
    assert stream.getvalue().rstrip().endswith("limit 0.5: MISSED")


def test_throughput_table(capsys: pytest.CaptureFixture[str]):
    flags = ["--tables", "throughput", "--models", "hcformer_pico", "resnet10t", "--size", "64", "--batch", "2"]
    assert main(["bench", "hcformer", *flags, "--repeats", "2", "--threads", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["model", "---", "hcformer_pico", "resnet10t"]
    assert all(float(row.split("|")[i]) > 0 for row in rows[2:] for i in range(2, 6))


def test_memory_counts_what_is_kept():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    kept = bench._memory(layer, torch.randn(5, 8), HCFormerOptions())
    assert kept == 5 * 16 * 4  # the result of tanh, kept twice and counted once


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "hcformer_pcio"], "hcformer_pcio"),
        (["--sizes", "448", "224"], "sizes must grow"),
        (["--repeats", "1"], "repeats must be 2 or more"),
        (["--device", "cuda", "--clock", "cpu"], "clock cpu"),
    ],
)
def test_bad_input_is_one_line(flags, words, capsys: pytest.CaptureFixture[str]):
    assert bench.main(["--tables", "throughput", "--size", "32", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("ramify: error: ") and words in error
