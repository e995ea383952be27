"""The check for NaN, with a device that takes its time played by an object."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyptree.errors import UserError
from hyptree.tokens.finite_check import FiniteCheck


class Event:
    """Of a copy that is done once somebody says so or waits for it."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


def submitted(values: list[float]) -> tuple[FiniteCheck, Event]:
    check, event = FiniteCheck(), Event()
    names = [f"layer {i}" for i in range(len(values))]
    message: Any = (names, torch.tensor(values), event)
    check._pending[torch.device("cuda", 0)] = message
    return check, event


@pytest.fixture(autouse=True)
def _no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_the_first_bad_layer_is_named_once_the_copy_has_arrived() -> None:
    check, event = submitted([1.0, float("nan"), float("inf")])
    check.report(wait=False)
    assert check._pending  # not there yet: nobody waits
    event.is_done = True
    with pytest.raises(UserError, match=r"^layer 1: NaN or infinity"):
        check.report(wait=False)
    check.report()  # an error is told once
    assert not check._pending


def test_waiting_finds_it_at_once() -> None:
    check, event = submitted([float("inf")])
    with pytest.raises(UserError, match=r"^layer 0: NaN or infinity"):
        check.report()
    assert event.is_done


def test_finite_passes_are_forgotten() -> None:
    check, event = submitted([1.0, -3.0])
    event.is_done = True
    check.report(wait=False)
    assert not check._pending


def test_the_cpu_raises_where_it_looks() -> None:
    check = FiniteCheck()
    features = torch.randn(2, 5, 4)
    x = torch.randn(2, 6, 8)
    check.record(features, x, 3, "blocks.3")
    features[1, 2, 0] = float("nan")
    with pytest.raises(UserError, match=r"layer 3 \(blocks\.3\): NaN in the features of image 1"):
        check.record(features, x, 3, "blocks.3")
    assert not check._flags
