"""The task ``fewshot``: the golden runs of the trainer it took the place of, kills, tests, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hyptree.config import load
from hyptree.runs import RunFolder, best_weights
from hyptree.train.loop import fit
from hyptree.train.run.recipe import Recipe
from tests.train.fewshot_world import save_world_clip

pytest.importorskip("transformers")

GOLDEN = json.loads((Path(__file__).parent / "golden_fewshot.json").read_text())
NAMES = {"cosine only": "cosine", "transfer world": "transfer_world", "shift grey": "shift_grey"}
NAMES["shift noise"] = "shift_noise"
COMMON = {"epochs": "schedule.epochs", "batch_size": "data.batch_size", "lr": "optim.lr"}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_world_clip(tmp_path_factory.mktemp("clip") / "clip")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


def recipe(clip: Path, cache: Path, **changes: Any) -> Recipe:
    """400 pictures to draw shots from, 80 to be tested on; ``fewshot__shots`` stands for ``fewshot.shots``."""
    keys = {
        "task": "fewshot",
        "model.name": f"hf:{clip}",
        "data.size": 32,
        "data.num_train": 400,
        "data.num_val": 80,
        "fewshot.cache": str(cache),
        "fewshot.shots": 2,
        "schedule.epochs": 2,
        "run.device": "cpu",
        "run.threads": 1,
        "run.tensorboard": False,
        "run.log_steps": 1,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return load(Recipe, None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])


def numbers_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics without the clock."""
    lines = RunFolder(run).read_metrics()
    return [{k: v for k, v in line.items() if k not in ("time", "per_second")} for line in lines]


def summary(tensor: torch.Tensor) -> list[float]:
    values = tensor.double().flatten()
    return [float(values.sum()), float(values.abs().sum()), float(values[0]), float(values[-1])] if len(values) else []


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_runs(name: str, clip: Path, cache: Path, tmp_path: Path) -> None:
    """To 1e-6: AdamW is fused here and was not, and a rate is a share of the top one."""
    expected = GOLDEN[name]
    changes = {COMMON.get(key, f"fewshot.{key}"): value for key, value in expected["settings"].items()}
    if changes.get("fewshot.host", "frozen") != "frozen" and changes["schedule.epochs"] == 1:
        changes["schedule.warmup"] = 0
    settings = recipe(clip, cache, **changes, run__seed=int(name[-1]))
    result = fit(settings, tmp_path / "run", quiet=True)
    numbers = {NAMES.get(key, key): value for key, value in expected["numbers"].items()}
    assert {key: result.numbers[key] for key in numbers} == pytest.approx(numbers, rel=1e-6)
    weights = best_weights(tmp_path / "run")
    assert set(weights) >= set(expected["weights"])
    for key, values in expected["weights"].items():
        assert summary(weights[key]) == pytest.approx(values, rel=1e-6, abs=1e-6), key
    lines = [line for line in numbers_of(tmp_path / "run") if line["split"] == "train"]
    epoch = lines[-result.step // int(settings.schedule.epochs) :]
    for key, value in expected["losses"].items():
        actual = sum(line["loss" if key == "total" else key] for line in epoch) / len(epoch)
        assert actual == pytest.approx(value, rel=1e-6), key
