"""The frozen weights under something that was trained: where they run, and whether they are the ones it was made on.

Weights that accelerate offloads are empty tensors; a hook on their module, or on one around it, brings them in.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

CHILD = "hyptree_adapters"
"""Name of the child that holds a model's adapters, and so the first word of their keys in its state dict."""


def device_of(model: nn.Module, name: str) -> torch.device:
    """Where a parameter is when its layer runs."""
    weight = own_weight(model, name)
    for hook, _ in _hooks_around(model, name) if weight.is_meta else ():
        if (device := getattr(hook, "execution_device", None)) is not None:
            return torch.device(device)
    return weight.device


def _value(model: nn.Module, name: str) -> Tensor | None:
    """The numbers of a parameter; None where there are none (a model on the meta device)."""
    weight: Tensor = own_weight(model, name)
    for hook, inner in _hooks_around(model, name) if weight.is_meta else ():
        if (kept := getattr(hook, "weights_map", None)) is not None:
            weight = kept[inner]
            break
    return None if weight.is_meta else weight.detach()


def own_weight(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter that a model itself holds, whatever an adapter makes of it."""
    path, _, attribute = name.rpartition(".")
    weight = model.get_submodule(path)._parameters[attribute]
    assert weight is not None
    return weight


def _hooks_around(model: nn.Module, name: str) -> Iterator[tuple[Any, str]]:
    """Hooks of accelerate on the modules that a parameter lies in, the nearest first, and its name within each."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        hook = model.get_submodule(".".join(parts[:depth])).__dict__.get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):
            yield one, ".".join(parts[depth:])


def samples(model: nn.Module, count: int = 64) -> dict[str, list[float]] | None:
    """Eight numbers of each of at most ``count`` weights of the base: by them one base is told from another.

    Unlike a hash they can be compared between float32 and its roundings. None for a model without numbers.
    """
    names = [name for name, p in model.named_parameters() if p.dim() > 1 and not name.startswith(f"{CHILD}.")]
    rows = {}
    for name in names[:: -(-len(names) // count)]:
        if (weight := _value(model, name)) is None:
            return None
        flat = weight.flatten()
        rows[name] = flat[torch.linspace(0, len(flat) - 1, 8).long()].tolist()
    return rows


def warn_of_another_base(model: nn.Module, expected: dict[str, list[float]] | None, what: str, made_on: str) -> None:
    """Say so where a model has other weights than the one called ``made_on``, by which ``expected`` was sampled."""
    actual = samples(model)
    if not expected or not actual:
        return
    names = [name for name in expected if name in actual]
    then, now = (torch.tensor([rows[name] for name in names]) for rows in (expected, actual))
    # Half precision keeps eight bits or more; what is nearly 0 is rounded by more.
    is_other = (then - now).abs() > 0.01 * then.abs() + 1e-3 * then.abs().mean()
    share = is_other.float().mean() if names else torch.tensor(1.0)
    if share > 0.05:
        warnings.warn(
            f"{what} was made on {made_on}, and this model has other weights of the same shapes "
            f"({share:.0%} of those compared differ): what it gives is not what was trained",
            stacklevel=4,
        )
