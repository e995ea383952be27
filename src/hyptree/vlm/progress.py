"""How far a long job is, for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def counted(name: str, total: int, quiet: bool, every: float = 30.0) -> Iterator[Callable[[int], None]]:
    """A function that takes how many were done: a bar on a terminal, a line now and then when piped."""
    if quiet:
        yield lambda count: None
    elif not sys.stderr.isatty() or find_spec("rich") is None:
        print(f"{name}: {total} to do", file=sys.stderr, flush=True)
        done, started = 0, time.monotonic()
        said = started

        def line(count: int) -> None:
            nonlocal done, said
            done, now = done + count, time.monotonic()
            if now - said >= every and done < total:
                said = now
                left = (now - started) / done * (total - done)
                print(f"{name}: {done}/{total}, {left:.0f} s left", file=sys.stderr, flush=True)

        yield line
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)
