"""Sweeps in their folder: tables, resuming bit for bit, damage, diverged models, a full disk, the command line."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.files import load_tensors
from hyptree.lab.engine import Engine
from hyptree.lab.fits import fit_runs
from hyptree.lab.sweeps import runner
from hyptree.lab.sweeps.folder import stored_parts
from hyptree.lab.sweeps.grid import PRESETS, Grid, preset
from hyptree.lab.sweeps.run_table import COLUMNS, read_runs
from hyptree.lab.sweeps.runner import sweep
from hyptree.lab.theory import frequencies, unlearned_loss
from hyptree.progress import ProgressBar
from hyptree.tables import to_csv

GRID = Grid(name="a", n=30, m=(3, 5, 8), alpha=(0.0, 1.5), gamma=(-1.0, 0.3), batch=32, steps=60, eval_samples=128)
OTHER = Grid(name="b", n=20, m=(2, 4), dist="linear", gamma=(-1.0,), batch=32, steps=10, eval_samples=64)
TINY = ["--n", "30", "--m", "3", "5", "--alpha", "1", "--gamma", "-1", "--batch", "16", "--steps", "5"]


class Killed(Exception):
    """Ends a sweep where a kill would."""


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Let something happen before a step, once."""
    advance = Engine.advance
    done = False

    def acting(self: Engine, with_loss: bool = False) -> Any:
        nonlocal done
        if self.step == step and not done:
            done = True
            act()
        return advance(self, with_loss)

    monkeypatch.setattr(Engine, "advance", acting)


def kill() -> None:
    raise Killed


