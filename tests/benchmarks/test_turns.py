"""Benchmarks that take turns: timed one after the other, once all are ready, and nobody waits for one that ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.turns import VARIABLE, turn
from hyptree.errors import UserError

BENCHMARK = """
import sys, time
from benchmarks.turns import take_part, turn
take_part()
if sys.argv[1] == "fails":
    sys.exit(1)
time.sleep(float(sys.argv[1]))  # what building takes
print("ready", time.time())
with turn():
    begin = time.time()
    time.sleep(0.2)
    print("timed", begin, time.time())
"""


def start(folder: Path, what: str) -> subprocess.Popen[str]:
    environment = {**os.environ, VARIABLE: f"{folder}:3"}
    return subprocess.Popen([sys.executable, "-c", BENCHMARK, what], env=environment, stdout=subprocess.PIPE, text=True)


def test_times_do_not_overlap_and_begin_when_all_are_ready(tmp_path: Path):
    processes = [start(tmp_path, what) for what in ("0", "0.6", "fails")]
    text = [process.communicate(timeout=120)[0].split() for process in processes]
    ready = [float(words[1]) for words in text[:2]]
    spans = sorted((float(words[3]), float(words[4])) for words in text[:2])
    assert text[2] == []
    assert spans[0][0] >= max(ready)
    assert spans[1][0] >= spans[0][1]


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with turn():
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["3", "folder:", "folder:none", ":3", "folder:0"])
def test_a_wrong_setting_is_one_line(setting: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, setting)
    with pytest.raises(UserError, match="expected FOLDER:COUNT"), turn():
        pass
