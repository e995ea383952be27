"""What an HCFormer has to compute and to move: the floor of any implementation, and the cost of ours, op by op.

The floor counts each branch of a block as one pass that reads its map and writes it, and every weight once. The cost
runs the network on tensors without data, with its kernels, under autocast to bfloat16, and adds up what each operation
reads and writes: an expectation for a GPU, made without one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from hyptree.models.hcformer import model as hcformer
from hyptree.models.hcformer.model import Block, HCFormer

PEAK, BANDWIDTH, LAUNCH = 600e12, 4.2e12, 7e-6
"""An H200, as reached and not as printed: bfloat16 products per second, bytes per second, seconds per eager launch."""
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "device")


@dataclass
class Cost:
    """What a pass costs: operations that start a kernel, bytes they move, floating-point operations."""

    kernels: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    on_device: float = 0.0
    """Seconds of all kernels, one after the other."""
    by_name: Counter[str] = field(default_factory=Counter)
    """Bytes by operation."""
    calls: Counter[str] = field(default_factory=Counter)
    saved_bytes: int = 0
    """Bytes that the backward pass waits for, beside the parameters and the pictures."""

    @property
    def seconds(self) -> float:
        """What is longer: the kernels, or the host that starts them one by one."""
        return max(self.on_device, self.kernels * LAUNCH)


class _Counting(TorchDispatchMode):
    def __init__(self, cost: Cost):
        super().__init__()
        self.cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in _FREE:
            return out
        read = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        written = {id(x): x for x in tree_leaves(out) if isinstance(x, Tensor)}
        if name in ("fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "new_zeros", "arange"):
            read = {}
        elif name == "copy_":
            read = {id(args[1]): args[1]}
        moved = sum(map(_bytes, (*read.values(), *written.values())))
        count = flop_registry.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count else 0
        cost = self.cost
        cost.kernels += 1
        cost.bytes += moved
        cost.flops += flops
        cost.on_device += max(moved / BANDWIDTH, flops / PEAK) + 1e-6
        cost.by_name[name] += moved
        cost.calls[name] += 1
        return out


def _bytes(x: Tensor) -> int:
    """Bytes that hold the numbers of ``x``: a broadcast axis is read once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size()


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Tensors without data on the CPU take the ways of a GPU: Triton's kernels, norms by rows."""
    with (
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1", "HYPTREE_BACKEND": "triton"}),
        mock.patch.object(hcformer, "CACHE", 2**62),  # no parts of a batch
    ):
        yield


def measure_cost(name: str, batch: int, size: int = 224, training: bool = False, checkpointing: Any = False) -> Cost:
    """The cost of one pass, forward or forward and backward, under autocast to bfloat16."""
    model = _on_meta(name)
    counted = Cost()
    with _as_on_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16):
        model.to_empty(device="cpu").train(training)
        if isinstance(model, HCFormer) and checkpointing:
            model.set_grad_checkpointing(checkpointing)
        x = torch.empty(batch, 3, size, size)
        known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), x)}
        held: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in known:
                held[storage._cdata] = storage.nbytes()
            return t

        with _Counting(counted), torch.set_grad_enabled(training):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                loss = model(x).float().square().mean()
                counted.saved_bytes = sum(held.values())
            if training:
                loss.backward()
    return counted


def _on_meta(name: str) -> nn.Module:
    import hyptree.models  # registers HCFormer

    assert hyptree.models.HCFormer is not None
    with torch.device("meta"):
        return timm.create_model(name, num_classes=1000)


def floor(name: str, batch: int, size: int, element: int, training: bool) -> tuple[float, float]:
    """Bytes and floating-point operations that no implementation can do without.

    Forward, each of a block's two branches reads its map and writes it; backward it reads map and gradient and writes a
    gradient. Weights are read once in each direction, and their gradients written.
    """
    model = _on_meta(name).train(training)
    maps = [0]

    def see(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        branches = 2 if isinstance(module, Block) else 1
        maps[0] += branches * (args[0].numel() + out.numel())

    for module in model.modules():
        if isinstance(module, (Block, _ConvNd)):
            module.register_forward_hook(see)
    x = torch.empty(batch, 3, size, size, device="meta")
    with FlopCounterMode(display=False) as counter:
        out = model(x).sum()
        if training:
            out.backward()
    weights = sum(p.numel() for p in model.parameters())
    numbers = maps[0] * 2.5 + weights * 3 if training else maps[0] + weights
    return numbers * element, float(counter.get_total_flops())
