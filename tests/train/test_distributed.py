"""Two processes on a CPU (gloo): the same numbers as one, one writer, and nobody left waiting."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hyptree.runs import RunFolder
from hyptree.train.evaluate import evaluate_run
from hyptree.train.loop import fit
from tests.processes import forkserver
from tests.train import tiny

ROOT = Path(__file__).resolve().parents[2]
SAME = ("model.args.dropout=0.0", "model.args.points=true", "schedule.epochs=1.5", "run.save_steps=4")


def _be_rank(rank: int, port: int) -> None:
    """What torchrun tells a process."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)


def _rank(rank: int, port: int, log: str, out: str, overrides: tuple[str, ...], resume: bool) -> None:
    """One process of a run, as torchrun would start it; what it prints and how it ends goes into a file."""
    _be_rank(rank, port)
    printed, ended = io.StringIO(), "fine"
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            fit(tiny.recipe(*overrides), out, resume=resume)
        except BaseException as error:
            ended = f"{type(error).__name__}: {error}"
    Path(f"{log}.{rank}").write_text(json.dumps({"printed": printed.getvalue(), "ended": ended}))


def _opens_three_times(rank: int, port: int, log: str, store: int) -> None:
    """Gathers among two processes, leaves them, and does both again; they meet at torchrun's store, which stays."""
    from hyptree.train.parallel.distributed import Processes

    _be_rank(rank, store)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    actual = []
    for i in range(3):
        processes = Processes("cpu")
        actual.append(processes.gather(torch.tensor([10 * i + rank])).tolist())
        processes.close()
    Path(f"{log}.{rank}").write_text(json.dumps(actual))


def _asks_for_any_device(rank: int, port: int, log: str) -> None:
    """Gathers among two processes that were told nothing of CPUs, as in the README."""
    from hyptree.train.parallel.distributed import Processes

    _be_rank(rank, port)
    processes = Processes("auto")
    actual = {"size": processes.size, "all": processes.gather(torch.tensor([rank])).tolist()}
    processes.close()
    Path(f"{log}.{rank}").write_text(json.dumps(actual))


def _evaluates(rank: int, port: int, log: str, run: str) -> None:
    """Samples of the training set, and how many of them cannot be read."""
    _be_rank(rank, port)
    results = evaluate_run(run, "train")
    Path(f"{log}.{rank}").write_text(json.dumps([results["samples"], results["skipped"]]))


def run_two(tmp_path: Path, out: Path, *overrides: str, resume: bool = False) -> list[dict[str, str]]:
    """Train in two processes; gives what each printed and how it ended."""
    return in_two(tmp_path, _rank, str(out), overrides, resume)


