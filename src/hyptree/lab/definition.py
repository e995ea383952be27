"""The toy model by its definition: dense samples, autograd, torch's Adam, one model at a time.

:mod:`hyptree.lab.engine` computes the same for a whole grid at once; this is what it is compared with, and the loop
that ``hyptree bench lab`` times it against.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hyptree.lab.hyperbolic import readout
from hyptree.lab.sweeps.grid import Grid, Model, schedule

EPS = 1e-8
"""Of Adam, and added to the norm in the growth rule."""


class ToyModel(nn.Module):
    """Tied auto-encoder: ``h = Wᵀx``, ``y = relu(W h + b)``; with a curvature, in hyperbolic space.

    Shape:
        x (B, n) -> y (B, n); W (n, m), b (n).
    """

    def __init__(self, W: Tensor, b: Tensor, curvature: float = 0.0):
        super().__init__()
        self.curvature = curvature
        self.W, self.b = nn.Parameter(W.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(readout(x @ self.W, self.W, self.curvature) + self.b)


def initial(model: Model, bias_init: str = "normal", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """``W ~ N(0, 1/m)`` (n, m) and ``b ~ N(0, 1)`` or zero (n): from the model's own seed, the same on every device."""
    generator = torch.Generator().manual_seed(model.init_seed)
    W = torch.randn(model.n, model.m, generator=generator) / model.m**0.5
    b = torch.randn(model.n, generator=generator)
    return W.to(dtype), (b if bias_init == "normal" else torch.zeros_like(b)).to(dtype)


def reconstruction_loss(y: Tensor, x: Tensor) -> Tensor:
    """Squared error summed over features, mean over samples: the loss that is reported."""
    return (y - x).square().sum(-1).mean()


@torch.no_grad()
def decay(W: Tensor, gamma: float, lr: float) -> None:
    """Shrink rows by ``1 - lr gamma`` (gamma >= 0), or pull their norm towards one (gamma < 0); in place.

    The pull is a step of gradient descent on ``|gamma|/2 (|W_i| - 1)^2``.
    """
    if gamma >= 0:
        W.mul_(1 - lr * gamma)
    else:
        norm = W.norm(dim=1, keepdim=True) + EPS
        W.add_(W * (1 / norm - 1), alpha=lr * -gamma)


class Loop:
    """Trains one model, a step at a time.

    The optimised loss is the mean over samples and features. Decay is decoupled: it moves W before Adam does, scaled by
    the scheduled learning rate, and touches neither the bias nor Adam's moments.
    """

    def __init__(self, toy: ToyModel, grid: Grid, gamma: float):
        self.toy, self.grid, self.gamma = toy, grid, gamma
        self.rates = grid.learning_rates(toy.W.shape[1])
        # One launch for all of Adam: the fastest that torch has for so small a model.
        self.optimizer = torch.optim.Adam([{"params": [toy.W]}, {"params": [toy.b]}], eps=EPS, fused=True)
        self.num_steps = 0

    def step(self, x: Tensor) -> Tensor:
        """Learn from samples (B, n); gives the loss before the step."""
        factor = schedule(self.num_steps, self.grid.steps, self.grid.warmup)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        loss = reconstruction_loss(self.toy(x), x)
        self.optimizer.zero_grad()
        (loss / x.shape[1]).backward()
        decay(self.toy.W, self.gamma, self.rates[0] * factor)
        self.optimizer.step()
        self.num_steps += 1
        return loss.detach()


def train(toy: ToyModel, batches: Iterable[Tensor], grid: Grid, gamma: float) -> list[Tensor]:
    """Train one model in place on dense batches (B, n), one step each; gives the loss of every step."""
    loop = Loop(toy, grid, gamma)
    return [loop.step(x) for x in batches]
