"""Runs that stop, by themselves, by signals or by kill -9, and go on bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hyptree.errors import UserError
from hyptree.runs import RunFolder, best_weights, damage
from hyptree.train.loop import Trainer, fit
from hyptree.train.run.recipe import Recipe
from tests.processes import forkserver
from tests.train import tiny


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last and the best checkpoint."""
    files = sorted((run / "checkpoints").glob("last/*.safetensors")) + [run / "checkpoints/best/model.safetensors"]
    return {f"{path.parent.name}/{path.name}:{key}": t for path in files for key, t in load_file(path).items()}


def assert_same_run(one: Path, other: Path, least: int = 21) -> None:
    """Weights, averages and moments to the last bit; the same lines of metrics but for the clock."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys() and len(a) >= least
    assert [key for key in a if not torch.equal(a[key], b[key])] == []

    def lines(run: Path) -> list[dict[str, float]]:
        actual = RunFolder(run).read_metrics()
        return [{k: v for k, v in line.items() if k not in ("time", "per_second")} for line in actual]

    assert lines(one) == lines(other)
    assert len(lines(one)) == len({(line["step"], line["split"]) for line in lines(one)}) > 3


@contextlib.contextmanager
def dying_before_step(step: int):
    """Inside, a run ends without any clean-up of its own when it has done this many steps."""
    real = Trainer.train_step

    def train_step(self: Trainer, batches: object) -> None:
        if self.progress.step == step:
            raise SystemExit("dead")
        real(self, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        with pytest.raises(SystemExit, match="dead"):
            yield


@pytest.mark.parametrize(
    ("overrides", "stops"),
    [
        ((), [3, 9]),  # in the middle of an epoch, checkpoints only at its end
        (("run.save_steps=2", "run.log_steps=3", "data.workers=1"), [5]),
        (("run.accumulate=4", "run.save_steps=1", "run.ema=null"), [2, 7]),
        (("model.args.norm=batch", "run.precision=bf16", "run.channels_last=true", "run.save_steps=5"), [8]),
        (("model.args.points=true", "run.save_steps=3"), [4, 8]),
        (("schedule.epochs=1.5", "run.eval_every=0", "schedule.name=poly", "optim.layer_decay=0.7"), [8]),
    ],
    ids=["epochs", "steps-workers", "accumulate", "bf16-batchnorm", "points", "layer-decay"],
)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, overrides, stops):
    recipe = tiny.recipe(*overrides)
    whole = fit(recipe, tmp_path / "whole", quiet=True)
    for step in stops:
        with dying_before_step(step):
            fit(recipe, tmp_path / "parts", resume=True, quiet=True)
    parts = fit(recipe, tmp_path / "parts", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert (parts.step, parts.numbers, parts.best) == (whole.step, whole.numbers, whole.best)


def test_another_seed_gives_another_run(tmp_path):
    """The comparison above would be worth nothing if all runs were equal."""
    fit(tiny.recipe(), tmp_path / "a", quiet=True)
    fit(tiny.recipe("run.seed=1"), tmp_path / "b", quiet=True)
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert not torch.equal(a["last/model.safetensors:head.weight"], b["last/model.safetensors:head.weight"])


def test_finished_run_stays_as_it_is(tmp_path, capsys):
    recipe = tiny.recipe()
    first = fit(recipe, tmp_path, quiet=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "log.txt"}
    again = fit(recipe, tmp_path, resume=True)
    assert again.numbers == first.numbers and again.best == first.best
    assert "this run is finished: 12 steps" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "log.txt"} == before


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    recipe = tiny.recipe("schedule.epochs=1")
    fit(recipe, tmp_path, quiet=True)
    with pytest.raises(
        UserError,
        match=r"already holds a run; choose another --out, --overwrite it, or go on with: hyptree train .* --resume$",
    ):
        fit(recipe, tmp_path, quiet=True)
    with pytest.raises(UserError, match=r"made with optim.lr = 0.01, now it is 0.02; give the same recipe"):
        fit(tiny.recipe("schedule.epochs=1", "optim.lr=0.02"), tmp_path, resume=True, quiet=True)
    # What does not change the numbers may change.
    fit(tiny.recipe("schedule.epochs=1", "data.workers=3", "run.save_steps=7"), tmp_path, resume=True, quiet=True)


def test_overwrite_replaces_a_run_once_training_can_begin(tmp_path):
    recipe = tiny.recipe("schedule.epochs=1")
    fit(recipe, tmp_path / "run", quiet=True)
    (tmp_path / "run" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="leave one of them out"):
        fit(recipe, tmp_path / "run", resume=True, overwrite=True, quiet=True)
    with pytest.raises(UserError, match="larger than the training set"):
        fit(tiny.recipe("data.batch_size=10000"), tmp_path / "run", overwrite=True, quiet=True)
    assert RunFolder(tmp_path / "run").recipe(Recipe).data.batch_size != 10000, "the old run is still there"
    other = tiny.recipe("schedule.epochs=1", "run.seed=5")
    fit(other, tmp_path / "run", overwrite=True, quiet=True)
    fit(other, tmp_path / "new", quiet=True)
    again, new = (RunFolder(tmp_path / name) for name in ("run", "new"))
    for name, value in best_weights(new.path).items():
        assert torch.equal(value, best_weights(again.path)[name]), name
    assert [line["step"] for line in again.read_metrics()] == [line["step"] for line in new.read_metrics()]
    assert (again.path / "mine.txt").read_text() == "keep" and not (again.checkpoints / "previous").exists()


# ------------------------------------------------------------------------------------------------ damaged checkpoints


def _truncate(folder: Path) -> str:
    path = folder / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "training.safetensors has"


def _flip(folder: Path) -> str:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    return "the content of model.safetensors has changed"


def _remove(folder: Path) -> str:
    (folder / "ema.safetensors").unlink()
    return "ema.safetensors is missing"


def _no_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json is missing"


def _half_manifest(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:40])
    return "manifest.json cannot be read"


@pytest.mark.parametrize("harm", [_truncate, _flip, _remove, _no_manifest, _half_manifest])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path, capsys, harm):
    recipe = tiny.recipe("run.save_steps=2")
    fit(recipe, tmp_path / "whole", quiet=True)
    with dying_before_step(7):
        fit(recipe, tmp_path / "run", quiet=True)
    reason = harm(tmp_path / "run/checkpoints/last")
    fit(recipe, tmp_path / "run", resume=True)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "checkpoints/last is damaged: " + reason in line]
    assert "going on from step 4" in out
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_the_damaged_checkpoint_does_not_push_out_the_whole_one(tmp_path):
    recipe = tiny.recipe("run.save_steps=2")
    with dying_before_step(5):
        fit(recipe, tmp_path, quiet=True)
    _flip(tmp_path / "checkpoints/last")
    with dying_before_step(4):  # after one more checkpoint
        fit(tiny.recipe("run.save_steps=1"), tmp_path, resume=True, quiet=True)
    for name, step in (("last", 4), ("previous", 3)):
        assert damage(tmp_path / "checkpoints" / name) is None
        assert json.loads((tmp_path / "checkpoints" / name / "manifest.json").read_text())["step"] == step


def test_when_all_checkpoints_are_damaged_both_are_named(tmp_path):
    recipe = tiny.recipe("run.save_steps=2")
    with dying_before_step(5):
        fit(recipe, tmp_path, quiet=True)
    _flip(tmp_path / "checkpoints/last")
    _truncate(tmp_path / "checkpoints/previous")
    with pytest.raises(UserError, match=r"last is damaged: .*previous is damaged: .*start anew with another --out"):
        fit(recipe, tmp_path, resume=True, quiet=True)


def test_numbers_before_the_first_step_are_written_once_and_never_the_best(tmp_path):
    recipe = tiny.recipe("run.eval_first=true", "run.eval_every=0", "optim.lr=1e-12", "schedule.warmup=0")
    with dying_before_step(1):  # and before any checkpoint
        fit(recipe, tmp_path, quiet=True)
    result = fit(recipe, tmp_path, resume=True, quiet=True)
    first, last = (line for line in RunFolder(tmp_path).read_metrics() if line["split"] == "val")
    assert (first["step"], last["step"], result.best_step) == (0, 12, 12)
    assert first["top1"] == last["top1"] == result.best


# ------------------------------------------------------------------------------------------------ signals and kill -9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_a_checkpoint_after_the_step(tmp_path, capfd, number):
    recipe = tiny.recipe("run.save_every=0", "run.eval_every=0")
    fit(recipe, tmp_path / "whole", quiet=True)
    real = Trainer.train_step

    def train_step(self: Trainer, batches: object) -> None:
        real(self, batches)
        if self.progress.step == 4:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        with pytest.raises(KeyboardInterrupt):
            fit(recipe, tmp_path / "run")
    shown = capfd.readouterr()
    assert f"stopped at step 5 of 12; go on with: hyptree train {tmp_path / 'run'} --resume\n" in shown.out
    assert "once more to stop at once" in shown.err
    assert json.loads((tmp_path / "run/checkpoints/last/manifest.json").read_text())["step"] == 5
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    fit(recipe, tmp_path / "run", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def _kill_at_random(tmp_path: Path, kills: int, overrides: tuple[str, ...]) -> int:
    """Train in processes that are killed at random moments; gives the number of processes it took."""
    fit(tiny.recipe(*overrides), tmp_path / "whole", quiet=True)
    run = tmp_path / "run"
    started, expected = 0, kills
    while True:
        process = forkserver().Process(target=tiny.train, args=(str(run), overrides, True))
        process.start()
        started += 1
        if expected:
            # From the first file on, so that the kills hit the run and not the imports before it.
            before = _newest(run)
            deadline = time.monotonic() + 60
            while _newest(run) == before and process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.0005)
            time.sleep(random.random() * 0.15)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                expected -= 1
        process.join(120)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        assert started < 10 * kills + 10
    assert expected < kills  # at least one kill hit
    assert_same_run(tmp_path / "whole", run)
    assert list(run.rglob(".*")) == []
    return started


def _newest(run: Path) -> int:
    times = [0]
    for folder, _, names in os.walk(run):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                times.append(os.stat(os.path.join(folder, name)).st_mtime_ns)
    return max(times)


def test_kill_9_at_random_moments(tmp_path):
    _kill_at_random(tmp_path, 3, ("run.save_steps=2", "schedule.epochs=6", "run.log_steps=3"))


@pytest.mark.slow
@pytest.mark.parametrize("round", range(4))
def test_kill_9_many_times(tmp_path, round):
    overrides = ("run.save_steps=3", "schedule.epochs=30", f"run.seed={round}", f"data.workers={round % 2}")
    assert _kill_at_random(tmp_path, 12, overrides) > 5


def test_signals_are_left_alone_outside_the_main_thread(tmp_path):
    errors: list[BaseException] = []

    def work() -> None:
        try:
            fit(tiny.recipe("schedule.steps=2"), tmp_path, quiet=True)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == [] and RunFolder(tmp_path).read_metrics()[-1]["step"] == 2
