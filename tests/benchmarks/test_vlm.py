"""The benchmark of adapters: its table, its JSON lines, its exit code, and what it says to a mistake."""

from __future__ import annotations

import io
import json
from typing import cast

import pytest

from benchmarks import harness
from benchmarks.vlm import head as vlm_head
from benchmarks.vlm import run as bench
from benchmarks.vlm.run import STEPS, VlmOptions
from hyptree.cli import main

pytest.importorskip("transformers")


def test_every_step_is_timed_and_right():
    stream = io.StringIO()
    options = VlmOptions(size="tiny", repeats=2, threads=1, clock="cpu", json=True)
    assert bench.run(options, stream) == 0
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    assert tuple(steps) == STEPS and all(line["status"] == "ok" for line in steps.values())
    assert steps["trained"]["of_trained"] == 1.0 and steps["frozen"]["parameters"] == steps["merged"]["parameters"] == 0
    # 2 towers x 2 layers x 3 matrices of width 32, in blocks of 16, or of rank 8 on both sides
    assert steps["scale"]["parameters"] == steps["lora"]["parameters"] == 12 * 32 * 16
    assert steps["lora, layers"]["parameters"] == 12 * 32 * 16 and steps["diagonal"]["parameters"] == 12 * 32
    assert steps["q,k,v"]["parameters"] == 12 * 32 * 32
    assert steps["scale"]["error"] == 0.0 and steps["merged"]["error"] == 0.0
    verdicts = {(line["step"], line["of"]) for line in lines if line["kind"] == "verdict"}
    assert verdicts == {("scale", "trained"), ("merged", "frozen"), ("by the head", "by cosine")}
    ways = {line["way"]: line for line in lines if line["kind"] == "inference"}
    assert all(line["status"] == "ok" and line["seconds"] > 0 for line in ways.values())
    assert ways["by the head"]["error"] < 1e-5


@pytest.mark.parametrize(
    ("head", "error", "binding", "code"),
    [(1.03, 0.0, True, 1), (1.01, 0.0, True, 0), (1.03, 0.0, False, 0), (1.0, 0.1, False, 1)],
)
def test_a_head_that_is_wrong_or_too_slow_gives_exit_code_1(head: float, error: float, binding: bool, code: int):
    lines: list[dict[str, object]] = []
    ways = [
        harness.Contender("by cosine", lambda: harness.Built(lambda: 1.0, 0.0)),
        harness.Contender("by the head", lambda: harness.Built(lambda: head, error)),
    ]

    def clock(run: harness.Run, number: int) -> float:
        return cast(float, run())

    assert vlm_head.inference(ways, clock, 2, binding, lambda line, text: lines.append(line)) == code
    assert lines[2]["status"] == ("wrong" if error else "ok")
    if not error:
        assert lines[-1]["ratio"] == pytest.approx(head) and lines[-1]["met"] is (head <= 1.02)


def test_a_wrong_answer_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "TOLERANCE", -1.0)
    stream = io.StringIO()
    options = VlmOptions(size="tiny", steps=("frozen", "merged"), repeats=2, threads=1, dtype="float32")
    assert bench.run(options, stream) == 1
    assert "wrong: error 0.0e+00" in stream.getvalue()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "scale", "lorra"], "got 'lorra'"),
        (["--tables", "speed"], "got 'speed'"),
        (["--classes", "0"], "classes must be 1 or more"),
        (["--repeats", "1"], "repeats must be 2 or more"),
        (["--clock", "cpu", "--device", "cuda"], "clock cpu does not see"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "vlm", *flags]) == 2
    assert words in capsys.readouterr().err
