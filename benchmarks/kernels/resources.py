"""What kernels need of a multiprocessor, found by compiling them for a GPU that need not be there.

A kernel that spills registers or wants more shared memory than there is may be right and slow, or not start at all;
Triton's interpreter shows neither. Here every launch of an operation is recorded on tensors that have shapes alone, the
kernel is compiled for Hopper, and its binary says what it takes.
"""

from __future__ import annotations

import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernels.cases import Job, Work
from hyptree.errors import UserError
from hyptree.geometry.core import launch as launching
from hyptree.ops.backend import HAS_TRITON, HOPPER_SHARED, interpreted

CAPABILITY = 90
REGISTERS, SHARED = 65536, HOPPER_SHARED
"""Of a multiprocessor, and the most shared memory that one program may have."""
RESERVED = 1024
"""Bytes of shared memory that every program costs on top."""

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
          torch.int64: "i64", torch.int32: "i32"}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its grid, dtypes of its tensors, its numbers and settings."""

    kernel: Any
    grid: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    numbers: tuple[int, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers of a thread, bytes spilt, bytes of shared memory, and who fits beside."""

    kernel: str
    programs: int
    warps: int
    registers: int
    spilled: int
    shared: int

    @property
    def resident(self) -> int:
        """Programs at a time on one multiprocessor; 0 if it cannot start."""
        if self.shared > SHARED:
            return 0
        a_warp = -(-self.registers * 32 // 256) * 256  # registers come in such pieces
        by_registers = REGISTERS // (a_warp * self.warps)
        return min(by_registers, 64 // self.warps, (SHARED + RESERVED) // (self.shared + RESERVED), 32)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "resident": self.resident}


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within the context, kernels started by :func:`hyptree.geometry.core.launch.launch` are noted and not started."""
    launched: list[Launch] = []

    def note(
        kernel: Any, grid: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int], settings: Mapping[str, Any]
    ) -> None:
        launched.append(Launch(kernel, tuple(grid), tuple(x.dtype for x in tensors), tuple(numbers), dict(settings)))

    replaced = {"launch": note, "has_data": _yes, "choose": _always}
    replaced["needs_operator"] = _no  # an operator would only be asked for the shapes of its results
    with ExitStack() as stack:
        for module in _modules():
            for name, value in replaced.items():
                if hasattr(module, name) and module is not launching:
                    stack.enter_context(mock.patch.object(module, name, value))
        yield launched


def _yes(x: Tensor) -> bool:
    return True


def _no(x: Tensor) -> bool:
    return False


def _always(backend: str, x: Tensor, unsupported: str | None) -> str:
    if unsupported is not None:
        raise ValueError(f"the kernel cannot run: {unsupported}")
    return "triton"


def _modules() -> list[ModuleType]:
    """All modules of ``hyptree.ops``; an operation imports its kernels only when it first runs them."""
    import hyptree.ops

    return [import_module(module.name) for module in pkgutil.walk_packages(hyptree.ops.__path__, "hyptree.ops.")]


def launches(work: Work) -> list[Launch]:
    """The launches of a forward and a backward pass, in their order."""
    with recorded() as launched:
        leaves = [
            x.detach().requires_grad_() if place in work.leaves and isinstance(x, Tensor) else x
            for place, x in enumerate(work.inputs)
        ]
        outputs = work.kernel(*leaves)
        grads = tuple(torch.empty_like(x) for x in outputs)
        if work.kernel_grad is not None:
            work.kernel_grad(work.inputs, outputs, grads)
        elif work.leaves:
            used = [(x, g) for x, g in zip(outputs, grads, strict=True) if x.requires_grad and x.numel()]
            wanted = [leaves[place] for place in work.leaves]
            torch.autograd.grad([x for x, _ in used], wanted, [g for _, g in used], allow_unused=True)  # type: ignore[arg-type]
    return launched


def of_job(job: Job) -> list[Resources]:
    """What each kernel of a job takes; compiles them.

    Raises:
        UserError: Triton is not there, or its interpreter is in its place.
    """
    if not HAS_TRITON:
        raise UserError("--resources needs Triton, which is not installed")
    if interpreted():
        raise UserError("--resources compiles kernels, but TRITON_INTERPRET=1 has Triton interpret them; unset it")
    return [compiled(one) for one in launches(job.make())]


def compiled(one: Launch) -> Resources:
    """Compile a launch for a Hopper GPU and look what it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = one.kernel.arg_names
    options = {key: value for key, value in one.settings.items() if key not in names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    arguments: list[Any] = [*one.dtypes, *one.numbers]
    for place, name in enumerate(names):
        if place >= len(arguments):
            signature[name], constants[name] = "constexpr", one.settings[name]
            continue
        value = arguments[place]
        if isinstance(value, torch.dtype):
            signature[name] = "*" + _TYPES[value]
        elif value == 1:  # Triton makes a constant of it
            signature[name], constants[name] = "constexpr", 1
            continue
        else:
            signature[name] = "i64" if value >= 2**31 else "i32"
        if isinstance(value, torch.dtype) or value % launching.ALIGNED == 0:
            attributes[(place,)] = [["tt.divisibility", launching.ALIGNED]]
    source = ASTSource(one.kernel, signature, constants, attributes)
    program = compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    registers, spilled = _usage(program.asm["cubin"])
    programs = 1
    for size in one.grid:
        programs *= size
    name = one.kernel.__name__.removeprefix("_").removesuffix("_kernel")
    return Resources(name, programs, program.metadata.num_warps, registers, spilled, program.metadata.shared)


def _usage(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, where registers are spilt."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        text = subprocess.run([str(tool), "-res-usage", str(file)], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump said nothing of registers: {' '.join(text.split())[:200]}")
    return int(match.group(1)), int(match.group(2))
