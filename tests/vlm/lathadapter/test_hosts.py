"""Hosts on real towers, and features on disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
        encoder.model.requires_grad_(False)
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
    assert [path.suffix for path in tmp_path.glob("[!.]*")] == [".safetensors"]  # no parts left

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
        list(actual.bad) == ["train/cat/broken.png"]
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
