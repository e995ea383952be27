"""Which implementation runs: what is asked for, else what fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ramify.ops import backend
from ramify.ops.backend import choose

ON_GPU: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAMIFY_BACKEND", raising=False)
    monkeypatch.setattr(backend, "_HAS_TRITON", True)


def test_a_kernel_runs_on_a_gpu_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", ON_GPU, None) == "triton"
    assert choose("torch", ON_GPU, None) == "torch"
    monkeypatch.setenv("RAMIFY_BACKEND", "torch")
    assert choose("auto", ON_GPU, None) == "torch"
    assert choose("triton", ON_GPU, None) == "triton"


def test_what_fits_no_kernel_is_torch_or_one_line() -> None:
    assert choose("auto", ON_GPU, "too wide") == "torch"
    with pytest.raises(ValueError, match="cannot run here: too wide"):
        choose("triton", ON_GPU, "too wide")
