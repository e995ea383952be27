"""Curvature as a value or as a parameter: ``c > 0``, the sectional curvature is ``-c`` (``+c`` on a sphere)."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .registry import check_curvature


class Curvature(nn.Module):
    """A positive number, or a tensor of them, that may be learned. Calling it gives ``c``.

    The raw parameter is ``log c`` (float32, no weight decay in :func:`ramify.optim.param_groups`), or, with bounds, a
    sigmoid between their logarithms. The value you pass is the value used: ``Curvature(1.0)() == 1.0``.

    Args:
        init: positive float, or tensor of shape such as (heads, 1, 1).
        learnable: make it a parameter; otherwise a float stays a float (nothing moves between devices).
        min: lower bound of a learned curvature. max: upper bound.
    """

    def __init__(
        self, init: float | Tensor = 1.0, learnable: bool = False, min: float | None = None, max: float | None = None
    ):
        super().__init__()
        check_curvature(init)
        values = torch.as_tensor(init, dtype=torch.float64)
        if not bool((values > 0).all() & torch.isfinite(values).all()):
            raise ValueError(f"curvature: c must be positive and finite (the sectional curvature is -c), got {init}")
        if (min is None) != (max is None):
            raise ValueError(
                "curvature: give both bounds or none; to leave one side open use a very small or large one"
            )
        if min is not None and max is not None and not bool(((values > min) & (values < max)).all() and min > 0):
            raise ValueError(f"curvature: expected 0 < min < c < max, got min={min}, c={init}, max={max}")
        self.learnable, self.min, self.max = learnable, min, max
        if learnable:
            self.raw = nn.Parameter(self._inverse(values).float())
        elif isinstance(init, Tensor):
            self.register_buffer("value", init.detach().clone().float())
        else:
            self.value = float(init)

    def _inverse(self, c: Tensor) -> Tensor:
        if self.min is None or self.max is None:
            return c.log()
        low, high = math.log(self.min), math.log(self.max)
        return torch.logit((c.log() - low) / (high - low))

    def forward(self) -> Tensor | float:
        if not self.learnable:
            return self.value
        if self.min is None or self.max is None:
            return self.raw.exp()
        low, high = math.log(self.min), math.log(self.max)
        return (low + (high - low) * self.raw.sigmoid()).exp()

    def extra_repr(self) -> str:
        c = self()
        value = c.detach() if isinstance(c, Tensor) else torch.tensor(c)
        shown = f"{value.item():.4g}" if value.numel() == 1 else f"{tuple(value.shape)}"
        return f"c={shown}" + (", learnable" if self.learnable else "")


def curvature_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The raw curvature parameters of a model, for a learning rate or a clipping of their own."""
    for module in model.modules():
        if isinstance(module, Curvature) and module.learnable:
            yield module.raw
