"""A changed byte of weights is never used: every file we write is refused by every verb that reads it."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyptree.cli import main
from hyptree.errors import UserError
from hyptree.files import check_weights, load_tensors, save_tensors, sign_weights
from hyptree.runs import RunFolder, _fingerprint, best_file, best_weights
from hyptree.train.evaluate import evaluate_run
from hyptree.train.loop import fit
from hyptree.train.model import create_model
from hyptree.train.run.recipe import ModelSettings
from tests.train import tiny
from tests.train.test_language import recipe as language_recipe


def flip(path: Path, seed: int, start: int | None = None) -> None:
    """Change one bit of one byte, by default of the tensors and not of the header before them."""
    content = bytearray(path.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    generator = random.Random(seed)
    content[generator.randrange(data if start is None else start, len(content))] ^= 1 << generator.randrange(8)
    path.unlink()  # the old file may be mapped
    path.write_bytes(content)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str], says: str = r"is damaged") -> None:
    """The verb gives one line and 2, and leaves every file as it is."""
    before = contents(folder)
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in error and ("its digest was sha256:" in error or "SHA-256" in error)
    assert contents(folder) == before


TENSORS = {
    "a": torch.randn(7, 3),
    "half": torch.randn(5).bfloat16(),
    "flags": torch.tensor([True, False]),
    "one": torch.tensor(3.5),
    "none": torch.zeros(0, 4),
    "t": torch.randn(4, 6).T,
}


def test_any_bit_of_a_file_matters(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS, {"step": 7, "name": "é"})
    whole, state = load_tensors(path)
    assert state == {"step": 7, "name": "é"} and all(torch.equal(whole[name], TENSORS[name]) for name in TENSORS)
    content = path.read_bytes()
    data, messages = 8 + int.from_bytes(content[:8], "little"), set()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.unlink()
        path.write_bytes(changed)
        try:
            tensors, read = load_tensors(path)
        except UserError as error:
            messages.add(str(error).partition(":")[0])
            continue
        # Only in the name under which state and digest are stored: the tensors are as they were.
        assert bit < 8 * data and read == {}
        assert tensors.keys() == whole.keys() and all(torch.equal(tensors[name], whole[name]) for name in whole)
    assert messages == {f"{path} is damaged"}


def test_files_of_others_and_older_ones_are_read(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "broken.safetensors").write_bytes(b"abc")  # its reader has words of its own for that
    check_weights(tmp_path)
    assert torch.equal(load_tensors(tmp_path / "model.safetensors")[0]["a"], TENSORS["a"])
    (tmp_path / "broken.safetensors").unlink()
    sign_weights(tmp_path)
    check_weights(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], TENSORS["a"])
    flip(tmp_path / "model.safetensors", 0)
    with pytest.raises(UserError, match=r"digest was sha256:\w+ when .* is sha256:\w+ now; copy it again"):
        check_weights(tmp_path)


def test_weights_that_the_hub_gave_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    check_weights("us/model")  # nothing was fetched yet
    check_weights("no name of the hub")
    place = tmp_path / "models--us--model"
    snapshot = place / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    save_tensors(snapshot / "model.safetensors", TENSORS)
    check_weights("us/model")
    flip(snapshot / "model.safetensors", 7)
    with pytest.raises(UserError, match=r"model\.safetensors is damaged: its digest was"):
        check_weights("us/model")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "tiny"
    fit(tiny.recipe("run.save_steps=4"), folder, quiet=True)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    for path, content in contents(run).items():
        place = tmp_path / "copy" / path.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return tmp_path / "copy"


@pytest.mark.parametrize("trial", range(5))
def test_a_run_whose_best_weights_have_changed(copy: Path, capsys: pytest.CaptureFixture[str], trial: int) -> None:
    flip(copy / "checkpoints/best/model.safetensors", trial)
    refused(["eval", str(copy)], copy, capsys)
    refused(["export", str(copy)], copy, capsys)
    with pytest.raises(UserError, match="is damaged"):
        best_weights(copy)
    with pytest.raises(UserError, match="is damaged"):
        fit(tiny.recipe(f"model.weights={copy}"), copy.parent / "new", quiet=True)


@pytest.mark.parametrize("name", ["last/ema", "last/model", "previous/ema", "previous/model"])
@pytest.mark.parametrize("signed", [True, False])
def test_weights_of_which_the_manifest_knows(
    copy: Path, name: str, signed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("best", "last", "previous"):
        for path in list((copy / "checkpoints" / folder).glob("[em]*.safetensors")):
            if f"{folder}/{path.stem}" != name:
                path.unlink()
    path = copy / "checkpoints" / f"{name}.safetensors"
    assert best_file(copy) == path
    if not signed:  # as it was before files had digests of their own
        tensors = {key: value.clone() for key, value in load_file(path).items()}
        path.unlink()
        save_file(tensors, path)
        manifest = json.loads((path.parent / "manifest.json").read_text())
        manifest["files"][path.name] = _fingerprint(path)
        (path.parent / "manifest.json").write_text(json.dumps(manifest))
    flip(path, 1)
    refused(["eval", str(copy)], copy, capsys, f"the content of {path.name} has changed")


def test_a_run_goes_on_from_the_checkpoint_before_and_says_so(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy / "checkpoints/last/training.safetensors", 3)
    assert RunFolder(copy).find(print) == "previous"
    assert "last is damaged: the content of training.safetensors has changed" in capsys.readouterr().out


def test_weights_in_no_run(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = copy.parent / "weights.safetensors"
    assert main(["export", str(copy), "--out", str(out)]) == 0
    flip(out, 4)
    with pytest.raises(UserError, match="is damaged"):
        fit(tiny.recipe(f"model.weights={out}"), copy.parent / "new", quiet=True)


def test_weights_that_timm_starts_from(tmp_path: Path) -> None:
    settings = ModelSettings(name="test_vit", args={"checkpoint_path": str(tmp_path / "x.safetensors")})
    first = create_model(ModelSettings(name="test_vit"))
    save_tensors(tmp_path / "x.safetensors", first.state_dict())
    second = create_model(settings)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    flip(tmp_path / "x.safetensors", 6)
    with pytest.raises(UserError, match="is damaged"):
        create_model(settings)


def test_a_run_of_others_has_no_pickle_opened(copy: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "opened",)

    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    expected = evaluate_run(copy)
    recipe = (copy / "recipe.yaml").read_text()
    assert recipe.count("  args: {}\n") >= 1
    (copy / "recipe.yaml").write_text(
        recipe.replace("  args: {}\n", f"  args: {{checkpoint_path: {tmp_path / 'evil.pth'}}}\n", 1)
    )
    actual = evaluate_run(copy)
    assert not (tmp_path / "opened").exists() and actual["top1"] == expected["top1"]


def test_language_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    fit(language_recipe(tmp_path / "cache", "helm-d-pico", "schedule.steps=2"), run, quiet=True)
    assert main(["export", str(run), "--format", "hf"]) == 0
    assert main(["generate", str(run / "hf"), "a", "--max-new-tokens", "1"]) == 0
    for folder, path in ((run / "hf", run / "hf/model.safetensors"), (run, best_file(run))):
        flip(path, 5)
        refused(["generate", str(folder), "a", "--max-new-tokens", "1"], tmp_path, capsys)
        refused(["lab", "overlap", str(folder)], tmp_path, capsys)
    refused(["eval", str(run)], tmp_path, capsys)
    refused(["explain", str(run), "--out", str(tmp_path / "page.html")], tmp_path, capsys)
    refused(["export", str(run), "--format", "hf", "--out", str(tmp_path / "other")], tmp_path, capsys)


def _adapter(folder: Path) -> tuple[Path, Callable[[], object]]:
    from hyptree.vlm import AdapterHandle, ScaleAdapterConfig, attach
    from tests.vlm.adapters.small_clips import CLIPS

    model = CLIPS[0]()
    handle = attach(model, ScaleAdapterConfig(16))
    handle.save(folder)
    handle.detach()
    return folder / "adapter.safetensors", lambda: AdapterHandle.load(model, folder).detach()


def _encoder(folder: Path) -> tuple[Path, Callable[[], object]]:
    from hyptree.vlm.encoders.encoder import load_encoder
    from tests.vlm.small_models import save_dual

    load_encoder(f"hf:{save_dual(folder / 'dual', 'clip')}").save(folder / "saved")
    return folder / "saved/model.safetensors", lambda: load_encoder(f"hf:{folder / 'saved'}")


def _open_clip(folder: Path) -> tuple[Path, Callable[[], object]]:
    from hyptree.vlm.encoders.encoder import load_encoder
    from tests.vlm.small_models import register_open_clip

    name = register_open_clip(folder)
    load_encoder(f"open_clip:{name}", random_init=True).save(folder / "saved")
    path = folder / "saved/open_clip_model.safetensors"
    return path, lambda: load_encoder(f"open_clip:{name}:{path}")


def _embedding(folder: Path) -> tuple[Path, Callable[[], object]]:
    from hyptree.train.tasks.embed import load_embedding

    words = ["train", "embed_world", "--out", str(folder / "out"), "--schedule.epochs", "2", "--run.device", "cpu"]
    assert main(words) == 0
    return folder / "out/checkpoints/best/model.safetensors", lambda: load_embedding(folder / "out")


@pytest.mark.parametrize("make", [_adapter, _encoder, _open_clip, _embedding])
def test_other_files_of_ours(make: Callable[[Path], tuple[Path, Callable[[], object]]], tmp_path: Path) -> None:
    path, read = make(tmp_path)
    read()
    whole = path.read_bytes()
    for trial in range(4):
        flip(path, trial)
        with pytest.raises(UserError, match=r"is damaged: its digest was sha256:\w+ when"):
            read()
        path.unlink()
        path.write_bytes(whole)
    read()


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl"])
def test_a_run_of_others_cannot_write_elsewhere(copy: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("mine")
    (copy / name).unlink()
    (copy / name).symlink_to(tmp_path / "mine")
    refuses = pytest.raises(UserError, match=r"is a link to .*mine; remove it")
    with refuses if name == "log.txt" else nullcontext():
        fit(tiny.recipe("run.save_steps=4"), copy, resume=True, quiet=True)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl"])
def test_a_run_of_others_makes_no_file_elsewhere(copy: Path, tmp_path: Path, name: str) -> None:
    (copy / name).unlink()
    (copy / name).symlink_to(tmp_path / "new")
    with pytest.raises(UserError, match=r"is a link to .*new; remove it"):
        fit(tiny.recipe("run.save_steps=4"), copy, resume=True, quiet=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("outside", ["../outside.safetensors", "/outside.safetensors", "a/../../b.safetensors"])
def test_an_index_cannot_name_a_file_outside_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, outside: str
) -> None:
    from hyptree.lab.lm_heads import checkpoint

    save_file({"lm_head.weight": torch.randn(8, 4)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": outside}}))
    message = f"{outside!r} is not the name of a file inside a folder"
    assert main(["lab", "overlap", str(folder)]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(UserError, match=re.escape(message)):
        check_weights(folder)
    fetched = []
    about = SimpleNamespace(siblings=[SimpleNamespace(rfilename=path.name) for path in folder.iterdir()])
    hub = SimpleNamespace(
        HfApi=lambda: SimpleNamespace(model_info=lambda repo, timeout: about),
        hf_hub_download=lambda repo, name: fetched.append(name) or str(folder / name),
    )
    monkeypatch.setattr(checkpoint, "_ask_hub", lambda repo, question: question(hub))
    with pytest.raises(UserError, match=re.escape(message)):
        checkpoint.find_lm_head("some/model")
    assert fetched == ["model.safetensors.index.json"]


def test_a_shard_in_a_folder_below_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    save_tensors(tmp_path / "shards/one.safetensors", {"a": TENSORS["a"]})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "shards/one.safetensors"}}))
    check_weights(tmp_path)
    flip(tmp_path / "shards/one.safetensors", 0)
    with pytest.raises(UserError, match=r"one\.safetensors is damaged: its digest was"):
        check_weights(tmp_path)
    index.write_text("{}")
    with pytest.raises(UserError, match=r"index\.json is damaged: it has no weight_map"):
        check_weights(tmp_path)
