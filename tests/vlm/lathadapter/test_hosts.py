"""Hosts on real towers, features on disk, and the command."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyptree.cli import main
from hyptree.data.world import World
from hyptree.errors import UserError
from hyptree.train.model import checkpoint_activations
from hyptree.vlm import ScaleAdapterConfig, attach
from hyptree.vlm.encoders import features as features_module
from hyptree.vlm.encoders.encoder import Encoder, load_encoder
from hyptree.vlm.encoders.features import (
    SHIFTS,
    PixelSet,
    data_fingerprint,
    encoder_fingerprint,
    labels_of,
    picture_features,
)
from hyptree.vlm.encoders.texts import TextTable
from hyptree.vlm.lathadapter.fewshot import freeze
from hyptree.vlm.lathadapter.fewshot_run import short_names
from hyptree.vlm.lathadapter.head_file import load_head
from hyptree.vlm.lathadapter.hosts import Host, JointHost, PromptHost
from tests.vlm.small_models import register_open_clip, save_bert, save_dual

pytest.importorskip("transformers")

NAMES = ["dog", "red truck", "boat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dual(tmp_path_factory.mktemp("clip"), "clip")


@pytest.fixture(scope="module")
def encoders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Encoder]:
    pytest.importorskip("open_clip")
    name = register_open_clip(tmp_path_factory.mktemp("open_clip"), "hyptree-fewshot-tiny")
    siglip = save_dual(tmp_path_factory.mktemp("siglip"), "siglip")
    actual = {
        "hf": load_encoder(f"hf:{folder}"),
        "open_clip": load_encoder(f"open_clip:{name}", random_init=True),
        "siglip": load_encoder(f"hf:{siglip}"),
    }
    for encoder in actual.values():
        freeze(encoder.model)
    return actual


def weights(encoder: Encoder) -> list[Tensor]:
    return [tensor.clone() for tensor in encoder.model.state_dict().values()]


# ---------------------------------------------------------------------------------------------------------------- hosts


@pytest.mark.parametrize("kind", ["hf", "open_clip", "siglip"])
def test_learned_context_begins_as_its_words_and_learns(kind: str, encoders: dict[str, Encoder]) -> None:
    encoder = encoders[kind]
    host = PromptHost(encoder, context="a photo of a")
    assert set(host.state_dict()) == {"context"} and host.num_context == 4
    expected = encoder.encode_text([f"a photo of a {name}." for name in NAMES])
    torch.testing.assert_close(host.text_features(NAMES), expected, rtol=1e-5, atol=1e-6)
    before = weights(encoder)
    optimizer = torch.optim.SGD(host.parameters(), lr=1.0)
    host.text_features(NAMES)[:, 0].sum().backward()
    assert host.context.grad is not None and (host.context.grad.abs().amax(1) > 0).all()
    optimizer.step()
    changed = host.text_features(NAMES)
    assert not torch.allclose(changed, expected, atol=1e-4)
    torch.testing.assert_close(encoder.encode_text([f"a photo of a {name}." for name in NAMES]), expected)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(encoder), strict=True))


@pytest.mark.parametrize("kind", ["hf", "open_clip", "siglip"])
def test_joint_prompts_reach_both_towers_and_leave_no_trace(kind: str, encoders: dict[str, Encoder]) -> None:
    encoder = encoders[kind]
    pixels = torch.randn(2, 3, 32, 32)
    plain_images, plain_text = encoder.encode_pixels(pixels), encoder.encode_text(NAMES)
    host = JointHost(encoder, 2, depth=9)
    assert host.depth == 2  # these towers have no more blocks
    images, text = host.image_features(pixels), host.text_features(NAMES)
    assert images.shape == plain_images.shape and not torch.allclose(images, plain_images, atol=1e-5)
    (images.sum() + text.sum()).backward()
    for name, parameter in host.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    # With text alone only the text side moves; the image side follows from it.
    (grad,) = torch.autograd.grad(host.image_features(pixels).square().sum(), host.context)
    assert grad.abs().max() > 0
    torch.testing.assert_close(encoder.encode_pixels(pixels), plain_images)
    torch.testing.assert_close(encoder.encode_text(NAMES), plain_text)


@pytest.mark.parametrize("kind", ["hf", "open_clip"])
def test_checkpointed_towers_give_the_same_gradients_or_are_refused(kind: str, encoders: dict[str, Encoder]) -> None:
    encoder = copy.deepcopy(encoders[kind])
    host, pixels = JointHost(encoder, 2, depth=2), torch.randn(2, 3, 32, 32)
    weights = torch.randn_like(encoder.encode_pixels(pixels))

    def gradients() -> tuple[Tensor, ...]:
        outputs = torch.stack([host.image_features(pixels), host.text_features(NAMES[:2])])
        return torch.autograd.grad((outputs * weights).sum(), list(host.parameters()))

    plain = gradients()
    checkpoint_activations(encoder.model.train(), kind)
    if hasattr(encoder.model, "activation_checkpointing_enable"):  # transformers from 5.23 on
        for a, b in zip(plain, gradients(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        return
    for call in (lambda: host.image_features(pixels), lambda: host.text_features(NAMES)):
        with pytest.raises(UserError, match="prompts inside of the towers cannot be checkpointed"):
            call()
        with torch.no_grad():
            assert call().isfinite().all()


def test_a_shallow_joint_host_has_one_set_of_prompts(encoders: dict[str, Encoder]) -> None:
    """Depth 1 on the text side is the prompt host."""
    host = JointHost(encoders["hf"], 4, depth=1)
    expected = PromptHost(encoders["hf"], 4).text_features(NAMES)
    torch.testing.assert_close(host.text_features(NAMES), expected)
    assert host.deeper.shape[0] == 0


def test_hosts_say_what_they_cannot_do(encoders: dict[str, Encoder], tmp_path: Path) -> None:
    sentence = load_encoder(f"hf:{save_bert(tmp_path / 'bert', None)}")
    with pytest.raises(UserError, match="no token_embedding"):
        PromptHost(sentence)
    with pytest.raises(UserError, match="num_context must be at least 1"):
        PromptHost(encoders["hf"], 0)
    with pytest.raises(UserError, match=r"take fewer|too long"):
        PromptHost(encoders["hf"], 40)
    siglip2 = load_encoder(f"hf:{save_dual(tmp_path / 'siglip2', 'siglip2')}")
    with pytest.raises(UserError, match="use the host prompt or frozen"):
        JointHost(siglip2)


# ------------------------------------------------------------------------------------------------------------- features


def test_features_are_made_once_and_named_by_encoder_and_data(
    encoders: dict[str, Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, world = encoders["hf"], World("val", 20, size=32)
    monkeypatch.setattr(features_module, "PART", 8)
    actual = picture_features(encoder, world, tmp_path)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = encoder.encode_images(world.images())
    torch.testing.assert_close(actual.features, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(actual.labels, world.labels()) and not actual.bad
    shifted = picture_features(encoder, world, change=SHIFTS["negative"])  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(shifted.features, encoder.encode_images(255 - world.images()), rtol=1e-5, atol=1e-6)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]  # no parts left

    def refuse(*args: Any) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr(features_module, "_encode", refuse)
    again = picture_features(encoder, world, tmp_path)  # type: ignore[arg-type]
    assert torch.equal(again.features, actual.features) and torch.equal(again.labels, actual.labels)
    for other in (World("val", 20, size=32, seed=1), World("val", 21, size=32), World("train", 20, size=32)):
        with pytest.raises(AssertionError, match="encoded again"):
            picture_features(encoder, other, tmp_path)  # type: ignore[arg-type]
        assert data_fingerprint(other) != data_fingerprint(world)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="encoded again"):
        picture_features(encoder, world, tmp_path, change=SHIFTS["grey"], change_name="grey")  # type: ignore[arg-type]


def test_a_stop_loses_one_part_at_most(
    encoders: dict[str, Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, world = encoders["hf"], World("val", 20, size=32)
    monkeypatch.setattr(features_module, "PART", 8)
    whole = picture_features(encoder, world)  # type: ignore[arg-type]
    encode, calls = features_module._encode, []

    def stops(*args: Any) -> Any:
        calls.append(args[2])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(*args)

    monkeypatch.setattr(features_module, "_encode", stops)
    with pytest.raises(KeyboardInterrupt):
        picture_features(encoder, world, tmp_path)  # type: ignore[arg-type]
    actual = picture_features(encoder, world, tmp_path)  # type: ignore[arg-type]
    assert calls[2:] == [range(16, 20), range(16, 20)]  # the first two parts were there
    assert torch.equal(actual.features, whole.features) and torch.equal(actual.labels, whole.labels)


def test_other_weights_are_another_encoder(folder: Path) -> None:
    one, two = load_encoder(f"hf:{folder}"), load_encoder(f"hf:{folder}")
    assert encoder_fingerprint(one) == encoder_fingerprint(two)
    with torch.no_grad():
        next(iter(two.model.parameters())).view(-1)[0] += 1
    assert encoder_fingerprint(one) != encoder_fingerprint(two)


def test_another_adapter_or_none_is_another_encoder(folder: Path) -> None:
    """The tensors are the same, the features are not."""
    encoder = load_encoder(f"hf:{folder}")
    bare = encoder_fingerprint(encoder)
    handle = attach(encoder, ScaleAdapterConfig(8, curvature=1.0))
    seen = [encoder_fingerprint(encoder)]
    with handle.disable_adapter():
        seen.append(encoder_fingerprint(encoder))
    handle.detach()
    attach(encoder, ScaleAdapterConfig(8, curvature=1.0, cap="paper"))
    seen.append(encoder_fingerprint(encoder))
    assert len({bare, *seen}) == 4


def test_a_table_of_texts_embeds_each_once_and_its_file_is_of_these_weights(folder: Path, tmp_path: Path) -> None:
    encoder, asked = load_encoder(f"hf:{folder}"), []

    def encode(texts: list[str]) -> torch.Tensor:
        asked.extend(texts)
        return encoder.encode_text(texts)

    texts, path = ["a red truck", "a", "a red truck", ""], tmp_path / "new" / "texts.safetensors"
    table = TextTable(encode, block=2)
    rows = table(texts)
    with torch.no_grad():
        torch.testing.assert_close(rows, encoder.encode_text(texts), rtol=1e-5, atol=1e-6)
    assert table(texts[:2]).equal(rows[:2]) and sorted(asked) == ["", "a", "a red truck"]
    with pytest.raises(KeyError):
        table.rows(["a car"])
    table.fill_from(path, texts, "these weights")
    again = TextTable(encode)
    asked.clear()
    again.fill_from(path, texts, "these weights")
    assert again.rows(texts).equal(rows) and asked == ["a red truck"]  # to compare
    for key, changes in (("others", False), ("these weights", True)):
        if changes:
            with torch.no_grad():
                encoder.model.text_projection.weight.mul_(2.0)
        other = TextTable(encode)
        other.fill_from(path, texts, key)
        with torch.no_grad():
            torch.testing.assert_close(other.rows(texts), encoder.encode_text(texts), rtol=1e-5, atol=1e-6)


def test_a_host_asks_the_encoder_as_it_is(folder: Path) -> None:
    encoder = load_encoder(f"hf:{folder}")
    host = Host(encoder.encode_text)
    before = host.text_features(["car"])
    with torch.no_grad():
        encoder.model.text_projection.weight.mul_(2.0)
    torch.testing.assert_close(host.text_features(["car"]), 2 * before)


def test_unreadable_pictures_are_left_out_and_counted(encoders: dict[str, Encoder], tmp_path: Path) -> None:
    from PIL import Image

    from hyptree.data.pictures.folders import FolderPictures

    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (40, 30 + i), (100 * label, 50, 50)).save(tmp_path / "train" / name / f"{i}.png")
    (tmp_path / "train" / "cat" / "broken.png").write_bytes(b"no picture")
    pictures = FolderPictures(tmp_path, "train")
    assert labels_of(pictures).tolist() == [0, 0, 0, 1, 1]  # the broken one is not opened for it
    actual = picture_features(encoders["hf"], pictures)
    assert (
        list(actual.bad) == ["cat/broken.png"]
        and actual.labels.tolist() == [0, 0, 1, 1]
        and actual.classes == ("cat", "dog")
    )


def test_pixels_and_labels_for_a_host_that_learns_from_pictures(encoders: dict[str, Encoder]) -> None:
    world = World("val", 6, size=48)
    pixels = PixelSet(encoders["hf"], world)  # type: ignore[arg-type]
    assert torch.equal(pixels.labels, world.labels()) and len(pixels) == 6
    index = torch.tensor([4, 1])
    torch.testing.assert_close(pixels.inputs(index), encoders["hf"].preprocess(world.images()[index]))
    assert torch.equal(labels_of(world), world.labels())  # type: ignore[arg-type]


def test_shifts_change_pictures_the_same_way_every_time(seed: int) -> None:
    image = torch.randint(256, (3, 20, 24), dtype=torch.uint8)
    for name, change in SHIFTS.items():
        shifted = change(image)
        assert shifted.shape == image.shape and shifted.dtype == torch.uint8, name
        assert not torch.equal(shifted, image) and torch.equal(change(image), shifted), name
    assert torch.equal(SHIFTS["negative"](SHIFTS["negative"](image)), image)
    assert torch.equal(SHIFTS["grey"](image)[0], SHIFTS["grey"](image)[2])


# -------------------------------------------------------------------------------------------------------------- command


def command(folder: Path, tmp_path: Path, *args: str) -> int:
    inputs = ["vlm", "train-fewshot", "--model", f"hf:{folder}", "--data", "world", "--size", "32"]
    inputs += [
        "--num-train",
        "300",
        "--num-val",
        "60",
        "--cache",
        str(tmp_path / "cache"),
        "--out",
        str(tmp_path / "out"),
    ]
    return main([*inputs, "--quiet", *args])


def test_the_command_trains_tests_writes_and_goes_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--shots", "1", "2", "--epochs", "1", "--protocol", "base-to-new", "--shift", "grey"]
    assert command(folder, tmp_path, *options, "--seeds", "1") == 0
    text = capsys.readouterr().out
    assert "hyperbolic to cosine slope" in text and "shift grey" in text
    first = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["variant"], row["shots"]) for row in first["rows"]] == [("zero-shot", 0), ("full", 1), ("full", 2)]
    for row in first["rows"]:
        h = 2 * row["base"] * row["new"] / (row["base"] + row["new"]) if row["base"] + row["new"] else 0
        assert row["h"] == pytest.approx(h)
    assert len(list((tmp_path / "out" / "heads").iterdir())) == 2
    assert command(folder, tmp_path, *options, "--seeds", "1") == 2
    assert "--resume" in capsys.readouterr().err
    assert command(folder, tmp_path, *options, "--seeds", "2", "--resume", "--json") == 0
    second = json.loads(capsys.readouterr().out)
    kept = [row for row in second["rows"] if row["seed"] == 0]
    assert kept == first["rows"] and len(second["rows"]) == 5  # what was there is not trained again
    assert command(folder, tmp_path, *options[3:], "--shots", "1", "--seeds", "1", "--resume", "--json") == 0
    third = json.loads(capsys.readouterr().out)["rows"]
    assert sorted(map(str, third)) == sorted(map(str, second["rows"]))  # rows that were not asked for stay
    assert command(folder, tmp_path, *options, "--resume", "--beta", "0.2") == 2
    assert "beta 0.1, now 0.2" in capsys.readouterr().err


def test_results_and_heads_know_the_weights_they_are_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of the model holds other weights the next time."""
    shutil.copytree(folder, tmp_path / "model")
    options = ["--shots", "1", "--epochs", "1", "--seeds"]
    assert command(tmp_path / "model", tmp_path, *options, "1") == 0
    head = next((tmp_path / "out" / "heads").iterdir())
    load_head(head, load_encoder(f"hf:{tmp_path / 'model'}"))  # warnings are errors here
    save_dual(tmp_path / "model", "clip", seed=1)
    assert command(tmp_path / "model", tmp_path, *options, "2", "--resume") == 2
    assert "holds results of other weights of hf:" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"the head in .* was made on hf:.*, and this model has other weights"):
        load_head(head, load_encoder(f"hf:{tmp_path / 'model'}"))
    wider = load_encoder(f"hf:{save_dual(tmp_path / 'siglip', 'siglip')}")
    with pytest.raises(UserError, match=r"is for features of 24 numbers, hf:.* gives 32"):
        load_head(head, wider)


