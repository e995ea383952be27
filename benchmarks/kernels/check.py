"""How one job of ``hyptree bench kernels`` is held to its definition in float64, and who is timed beside the kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import Built, Contender, Run, Skipped
from benchmarks.kernels.cases import Outputs, Work
from hyptree.ops.backend import interpreted

KERNEL, EAGER, COMPILED, RIVAL = "kernel", "eager", "compiled", "rival"
Pass = Literal["forward", "backward"]

TOLERANCE = {torch.float32: (5e-5, 2e-3), torch.bfloat16: (3e-2, 0.25)}
"""Most that results may differ: in norm beside the norm of the right ones, and in one place beside that place and the
mean size of all. The first finds what is coarse everywhere, the second one bad tile among thousands."""
SCALAR = 20.0
"""A single number is a sum of either sign over everything: as exact as its terms, not as itself."""


@dataclass(frozen=True)
class Error:
    """How far results are from the right ones: in norm, in the worst place, and of which result."""

    norm: float
    worst: float
    of: str = ""

    def beyond(self, dtype: torch.dtype) -> bool:
        """Whether this is wrong and not rounding; NaN is wrong."""
        norm, worst = TOLERANCE[dtype]
        return not (self.norm <= norm and self.worst <= worst)


def error_of(actual: Tensor | None, wanted: Tensor | None, of: str) -> Error:
    """Infinite where one is missing, has another shape or is not finite; whole numbers must be equal."""
    if actual is None or wanted is None or actual.shape != wanted.shape:
        return Error(0.0, 0.0, of) if actual is None and wanted is None else Error(math.inf, math.inf, of)
    if not wanted.numel():
        return Error(0.0, 0.0, of)
    if not wanted.is_floating_point():
        share = (actual != wanted).double().mean().item()
        return Error(share and math.inf, share and math.inf, of)
    exact, size = wanted.double(), wanted.double().norm()
    gap = (actual.double() - exact).abs()
    typical = size / math.sqrt(exact.numel())
    norm = (gap.norm() / size.clamp_min(1e-30)).item()
    worst = (gap / (exact.abs() + typical).clamp_min(1e-30)).max().item()
    if exact.numel() == 1:
        norm, worst = norm / SCALAR, worst / SCALAR
    return Error(norm if math.isfinite(norm) else math.inf, worst if math.isfinite(worst) else math.inf, of)


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, or of the smallest number, so that a place nobody writes shows."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.is_floating_point():
                return x.fill_(torch.nan)
            return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).min)

        return run

    like = mock.patch.object(torch, "empty_like", filled(torch.empty_like))
    with mock.patch.object(torch, "empty", filled(torch.empty)), like:
        yield


class Trial:
    """A job with its inputs drawn: the truth, and contenders that are checked against it when they are built.

    What was found wrong is in ``errors``, by contender; it is timed all the same, since a time is hard to come by on a
    machine that is there for minutes.
    """

    def __init__(self, work: Work, dtype: torch.dtype, device: str, compiled: bool):
        self.work, self.dtype, self.device, self.with_compiled = work, dtype, device, compiled
        self.errors: dict[str, Error] = {}

    @property
    def passes(self) -> tuple[Pass, ...]:
        return ("forward", "backward") if self.work.leaves else ("forward",)

    @functools.cached_property
    def truth(self) -> Outputs:
        """Results of the definition in float64."""
        with torch.no_grad():
            return self._seen(self.work.definition(*self._doubles()))

    @functools.cached_property
    def cotangents(self) -> Outputs:
        """Random gradients of the results, as the kernel gets them."""
        with torch.no_grad():
            outputs = self.work.definition(*self._copies())
        scales = (*self.work.scales, *[1.0] * len(outputs))
        return tuple(
            torch.randn_like(x) * s if x.is_floating_point() else x for x, s in zip(outputs, scales, strict=False)
        )

    @functools.cached_property
    def true_grads(self) -> Sequence[Tensor | None]:
        """Gradients of the leaves by the definition in float64."""
        leaves = self._with_leaves(self._doubles())
        outputs = self.work.definition(*leaves)
        return self._grads(outputs, [leaves[i] for i in self.work.leaves])

    def num_bytes(self, kind: Pass) -> int:
        """What has to be read and written at least."""
        results = sum(x.nbytes for x in self.cotangents)
        inputs = sum(x.nbytes for x in self.work.inputs if x is not None)
        if kind == "forward":
            return inputs + results
        leaves = [self.work.inputs[i] for i in self.work.leaves]
        again = results if self.work.gives_again else 0
        return inputs + results + sum(x.nbytes for x in leaves if x is not None) + again

    def contenders(self, kind: Pass) -> list[Contender]:
        """The kernel, its definition as it is and compiled, the Euclidean rival."""
        build = self._forward if kind == "forward" else self._backward
        names = [KERNEL, EAGER]
        if self.with_compiled and self.work.compiles:
            names.append(COMPILED)
        if self.work.rival is not None:
            names.append(RIVAL)
        return [Contender(name, functools.partial(build, name)) for name in names]

    # ------------------------------------------------------------------------------------------------------- building

    def _forward(self, name: str) -> Built:
        run, work = self._way(name), self.work

        def call() -> object:
            with torch.no_grad():
                return run(*work.inputs)

        error = None
        if name != RIVAL:
            with torch.no_grad(), poisoned() if name == KERNEL else _nothing():
                outputs = self._seen(run(*self._copies()))
            error = self._judge(name, "forward", outputs, self.truth, "result")
        return Built(self._timed(name, call), error)

    def _backward(self, name: str) -> Built:
        run, work = self._way(name), self.work
        leaves = self._with_leaves(self._copies())
        wanted = [leaves[i] for i in work.leaves]
        if name == KERNEL and work.kernel_grad is not None:
            grad = work.kernel_grad
            with torch.no_grad():
                outputs = run(*work.inputs)
                with poisoned():
                    grads = grad(work.inputs, outputs, self.cotangents)
            error = self._judge(name, "backward", tuple(grads), self.true_grads, "gradient")

            def explicit() -> object:
                with torch.no_grad():
                    return grad(work.inputs, outputs, self.cotangents)

            return Built(self._timed(name, explicit), error)
        outputs = run(*leaves)
        if name == RIVAL:
            results = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = [(x, torch.randn_like(x)) for x in results if x.requires_grad]
            return Built(_backward_of(pairs, [x for x in wanted if x is not None]), None)
        with poisoned() if name == KERNEL else _nothing():
            grads = self._grads(outputs, wanted)
        error = self._judge(name, "backward", grads, self.true_grads, "gradient")
        return Built(self._timed(name, _backward_of(self._pairs(outputs), wanted)), error)

    def _timed(self, name: str, run: Run) -> Run:
        """What is timed: not the interpreter, whose times say nothing."""
        return _idle if name == KERNEL and self.device == "cpu" else run

    def _way(self, name: str) -> Callable[..., Any]:
        if name == KERNEL:
            if self.device == "cpu" and not interpreted():
                raise Skipped("absent", "kernels need CUDA, or TRITON_INTERPRET=1 to be checked on a CPU")
            return self.work.kernel
        if name == RIVAL:
            assert self.work.rival is not None
            return self.work.rival[1]
        return self.work.definition if name == EAGER else torch.compile(self.work.definition, dynamic=False)

    def _judge(
        self, name: str, kind: Pass, actual: Sequence[Tensor | None], wanted: Sequence[Tensor | None], word: str
    ) -> float:
        """Note the worst error of all; gives it in norm."""
        if len(actual) != len(wanted):
            raise RuntimeError(f"{len(actual)} {word}s, expected {len(wanted)}")
        errors = [error_of(a, b, f"{word} {i}") for i, (a, b) in enumerate(zip(actual, wanted, strict=True))]
        norm, worst = TOLERANCE[self.dtype]
        error = max(errors, key=lambda e: max(e.norm / norm, e.worst / worst))
        self.errors[f"{name} {kind}"] = error
        return error.norm

    # ---------------------------------------------------------------------------------------------------------- inputs

    def _seen(self, outputs: Outputs) -> Outputs:
        return outputs if self.work.seen is None else self.work.seen(outputs)

    def _copies(self) -> list[Tensor | None]:
        """Inputs that may be overwritten."""
        return [None if x is None else x.clone() for x in self.work.inputs]

    def _doubles(self) -> list[Tensor | None]:
        return [x.double() if x is not None and x.is_floating_point() else x for x in self._copies()]

    def _with_leaves(self, inputs: list[Tensor | None]) -> list[Any]:
        return [
            x.requires_grad_() if x is not None and i in self.work.leaves else x for i, x in enumerate(inputs)
        ]  # fmt: skip

    def _pairs(self, outputs: Outputs) -> list[tuple[Tensor, Tensor]]:
        together = zip(outputs, self.cotangents, strict=True)
        return [(x, g.to(x.dtype)) for x, g in together if x.requires_grad and x.numel()]

    def _grads(self, outputs: Outputs, wanted: Sequence[Tensor]) -> Sequence[Tensor]:
        pairs = self._pairs(outputs)
        return torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], retain_graph=True)


def _backward_of(pairs: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]) -> Run:
    """A backward pass that can be run again and again."""
    results, cotangents = [x for x, _ in pairs], [g for _, g in pairs]
    return lambda: torch.autograd.grad(results, wanted, cotangents, retain_graph=True, allow_unused=True)


def _idle() -> None:
    """No work."""


@contextmanager
def _nothing() -> Iterator[None]:
    yield
