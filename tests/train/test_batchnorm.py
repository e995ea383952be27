"""Two processes with batch norm train what one trains: statistics are those of the whole batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from hyptree.models.convs import MapBatchNorm
from hyptree.nn import LorentzBatchNorm
from hyptree.runs import RunFolder
from hyptree.train.loop import fit
from hyptree.train.parallel.batchnorm import sync_batch_norms
from tests.train import tiny
from tests.train.test_distributed import assert_close, in_two, run_two

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "maps": (lambda: nn.BatchNorm2d(4), (7, 4, 3, 5)),
    "channels last, where an axis has as many": (lambda: MapBatchNorm(4), (7, 4, 4, 4)),
    "with an activation": (lambda: BatchNormAct2d(4), (7, 4, 3, 3)),
    "points": (lambda: LorentzBatchNorm(4), (7, 2, 4)),
    "without weights": (lambda: nn.BatchNorm1d(4, affine=False), (7, 4)),
    "a mean over all steps": (lambda: nn.BatchNorm1d(4, momentum=None), (7, 4, 2)),
    "no running statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (7, 4)),
}


def _both(name: str, seed: int, share: slice, device: str) -> list[tuple[str, Tensor, Tensor]]:
    """What a norm gives of all samples at once and, with statistics over all processes, of a share of them."""
    make, shape = NORMS[name]
    torch.manual_seed(seed)
    whole, synced = make(), make()
    for p in whole.parameters():
        nn.init.uniform_(p, 0.5, 2)
    synced.to(device).load_state_dict(whole.state_dict())
    notes = sync_batch_norms(nn.Sequential(synced), 2)
    assert notes == ["batch norm: statistics over all 2 processes"] and isinstance(synced, type(whole))
    found = []
    for _ in range(2):
        x, grad = torch.randn(shape) * 3 + 10, torch.randn(shape)
        mine, all_x = x[share].to(device, copy=True).requires_grad_(), x.clone().requires_grad_()
        expected, actual = whole(all_x), synced(mine)
        expected.backward(grad)
        actual.backward(grad[share].to(device))
        found += [("values", expected[share], actual), ("gradient", all_x.grad[share], mine.grad)]
    for p, q in zip(whole.parameters(), synced.parameters(), strict=True):
        dist.all_reduce(q.grad)
        found.append(("gradient of a weight", p.grad, q.grad))
    found += [("state", a, b) for a, b in zip(whole.state_dict().values(), synced.state_dict().values(), strict=True)]
    if name != "no running statistics":  # else each process has those of its own samples, as it has no others
        found.append(("evaluation", whole.eval()(x)[share], synced.eval()(mine)))
    return found


def _compares(rank: int, port: int, log: str, seed: int, device: str) -> None:
    from tests.train.test_distributed import _be_rank

    _be_rank(rank, port)
    dist.init_process_group("gloo")
    found: Any = {}
    for name in NORMS:
        try:
            for what, expected, actual in _both(name, seed, slice(0, 5) if rank == 0 else slice(5, 7), device):
                message = f"{what}: {{}}".format
                torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=3e-5, msg=message)
            found[name] = "equal"
        except AssertionError as error:
            found[name] = str(error)
    dist.destroy_process_group()
    Path(f"{log}.{rank}").write_text(json.dumps(found))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_kind_of_batch_norm_is_that_of_all_samples(tmp_path: Path, seed: int, device: str) -> None:
    assert in_two(tmp_path, _compares, seed, device) == [dict.fromkeys(NORMS, "equal")] * 2


BATCH_NORM = ("model.args.dropout=0.0", "model.args.norm=batch", "schedule.epochs=1.5", "run.save_steps=4")


@pytest.mark.parametrize(
    "how", ["run.parallel=ddp", "run.parallel=fsdp2", pytest.param("run.compile=true", marks=pytest.mark.slow)]
)
def test_two_processes_equal_one_with_batch_norm(tmp_path: Path, how: str) -> None:
    fit(tiny.recipe(*BATCH_NORM), tmp_path / "one", quiet=True)
    first, second = run_two(tmp_path, tmp_path / "two", *BATCH_NORM, how)
    assert first["ended"] == second["ended"] == "fine"
    assert "batch norm: statistics over all 2 processes" in first["printed"]
    assert_close(tmp_path / "one", tmp_path / "two")
    assert_same_losses(tmp_path)


def assert_same_losses(folder: Path, rel: float = 1e-5) -> None:
    """Of the runs ``one`` and ``two``, line by line."""
    one, two = (RunFolder(folder / name).read_metrics() for name in ("one", "two"))
    assert len(one) == len(two) > 2
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=rel), (a["step"], a["split"])


PICTURES = (
    "data.num_train=64",
    "data.num_val=16",
    "data.size=32",
    "model.name=hcformer_pico",
    "optim.lr=1e-3",
    "run.ema=null",
    "run.log_steps=1",
)
TASKS = {
    "classify": ("task=classify", "data.augment.mixup=0.8", "data.augment.cutmix=1.0"),
    "segment": ("task=segment", "model.head.pyramid_channels=32", "data.augment.scale_jitter=[0.5, 1.0]"),
}


@pytest.mark.parametrize("task", TASKS)
def test_two_processes_equal_one_on_pictures(tmp_path: Path, task: str) -> None:
    """HCFormer has batch norms; Mixup pairs pictures; in segmentation the processes have unequally many pixels."""
    overrides = (*PICTURES, *TASKS[task], "schedule.epochs=2")
    fit(tiny.recipe(*overrides), tmp_path / "one", quiet=True)
    first, second = run_two(tmp_path, tmp_path / "two", *overrides)
    assert first["ended"] == second["ended"] == "fine"
    assert_same_losses(tmp_path, rel=1e-4)


def test_what_is_not_synchronised_is_said() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_var", torch.ones(3))

    assert sync_batch_norms(nn.Sequential(Own(), nn.LayerNorm(3)), 2) == [
        "Own: statistics in each process, so that 2 do not train what one would"
    ]
    norm = nn.BatchNorm1d(3)
    (note,) = sync_batch_norms(norm, 1, num_parts=4)
    assert note == "batch norm: statistics over each of the 4 parts of a batch"
    assert type(norm) is nn.BatchNorm1d
