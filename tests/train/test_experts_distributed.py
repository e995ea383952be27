"""Two processes balance the experts of a mixture as one does: by the counts of all tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hyptree.runs import RunFolder
from hyptree.train.loop import fit
from tests.train import tiny
from tests.train.test_distributed import run_two, weights
from tests.train.test_language import SMALL

pytest.importorskip("transformers")


@pytest.mark.parametrize(("name", "parallel"), [("helm-mice-pico", "ddp"), ("twin:helm-mice-pico", "fsdp2")])
def test_two_processes_balance_experts_as_one(tmp_path: Path, name: str, parallel: str) -> None:
    overrides = (*SMALL, f"text.cache={tmp_path / 'text'}", f"model.name={name}", "run.ema=null", "run.accumulate=2")
    overrides = (*overrides, "schedule.steps=4", "run.log_steps=1")
    fit(tiny.recipe(*overrides), tmp_path / "one", quiet=True)
    first, second = run_two(tmp_path, tmp_path / "two", *overrides, f"run.parallel={parallel}")
    assert first["ended"] == second["ended"] == "fine"
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    biases = [key for key in one if key.endswith(("balance_bias", "e_score_correction_bias"))]
    assert biases
    for key in biases:
        assert one[key].any(), "experts that are never balanced show nothing"
        torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-6)
    a, b = (RunFolder(tmp_path / run).read_metrics() for run in ("one", "two"))
    assert [line["loss"] for line in b] == pytest.approx([line["loss"] for line in a], rel=1e-4)
