"""Which implementation runs: what is asked for, else what fits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyptree.ops import backend, tree_reader
from hyptree.ops.backend import choose

ON_GPU: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPTREE_BACKEND", raising=False)
    monkeypatch.setattr(backend, "HAS_TRITON", True)


def test_a_kernel_runs_on_a_gpu_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", ON_GPU, None) == "triton"
    assert choose("torch", ON_GPU, None) == "torch"
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    assert choose("auto", ON_GPU, None) == "torch"
    assert choose("triton", ON_GPU, None) == "triton"


def test_what_fits_no_kernel_is_torch_or_one_line() -> None:
    assert choose("auto", ON_GPU, "too wide") == "torch"
    with pytest.raises(ValueError, match="cannot run here: too wide"):
        choose("triton", ON_GPU, "too wide")


def _with_shared(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    actual = SimpleNamespace(shared_memory_per_block_optin=size, shared_memory_per_block=49152, multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: actual)
    backend._ask_limits.cache_clear()


@pytest.fixture
def forgetful() -> Iterator[None]:
    yield
    backend._ask_limits.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_a_tree_is_read_by_kernels_where_its_weights_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, width, expected in [(232_448, 128, True), (166_912, 128, False), (101_376, 64, True)]:
        _with_shared(monkeypatch, size)
        assert tree_reader._fits(ON_GPU, torch.bfloat16, width, 4, 60) is expected
    _with_shared(monkeypatch, 101_376)
    with pytest.raises(ValueError, match="101376 bytes of shared memory, the kernel takes 212992"):
        tree_reader._fits(ON_GPU, torch.bfloat16, 128, 4, 60, "triton")


def test_limits_of_a_device_are_constants_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_ask_limits", lambda index: (int(bytes([49 + index]) * 6), 5))  # nothing to trace
    run = torch.compile(
        lambda x: x + backend._device_limits(0)[0] + backend._device_limits(0)[1], backend="eager", fullgraph=True
    )
    assert run(torch.zeros(2)).tolist() == [111_116, 111_116]
    assert backend.shared_memory(torch.zeros(2)) == backend.HOPPER_SHARED
    assert backend.multiprocessors(torch.zeros(2)) == 132


@pytest.mark.usefixtures("forgetful")
def test_multiprocessors_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_shared(monkeypatch, 101_376)
    assert backend.multiprocessors(ON_GPU) == 7


@pytest.mark.usefixtures("forgetful")
def test_a_tensor_without_data_may_be_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    backend._ask_limits.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.shared_memory(ON_GPU) == backend.HOPPER_SHARED
