"""The loop against one written by hand, and what it says when something goes wrong."""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hyptree import files
from hyptree.errors import UserError
from hyptree.runs import RunFolder, damage
from hyptree.train import load_model
from hyptree.train.evaluate import evaluate_run
from hyptree.train.loop import fit
from tests.processes import forkserver
from tests.train import tiny


def weights(run: Path, name: str = "last/model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / name)


def test_fit_equals_a_loop_written_by_hand(tmp_path):
    """Order of data, groups, schedule, clipping and steps are what they are said to be: the weights are equal."""
    fit(
        tiny.recipe("model.args.dropout=0.0", "run.ema=null", "optim.weight_decay=0.1", "optim.clip=0.5"),
        tmp_path,
        quiet=True,
    )
    from hyptree.data.loader import build_loader
    from hyptree.data.seeding import mix_bits

    task = tiny.Tiny(tiny.recipe())
    torch.manual_seed(mix_bits(0) & (2**63 - 1))
    model = tiny.Net(dropout=0.0)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    step = 0
    for epoch in range(2):
        for batch in build_loader(
            task.build_dataset("train"),
            lambda samples: task.collate(samples, True),
            batch_size=16,
            seed=0,
            epoch=epoch,
            train=True,
        ):
            done = (step - 3) / 9
            factor = (step + 1) / 4 if step < 3 else 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * factor
            F.cross_entropy(model(batch["image"]), batch["label"]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    actual = weights(tmp_path)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


def test_accumulation_changes_nothing_but_rounding(tmp_path):
    for parts in (1, 4):
        fit(tiny.recipe("model.args.dropout=0.0", f"run.accumulate={parts}"), tmp_path / str(parts), quiet=True)
    one, four = weights(tmp_path / "1"), weights(tmp_path / "4")
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=1e-3, atol=1e-5)
    a, b = (RunFolder(tmp_path / name).read_metrics() for name in ("1", "4"))
    assert [line["loss"] for line in b] == pytest.approx([line["loss"] for line in a], rel=1e-4)


def test_bf16_trains_and_keeps_float32_weights(tmp_path):
    fit(tiny.recipe(), tmp_path / "fp32", quiet=True)
    fit(tiny.recipe("run.precision=bf16"), tmp_path / "bf16", quiet=True)
    a, b = weights(tmp_path / "fp32"), weights(tmp_path / "bf16")
    assert all(t.dtype == torch.float32 for t in b.values())
    assert not torch.equal(a["head.weight"], b["head.weight"])  # it did compute in another precision
    torch.testing.assert_close(a["head.weight"], b["head.weight"], rtol=0, atol=0.05)


def test_best_weights_are_those_of_the_best_evaluation(tmp_path):
    recipe = tiny.recipe("schedule.epochs=4", "run.eval_every=0.5", "run.threads=1")
    result = fit(recipe, tmp_path, quiet=True)
    lines = [line for line in RunFolder(tmp_path).read_metrics() if line["split"] == "val"]
    assert [line["step"] for line in lines] == list(range(3, 25, 3))
    best = max(lines, key=lambda line: line["top1"])  # the first of equals
    assert (result.best, result.best_step) == (best["top1"], best["step"])
    assert result.numbers["top1"] == lines[-1]["top1"] > 0.5  # it learns
    actual = evaluate_run(tmp_path)
    assert actual["top1"] == best["top1"] and actual["loss"] == pytest.approx(best["loss"], rel=1e-6)
    assert (actual["split"], actual["samples"], actual["skipped"]) == ("val", 41, 0)

    model, kept = load_model(tmp_path)
    assert not model.training and kept == recipe
    for name, value in weights(tmp_path, "best/model.safetensors").items():
        assert torch.equal(model.state_dict()[name], value)


def test_a_run_can_start_from_the_weights_of_another(tmp_path):
    fit(tiny.recipe(), tmp_path / "first", quiet=True)
    start = ("schedule.steps=1", "optim.lr=1e-9", "run.ema=null", f"model.weights={tmp_path / 'first'}")
    fit(tiny.recipe(*start), tmp_path / "second", quiet=True)
    best = weights(tmp_path / "first", "best/model.safetensors")
    for name, value in weights(tmp_path / "second").items():
        torch.testing.assert_close(value, best[name], rtol=0, atol=1e-7)
    log = (tmp_path / "second/log.txt").read_text()
    assert log.startswith(f"weights from {tmp_path / 'first'}\n")
    with pytest.raises(UserError, match=r"nowhere\.safetensors: no such file"):
        fit(tiny.recipe("model.weights=nowhere.safetensors"), tmp_path / "third", quiet=True)


def test_lines_on_a_pipe(tmp_path, capsys):
    fit(tiny.recipe(), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hcformer_pico: 4,950 parameters; 12 steps of 16 img, 6 per epoch, on cpu, 1 CPU thread"
    assert lines[1].startswith("step 2/12  epoch 0.33  loss ") and "img/s  eta 0:0" in lines[1]
    assert lines[-1].startswith("step 12/12  val: epoch 2.00  top1 ")
    assert (tmp_path / "log.txt").read_text().splitlines() == lines


def test_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    fit(tiny.recipe("run.log_steps=1"), tmp_path)
    out = capsys.readouterr().out
    assert "12/12" in out and "step 12/12  val: epoch 2.00" in out
    assert len(RunFolder(tmp_path).read_metrics()) == 14


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    fit(tiny.recipe("run.tensorboard=true"), tmp_path, quiet=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = {line["step"]: line["loss"] for line in RunFolder(tmp_path).read_metrics() if line["split"] == "train"}
    assert {e.step: e.value for e in events.Scalars("train/loss")} == pytest.approx(expected)


# -------------------------------------------------------------------------------------------------------- what fails


@pytest.mark.parametrize("log_steps", [1, 50])
def test_nan_names_its_step_and_keeps_the_last_good_checkpoint(tmp_path, log_steps):
    recipe = tiny.recipe("model.head.nan_at=7", "run.save_steps=5", f"run.log_steps={log_steps}")
    with pytest.raises(
        UserError, match=r"the loss is nan at step 8; the last good checkpoint is .*last; .*HYPTREE_DEBUG=1"
    ):
        fit(recipe, tmp_path, quiet=True)
    assert json.loads((tmp_path / "checkpoints/last/manifest.json").read_text())["step"] == 6  # the end of the epoch
    assert all(t.isfinite().all() for t in weights(tmp_path).values())
    assert all(line["step"] < 8 for line in RunFolder(tmp_path).read_metrics())


def _raise_when_full(error: Exception):
    def save_file(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half a file")
        raise error

    return save_file


@pytest.mark.parametrize("kind", ["python", "safetensors"])
def test_full_disk_is_one_line_and_harms_nothing(tmp_path, monkeypatch, kind):
    import safetensors
    import safetensors.torch

    recipe = tiny.recipe("run.save_steps=2")
    fit(recipe, tmp_path / "whole", quiet=True)
    error: Exception = OSError(28, "No space left on device")
    if kind == "safetensors":
        error = safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    real = files.save_tensors
    count = 0

    def save_tensors(*args, **kwargs):
        nonlocal count
        count += 1
        if count == 8:  # in the middle of the third checkpoint
            monkeypatch.setattr(safetensors.torch, "save_file", _raise_when_full(error))
        real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("hyptree.runs.save_tensors", save_tensors)
        with pytest.raises(UserError, match=r"^the disk of .*run is full .*No space left.*go on with --resume$"):
            fit(recipe, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    assert damage(tmp_path / "run/checkpoints/last") is None and damage(tmp_path / "run/checkpoints/previous") is None
    assert not list((tmp_path / "run").rglob("*.tmp"))
    fit(recipe, tmp_path / "run", resume=True, quiet=True)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def _train_with_small_files(out: str, answer: str) -> None:
    """The kernel refuses to let any file grow beyond 30 kB: weights fit, the optimiser's moments do not."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    try:
        tiny.train(out)
    except UserError as error:
        Path(answer).write_text(str(error))


def test_the_kernel_refusing_to_write_is_one_line(tmp_path):
    words = (str(tmp_path / "run"), str(tmp_path / "answer"))
    process = forkserver().Process(target=_train_with_small_files, args=words)
    process.start()
    process.join(100)
    assert process.exitcode == 0
    assert "File too large" in (tmp_path / "answer").read_text()
    assert not (tmp_path / "run/checkpoints/last").exists() and not list((tmp_path / "run").rglob("*.tmp"))


def test_bad_samples_are_counted_unless_strict(tmp_path):
    fit(tiny.recipe("model.head.bad=[3, 50, 51]"), tmp_path / "run", quiet=True)
    log = (tmp_path / "run/log.txt").read_text()
    assert "3 samples could not be read and were skipped, e.g. blob " in log and log.count("were skipped") == 1
    line = RunFolder(tmp_path / "run").read_metrics()[-1]
    assert (line["split"], line["skipped"]) == ("val", 3)
    with pytest.raises(UserError, match=r"cannot read picture blob \d+: it is bad"):
        fit(tiny.recipe("model.head.bad=[3, 50, 51]", "data.strict=true"), tmp_path / "strict", quiet=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task=clasify", r"unknown task 'clasify'; did you mean 'classify'\?"),
        ("data.batch_size=97", "batch_size 97 is larger than the training set"),
        ("run.grad_checkpointing=true", "cannot do run.grad_checkpointing; switch it off"),
        ("run.device=cuda:7", "run.device must be auto, cpu or cuda, got 'cuda:7'"),
        ("schedule.epochs=0.01", "is less than one step"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_written(tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        fit(tiny.recipe("schedule.warmup=0", override), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("eval_every", "expected"), [("0", {True}), ("1", {True, False})])
def test_a_single_evaluation_is_not_compiled(tmp_path, monkeypatch, eval_every, expected):
    training, compile_module = [], torch.nn.Module.compile

    def backend(graph, inputs):
        training.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_module(self, backend=backend))
    torch.compiler.reset()
    fit(tiny.recipe("run.compile=true", f"run.eval_every={eval_every}"), tmp_path / "run", quiet=True)
    torch.compiler.reset()
    assert set(training) == expected


@pytest.mark.slow
def test_compiled_model_gives_the_same_numbers(tmp_path):
    for flag in ("false", "true"):
        fit(tiny.recipe("model.args.dropout=0.0", f"run.compile={flag}"), tmp_path / flag, quiet=True)
    one, other = weights(tmp_path / "false"), weights(tmp_path / "true")
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-3, atol=1e-5)
