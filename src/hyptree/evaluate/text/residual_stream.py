"""What goes on inside a language model in training: how long the stream is, what hits a bound, who does the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MAX_SEQUENCES = 4
"""Sequences that are looked at; more would cost time and say the same."""


def stream_statistics(model: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    """Numbers of one forward pass without gradients, by name.

    * ``stream/00``, ...: mean norm of the tokens after each layer (of their space components, for HELM);
    * ``clamped``: share of the numbers that a lower bound of the geometry had to lift (residuals, centroids of HELM):
      rounding where it is small, trouble where it grows;
    * ``load/02.1``: share of the choices that went to expert 1 of layer 2; ``curvature/02.1``: its K, curvature -K;
    * ``curvature_min``, ``curvature_mean``, ``curvature_max``: over all experts of all layers.

    The model is uncompiled and in eval mode; the batch has ``input_ids`` (B, N), perhaps ``position_ids`` and
    ``attention_mask``.
    """
    norms: dict[int, Tensor] = {}
    loads: dict[int, Tensor] = {}
    curvatures: dict[int, Tensor] = {}
    bounds = _Bounds()
    inputs = {name: value[:MAX_SEQUENCES] for name, value in batch.items() if name != "labels"}
    with contextlib.ExitStack() as stack:
        for i, layer in enumerate(model.base_model.layers):
            stack.enter_context(reading(layer, norms, i, lambda out: hidden_state(out).float().norm(dim=-1).mean()))
            for module in layer.modules():
                if hasattr(module, "balance_bias"):  # the gate of a mixture of experts
                    stack.enter_context(reading(module, loads, i, _load))
                if getattr(module, "log_curvature", None) is not None:
                    curvatures[i] = torch.as_tensor(module.curvature())
        stack.enter_context(bounds)
        with torch.no_grad():
            model.base_model(**inputs, use_cache=False)
    readings = {f"stream/{i:02}": value for i, value in norms.items()}
    if bounds.parts:
        hit, total = torch.stack(bounds.parts).sum(0)
        readings["clamped"] = hit / total
    for name, values in (("load", loads), ("curvature", curvatures)):
        readings |= {f"{name}/{i:02}.{j}": value for i, row in values.items() for j, value in enumerate(row)}
    if curvatures:
        every = torch.cat([row.flatten() for row in curvatures.values()]).double()
        readings |= {"curvature_min": every.min(), "curvature_mean": every.mean(), "curvature_max": every.max()}
    if not readings:
        return {}
    numbers = torch.stack([value.detach().double() for value in readings.values()]).tolist()  # one wait for the device
    return dict(zip(readings, numbers, strict=True))


@contextlib.contextmanager
def reading(module: nn.Module, readings: dict[int, Tensor], place: int, measure: Any) -> Iterator[None]:
    """Within it, every call of a module puts the measure of its output into ``readings[place]``."""

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        readings[place] = measure(output)

    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def hidden_state(output: Any) -> Tensor:
    """The points of the tokens, of what a layer gives."""
    return output if isinstance(output, Tensor) else output[0]


def _load(route: Any) -> Tensor:
    counts: Tensor = route.counts.reshape(-1, route.counts.shape[-1]).sum(0).double()
    return counts / counts.sum()


class _Bounds(TorchFunctionMode):
    """Counts what ``clamp(min=...)`` changes, wherever it is called inside: the models need no code for it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Tensor] = []
        """(2,) of each call: numbers below the bound, numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.clamp and len(args) == 1 and set(kwargs) == {"min"} and args[0].is_floating_point():
            below = (args[0] < kwargs["min"]).sum().double()
            self.parts.append(torch.stack([below, torch.full_like(below, args[0].numel())]))
        return func(*args, **kwargs)
