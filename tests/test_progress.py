"""Bars on a terminal, lines elsewhere, nothing when quiet."""

from __future__ import annotations

import io

import pytest

from hyptree import progress
from hyptree.progress import progress_bar


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_now_and_then_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("runs", 3, every=0) as bar:
        for _ in range(3):
            bar.advance()
    first, one, two, three = capsys.readouterr().err.splitlines()
    assert (first, three) == ("runs: 3 to do", "runs: 3/3")
    assert one.startswith("runs: 1/3, ") and two.startswith("runs: 2/3, ") and two.endswith(" s left")
    with progress_bar("runs", 3) as bar:  # a short one says no more
        bar.advance(3)
    with progress_bar("runs", 3, quiet=True) as bar:
        bar.advance(3)
        bar.say("nothing")
    assert capsys.readouterr().err == "runs: 3 to do\n"


def test_the_last_line_has_the_last_note(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("train", 4, done=1) as bar:
        bar.reach(2, "loss 2")
        bar.reach(4, "loss 1")
    assert capsys.readouterr().err == "train: 3 to do\ntrain: 4/4, loss 1\n"


def test_time_left_counts_from_where_the_job_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 100.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with progress_bar("a", 100, stream=out, every=0, done=90) as bar:
        bar.reach(95)  # five in ten seconds: five more in ten
        bar.reach(0, name="b", total=20)
    assert out.getvalue() == "a: 10 to do\na: 95/100, 10 s left\nb: 0/20\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    with progress_bar("a plane", 300, stream=screen) as bar:
        for _ in range(300):
            bar.advance(note="loss 0.2500")
        bar.say("a line")
        bar.reach(1, name="another", total=2)
    text = screen.getvalue()
    assert all(part in text for part in ("a plane", "0/300", "loss 0.2500", "━", "a line\n", "another", "1/2"))
