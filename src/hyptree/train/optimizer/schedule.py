"""The learning rate as a function of the step: no state, so nothing to save and nothing to get wrong on resume."""

from __future__ import annotations

import math

from hyptree.errors import UserError
from hyptree.train.run.recipe import ScheduleSettings

BURN_IN = 0.01
"""Share of the top learning rate during a burn-in."""


class Schedule:
    """How many steps a run has, and the share of the top learning rate that each one gets."""

    def __init__(self, settings: ScheduleSettings, steps_per_epoch: int):
        self.settings, self.steps_per_epoch = settings, steps_per_epoch
        by_steps = settings.steps is not None
        self.num_steps: int = settings.steps or round(settings.epochs * steps_per_epoch)
        """Optimiser steps of the whole run."""
        unit = 1 if by_steps else steps_per_epoch
        self.num_burn_in_steps = round(settings.burn_in * unit)
        """Steps before the warm-up, at ``BURN_IN``."""
        self.num_warmup_steps = round(settings.warmup * unit)
        """Steps from there until the top is reached."""
        if self.num_steps < 1:
            raise UserError(
                f"schedule.epochs {settings.epochs:g} is less than one step (an epoch has {steps_per_epoch})"
            )

    def factor(self, step: int) -> float:
        """Share of the top learning rate at this step (from 0): rises linearly, then falls to ``min_lr``.

        The first step of a warm-up of n has 1/(n + 1), the first after it 1; the last step of the run comes out just
        above ``min_lr``, which would be that of the step after it.
        """
        warmup, step = self.num_warmup_steps, step - self.num_burn_in_steps
        if step < 0:
            return BURN_IN
        if step < warmup:
            return (step + 1) / (warmup + 1)
        low = self.settings.min_lr
        done = (step - warmup) / max(1, self.num_steps - self.num_burn_in_steps - warmup)
        if self.settings.name == "constant":
            return 1.0
        if self.settings.name == "poly":
            return low + (1 - low) * (1 - done) ** self.settings.power
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
