"""Which implementation runs: a kernel that no GPU has run is left to those who ask for it."""

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
    monkeypatch.delenv("RAMIFY_TRIAL", raising=False)
    monkeypatch.setattr(backend, "_HAS_TRITON", True)


def test_a_kernel_on_trial_runs_only_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", ON_GPU, None) == "triton"
    assert choose("auto", ON_GPU, None, on_trial=True) == "torch"
    assert choose("triton", ON_GPU, None, on_trial=True) == "triton"
    monkeypatch.setenv("RAMIFY_TRIAL", "1")
    assert choose("auto", ON_GPU, None, on_trial=True) == "triton"
    monkeypatch.setenv("RAMIFY_BACKEND", "torch")
    assert choose("auto", ON_GPU, None, on_trial=True) == "torch"


def test_what_fits_no_kernel_is_torch_or_one_line() -> None:
    assert choose("auto", ON_GPU, "too wide") == "torch"
    with pytest.raises(ValueError, match="cannot run here: too wide"):
        choose("triton", ON_GPU, "too wide")
