"""Parameters that are points: a plain ``nn.Parameter`` that knows its manifold.

No tensor subclass: the manifold is an attribute of the parameter. PyTorch drops such attributes when it copies,
unpickles or re-creates a parameter. So a module that owns points derives from :class:`PointModule`, which puts them
back.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hyptree.geometry.manifold import Manifold


def mark_manifold(parameter: nn.Parameter, manifold: Manifold) -> nn.Parameter:
    """Tell optimisers that the rows of ``parameter`` are points of ``manifold``; returns the parameter."""
    parameter.manifold = manifold  # type: ignore[attr-defined]
    return parameter


def manifold_of(parameter: Tensor) -> Manifold | None:
    """The manifold that ``parameter`` was marked with, or None for an ordinary parameter."""
    return getattr(parameter, "manifold", None)


class PointModule(nn.Module):
    """A module with parameters that are points; deepcopy, pickle, ``to`` and ``fully_shard`` leave them marked."""

    def __init__(self) -> None:
        super().__init__()
        self._points: dict[str, Manifold] = {}

    def register_point(self, name: str, value: Tensor, manifold: Manifold) -> None:
        """Register ``value`` (..., n) as the parameter ``name`` whose rows are points of ``manifold``."""
        self.register_parameter(name, nn.Parameter(value))
        self._points[name] = manifold
        self.mark_points()

    def mark_points(self) -> None:
        """Mark this module's point parameters again, after something replaced them."""
        for name, manifold in self._points.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                mark_manifold(parameter, manifold)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_points", ()) and isinstance(value, nn.Parameter):
            mark_manifold(value, self._points[name])  # fully_shard puts its parameters in place this way

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_points()

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self.mark_points()  # torch may swap parameters for what it loads

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PointModule":
        super()._apply(fn, recurse)
        self.mark_points()
        return self


def mark_points(model: nn.Module) -> None:
    """Mark every point parameter of ``model`` again.

    Needed before making an optimiser if something put new parameters into a module behind its back;
    :func:`hyptree.optim.param_groups` calls it for you. Assignments, copies, ``to`` and ``fully_shard`` keep the marks.
    """
    for module in model.modules():
        if isinstance(module, PointModule):
            module.mark_points()
