"""The learning rate as a function of the step: no state, so nothing to save and nothing to get wrong on resume."""

from __future__ import annotations

import math

from hyptree.errors import UserError
from hyptree.train.run.recipe import ScheduleSettings


class Schedule:
    """How many steps a run has, and the share of the top learning rate that each one gets."""

    def __init__(self, settings: ScheduleSettings, steps_per_epoch: int):
        self.settings, self.steps_per_epoch = settings, steps_per_epoch
        by_steps = settings.steps is not None
        self.num_steps: int = settings.steps or round(settings.epochs * steps_per_epoch)
        """Optimiser steps of the whole run."""
        self.num_warmup_steps = round(settings.warmup * (1 if by_steps else steps_per_epoch))
        """Steps before the top is reached."""
        if self.num_steps < 1:
            raise UserError(
                f"schedule.epochs {settings.epochs:g} is less than one step (an epoch has {steps_per_epoch})"
            )

    def factor(self, step: int) -> float:
        """Share of the top learning rate at this step (from 0): rises linearly or waits, then falls to ``min_lr``.

        The first step of a warm-up of n has 1/(n + 1), the first after it 1; the last step of the run comes out just
        above ``min_lr``, which would be that of the step after it.
        """
        warmup = self.num_warmup_steps
        if step < warmup and self.settings.warmup_lr is not None:
            return self.settings.warmup_lr
        if step < warmup:
            return (step + 1) / (warmup + 1)
        low = self.settings.min_lr
        done = (step - warmup) / max(1, self.num_steps - warmup)
        if self.settings.name == "constant":
            return 1.0
        if self.settings.name == "poly":
            return low + (1 - low) * (1 - done) ** self.settings.power
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
