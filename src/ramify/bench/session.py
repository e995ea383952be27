"""What every benchmark does around its tables: look for the device, set the threads, and write each line twice."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from ramify.errors import UserError

Emit = Callable[[dict[str, Any], Sequence[str]], None]
"""Takes what was found, and the same as lines for people."""


class SessionOptions(Protocol):
    """The options that all benchmarks have."""

    @property
    def device(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def json(self) -> bool: ...

    @property
    def out(self) -> Path | None: ...


@contextmanager
def session(options: SessionOptions, stream: TextIO | None = None) -> Iterator[Emit]:
    """Gives the function that prints; within the context torch has the threads that were asked for (0: all cores).

    Lines for people, or JSON lines if asked for, go to ``stream`` (standard output by default). JSON lines are also
    appended to ``options.out``, each as soon as it is there, so that a stop loses nothing.
    """
    import torch

    stream = stream or sys.stdout
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch finds no CUDA device; use --device cpu")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)

    def emit(line: dict[str, Any], text: Sequence[str]) -> None:
        as_json = json.dumps(line)
        print(*([as_json] if options.json else text), sep="\n", file=stream, flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                print(as_json, file=file)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(options.threads or os.cpu_count() or 1)
        yield emit
    finally:
        torch.set_num_threads(threads)