def test_the_ablation_prints_each_part_on_and_off(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(folder, tmp_path, "--shots", "1", "--epochs", "1", "--ablate", "--seeds", "3", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    trained = [row for row in report["summary"] if row["variant"] != "zero-shot"]
    assert len(trained) == 10 and all(row["seeds"] == 3 for row in trained)
    host = next(row for row in report["summary"] if row["variant"] == "host alone")
    zero = next(row for row in report["summary"] if row["variant"] == "zero-shot")
    assert host["top1"]["mean"] == zero["top1"]["mean"]  # a frozen host learns nothing by itself


@pytest.mark.parametrize("host", ["prompt", "joint"])
def test_the_command_trains_every_host(
    host: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--host", host, "--shots", "1", "--epochs", "1", "--seeds", "1", "--batch-size", "15", "--json"]
    assert command(folder, tmp_path, *options) == 0
    full = json.loads(capsys.readouterr().out)["rows"][1]
    assert full["losses"]["L_e"] > 0 and full["num_attributes"] == 11


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--shots", "200"], "200 shots need 200 pictures of every class"),
        (["--data", "wrld"], "did you mean 'world'"),
        (["--shots", "1", "--shift", "gray"], "no such folder or file"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--shots", "1", "--template", "a photo"], "no place for the class"),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str], text: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(folder, tmp_path, "--seeds", "1", *options) == 2
    error = capsys.readouterr().err.strip()
    assert text in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out" / "results.json").exists()  # nothing in the way of the next try


def test_what_cannot_be_is_told_before_any_feature_is_made(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for name in ("cat", "dog", "Cat"):
            (tmp_path / "twice" / split / name).mkdir(parents=True)
            Image.new("RGB", (40, 40)).save(tmp_path / "twice" / split / name / "1.png")

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr(Encoder, "encode_images", refuse)
    assert command(folder, tmp_path, "--data", str(tmp_path / "twice"), "--shots", "1") == 2
    assert "are both called" in capsys.readouterr().err
    (tmp_path / "twice/train/Cat").rename(tmp_path / "twice/train/cow")
    assert command(folder, tmp_path, "--data", str(tmp_path / "twice"), "--shots", "1") == 2
    capsys.readouterr()
    (tmp_path / "twice/val/Cat").rename(tmp_path / "twice/val/cow")
    assert command(folder, tmp_path, "--data", str(tmp_path / "twice"), "--shots", "1", "2") == 2
    assert "2 shots need 2 pictures of every class, but cat has 1" in capsys.readouterr().err


def _pictures_of(folder: Path, classes: tuple[str, ...]) -> Path:
    from PIL import Image

    for split in ("train", "val"):
        for shade, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (40, 40), (80 * shade, 90, 10)).save(folder / split / name / "1.png")
    return folder


def test_data_of_the_same_name_have_columns_of_their_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three = _pictures_of(tmp_path / "old" / "photos.v1", ("cat", "dog", "cow"))
    one = _pictures_of(tmp_path / "new" / "photos.v1", ("cat",))
    options = ["--shots", "1", "--epochs", "1", "--seeds", "1", "--num-val", "30", "--transfer", str(three), str(one)]
    assert command(folder, tmp_path, *options) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert "transfer old/photos.v1" in heading and "transfer new/photos.v1" in heading
    row = json.loads((tmp_path / "out" / "results.json").read_text())["rows"][0]
    assert row["transfer new/photos.v1"] == 1.0  # one class: always right
    assert row["transfer old/photos.v1"] in [pytest.approx(i / 3) for i in range(4)]
    assert command(folder, tmp_path, "--shots", "1", "--overwrite", "--transfer", str(one), f"{one}/") == 2
    assert "--transfer names the same data twice" in capsys.readouterr().err


def test_names_of_data_grow_until_they_differ() -> None:
    names = short_names(["pets:a/x", "pets:b/x", "cifar10:c", "deep/a/x", "deep/b/x", "y.npz"], "--transfer")
    assert list(names.values()) == ["pets:a/x", "pets:b/x", "cifar10", "a/x", "b/x", "y.npz"]


def test_missing_transfer_data_is_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "no model", tmp_path, "--shots", "1", "--transfer", str(tmp_path / "nowhere")) == 2
    assert "nowhere" in capsys.readouterr().err


def test_text_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(save_bert(tmp_path / "bert", None), tmp_path, "--shots", "1") == 2
    assert "reads text alone" in capsys.readouterr().err
