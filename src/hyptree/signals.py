"""Ctrl-C and SIGTERM as a question that the loop asks between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after a checkpoint was written: the same command with ``--resume`` goes on."""


def is_main_process() -> bool:
    """Whether this process speaks: the first of those that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def stop_signals(quiet: bool = False) -> Iterator[Callable[[], bool]]:
    """Within it, the first Ctrl-C or SIGTERM only sets a flag, which the yielded function reads; the second raises.

    Args:
        quiet: do not tell the user that the signal was understood.
    """
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        if not quiet:  # straight to the file: a handler must not touch Python's buffers
            os.write(2, b"\nstopping after this step, with a checkpoint; once more to stop at once\n")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
