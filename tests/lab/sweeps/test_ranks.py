"""Two processes train what one trains, to the bit; each has its own checkpoint."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.files import load_tensors
from hyptree.lab.sweeps.folder import read_part
from hyptree.lab.sweeps.grid import Grid, preset
from hyptree.lab.sweeps.run_table import read_runs
from hyptree.lab.sweeps.runner import Ranks, sweep
from hyptree.tables import to_csv

ROOT = Path(__file__).resolve().parents[3]
GRID = Grid(name="a", n=30, m=(3, 5), alpha=(0.0, 1.5), gamma=(-1.0, 0.3), seeds=1, batch=32, steps=25, eval_samples=64)

SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from hyptree.lab.engine import Engine
from hyptree.lab.sweeps.grid import Grid
from hyptree.lab.sweeps.runner import sweep
from tests.lab.sweeps.test_ranks import GRID
out, stop = Path(sys.argv[1]), int(sys.argv[2])
if stop:
    advance = Engine.advance
    def dying(self, with_loss=False):
        if self.step == stop:
            raise SystemExit(3)
        return advance(self, with_loss)
    Engine.advance = dying
sweep(GRID, out, checkpoint_seconds=0, resume=out.exists())
"""


def run_two(out: Path, stop: int = 0) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    common = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(out), str(stop)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [subprocess.CompletedProcess(p.args, p.wait(100), p.communicate()[0]) for p in started]
    finally:
        for p in started:
            p.kill()


def assert_like_one(tmp_path: Path) -> None:
    sweep(GRID, tmp_path / "one")
    assert to_csv(read_runs(tmp_path / "one")) == to_csv(read_runs(tmp_path / "two"))  # as csv: NaN is like NaN there
    assert (tmp_path / "one" / "fits.csv").read_text() == (tmp_path / "two" / "fits.csv").read_text()


def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    ended = run_two(tmp_path / "two")
    assert [p.returncode for p in ended] == [0, 0], ended
    assert_like_one(tmp_path)
    # Stopped before the end, a part is in the files of the processes: complete with all of them, not with some.
    whole = load_tensors(tmp_path / "two" / "parts" / "a.safetensors")
    for path in ("parts/a.safetensors", "runs.csv", "runs.parquet"):
        (tmp_path / "two" / path).unlink(missing_ok=True)
    assert to_csv(read_runs(tmp_path / "two", print)) == to_csv(read_runs(tmp_path / "one"))
    actual = read_part(tmp_path / "two", "a", 8)
    assert actual is not None and actual[1] == whole[1] and torch.equal(actual[0]["norms"], whole[0]["norms"])
    (tmp_path / "two" / "parts" / "a.0-of-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"no part of it is complete \(a\)"):
        read_runs(tmp_path / "two", print)


@pytest.mark.slow
def test_two_processes_go_on_after_a_kill(tmp_path: Path) -> None:
    killed = run_two(tmp_path / "two", stop=11)
    assert [p.returncode for p in killed] == [3, 3], killed
    actual = sorted(path.name for path in (tmp_path / "two" / "checkpoints").iterdir() if "previous" not in path.name)
    assert actual == ["a.0-of-2.safetensors", "a.1-of-2.safetensors"]
    with pytest.raises(UserError, match="processes was 2 and is now 1"):
        sweep(GRID, tmp_path / "two", resume=True)
    ended = run_two(tmp_path / "two")
    assert [p.returncode for p in ended] == [0, 0], ended
    assert_like_one(tmp_path)


def test_shares_are_even_and_complete() -> None:
    (grid,) = preset("paper-grid")
    shares = [Ranks(rank, 8).share(grid) for rank in range(8)]
    assert sorted(model for share in shares for model in share) == sorted(grid.models())
    for share in shares:
        assert all(abs(sum(model.m == m for model in share) - 170 / 8) < 1 for m in grid.m)
    with pytest.raises(UserError, match="5 processes need 5 models or more of every width, part a has 4"):
        Ranks(0, 5).share(GRID)


def test_devices_by_process() -> None:
    assert str(Ranks(5, 8, 1).device("cuda")) == "cuda:1"
    assert str(Ranks(5, 8, 1).device("cpu")) == "cpu"
    assert str(Ranks().device("cuda")) == "cuda"


def test_commands_that_are_told_to_people_reach_the_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun reads flags before a lone --, and takes --n for one of its own that begins so."""
    from torch.distributed.run import parse_args

    monkeypatch.setenv("COLUMNS", "200")
    assert main(["lab", "sweep", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    guide = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    command = r"torchrun (--nproc-per-node \d+ -m[^`(]* lab sweep[^`(]*)"
    actual = [*re.findall(command, text), *re.findall(command, guide)]
    assert len(actual) >= 2
    for line in actual:
        read = parse_args([*line.split(), "--n", "64", "--m", "8", "16"])
        assert (read.module, read.training_script, read.training_script_args[:2]) == (True, "hyptree", ["lab", "sweep"])
        assert read.training_script_args[-5:] == ["--n", "64", "--m", "8", "16"]
