"""How to go on after Ctrl-C: a command that does so when it is pasted, however hyptree was called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyptree.errors import as_called

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}  # no environment is active


def program(path: Path) -> Path:
    """An executable in the place of a real one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom hyptree.cli import main\nsys.exit(main())\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder to be in, with an environment below it that is not on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    for name in ("hyptree", "python", "torchrun"):
        program(tmp_path / ".venv" / "bin" / name)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    return tmp_path


@pytest.mark.parametrize("is_active", [False, True])
@pytest.mark.parametrize(
    ("script", "inactive", "active"),
    [
        (".venv/bin/hyptree", ".venv/bin/hyptree", "hyptree"),
        ("{place}/.venv/bin/hyptree", ".venv/bin/hyptree", "hyptree"),
        ("/elsewhere/bin/hyptree", "/elsewhere/bin/hyptree", "/elsewhere/bin/hyptree"),
        ("src/hyptree/__main__.py", ".venv/bin/python -m hyptree", "python -m hyptree"),
        ("my_program.py", "hyptree", "hyptree"),
    ],
)
def test_the_way_the_user_called_it(script, inactive, active, is_active, place, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script.format(place=place)])
    if is_active:
        monkeypatch.setenv("PATH", f"{place}/.venv/bin:/usr/bin")
    message = as_called("train", Path("my runs/x"), "--resume")
    assert message == f"{active if is_active else inactive} train 'my runs/x' --resume"


def test_in_the_folder_of_the_program(place, monkeypatch):
    monkeypatch.chdir(".venv/bin")
    monkeypatch.setattr(sys, "argv", ["./hyptree"])
    assert as_called("demo") == "./hyptree demo"


def test_under_torchrun(place, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["src/hyptree/__main__.py"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert as_called("demo") == ".venv/bin/python -m torch.distributed.run --nproc-per-node 2 -m hyptree demo"
    monkeypatch.setenv("PATH", f"{place}/.venv/bin")
    assert as_called("demo") == "torchrun --nproc-per-node 2 -m hyptree demo"


TRAIN = (
    "train world_classify --out 'my runs/x' --data.num_train 64 --data.num_val 16 --data.batch_size 8 --data.size 32 "
    "--data.workers 0 --schedule.steps 60 --schedule.warmup 0 --run.device cpu --run.log_steps 1 --run.eval_every 0"
)
EMBED = (
    "train embed_world --out 'my runs/x' --embed.edges edges.tsv --schedule.epochs 3000 --run.save_steps 1 "
    "--run.device cpu"
)


@pytest.mark.parametrize(
    ("called", "words", "begun"),
    [
        (".venv/bin/hyptree", TRAIN, "metrics.jsonl"),
        (f"{sys.executable} -m hyptree", EMBED, "checkpoints/last/manifest.json"),
    ],
    ids=["train by its script", "embed as a module"],
)
def test_what_is_printed_after_ctrl_c_goes_on(called, words, begun, tmp_path):
    program(tmp_path / ".venv" / "bin" / "hyptree")
    (tmp_path / "edges.tsv").write_text("dog\tanimal\ncat\tanimal\nbeagle\tdog\n")
    options = {"cwd": tmp_path, "env": ENV, "shell": True, "text": True}
    run = subprocess.Popen(f"exec {called} {words}", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    begun = tmp_path / "my runs" / "x" / begun
    deadline = time.monotonic() + 120
    while not (begun.is_file() and begun.stat().st_size) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    shown = run.communicate(timeout=120)[0]
    assert run.returncode == 130, shown
    (command,) = [line.partition("go on with: ")[2] for line in shown.splitlines() if "go on with: " in line]
    assert command.startswith(f"{called} {words.split()[0]} ")
    again = subprocess.run(command, capture_output=True, **options)
    assert again.returncode == 0, again.stderr
    assert "going on from step" in again.stdout
