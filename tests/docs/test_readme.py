"""Every command and every Python block of README and quickstart runs as pasted, in order, in one folder like a clone.

What takes minutes is shrunk by flags that ``hyptree VERB --help`` explains (SHRUNK). What installs is not run: its
target has to exist, and the address to clone from is the project's own. A page that no longer says what is listed here
fails as well. Verbs of HERE run in this process, which has imported torch; everything else in one of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from hyptree.cli import main

ROOT = Path(__file__).resolve().parents[2]
README, QUICKSTART = "README.md", "docs/quickstart.md"
FEW = "--data.num-train 128 --data.num-val 64 --schedule.epochs 1 --run.eval-every 0"
SHRUNK = {
    README: {
        "hyptree demo": "--recipe demo_tiny.yaml",
        "hyptree train helm_builtin": "--schedule.steps 2 --schedule.warmup 0",
        "hyptree train clip_world_tiny": FEW,
        "hyptree lab sweep --preset smoke": "--steps 20",
    },
    QUICKSTART: {
        "hyptree demo": "--recipe demo_tiny.yaml",
        "hyptree explain runs/demo --table": "--samples 8",
        "hyptree train demo --optim.lr 1e-3 --schedule.epochs 2 --out runs/mine": FEW,
        "hyptree train clip_world_tiny": FEW,
        "hyptree vlm eval-hierarchy --model hf:runs/clip_world_tiny --suite world-text": "--limit 50",
        "hyptree train fewshot_world": "--data.num-train 400 --data.num-val 100 --schedule.epochs 2",
        "hyptree train radial_world": "--data.num-train 40 --data.num-val 20",
        "hyptree train openvocab_world_tiny": FEW,
        "hyptree train helm_builtin": "--schedule.steps 2 --schedule.warmup 0",
        "hyptree lab sweep --preset smoke --out runs/lab": "--steps 20",
    },
}

HERE = {"generate", "lab", "train"}
"""Verbs that other tests start as processes: tests/cli/test_generate.py, tests/lab/sweeps, tests/cli/test_go_on.py."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands(page: str) -> list[tuple[int, str, str]]:
    """Line number, language and text: Python blocks whole, of the others every command (with its continued lines)."""
    text, actual = text_of(page), []
    for block in re.finditer(r"^```(bash|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, block.start(2)) + 1
        if block[1] == "python":
            actual.append((line, "python", block[2]))
            continue
        for command in re.finditer(r"(?:.*\\\n)*.+\n", block[2]):
            actual.append((line + block[2].count("\n", 0, command.start()), "bash", command[0].strip()))
    return actual


def clone(folder: Path) -> dict[str, str]:
    """Make a folder look like a clone after ``make setup``, and give the environment to work in it."""
    for path in ROOT.iterdir():
        if path.name[0] != "." and path.name not in ("runs", "build", "dist"):
            (folder / path.name).symlink_to(path)
    small = yaml.safe_load(text_of("recipes/demo.yaml"))
    small["data"].update(num_train=64, num_val=64)
    small["schedule"].update(epochs=1, warmup=0)
    (folder / "demo_tiny.yaml").write_text(yaml.safe_dump(small), encoding="utf-8")
    bin = folder / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "hyptree").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hyptree "$@"\n', encoding="utf-8")
    (bin / "hyptree").chmod(0o755)
    # What was said to the `make` that runs this test is not said to those of the page.
    said = {"MAKEFLAGS", "MFLAGS", "ARGS", *re.findall(r"^(\w+) *\?=", text_of("Makefile"), re.MULTILINE)}
    env = {name: value for name, value in os.environ.items() if name not in said}
    settings = {"PYTHONPATH": str(ROOT / "src"), "PATH": f"{bin}:{os.defpath}", "HYPTREE_CACHE": str(folder / "cache")}
    return env | settings


def dry_run(command: str, folder: Path, env: dict[str, str]) -> list[str]:
    """The commands that a ``make`` would start."""
    words = command.split()
    shown = subprocess.run([words[0], "-n", *words[1:]], cwd=folder, env=env, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines()


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run what a page says; the commands that were shrunk."""
    env, shrunk = clone(folder), []
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HYPTREE_CACHE", env["HYPTREE_CACHE"])
    for line, language, command in commands(page):
        where = f"{page}:{line}: {command}"
        if command.startswith("git clone "):
            assert command.split()[2] == tomllib.loads(text_of("pyproject.toml"))["project"]["urls"]["Homepage"], where
            continue
        if command in ("cd hyptree", "source .venv/bin/activate"):
            continue
        if command.startswith("make "):
            starts = [start for start in dry_run(command, folder, env) if start.startswith(".venv/bin/hyptree ")]
            assert bool(starts) == (command == "make demo"), where
        else:
            starts = [command]
        for start in starts:
            words = start.removeprefix(".venv/bin/").strip()
            if (flags := SHRUNK[page].get(words)) is not None:
                shrunk.append(words)
                start += f" {flags}"
            if words.split()[0] == "hyptree" and words.split()[1] in HERE:
                assert main(shlex.split(start)[1:]) == 0, where
                continue
            program = [sys.executable, "-c"] if language == "python" else ["bash", "-c"]
            ended = subprocess.run([*program, start], cwd=folder, env=env, capture_output=True, text=True)
            assert ended.returncode == 0, f"{where}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return shrunk


@pytest.mark.parametrize("page", [README, pytest.param(QUICKSTART, marks=pytest.mark.slow)])
def test_a_page_runs_as_pasted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(run_page(page, tmp_path, monkeypatch)) == sorted(SHRUNK[page])
    built = {path.parent.name for path in (tmp_path / "runs").rglob("*.html")}
    assert "demo" in built


def test_targets_and_settings_of_make_exist(tmp_path: Path) -> None:
    env = clone(tmp_path)
    named = set(re.findall(r"(?:^|`)(make [^`\n]+)", text_of(README) + text_of(QUICKSTART), re.MULTILINE))
    assert {"make setup", "make demo", "make test", "make docs"} <= named
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.MULTILINE))  # a folder would do for make
    for command in named:
        _, target, *values = command.split()
        shown = "\n".join(dry_run(command, tmp_path, env))
        assert target in targets and all(value.partition("=")[2] in shown for value in values), command


def test_the_readme_fits_on_three_screens() -> None:
    lines = text_of(README).splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 100 and not line.startswith(("|", "!["))] == []
