"""``hyptree runs``: what lies in a folder of runs, and which of them is being trained now."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from hyptree import cli
from hyptree.runs import RunFolder
from hyptree.train.loop import Trainer, fit
from tests.train import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is finished, and one that ended in the middle."""
    runs = tmp_path_factory.mktemp("runs")
    fit(tiny.recipe(), runs / "all", quiet=True)

    def stop(trainer: Trainer, *_: object) -> None:
        if trainer.progress.step == 5:
            raise KeyboardInterrupt
        step(trainer, *_)

    step, Trainer.train_step = Trainer.train_step, stop  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(tiny.recipe("run.save_steps=2"), runs / "deep" / "part", quiet=True)
    finally:
        Trainer.train_step = step  # type: ignore[method-assign]
    return runs


def test_runs_are_told_by_how_far_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", str(folder), "--json"]) == 0
    whole, part = json.loads(capsys.readouterr().out)
    last = RunFolder(folder / "all").read_metrics()[-1]
    assert (whole["run"], whole["state"], whole["step"], whole["num_steps"]) == (
        str(folder / "all"),
        "finished",
        12,
        12,
    )
    assert whole["task"] == "tiny" and whole["seconds"] == last["time"] and whole["bytes"] > 10_000
    (name,) = whole["best"]
    numbers = [line[name] for line in RunFolder(folder / "all").read_metrics() if line["split"] == "val"]
    assert whole["best"][name] == pytest.approx(max(numbers))
    assert (part["state"], part["step"], part["num_steps"]) == ("stopped", 4, 12)
    assert cli.main(["runs", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "stopped at step 4 of 12" in lines[2] and f"{name} {whole['best'][name]:.4g}" in lines[1]


def _hold(folder: str, held: object, done: object) -> None:
    from hyptree.train.run.log import Reporter

    reporter = Reporter(RunFolder(folder), 12, "img", quiet=True)
    held.set()  # type: ignore[attr-defined]
    done.wait(60)  # type: ignore[attr-defined]
    reporter.close()


def test_a_run_is_running_as_long_as_a_process_writes_its_log(folder: Path) -> None:
    run, context = RunFolder(folder / "all"), multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    assert not run.is_running()
    process = context.Process(target=_hold, args=(str(run.path), held, done))
    process.start()
    try:
        assert held.wait(120) and run.is_running()
    finally:
        process.kill()  # kill -9: nothing is left behind that would say it still runs
        process.join()
    assert not run.is_running()


def test_no_runs_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
