"""Curves for TensorBoard: asked for, or written where it is installed."""

from __future__ import annotations

import sys

import pytest

from hyptree.errors import UserError
from hyptree.train import fit
from tests.train import tiny


@pytest.fixture
def no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)


def test_asked_for_and_missing_is_one_line_before_any_work(no_tensorboard, tmp_path):
    out = tmp_path / "run"
    message = r"^run.tensorboard true needs tensorboard: pip install hyptree\[board\]$"
    with pytest.raises(UserError, match=message):
        fit(tiny.recipe("run.tensorboard=true"), out, quiet=True)
    assert not out.exists()


def test_by_default_a_run_goes_without(no_tensorboard, tmp_path):
    assert fit(tiny.recipe("run.tensorboard=auto", "schedule.steps=1"), tmp_path, quiet=True).step == 1
    assert not (tmp_path / "tensorboard").exists()
