"""Where a run is: its step, its best number, and the numbers of recent steps, which must be finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


class NotFinite(Exception):
    """A loss or a gradient is not a finite number; the message says where and what to do."""


@dataclass
class RunState:
    """Where a run is; goes into the checkpoint as JSON, which keeps floats to the last bit."""

    step: int = 0
    """Optimiser steps done."""
    num_steps: int = 0
    """Those of the whole run."""
    seconds: float = 0.0
    """Time spent so far, over all the times the run was resumed."""
    best: float | None = None
    """Best value of the task's metric."""
    best_step: int | None = None
    window: dict[str, list[float]] = field(default_factory=dict)
    """Numbers of the steps since the last line of metrics."""
    num_ema_updates: int = 0
    num_skipped_steps: int = 0
    """Steps that were left out because their gradient was not finite (``run.max_skipped_steps``)."""
    num_skipped_in_row: int = 0
    """Of these, the ones at the end without a good one after them."""

    def require_finite(self, count: int, kept: str = "") -> None:
        """Look at loss and gradient of the last ``count`` steps; ``kept`` says what is saved.

        Raises:
            NotFinite: at the first step whose loss or gradient is not finite.
        """
        for i in range(count):
            for name, what in (("loss", "loss"), ("grad_norm", "gradient")):
                value = self.window[name][len(self.window[name]) - count + i]
                if not math.isfinite(value):
                    raise NotFinite(
                        f"the {what} is {value} at step {self.step - count + i + 1}{kept}; lower optim.lr or set "
                        "optim.clip, and HYPTREE_DEBUG=1 shows where it starts"
                    )

    def drop_skipped(self, count: int, limit: int) -> int:
        """Count those of the last ``count`` steps that changed nothing and forget their numbers; gives what is left.

        Raises:
            NotFinite: more than ``limit`` of them in a row.
        """
        first = len(self.window["grad_norm"]) - count
        good = [math.isfinite(value) for value in self.window["grad_norm"][first:]]
        for is_good in good:
            self.num_skipped_in_row = 0 if is_good else self.num_skipped_in_row + 1
            self.num_skipped_steps += not is_good
            if self.num_skipped_in_row > limit:
                raise NotFinite(
                    f"{self.num_skipped_in_row} steps in a row had a gradient that is not finite (around step "
                    f"{self.step}); lower optim.lr, or HYPTREE_DEBUG=1 shows where it starts"
                )
        for values in self.window.values():
            values[first:] = [value for value, is_good in zip(values[first:], good, strict=True) if is_good]
        return sum(good)
