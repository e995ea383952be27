"""How far a long job is, for people: a bar on a terminal, a line now and then when piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TextIO


class ProgressBar:
    """What :func:`progress_bar` gives: told how far the job is, it shows that or nothing."""

    def __init__(self, name: str, total: int, stream: TextIO | None, every: float):
        self.name, self.total, self.done = name, total, 0
        self._stream, self._every = stream, every
        self._start = self._format = time.monotonic()
        self._first = 0
        self._rich: Any = None
        self._task: Any = None

    def advance(self, count: int = 1, note: str = "") -> None:
        """So many more are done; the note is shown beside the bar."""
        self.reach(self.done + count, note)

    def reach(self, done: int, note: str = "", *, name: str | None = None, total: int | None = None) -> None:
        """So many are done in all; a new name begins a new bar."""
        if name is not None and name != self.name:
            self.name, self._start, self._first = name, time.monotonic(), done
            if self._rich is not None:
                self._rich.reset(self._task)
        self.done, self.total = done, self.total if total is None else total
        if self._rich is not None:
            self._rich.update(self._task, description=self.name, completed=done, total=self.total, note=note)
        elif self._stream is not None:
            self._line(note)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._rich is not None:
            self._rich.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self._stream is not None:
            print(text, file=self._stream, flush=True)

    def _line(self, note: str) -> None:
        now = time.monotonic()
        is_last = self.done >= self.total
        if now - self._format < self._every and not (is_last and note):
            return
        self._format = now
        parts = [f"{self.name}: {self.done}/{self.total}", note]
        if not is_last and self.done > self._first:
            parts.append(f"{(now - self._start) / (self.done - self._first) * (self.total - self.done):.0f} s left")
        print(", ".join(filter(None, parts)), file=self._stream, flush=True)


def say(text: str, quiet: bool = False) -> None:
    """A line to people, not into the output."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(
    name: str, total: int, *, quiet: bool = False, stream: TextIO | None = None, every: float = 30.0, done: int = 0
) -> Iterator[ProgressBar]:
    """Shows a job of ``total`` pieces while the block runs.

    Args:
        name: what is done, in a word or two.
        total: number of pieces.
        quiet: show nothing.
        stream: where to; stderr by default.
        every: seconds between lines where there is no terminal.
        done: pieces that an earlier call did.
    """
    stream = sys.stderr if stream is None else stream
    shown = ProgressBar(name, total, None if quiet else stream, every)
    shown.done = shown._first = done
    if quiet or not stream.isatty() or find_spec("rich") is None:
        shown.say(f"{name}: {total - done} to do")
        yield shown
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    about, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (about, BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as shown._rich:
        shown._task = shown._rich.add_task(name, total=total, completed=done, note="")
        yield shown


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' bars and notes, and the hub's on its retries: what matters of them is checked here."""
    import logging as python_logging

    from transformers.utils import logging

    hub = python_logging.getLogger("huggingface_hub")
    level, bars, hub_level = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.setLevel(python_logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(hub_level)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
