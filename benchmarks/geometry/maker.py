"""How a case of ``hyptree bench geometry`` is made: random inputs, the right answer, and who takes part."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.geometry import definitions as exact
from benchmarks.geometry.rivals import Rival
from benchmarks.harness import Built, Contender, Skipped, relative_error

C = 0.8
"""Curvature of all cases; not 1, so that a mistaken convention is seen."""

OURS, COMPILED, KERNELS, GEOOPT, HYPLL = "ours", "compiled", "kernels", "geoopt", "HypLL"
TWIN, TWIN_COMPILED, TWIN_FUSED = "twin", "twin compiled", "twin fused"

Pass = Literal["forward", "backward", "step"]
PASSES: tuple[Pass, Pass] = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """One line of the table. ``twin`` says in words what the Euclidean twin is."""

    op: str
    shape: str
    kind: Pass
    twin: str
    contenders: Sequence[Contender]
    num_bytes: int
    flops: int = 0
    target: float | None = None


@dataclass
class Maker:
    """Makes random inputs and cases for one device and dtype."""

    device: str
    dtype: torch.dtype
    seed: int
    quick: bool = False
    compile: bool = True
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self._store(torch.randn(*shape, generator=self.generator, dtype=torch.float64) * scale)

    def positive(self, *shape: int) -> Tensor:
        return self._store(torch.rand(*shape, generator=self.generator, dtype=torch.float64) + 0.1)

    def tangent(self, *shape: int) -> Tensor:
        """Vectors of random direction with length 0.1 to 3."""
        return self._store(self._tangent(shape))

    def points(self, *shape: int) -> Tensor:
        """Lorentz points at distance 0.1 to 3 from the origin."""
        return self._store(exact.lorentz_expmap0(self._tangent(shape), C))

    def ball_points(self, *shape: int) -> Tensor:
        """The same in the Poincaré ball."""
        return self._store(exact.poincare_expmap0(self._tangent(shape) / 2, C))

    def _tangent(self, shape: Sequence[int]) -> Tensor:
        v = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        radius = 0.1 + 2.9 * torch.rand(*shape[:-1], 1, generator=self.generator, dtype=torch.float64)
        return F.normalize(v, dim=-1) * radius

    def _store(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype)

    def target(self, most: float | None) -> float | None:
        """The most that ours, compiled, may cost: a matter of real sizes only."""
        return most if self.compile and not self.quick else None

    def size(self, full: tuple[int, ...], quick: tuple[int, ...]) -> tuple[int, ...]:
        return quick if self.quick else full

    # ------------------------------------------------------------------------------------------- cases of functions

    def cases(
        self,
        op: str,
        inputs: Sequence[Tensor],
        definition: Callable[..., Tensor],
        ours: Callable[..., Tensor],
        twin: tuple[str, Callable[..., Tensor]],
        *,
        shape: str = "",
        twin_inputs: Callable[..., Sequence[Tensor]] | None = None,
        geoopt: Rival | None = None,
        hypll: Rival | None = None,
        kernels: Callable[..., Tensor] | None = None,
        wide_result: bool = False,
        flops: int = 0,
        target: float | None = None,
    ) -> Iterator[Case]:
        """The forward case and the forward-and-backward case of a function of tensors.

        Args:
            kernels: the same function by kernels of ``hyptree.ops``, which take part on a GPU.
            wide_result: the result is float32 at least whatever the inputs are, and its bytes count as such.
        """
        doubles = [x.double() for x in inputs]
        twin_name, twin_run = twin
        ways: list[tuple[str, Rival | None, bool]] = [
            (OURS, Rival(lambda: ours), False),
            (COMPILED, Rival(lambda: ours), True),
            (GEOOPT, geoopt, False),
            (HYPLL, hypll, False),
            (TWIN, Rival(lambda: twin_run, twin_inputs or (lambda *x: x)), False),
            (TWIN_COMPILED, Rival(lambda: twin_run, twin_inputs or (lambda *x: x)), True),
        ]
        if kernels is not None and self.device == "cuda" and self.dtype != torch.float64:
            ways.insert(2, (KERNELS, Rival(lambda: kernels), False))
        target = self.target(target)
        with torch.no_grad():
            truth = definition(*doubles, C)
        data, result = sum(x.nbytes for x in inputs), truth.numel() * self.dtype.itemsize
        if wide_result:
            result = max(result, 4 * truth.numel())
        shape = shape or str(tuple(inputs[0].shape)).replace(" ", "")
        for kind in PASSES:
            if kind == "backward":
                check = self._gradient_check(doubles, definition, truth)
            else:
                check = _Check(truth, None)
            contenders = [
                Contender(name, functools.partial(self._build, way, inputs, check, name, compiled))
                for name, way, compiled in ways
                if self.compile or not compiled
            ]
            if kind == "forward":
                yield Case(op, shape, kind, twin_name, contenders, data + result, flops, target)
            else:
                yield Case(op, shape, kind, twin_name, contenders, 3 * data + 2 * result, 3 * flops, target)

    def _gradient_check(self, doubles: Sequence[Tensor], definition: Callable[..., Tensor], truth: Tensor) -> _Check:
        cotangent = self.normal(*truth.shape)
        leaves = [x.detach().requires_grad_() for x in doubles]
        grads = torch.autograd.grad(definition(*leaves, C), leaves, cotangent.double())
        return _Check(truth, cotangent, grads)

    def _build(self, way: Rival | None, inputs: Sequence[Tensor], check: _Check, name: str, compiled: bool) -> Built:
        if way is None:
            raise Skipped("absent", "has no such operation")
        _require_memory(self.device, way.peak_elements * self.dtype.itemsize, check.cotangent is not None)
        run = way.make()
        if compiled:
            run = torch.compile(run, fullgraph=True, dynamic=False)
        is_twin = name.startswith(TWIN)
        if check.cotangent is None:
            args = [x.detach() for x in way.prepare(*inputs)]
            with torch.no_grad():
                error = None if is_twin else relative_error(way.read(run(*args)), check.truth)
            return Built(_without_grad(run, args), error)
        leaves = [x.detach().requires_grad_() for x in inputs]
        prepared = way.prepare(*leaves)
        error = None
        if not is_twin:
            out = way.read(run(*prepared))
            grads = torch.autograd.grad(out, leaves, check.cotangent.to(out.dtype))
            error = max(relative_error(g, e) for g, e in zip(grads, check.grads, strict=True))
        args = [x.detach().requires_grad_() for x in prepared]
        return Built(_with_grad(run, args), error)


@dataclass(frozen=True)
class _Check:
    """The right answer, and for the backward pass the cotangent and the right gradients."""

    truth: Tensor
    cotangent: Tensor | None
    grads: Sequence[Tensor] = ()


def _without_grad(run: Callable[..., Tensor], args: Sequence[Tensor]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return run(*args)

    return call


def _with_grad(run: Callable[..., Tensor], args: Sequence[Tensor]) -> Callable[[], object]:
    cotangent = torch.randn_like(run(*args))

    def call() -> object:
        return torch.autograd.grad(run(*args), args, cotangent)

    return call


def _require_memory(device: str, largest: int, backward: bool) -> None:
    """Leave out a contender whose temporaries (about 4 of the largest, 8 for backward) exceed 60 % of free memory."""
    needed = largest * (8 if backward else 4)
    if not needed:
        return
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > 0.6 * free:
        raise Skipped("skipped", f"needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free")
