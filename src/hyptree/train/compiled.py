"""The model of a run under ``torch.compile``: plainly, or with CUDA graphs in the training step.

A step of a small model is thousands of kernels that the host must start one by one. A CUDA graph records them once and
starts them together, which asks for three things: batches of one shape, a word at the start of every pass that what
the last one gave may be overwritten, and gradients that are copied out before they are. Evaluation has batches of other
sizes and no use for graphs: it is compiled plainly. The model itself stays what it is, names of weights included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

GRAPHS: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False}
"""What torch calls it."""


class Compiled:
    """How a model is called in training and in evaluation.

    Args:
        model: compiled in place, so that the names in its state dict stay what they are.
        kind: ``run.compile`` of the recipe: true or "graphs".
        device: where the model is; without a GPU there are no CUDA graphs, and "graphs" compiles plainly.
        eager_evaluation: do not compile the model once more for evaluation, which pays off only if repeated.
    """

    def __init__(self, model: nn.Module, kind: bool | str, device: torch.device, eager_evaluation: bool = False):
        self.model, self.eager_evaluation = model, eager_evaluation
        self.uses_graphs = kind == "graphs" and device.type == "cuda"
        self.notes: list[str] = []
        """A line for the log where something else is done than was asked for."""
        if kind == "graphs" and not self.uses_graphs:
            self.notes = [
                f"run.compile graphs: {device.type} has no CUDA graphs, so the model is compiled without them"
            ]
        model.compile(**GRAPHS if self.uses_graphs else {})

    def begin_pass(self) -> None:
        """Before each forward pass of training: whatever the last one left in the memory of the graph is not needed."""
        if self.uses_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def keep_gradients(self) -> None:
        """Between the parts of a batch: gradients move out of the graph's memory, which the next part overwrites.

        Needed once, after the first part: from then on torch adds to these tensors in place.
        """
        if self.uses_graphs:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad = p.grad.clone()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is called as evaluation wants it: eager if told so, otherwise compiled without graphs."""
        if self.eager_evaluation:
            with torch.compiler.set_stance("force_eager"):
                yield
        elif self.uses_graphs:
            self.model.compile()  # what was compiled before, either way, is found again: nothing is compiled twice
            try:
                yield
            finally:
                self.model.compile(**GRAPHS)
        else:
            yield