def in_two(tmp_path: Path, target: Any, *args: Any) -> list[Any]:
    """Call ``target(rank, port, log, *args)`` in two processes; gives what each wrote into its file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = str(tmp_path / "ended")
    ranks = [forkserver().Process(target=target, args=(r, port, log, *args)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    hanging = [process for process in ranks if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging, "a process waits for ever"
    return [json.loads(Path(f"{log}.{r}").read_text()) for r in range(2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would want two GPUs")
def test_processes_find_each_other_without_a_gpu_and_without_a_flag(tmp_path: Path) -> None:
    assert in_two(tmp_path, _asks_for_any_device) == [{"size": 2, "all": [0, 1]}] * 2


def test_a_process_that_is_alone_where_several_were_started_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate

    from hyptree.errors import UserError
    from hyptree.train.parallel.distributed import Processes

    class Alone:
        def __init__(self, cpu: bool) -> None:
            self.device, self.process_index, self.num_processes = torch.device("cpu"), 0, 1

    monkeypatch.setattr(accelerate, "Accelerator", Alone)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Processes("cpu").size == 1, "not started by torchrun"
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match=r"3 processes were started \(WORLD_SIZE\), accelerate sees 1"):
        Processes("cpu")


def test_processes_come_together_again_after_they_parted(tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert in_two(tmp_path, _opens_three_times, store.port) == [[[0, 1], [10, 11], [20, 21]]] * 2


def weights(run: Path, name: str = "last/model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / name)


def assert_close(one: Path, other: Path) -> None:
    """Weights, averages and moments are equal up to the rounding of float32 sums taken in another order."""
    for name in ("last/model.safetensors", "last/ema.safetensors", "last/training.safetensors"):
        a, b = weights(one, name), weights(other, name)
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("one")
    fit(tiny.recipe(*SAME), out, quiet=True)
    return out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_equal_one(tmp_path, one_process, parallel):
    out = tmp_path / "two"
    first, second = run_two(tmp_path, out, *SAME, f"run.parallel={parallel}")
    assert first["ended"] == second["ended"] == "fine"
    assert f"on cpu x 2 ({parallel})" in first["printed"] and "step 9/9  val:" in first["printed"]
    assert second["printed"] == ""  # and therefore wrote nothing twice
    assert_close(one_process, out)
    one, two = (RunFolder(run).read_metrics() for run in (one_process, out))
    assert [(line["step"], line["split"]) for line in one] == [(line["step"], line["split"]) for line in two]
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert a.get("count", 41) == b.get("count", 41) == 41  # each sample was evaluated once

    # The checkpoint of two is whole: one process evaluates it, and goes on with it.
    actual = evaluate_run(out)
    best = max((line for line in two if line["split"] == "val"), key=lambda line: line["top1"])
    assert actual["top1"] == best["top1"] and actual["loss"] == pytest.approx(best["loss"], rel=1e-6)
    before = {key: value.clone() for key, value in weights(out).items()}
    (out / "checkpoints/last").rename(out / "checkpoints/finished")
    assert fit(tiny.recipe(*SAME, "run.parallel=auto"), out, resume=True, quiet=True).step == 9
    for key, value in weights(out).items():
        torch.testing.assert_close(value, before[key], rtol=1e-4, atol=2e-6)


def test_sharded_run_resumes_bit_for_bit(tmp_path):
    """Dropout, accumulation and a batch norm's buffers included; the checkpoint is that of another moment."""
    overrides = (
        "run.parallel=fsdp2",
        "run.accumulate=2",
        "model.args.norm=batch",
        "schedule.epochs=1",
        "run.save_steps=4",
    )
    run_two(tmp_path, tmp_path / "whole", *overrides)
    expected = weights(tmp_path / "whole"), weights(tmp_path / "whole", "last/training.safetensors")
    (tmp_path / "whole/checkpoints/last").rename(tmp_path / "gone")  # as if killed after step 4
    first, _ = run_two(tmp_path, tmp_path / "whole", *overrides, resume=True)
    assert "going on from step 4" in first["printed"]
    actual = weights(tmp_path / "whole"), weights(tmp_path / "whole", "last/training.safetensors")
    for a, b in zip(expected, actual, strict=True):
        assert a.keys() == b.keys()
        assert [key for key in a if not torch.equal(a[key], b[key])] == []


def test_an_error_in_one_process_ends_both(tmp_path):
    first, second = run_two(tmp_path, tmp_path / "data", "model.head.missing_on=1")
    assert first["ended"] == "UserError: this rank has no data"  # printed once, by the first process
    assert second == {"printed": "", "ended": "SystemExit: 2"}
    assert not (tmp_path / "data").exists()

    first, second = run_two(tmp_path, tmp_path / "nan", "model.head.nan_at=3")
    assert first["ended"].startswith("UserError: the loss is nan at step 4")
    assert second["ended"] == "SystemExit: 2"

    first, second = run_two(tmp_path, tmp_path / "bug", "model.head.raise_at=3", "model.head.raise_on=1")
    assert second["ended"] == "RuntimeError: a bug in one process"
    assert first["ended"] != "fine"


def test_a_signal_to_one_process_stops_both_with_a_checkpoint(tmp_path):
    first, second = run_two(tmp_path, tmp_path / "run", "model.head.signal_at=4")
    assert first["ended"].startswith("KeyboardInterrupt") and second["ended"] == "SystemExit: 130"
    assert "stopped at step 10 of 12" in first["printed"]  # they ask each other every tenth step
    assert json.loads((tmp_path / "run/checkpoints/last/manifest.json").read_text())["step"] == 10


def test_bad_samples_in_one_process_are_replaced(tmp_path):
    first, second = run_two(tmp_path, tmp_path / "run", "model.head.bad=[3, 50, 60]", "schedule.epochs=1")
    assert first["ended"] == second["ended"] == "fine"
    assert RunFolder(tmp_path / "run").read_metrics()[-1]["step"] == 6
    assert in_two(tmp_path, _evaluates, str(tmp_path / "run")) == [[96, 3]] * 2  # not those of one process alone


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_torchrun_trains_a_recipe(tmp_path, parallel):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "data: {size: 32, num_train: 64, num_val: 32, batch_size: 16}\n"
        "model: {name: test_vit, args: {img_size: 32}}\n"
        "schedule: {epochs: 1}\n"
        f"run: {{device: cpu, parallel: {parallel}}}\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hyptree", "train"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(recipe), "--out", str(tmp_path / "run")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 4/4  val:") == 1
    assert evaluate_run(tmp_path / "run")["samples"] == 32
