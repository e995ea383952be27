"""Training that is a row of small steps: kept by the clock, stopped between two steps, taken up again bit for bit.

For what has no recipe: chains of captions and embedded hierarchies, whose steps take milliseconds and whose batches
follow from the settings alone. ``hyptree.train.loop`` trains everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hyptree.errors import UserError
from hyptree.files import load_tensors, save_tensors
from hyptree.signals import Stopped, stop_signals

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

CHECKPOINT = "checkpoint.safetensors"


class Steps(Protocol):
    """What is trained: a class with ``advance``, which takes a step, and with what goes into a checkpoint."""

    seconds: float

    @property
    def is_done(self) -> bool: ...
    def advance(self) -> Any: ...
    def save(self, path: Path) -> None: ...


def run_steps(
    job: Steps,
    out: Path,
    every: float,
    most: float | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Any]:
    """Take the steps that are left; yields what ``advance`` gives, with the time of all steps in ``job.seconds``.

    Ctrl-C (and SIGTERM) finishes the step, writes a checkpoint into ``out`` and raises ``KeyboardInterrupt``.

    Args:
        every: seconds between checkpoints.
        most: seconds of training after which it stops as if interrupted, but without the exception.
        around: what each step runs in.
    """
    saved_at = time.perf_counter()
    with stop_signals() as stopped:
        while not job.is_done:
            began = time.perf_counter()
            with around():
                result = job.advance()
            now = time.perf_counter()
            job.seconds += now - began
            yield result
            is_late = most is not None and job.seconds >= most
            if stopped() or is_late or now - saved_at >= every:
                job.save(out / CHECKPOINT)
                saved_at = time.perf_counter()
            if stopped():
                raise Stopped
            if is_late:
                return
        job.save(out / CHECKPOINT)


def save_steps(
    path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Write a checkpoint: parameters, the tensors of their optimiser, and a state for JSON."""
    from torch import Tensor

    tensors = {f"parameter.{name}": value.detach() for name, value in parameters.items()}
    for name, value in parameters.items():
        moments = optimizer.state.get(value, {}).items()
        tensors |= {f"optimizer.{key}.{name}": moment for key, moment in moments if isinstance(moment, Tensor)}
    save_tensors(path, tensors, state)


def load_steps(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    mine: Mapping[str, Any],
    source: str,
) -> dict[str, Any]:
    """Fill parameters and optimiser with what :func:`save_steps` wrote; gives its state.

    Args:
        mine: the state of this run, whose ``settings`` and ``digest`` of its data must be those of the file.
        source: what the data is, for the message.

    Raises:
        UserError: other settings, other data or another model.
    """
    tensors, state = load_tensors(path)
    for key, value in mine["settings"].items():
        saved = state.get("settings", {}).get(key)
        if saved != value:
            raise UserError(f"cannot resume {path}: it was made with {key} = {saved}, now it is {value}")
    if state.get("digest") != mine["digest"]:
        raise UserError(f"cannot resume {path}: it was made from other {source}; use the same data")
    for name, value in parameters.items():
        if f"parameter.{name}" not in tensors or tensors[f"parameter.{name}"].shape != value.shape:
            raise UserError(f"cannot resume {path}: it has no {name} of this shape; it was made with another model")
    for name, value in parameters.items():
        value.detach().copy_(tensors[f"parameter.{name}"])
    for full_name, moment in tensors.items():
        kind, *rest = full_name.split(".", 2)
        if kind == "optimizer" and rest[1] in parameters:
            value = parameters[rest[1]]
            optimizer.state[value][rest[0]] = moment if rest[0] == "step" else moment.to(value.device)
    return state