def everything(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    return to_csv(read_runs(folder)), load_tensors(folder / "parts" / "a.safetensors")[0]


def assert_same(a: Path, b: Path) -> None:
    (table_a, tensors_a), (table_b, tensors_b) = everything(a), everything(b)
    assert table_a == table_b
    assert torch.equal(tensors_a["norms"], tensors_b["norms"])


def test_tables_of_a_sweep(tmp_path: Path) -> None:
    printed = io.StringIO()
    rows = sweep([GRID, OTHER], tmp_path, bar=ProgressBar("", 1, printed, every=0.0), keep_weights=True)
    assert len(rows) == 12 + 2 and [list(row) for row in rows] == [list(COLUMNS)] * 14
    read = read_runs(tmp_path)
    for row, back in zip(rows, read, strict=True):
        assert all(row[name] == back[name] or (row[name] != row[name] and back[name] != back[name]) for name in row)
    assert "a: 60/60, 12 models" in printed.getvalue() and "b: 10/10, 2 models" in printed.getvalue()
    losses = re.findall(r"median loss (\S+?),?\s", printed.getvalue())
    assert losses and all(float(loss) > 0 for loss in losses)
    norms = load_tensors(tmp_path / "parts" / "a.safetensors")[0]["norms"]
    weights = load_tensors(tmp_path / "weights" / "a.safetensors")[0]
    for i, row in enumerate(rows[:12]):
        W = weights[f"{i}.W"]
        assert W.shape == (30, row["m"]) and weights[f"{i}.b"].shape == (30,)
        assert torch.allclose(W.norm(dim=1), norms[i])
        assert row["phi_half"] == pytest.approx((norms[i] > 0.5).float().mean().item())
        kept = int((norms[i] > 0.5).sum())
        assert row["loss_unlearned"] == pytest.approx(unlearned_loss(frequencies(30, row["alpha"]), kept))
        assert row["loss_se"] < row["loss_eval"] and not row["diverged"]
    assert all(math.isnan(row["alpha"]) for row in rows[12:])
    with (tmp_path / "fits.csv").open() as file:
        fits = list(csv.DictReader(file))
    assert [line["part"] for line in fits] == ["a"] * 4 + ["b"]
    assert not (tmp_path / "checkpoints").exists()


def test_training_loss_is_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    rows = sweep([GRID], tmp_path)
    engine = Engine(GRID)
    losses = torch.stack([engine.advance(with_loss=True) for _ in range(60)])  # type: ignore[misc]
    expected = losses[-3:].mean(0)  # 5 % of 60
    assert [row["loss_train"] for row in rows] == pytest.approx(expected.tolist())


def test_a_kill_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep([GRID], tmp_path / "whole")
    at_step(monkeypatch, 31, kill)
    with pytest.raises(Killed):
        sweep([GRID], tmp_path / "cut", checkpoint_seconds=0)
    assert load_tensors(tmp_path / "cut" / "checkpoints" / "a.safetensors")[1] == {"step": 31}
    sweep([GRID], tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_kill_in_the_second_part_keeps_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [GRID, Grid(**{**OTHER.__dict__, "steps": 100})]
    whole = sweep(both, tmp_path / "whole")
    at_step(monkeypatch, 99, kill)  # only the second part has so many steps
    with pytest.raises(Killed):
        sweep(both, tmp_path / "cut")
    assert (tmp_path / "cut" / "parts" / "a.safetensors").is_file()
    with pytest.raises(UserError, match="the sweep is not finished; go on with: hyptree lab sweep --resume --out "):
        read_runs(tmp_path / "cut")
    assert to_csv(sweep(both, tmp_path / "cut", resume=True)) == to_csv(whole)


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that resuming reads."""
    files = [folder / "config.json", *(folder / "parts").rglob("*"), *(folder / "checkpoints").rglob("*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def test_a_stopped_sweep_is_fitted_and_drawn_as_far_as_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    both, cut = [GRID, Grid(**{**OTHER.__dict__, "steps": 100})], tmp_path / "cut"
    whole = sweep(both, tmp_path / "whole")
    at_step(monkeypatch, 99, kill)
    with pytest.raises(Killed):
        sweep(both, cut, checkpoint_seconds=0)
    before = contents(cut)
    assert "checkpoints/b.safetensors" in before
    line = (
        f"the sweep in {cut} is not finished: shown is a (12 models), missing is b; "
        f"go on with: hyptree lab sweep --resume --out {cut}"
    )
    assert main(["lab", "fit", str(cut), "--json"]) == 0
    captured = capsys.readouterr()
    assert [fit["part"] for fit in json.loads(captured.out)] == ["a"] * 4 and captured.err == f"{line}\n"
    assert main(["lab", "plot", str(cut), "--which", "loss", "strong"]) == 0
    captured = capsys.readouterr()
    assert "strong.png" in captured.out and captured.err == f"{line}\n"
    assert line in (cut / "index.html").read_text(encoding="utf-8")
    text: list[str] = []
    assert to_csv(read_runs(cut, text.append)) == to_csv(whole[:12]) and text == [line]
    with pytest.raises(UserError, match="the sweep is not finished"):
        read_runs(cut)
    assert contents(cut) == before and not list(cut.glob("runs.*"))
    assert to_csv(sweep(both, cut, resume=True)) == to_csv(whole)
    assert_same(tmp_path / "whole", cut)
    assert contents(cut) == contents(tmp_path / "whole")
    assert (cut / "fits.csv").read_bytes() == (tmp_path / "whole" / "fits.csv").read_bytes()
    assert main(["lab", "fit", str(cut), "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_a_stop_before_the_table_is_written_loses_no_part(tmp_path: Path) -> None:
    rows = sweep([OTHER], tmp_path)
    for path in tmp_path.glob("runs.*"):
        path.unlink()
    text: list[str] = []
    assert to_csv(read_runs(tmp_path, text.append)) == to_csv(rows)
    assert len(text) == 1 and "shown is b (2 models), missing is its table of runs; go on with" in text[0]


def test_a_sweep_without_a_complete_part_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    interrupted(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    for verb in ("fit", "plot"):
        assert main(["lab", verb, str(tmp_path)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert (
            "is not finished, and no part of it is complete (a); go on with: hyptree lab sweep --resume" in captured.err
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_ctrl_c_writes_a_checkpoint_and_exits_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*TINY, "--steps", "40", "--eval-samples", "64", "--quiet"]
    assert main(["lab", "sweep", *flags, "--out", str(tmp_path / "whole")]) == 0
    at_step(monkeypatch, 20, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert main(["lab", "sweep", *flags, "--out", str(tmp_path / "cut")]) == 130
    assert load_tensors(tmp_path / "cut" / "checkpoints" / "grid.safetensors")[1] == {"step": 21}
    assert main(["lab", "sweep", "--resume", "--quiet", "--out", str(tmp_path / "cut")]) == 0
    assert to_csv(read_runs(tmp_path / "whole")) == to_csv(read_runs(tmp_path / "cut"))


def interrupted(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep that was killed with two checkpoints; gives their folder."""
    at_step(monkeypatch, 31, kill)
    with pytest.raises(Killed):
        sweep([GRID], out, checkpoint_seconds=0)
    monkeypatch.undo()
    return out / "checkpoints"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def test_a_truncated_checkpoint_is_named_and_the_one_before_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = interrupted(tmp_path / "cut", monkeypatch)
    truncate(folder / "a.safetensors")
    text: list[str] = []
    sweep([GRID], tmp_path / "cut", resume=True, say=text.append)
    assert len(text) == 1 and "a.safetensors cannot be used" in text[0] and "damaged" in text[0]
    sweep([GRID], tmp_path / "whole")
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_without_a_whole_checkpoint_nothing_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = interrupted(tmp_path, monkeypatch)
    for name in ("a.safetensors", "a.previous.safetensors"):
        truncate(folder / name)
    with pytest.raises(UserError, match=r"no whole checkpoint is left, remove .*checkpoints to train this part anew"):
        sweep([GRID], tmp_path, resume=True)
    assert len(list(folder.iterdir())) == 2


def test_a_changed_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, monkeypatch)
    for changes, message in (
        ({"steps": 61}, "parts.a.steps was 60 and is now 61"),
        ({"alpha": (0.0, 1.0)}, r"parts.a.alpha was \[0.0, 1.5\] and is now \[0.0, 1.0\]"),
        ({"name": "c"}, "parts.a is there, but not asked for now"),
    ):
        with pytest.raises(UserError, match=f"cannot resume .*: {message}"):
            sweep([Grid(**{**GRID.__dict__, **changes})], tmp_path, resume=True)
    with pytest.raises(UserError, match="pad was false and is now true"):
        sweep([GRID], tmp_path, resume=True, pad=True)
    assert len(sweep([GRID], tmp_path, resume=True)) == 12


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = runner.save_tensors
    count = 0

    def full(path: Path, tensors: dict[str, Any], state: dict[str, Any] | None = None) -> None:
        nonlocal count
        count += 1
        if count == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, tensors, state)

    monkeypatch.setattr(runner, "save_tensors", full)
    with pytest.raises(UserError, match=r"the disk of .* is full") as actual:
        sweep([GRID], tmp_path / "cut", checkpoint_seconds=0)
    assert "\n" not in str(actual.value)
    monkeypatch.undo()
    assert load_tensors(tmp_path / "cut" / "checkpoints" / "a.safetensors")[1] == {"step": 5}
    sweep([GRID], tmp_path / "cut", resume=True)
    sweep([GRID], tmp_path / "whole")
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_diverged_models_are_marked_and_counted(tmp_path: Path) -> None:
    """A decay of 400 with this learning rate multiplies rows by -7 and overflows; the neighbour is untouched."""
    grid = Grid(**{**GRID.__dict__, "gamma": (-1.0, 400.0), "steps": 80})
    rows = sweep([grid], tmp_path)
    assert {(row["gamma"], row["diverged"]) for row in rows} == {(-1.0, False), (400.0, True)}
    fits = {line["gamma"]: line for line in fit_runs(read_runs(tmp_path)) if line["alpha"] == 0}
    assert (fits[-1.0]["num_models"], fits[-1.0]["num_diverged"]) == (3, 0)
    assert (fits[400.0]["num_models"], fits[400.0]["num_diverged"]) == (0, 3)
    assert math.isnan(fits[400.0]["exponent"])


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    sweep([OTHER], tmp_path / "a")
    with pytest.raises(UserError, match="already holds a sweep; continue it with --resume, replace it with --overw"):
        sweep([OTHER], tmp_path / "a")
    with pytest.raises(UserError, match=r"nothing to resume in .*b: it has no config.json"):
        sweep([OTHER], tmp_path / "b", resume=True)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file, expected a folder"):
        sweep([OTHER], tmp_path / "file")
    with pytest.raises(UserError, match="need different names, got b, b"):
        sweep([OTHER, OTHER], tmp_path / "c")
    rows = sweep([Grid(**{**OTHER.__dict__, "steps": 3})], tmp_path / "a", overwrite=True)
    assert [row["steps"] for row in rows] == [3, 3]


