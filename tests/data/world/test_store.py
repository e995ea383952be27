"""The stored pictures of the built-in world: as rendered, safe from damage, full disks and each other."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hyptree.data.world import World
from hyptree.data.world import dataset as dataset_module
from hyptree.data.world.store import load_or_build
from hyptree.errors import UserError
from hyptree.files import cache_folder

NUM, SIZE = 20, 32


def _world(folder: Path | None, num_images: int = NUM, seed: int = 2) -> World:
    return World("val", num_images=num_images, size=SIZE, seed=seed, cache=folder)


def _folder(root: Path) -> Path:
    folders = list(root.iterdir())
    assert len(folders) == 1, folders  # nothing half-written is left beside it
    return folders[0]


def _same(a: World, b: World) -> None:
    assert torch.equal(a.images(), b.images()) and torch.equal(a.labels(), b.labels())
    for i in range(len(a)):
        x, y = a[i], b[i]
        assert x.captions == y.captions and x.contradictions == y.contradictions and x.id == y.id
        for name in ("image", "semantic", "parts", "boxes", "box_labels", "masks"):
            assert torch.equal(getattr(x, name), getattr(y, name)), name


def test_stored_samples_equal_rendered_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = _world(tmp_path / "a" / "b")
    _same(stored, _world(None))
    monkeypatch.setattr(dataset_module, "render", lambda *_: pytest.fail("rendered although it is stored"))
    _same(_world(tmp_path / "a" / "b"), stored)


def test_every_setting_has_its_own_folder(tmp_path: Path) -> None:
    _world(tmp_path), _world(tmp_path, seed=3), _world(tmp_path, num_images=NUM - 1)
    World("test", num_images=NUM, size=SIZE, seed=2, cache=tmp_path)
    World("val", num_images=NUM, size=33, seed=2, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPTREE_CACHE", raising=False)
    World("val", num_images=2, size=SIZE, cache=True)
    assert list(tmp_path.glob(".cache/hyptree/world/*/image.npy"))
    monkeypatch.setenv("HYPTREE_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder("world") == tmp_path / "elsewhere" / "world"


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "manifest", "other shape"])
def test_a_damaged_folder_is_rendered_again(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    _world(tmp_path)
    file = _folder(tmp_path) / "image.npy"
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "missing":
        file.unlink()
    elif damage == "manifest":
        (file.parent / "manifest.json").write_text("{")
    else:
        np.save(file, np.zeros(3, np.uint8))
    capsys.readouterr()
    _same(_world(tmp_path), _world(None))
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "rendering it again" in message and str(file.parent) in message
    _folder(tmp_path)
    _world(tmp_path)
    assert capsys.readouterr().err == ""


def test_two_processes_building_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import hashlib, sys; from hyptree.data.world import World;"
        f"w = World('val', num_images=60, size={SIZE}, seed=2, cache=sys.argv[1]);"
        "print(hashlib.sha256(w.images().numpy().tobytes()).hexdigest())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert results[0] == results[1] and results[0][1] == ""
    _folder(tmp_path)


def test_the_loser_of_a_race_uses_the_winners_work(tmp_path: Path) -> None:
    layout: dict[str, tuple[tuple[int, ...], str]] = {"x": ((4,), "uint8")}
    folder = tmp_path / "split"

    def slow():  # type: ignore[no-untyped-def]
        load_or_build(folder, layout, lambda: iter([(0, {"x": np.arange(4, dtype=np.uint8)})]))
        yield 0, {"x": np.arange(4, dtype=np.uint8)}

    assert load_or_build(folder, layout, slow)["x"].tolist() == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["split"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset_module, "render", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _world(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"no space left on the disk; free some space, or set HYPTREE_CACHE") as caught:
        _world(tmp_path)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the pictures to .*file") as caught:
        _world(tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_stored_pictures_cannot_be_changed_through_a_sample(tmp_path: Path) -> None:
    world = _world(tmp_path)
    before = world.images().clone()
    world[0].image.zero_()
    world.images()[1].zero_()
    assert torch.equal(_world(tmp_path).images(), before)


def test_a_world_pickles_as_its_settings(tmp_path: Path) -> None:
    world = _world(tmp_path)
    data = pickle.dumps(world)
    assert len(data) < 1000
    _same(pickle.loads(data), world)


def test_only_so_much_is_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "_MEMORY", 2 * 128 * SIZE * SIZE * 5)
    world = _world(None, num_images=128 * 3 + 1)
    expected = world.images()
    for i in (0, 130, 384, 200, 3, 260):
        assert torch.equal(world[i].image, expected[i])
        assert len(world._kept) <= 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "trian"}, r"split must be one of train, val, test, got 'trian'; did you mean 'train'\?"),
        ({"split": "xyz"}, "split must be one of train, val, test, got 'xyz'$"),
        ({"size": 16}, "size must be between 32 and 512, got 16"),
        ({"size": 64.0}, "size must be a whole number, got 64.0"),
        ({"num_images": 0}, "num_images must be between 1 and 1000000000, got 0"),
        ({"num_images": True}, "num_images must be a whole number, got True"),
        ({"seed": -1}, "seed must be between 0"),
    ],
)
def test_bad_arguments_are_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        World(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
