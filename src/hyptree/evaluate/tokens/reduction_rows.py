"""The rows of ``hyptree reduce``: one model patched one way, its accuracy, images per second, FLOPs and tokens."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.files import write_text

if TYPE_CHECKING:
    from hyptree.tokens.families.adapter import FamilyAdapter

PLAIN = "none"
"""Method of the row without any reduction."""
WARMUP = 2


class Measurable(Protocol):
    """A classifier, and how its accuracy is measured."""

    model: nn.Module

    def accuracy(self) -> dict[str, float]: ...
    def autocast(self) -> Any: ...


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    method: str
    linkage: str
    """Empty where the method has none."""
    keep: float
    tokens: list[int]
    """Patch tokens that leave each of the layers."""
    gflops: float
    """Of one picture, two per multiply-add; without what choosing the clusters costs, which images/s shows."""
    images_per_second: float
    speedup: float
    """Over the plain model, timed in the same rounds."""
    top1: float | None = None
    top5: float | None = None

    @property
    def name(self) -> str:
        return f"{self.method} {self.linkage}".strip()

    @property
    def cost(self) -> str:
        """GFLOPs for people, three digits."""
        return f"{self.gflops:,.0f}" if self.gflops >= 100 else f"{self.gflops:.3g}"


@dataclass
class Results:
    """All rows of one model on one machine; goes to and from JSON."""

    about: dict[str, Any]
    """Everything that the numbers depend on, beside the row's own method, linkage and keep."""
    machine: list[str]
    rows: list[Row]

    def find(self, method: str, linkage: str, keep: float) -> Row | None:
        """The row of this reduction, None if it was not measured yet."""
        return next((r for r in self.rows if (r.method, r.linkage, r.keep) == (method, linkage, keep)), None)

    def write(self, path: Path) -> None:
        """As JSON, at once or not at all."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            return cls(table["about"], table["machine"], [Row(**row) for row in table["rows"]])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} does not hold results of hyptree reduce; --overwrite replaces it") from error


# ------------------------------------------------------------------------------------------------------------- numbers


def vit_flops(adapter: FamilyAdapter, x: Tensor) -> int:
    """Floating-point operations for the pictures x of a vision transformer, patched or not, two per multiply-add.

    Of a block with n tokens in attention and m in its MLP: ``2 n`` per weight of the attention's linear layers,
    ``4 n^2 width`` for queries times keys and for the mean of the values, ``2 m`` per weight of the MLP. What lies
    outside the blocks (patches, classifier) is counted where it is called. Norms, softmax and activations are left
    out, as usual, and so is the choice of clusters.

    Args:
        adapter: of the model, ``hyptree.tokens.patch.find_adapter(model)`` or ``handle.adapter``.
        x: (B, 3, H, W).
    """
    inside = {part for parts in adapter.blocks for part in parts.block.modules()}
    outside = [m for m in adapter.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and m not in inside]
    total = 0

    def count_layer(module: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal total
        assert isinstance(module.weight, Tensor)
        total += 2 * module.weight.numel() * (out.numel() // module.weight.shape[0])  # weights times places

    def count_block(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        nonlocal total
        num_in, num_out = args[0].shape[1], (out if isinstance(out, Tensor) else out[0]).shape[1]
        parts = by_block[module]
        attention = [part for part in parts.attention.modules() if isinstance(part, nn.Linear)]
        linear = [part for part in parts.block.modules() if isinstance(part, nn.Linear)]
        weights = sum(part.weight.numel() for part in attention)
        width = attention[-1].in_features  # of the projection back, so of all heads together
        total += len(x) * (2 * num_in * weights + 4 * num_in**2 * width)
        total += len(x) * 2 * num_out * (sum(part.weight.numel() for part in linear) - weights)

    by_block = {parts.block: parts for parts in adapter.blocks}
    hooks = [module.register_forward_hook(count_layer) for module in outside]
    hooks += [block.register_forward_hook(count_block) for block in by_block]
    try:
        with torch.no_grad():
            adapter.model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return total


def speed(model: nn.Module, handle: Any, x: Tensor, repeats: int) -> tuple[float, float]:
    """Images per second with the reduction, and how many times as fast that is as without.

    Both are timed in every round, one after the other, so that whatever else the machine does hits both; medians over
    the rounds, after a warm-up. The speed-up is the median of the rounds' own ratios.
    """
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    seconds: dict[bool, list[float]] = {True: [], False: []}
    try:
        for turn in range(WARMUP + repeats):
            for enabled in (True, False):
                handle.enabled = enabled
                wait()
                began = time.perf_counter()
                model(x)
                wait()
                if turn >= WARMUP:
                    seconds[enabled].append(time.perf_counter() - began)
    finally:
        handle.enabled = True
    ratios = [plain / reduced for reduced, plain in zip(seconds[True], seconds[False], strict=True)]
    return len(x) / statistics.median(seconds[True]), statistics.median(ratios)


def measure(
    subject: Measurable,
    x: Tensor,
    method: str,
    linkage: str,
    keep: float,
    layers: Sequence[int],
    *,
    repeats: int = 9,
    seed: int = 0,
) -> Row:
    """One row: the model patched this way and its numbers, timed on x (B, 3, S, S). It is left as it was.

    The method is one of ``hyptree.tokens``, or none for the plain model; the linkage that of atc, else empty.
    """
    with patched_as(subject.model, method, linkage, keep, layers, seed=seed) as handle:
        accuracy = subject.accuracy()
        with torch.no_grad(), subject.autocast():
            gflops = vit_flops(handle.adapter, x[:1]) / 1e9
            tokens = [int(count) for count in handle.num_tokens]
            per_second, speedup = speed(subject.model, handle, x, repeats)
    if method == PLAIN:  # it was timed against itself: what differs is noise
        speedup = 1.0
    return Row(method, linkage, keep, tokens, gflops, per_second, speedup, accuracy.get("top1"), accuracy.get("top5"))


def patched_as(
    model: nn.Module, method: str, linkage: str, keep: float, layers: Sequence[int], **options: Any
) -> contextlib.AbstractContextManager[Any]:
    """The model patched as a row of the table says, for a while."""
    from hyptree.tokens.patch import patched

    chosen = {"linkage": linkage} if linkage else {}
    name = "atc" if method == PLAIN else method
    return patched(model, method=name, keep=keep, layers=tuple(layers), **chosen, **options)
