"""Kernels that were not seen in compiled graphs on a GPU stay out of them unless they are asked for."""

from __future__ import annotations

import pytest
import torch

from ramify.ops import backend
from ramify.ops.residual_norm import fits


def test_kernels_stay_out_of_graphs_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(2, 4, device="meta")
    monkeypatch.delenv("RAMIFY_BACKEND", raising=False)
    assert backend.graph_misfit() is None
    assert not fits(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "RAMIFY_BACKEND" in (backend.graph_misfit() or "")
    monkeypatch.setenv("RAMIFY_BACKEND", "triton")
    assert backend.graph_misfit() is None
