"""Which of an operation's implementations runs: the argument decides, then ``HYPTREE_BACKEND``, then what fits."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from hyptree.errors import require_one_of
from hyptree.geometry.core.numerics import constant_when_compiled

BACKENDS = ("auto", "torch", "triton")


HAS_TRITON = find_spec("triton") is not None  # it comes with torch on Linux, not everywhere


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device and slowly: for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_host(x: Tensor) -> bool:
    """Whether ``x`` is on a CPU, where what saves launches and memory on a GPU only costs time.

    Not where ``HYPTREE_BACKEND=triton`` asks for kernels there: then all is done as on a GPU.
    """
    return x.device.type == "cpu" and not (os.environ.get("HYPTREE_BACKEND") == "triton" and interpreted())


def choose(backend: str, x: Tensor, unsupported: str | None) -> str:
    """Give "torch" or "triton".

    Args:
        backend: "auto" (or None in ``HYPTREE_BACKEND``), "torch" or "triton".
        x: the input; kernels need a CUDA tensor.
        unsupported: why the kernel cannot take this input, or None.

    Raises:
        ValueError: The kernel was asked for and cannot run.
    """
    require_one_of("backend", backend, BACKENDS)
    if backend == "auto":
        backend = os.environ.get("HYPTREE_BACKEND", "auto")
        require_one_of("HYPTREE_BACKEND", backend, BACKENDS)
    if backend == "torch":
        return "torch"
    if unsupported is None and not HAS_TRITON:
        unsupported = "Triton is not installed"
    if unsupported is None and not x.is_cuda and not (backend == "triton" and interpreted()):
        unsupported = f"the input is on {x.device.type}, the kernel needs CUDA"
    if unsupported is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend 'triton' cannot run here: {unsupported}; use backend='auto' or 'torch'")
    return "torch"


HOPPER_SHARED = 227 * 1024
"""Bytes of shared memory that one program may have on a Hopper; an A100 has 163 KB, a GPU for gamers 99."""

_H200 = (HOPPER_SHARED, 132)


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory that one program may have on the device of ``x``; a Hopper's where there is no GPU."""
    return _limits(x)[0]


def multiprocessors(x: Tensor) -> int:
    """Multiprocessors of the device of ``x``; those of an H200 where there is no GPU."""
    return _limits(x)[1]


def _limits(x: Tensor) -> tuple[int, int]:
    return _device_limits(x.device.index or 0) if x.is_cuda else _H200


@constant_when_compiled  # a compiler need not see what it asks of the driver
def _device_limits(index: int) -> tuple[int, int]:
    return _ask_limits(index)


@functools.lru_cache
def _ask_limits(index: int) -> tuple[int, int]:
    if not torch.cuda.is_available():  # a tensor without data, that only says it were on one
        return _H200
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return int(shared), int(properties.multi_processor_count)


def needs_operator(x: Tensor) -> bool:
    """Whether a kernel has to be called as a registered operator: while a graph is traced, or on a tensor without data.

    Otherwise it is called directly, which spares the host the dispatcher's way through Python, several times as long as
    a launch.
    """
    return torch.compiler.is_compiling() or type(x) not in (Tensor, Parameter)


def exporting() -> bool:
    """Whether ``torch.export`` traces this; up to torch 2.11 ``is_exporting`` alone is true in any compiled code."""
    return not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()


_LIBRARY = torch.library.Library("hyptree", "FRAGMENT")


def operator(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    """``launch`` as the operator ``hyptree::name``, which stays one node of a graph: a compiler does not look inside.

    Inside, it would ask for each call once more what the kernel writes, which takes longer than all the rest of the
    compilation (``torch.library.triton_op`` with torch 2.11). Plain registration also spares a call the layers of
    ``torch.library.custom_op``.

    Args:
        launch: takes and gives tensors and numbers, annotated; makes its results and skips the kernel where the input
            has no data (:func:`has_data`). It is called without autograd.
    """
    _LIBRARY.define(name + torch.library.infer_schema(launch, mutates_args=()))
    _LIBRARY.impl(name, launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hyptree::{name}", launch, lib=_LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.hyptree, name).default
    return overload


def has_data(x: Tensor) -> bool:
    """Whether a kernel can read ``x``: false for tensors that stand for their shapes while a graph is traced."""
    return not (x.is_meta or isinstance(x, FakeTensor))


KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels over rows of points take; they compute in float32."""


def rows_fit(backend: str, rows: Tensor, width: int, most: int) -> bool:
    """Whether a kernel that holds rows of ``width``, at most ``most``, runs on ``rows``."""
    unsupported = None
    if rows.dtype not in KERNEL_DTYPES:
        unsupported = f"{rows.dtype}, the kernel takes float32, bfloat16 and float16"
    elif width > most:
        unsupported = f"rows of {width}, the kernel takes up to {most}"
    return choose(backend, rows, unsupported) == "triton"