def test_tables_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no runs.parquet or runs.csv; hyptree lab sweep writes one"):
        read_runs(tmp_path)
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(UserError, match="is not a table of runs: it has no column 'part'"):
        read_runs(tmp_path / "a.csv")
    sweep([OTHER], tmp_path / "run")
    text = to_csv(read_runs(tmp_path / "run"))
    (tmp_path / "b.csv").write_text(text.replace("linear,nan,-1.0", "linear,nan,x", 1))
    with pytest.raises(UserError, match=r"b.csv: line 2: gamma must be a float, got 'x'"):
        read_runs(tmp_path / "b.csv")


def test_presets_are_what_was_published() -> None:
    counts = {name: sum(len(grid.models()) for grid in parts) for name, parts in PRESETS.items()}
    paper = {"paper-grid": 1020, "paper-density": 540, "paper-wide": 48}
    assert counts == {"smoke": 34, "quick": 252, "curvature": 92, "curvature-grid": 1080, **paper}
    (grid,) = preset("paper-grid")
    assert grid.m == (10, 15, 25, 39, 63, 100) and (grid.n, grid.batch, grid.steps) == (1000, 2048, 20000)
    assert [round(gamma, 3) for gamma in grid.gamma[:5]] == [-1, -0.778, -0.556, -0.333, -0.111]
    assert len(grid.alpha) == 17 and grid.alpha[1] == 0.125 and grid.alpha[-1] == 2
    (density,) = preset("paper-density")
    assert density.density[-1] == pytest.approx(7.485, abs=5e-4)
    assert density.density[1] - 1 == pytest.approx(0.811, abs=5e-4)
    with pytest.raises(UserError, match=r"unknown preset 'papergrid'; did you mean 'paper-grid'\?"):
        preset("papergrid")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["lab", "sweep", *TINY, "--eval-samples", "32", "--out", out]) == 0
    captured = capsys.readouterr()
    assert "exponent" in captured.out and "finite-n" in captured.out and "5/5" in captured.err
    assert main(["lab", "fit", out, "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert line["num_models"] == 2 and line["error"] is None and line["theory_strong"] == 1
    assert main(["lab", "theory", "--alpha", "1.75", "2", "--json"]) == 0
    assert [round(line["weak_finite"], 2) for line in json.loads(capsys.readouterr().out)] == [0.8, 1.02]
    assert main(["lab", "sweep", *TINY, "--dry-run"]) == 0
    assert "2 models, 10 model-steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["sweep", "--alpha", "2", "--density", "5"], "needs a feature that is active with probability 3.05 > 1"),
        (["sweep", "--dist", "liner"], "--dist must be one of power, exponential, linear, got 'liner'; did you mean"),
        (["sweep", "--preset", "smok"], "unknown preset 'smok'; did you mean 'smoke'?"),
        (["sweep", "--resume"], "nothing to resume in runs/lab: it has no config.json"),
        (["sweep", "--device", "abacus"], "device 'abacus' cannot be used here"),
        (["sweep", "--threads", "-1"], "--threads must be at least 0, got -1"),
        (["fit", "nowhere"], "cannot read nowhere: no such file"),
        (["fit", "."], ". holds no runs.parquet or runs.csv"),
        (["theory", "--m", "5"], "an exponent needs two widths below n = 1000, got 5"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lab", *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("times", "other", "is_diverged"),
    [
        (0.3, {}, False),
        (1.99, {}, False),
        (2.01, {}, True),
        (0.3, {"loss_train": math.inf}, True),
        (math.nan, {}, True),
    ],
)
def test_a_loss_above_twice_the_first_is_marked_as_diverged(
    times: float, other: dict[str, float], is_diverged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss is that of the first step, before anything was learned; weights stay finite all along."""
    first: list[torch.Tensor] = []
    advance, row = Engine.advance, runner._row

    def remember(self: Engine, with_loss: bool = False) -> Any:
        loss = advance(self, with_loss)
        if self.step == 1:
            assert loss is not None
            first.append(loss.clone())
        return loss

    def rated(
        grid: Grid, model: Any, W: torch.Tensor, b: torch.Tensor, p: Any, numbers: dict[str, float]
    ) -> dict[str, Any]:
        (loss,) = first[-1].tolist()
        assert numbers["first_loss"] == pytest.approx(loss, rel=1e-6) and numbers["loss_eval"] < loss
        return row(grid, model, W, b, p, {**numbers, "loss_eval": times * loss, **other})

    monkeypatch.setattr(Engine, "advance", remember)
    monkeypatch.setattr(runner, "_row", rated)
    grid = Grid(n=30, m=(8,), alpha=(0.0,), gamma=(-1.0,), batch=64, steps=60, eval_samples=512)
    (actual,) = sweep(grid, tmp_path)
    assert actual["diverged"] is is_diverged and actual["regime"] != "diverged"
    (fit,) = fit_runs([actual])
    assert (fit["num_models"], fit["num_diverged"]) == ((0, 1) if is_diverged else (1, 0))


def test_a_sweep_of_others_cannot_write_elsewhere(tmp_path):
    sweep([GRID], tmp_path / "sweep")
    config = json.loads((tmp_path / "sweep" / "config.json").read_text())
    (tmp_path / "sweep" / "runs.csv").unlink()
    for part in config["parts"].values():
        part["name"] = "../../elsewhere"
    (tmp_path / "sweep" / "config.json").write_text(json.dumps(config))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"name: '\.\./\.\./elsewhere' is not the name of a file inside a folder"):
        stored_parts(tmp_path / "sweep")
    assert main(["lab", "sweep", "--resume", "--quiet", "--out", str(tmp_path / "sweep")]) == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_settings_that_would_do_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--dist", "linear", "--alpha", "1"], "--alpha is for the shape power, and the data are linear; leave it out"),
        (["--chunk", "-1"], "--chunk must be at least 0, got -1"),
        (["--checkpoint-seconds", "-1"], "--checkpoint-seconds must be at least 0, got -1"),
    ):
        assert main(["lab", "sweep", "--steps", "2", "--out", str(tmp_path / "s"), *flags]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_weights_that_are_gone_are_told_on_resume(tmp_path: Path) -> None:
    lines: list[str] = []
    sweep([OTHER], tmp_path)
    sweep([OTHER], tmp_path, resume=True, keep_weights=True, say=lines.append)
    assert lines == ["no weights of part b: it was finished without --keep-weights"]


def test_what_is_left_of_an_older_sweep_is_never_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep([OTHER], tmp_path)
    (tmp_path / "index.html").write_text("a page of the old numbers")

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("hyptree.lab.sweeps.folder.shutil.rmtree", busy)
        with pytest.raises(PermissionError):
            sweep([replace(OTHER, steps=3)], tmp_path, overwrite=True)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="already holds a sweep"):
        sweep([replace(OTHER, steps=3)], tmp_path)
    assert {row["steps"] for row in sweep([replace(OTHER, steps=3)], tmp_path, overwrite=True)} == {3}
    assert not (tmp_path / "index.html").exists()
