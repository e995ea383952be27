"""The benchmark of the lab: it checks before it times, says what it measured, and fails where the target is missed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from benchmarks import lab as bench
from benchmarks.lab import LabOptions
from hyptree.errors import UserError
from tests.benchmarks.words import options_of

TINY = {"n": 24, "batch": 16, "m": (3, 5), "alpha": (0.0, 1.0), "seeds": 2, "repeats": 2, "clock": "cpu"}


def run(tmp_path: Path, **changes: object) -> tuple[int, list[dict[str, object]]]:
    out = tmp_path / "lines.jsonl"
    code = bench.run(LabOptions(**{**TINY, **changes}, out=out), io.StringIO())  # type: ignore[arg-type]
    return code, [json.loads(line) for line in out.read_text().splitlines()]


def test_it_reports_both_and_their_agreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.TARGETS, "cpu", 0.01)  # tiny sizes say nothing about the speed
    code, (header, result) = run(tmp_path)
    assert code == 0 and header["num_models"] == 16
    rates = result["model_steps_per_second"]
    assert isinstance(rates, dict) and rates["loop"] > 0 and rates["engine"] > 0
    assert result["speedup"] == pytest.approx(rates["engine"] / rates["loop"])
    assert 0 <= result["error"] < 1e-4 and result["met"] is True  # type: ignore[operator]


def test_a_missed_target_and_a_wrong_engine_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.TARGETS, "cpu", 1e9)
    code, (_, result) = run(tmp_path)
    assert code == 1 and result["met"] is False
    monkeypatch.setitem(bench.TARGETS, "cpu", 0.01)
    monkeypatch.setattr(bench, "_disagreement", lambda *_: 0.5)
    code, lines = run(tmp_path / "wrong")
    assert code == 1 and lines[1]["status"] == {"loop": "ok", "engine": "wrong"} and lines[1]["speedup"] is None


def test_the_table_for_people_and_the_flags() -> None:
    stream = io.StringIO()
    bench.run(LabOptions(**TINY), stream)  # type: ignore[arg-type]
    assert "| loop |" in stream.getvalue() and "engine / loop:" in stream.getvalue()
    parsed = options_of(["hyptree", "bench", "lab", "--m", "3", "5", "--clock", "cpu", "--compared-steps", "2"])
    assert (parsed.m, parsed.clock, parsed.compared_steps) == ((3, 5), "cpu", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 1}, "repeats must be 2 or more"),
        ({"device": "cuda", "clock": "cpu"}, "clock cpu does not see"),
        ({"device": "tpu"}, "device must be one of cpu, cuda, got 'tpu'"),
        ({"m": (500,)}, "m must be between 1 and n = 256, got 500"),
        ({"threads": -1}, "threads must be 0"),
    ],
)
def test_wrong_options_are_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LabOptions(**changes)  # type: ignore[arg-type]
