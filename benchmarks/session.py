"""What every benchmark does around its tables: look for the device, set the threads, and write each line twice."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from benchmarks.turns import take_part
from hyptree.errors import UserError

if TYPE_CHECKING:
    from benchmarks.options import BenchOptions

Options = TypeVar("Options")

Emit = Callable[[dict[str, Any], Sequence[str]], None]
"""Takes what was found, and the same as lines for people."""

_LARGEST_BLOCK = 32 * 2**20 - 2**16  # bytes; freeing a larger one does not move glibc's threshold


@contextmanager
def session(options: BenchOptions, stream: TextIO | None = None) -> Iterator[Emit]:
    """Gives the function that prints; within the context torch has the threads that were asked for (0: all cores).

    Lines for people, or JSON lines if asked for, go to ``stream`` (standard output by default). JSON lines are also
    appended to ``options.out``, each as soon as it is there, so that a stop loses nothing.
    """
    import torch

    stream = stream or sys.stdout
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch finds no CUDA device; use --device cpu")
    take_part()
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
        settle_allocator()
        yield emit
    finally:
        torch.set_num_threads(threads)


def settle_allocator() -> None:
    """Bring glibc's allocator into the state that it has in any program which once freed a large tensor.

    It gives freed memory back to the system above a threshold, twice the largest block freed so far and at most 64 MiB.
    While the threshold is low, who frees more than two tensors at once pays for fresh pages in every call. Whether a
    contender pays would depend on what ran before it: the same function took 1.2 or 1.45 times its twin.
    """
    import torch

    torch.empty(_LARGEST_BLOCK, dtype=torch.uint8).zero_()
