"""The benchmark of launches: its rows, and what is taken from what."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import launch as bench
from benchmarks.launch import LaunchOptions
from benchmarks.launches import Launches


def lines_of(**options: Any) -> list[dict[str, Any]]:
    stream = io.StringIO()
    assert bench.run(LaunchOptions(quick=True, repeats=2, threads=1, json=True, **options), stream) == 0
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_rows_for_one_launch_and_for_blocks() -> None:
    head, table, *rows = lines_of()
    assert head["model"] == "hcformer_pico" and table["name"] == "launch"
    passes = ("inference", "forward and backward")
    blocks = [f"block of hcformer_pico, stage {i}, {kind}" for i in (1, 2, 3, 4) for kind in passes]
    blocks += [f"block of helm-d-pico, {kind}" for kind in passes]
    assert [row["what"] for row in rows] == ["torch, x.add_(1)", *blocks]
    assert all(row["host_seconds"] > 0 and row["kernels"] is None for row in rows[:-2])
    assert rows[0]["host_seconds"] < rows[1]["host_seconds"] < rows[2]["host_seconds"]


def test_a_block_is_half_of_what_two_more_cost() -> None:
    few, many = Launches(30.0, 1e-3), Launches(70.0, 2e-3)
    assert bench._times(many, 0.5, few) == Launches(20.0, 5e-4)
    assert bench._times(Launches(None, 4e-3), 1 / 4) == Launches(None, 1e-3)


@pytest.mark.gpu
def test_a_launch_is_one_kernel_on_the_gpu() -> None:
    rows = {row["what"]: row for row in lines_of(device="cuda")[2:]}
    for what in ("torch, x.add_(1)", "Triton, kernel[grid](...)", "hyptree, launch"):
        assert rows[what]["kernels"] == pytest.approx(1, abs=0.02)
    assert all(row["kernels"] > 3 for what, row in rows.items() if what.startswith("block"))
