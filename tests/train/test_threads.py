"""CPU threads of a run: as many as find a free core, kept in its folder, and taken up when it goes on."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from hyptree import devices
from hyptree.devices import cpu_threads, free_threads
from hyptree.runs import RunFolder
from hyptree.train import Recipe, fit
from hyptree.train.compare import TableSettings, make_table
from hyptree.train.evaluate import evaluate_run
from hyptree.train.loop import Trainer
from tests.train import tiny


@pytest.fixture
def machine(monkeypatch):
    """``machine(cores, load)``: a machine of so many cores, of which others use some."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()

    def make(cores: int, load: float, busy_now: float | None = None, allowed: int | None = None) -> None:
        share = (load if busy_now is None else busy_now) / cores
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed or cores)), raising=False)
        monkeypatch.setattr(psutil, "getloadavg", lambda: (load, load, load))
        monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 100 * share)
        monkeypatch.setattr(devices, "quota", lambda: float("inf"))
        torch.set_num_threads(cores)

    yield make
    torch.set_num_threads(before)


def test_an_idle_machine_gives_all_cores_and_a_crowded_one_those_that_are_free(machine, monkeypatch):
    for cores, load, expected in ((2, 0.1, 2), (2, 1.2, 1), (2, 7.0, 1), (8, 3.1, 5), (1, 0.0, 1)):
        machine(cores, load)
        assert free_threads() == expected
    machine(8, 0.0, allowed=3)
    assert (free_threads(), free_threads(processes=2), free_threads(processes=9)) == (3, 1, 1)
    monkeypatch.setattr(devices, "quota", lambda: 2.0)
    assert free_threads() == 2


def test_a_load_that_is_over_does_not_count(machine):
    machine(4, 3.8, busy_now=0.0)
    assert free_threads() == 4


def test_omp_num_threads_is_taken_at_its_word(machine, monkeypatch):
    machine(4, 4.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)  # what torch does with it when it is imported
    assert free_threads() == 3


def test_threads_are_given_back(machine):
    machine(4, 3.0)
    with cpu_threads():
        assert torch.get_num_threads() == 1
    with cpu_threads(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000"}, float("inf")),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf")),
    ],
)
def test_the_quota_of_a_container(files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert devices.quota(tmp_path) == expected


@pytest.fixture
def used(monkeypatch) -> list[int]:
    """The threads of every training step."""
    actual: list[int] = []
    real = Trainer.train_step

    def train_step(self: Trainer, batches: object) -> None:
        actual.append(torch.get_num_threads())
        real(self, batches)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    return actual


def test_a_run_keeps_its_number_and_goes_on_with_it(machine, used, tmp_path, capsys):
    recipe = tiny.recipe("schedule.steps=2", "schedule.warmup=0")
    machine(3, 1.0)
    fit(recipe, tmp_path)
    assert used == [2, 2] and recipe.run.threads is None
    assert torch.get_num_threads() == 3
    assert RunFolder(tmp_path).recipe(Recipe).run.threads == 2
    shown = capsys.readouterr().out
    assert "on cpu, 2 CPU threads\n" in shown
    assert "2 of 3 CPU threads: others kept the rest busy when this run began; --run.threads 3 takes all\n" in shown

    used.clear()
    machine(4, 0.0)  # now there are more
    _cut(tmp_path)
    fit(recipe, tmp_path, resume=True, quiet=True)
    assert used and set(used) == {2}
    used.clear()
    _cut(tmp_path)
    fit(tiny.recipe("schedule.steps=2", "schedule.warmup=0", "run.threads=3"), tmp_path, resume=True, quiet=True)
    assert used and set(used) == {3}


def test_a_number_that_is_given_is_not_questioned(machine, used, tmp_path, capsys):
    machine(2, 6.0)
    fit(tiny.recipe("schedule.steps=1", "run.threads=2"), tmp_path)
    assert used == [2]
    assert "others kept" not in capsys.readouterr().out


def test_evaluation_takes_the_number_of_the_run(machine, used, tmp_path, monkeypatch):
    machine(4, 2.0)
    fit(tiny.recipe("schedule.steps=1"), tmp_path, quiet=True)
    machine(4, 0.0)
    actual: list[int] = []
    real = tiny.Tiny.evaluate
    monkeypatch.setattr(
        tiny.Tiny, "evaluate", lambda *words: actual.append(torch.get_num_threads()) or real(*words), raising=True
    )
    evaluate_run(tmp_path)
    assert actual == [2] and torch.get_num_threads() == 4


def test_the_runs_of_a_table_share_the_cores(machine, used, tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: tiny\ndata: {batch_size: 16}\nrun: {device: cpu, eval_every: 0}\n")
    settings = TableSettings(
        title="t", recipe=tmp_path / "recipe.yaml", rows={"a": {}, "b": {"run.threads": 3}}, seeds=[0],
        metrics=["top1"], overrides={"schedule.steps": 1, "run.tensorboard": False},
    )  # fmt: skip
    machine(4, 2.0)
    make_table(settings, tmp_path / "runs")
    assert used == [2, 3]


def _cut(run) -> None:
    """Back to the beginning, as if no checkpoint had been written."""
    import shutil

    shutil.rmtree(run / "checkpoints")


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch):
    assert devices.find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch, "zeros", lambda *args, device: None)
    for there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert devices.find_device("auto").type == kind
