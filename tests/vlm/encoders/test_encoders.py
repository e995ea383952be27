"""Encoders of open_clip and transformers: one face, checked against the libraries' own calls; errors of one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hyptree.errors import UserError
from hyptree.vlm import ScaleAdapterConfig, attach
from hyptree.vlm.encoders import transformers as encoders_hf
from hyptree.vlm.encoders.encoder import load_encoder
from hyptree.vlm.encoders.pixels import CLIP_MEAN, CLIP_STD, PixelFormat
from tests.vlm.small_models import register_open_clip, save_bert, save_dual

pytest.importorskip("transformers")
TEXTS = ["a red truck", "a vehicle", "", "a truck with three wheels on the road at night a a a a a a a a"]
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def pictures(seed: int, n: int = 3, height: int = 40, width: int = 52) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, height, width, 3), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def open_clip_name(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("open_clip")
    return register_open_clip(tmp_path_factory.mktemp("open_clip"))


def load(kind: str, tmp_path: Path, open_clip_name: str) -> Any:
    if kind == "open_clip":
        return load_encoder(f"open_clip:{open_clip_name}", random_init=True)
    return load_encoder(f"hf:{save_dual(tmp_path / kind, kind)}")


@pytest.mark.parametrize("kind", ["open_clip", "clip", "siglip", "siglip2"])
def test_a_dual_encoder_has_one_face(kind: str, tmp_path: Path, open_clip_name: str, seed: int) -> None:
    encoder = load(kind, tmp_path, open_clip_name)
    text, image = encoder.encode_text(TEXTS), encoder.encode_images(pictures(seed))
    tokens = encoder.image_tokens(pictures(seed))
    assert text.shape == (4, encoder.width) and image.shape == (3, encoder.width)
    assert tokens.shape == (3, 16, encoder.width)  # 32 pixels in patches of 8
    assert text.requires_grad and image.requires_grad and tokens.requires_grad
    assert torch.isfinite(encoder.root()).all()
    torch.testing.assert_close(encoder.root(), text[2])
    torch.testing.assert_close(encoder.encode_text(TEXTS[:1])[0], text[0])  # alone as among longer ones
    unit = encoder.encode_images(pictures(seed), normalize=True)
    torch.testing.assert_close(unit, image / image.norm(dim=1, keepdim=True))
    assert encoder.encode_text([]).shape == (0, encoder.width)
    assert encoder.logit_scale.item() == pytest.approx(encoder.model.logit_scale.exp().item())
    assert (encoder.logit_bias is not None) == kind.startswith("siglip")
    # The two sides and the scale are all there is, and each side reaches what it says it does.
    ours = [*encoder.text_parameters(), *encoder.image_parameters()]
    rest = {id(p) for p in encoder.model.parameters()} - {id(p) for p in ours}
    assert len({id(p) for p in ours}) == len(ours)
    assert rest == {id(p) for n, p in encoder.model.named_parameters() if n.startswith("logit_")}
    text.square().sum().backward()
    assert all(p.grad is None for p in encoder.image_parameters())
    assert sum(p.grad is not None for p in encoder.text_parameters()) >= len(encoder.text_parameters()) - 1


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_it_gives_what_transformers_itself_gives(family: str, tmp_path: Path, seed: int) -> None:
    from transformers import AutoModel

    folder = save_dual(tmp_path / "m", family, seed=seed % 1000)
    encoder, model = load_encoder(f"hf:{folder}"), AutoModel.from_pretrained(folder).eval()
    ids = torch.tensor([[1, 4, 5, 6, 3] + [0] * 7])  # <bos> a red truck <eos>
    mask = None if family == "siglip" else (ids > 0).long()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        text = encoders_hf.features_of(model.get_text_features(input_ids=ids, attention_mask=mask))
        image = encoders_hf.features_of(model.get_image_features(pixel_values=pixels))
        torch.testing.assert_close(encoder.encode_text(["a red truck"]), text)
        torch.testing.assert_close(encoder.encode_images(pixels), image)


@pytest.mark.parametrize("kind", ["open_clip", "clip"])
def test_a_patch_is_embedded_as_the_class_token_is(kind: str, tmp_path: Path, open_clip_name: str) -> None:
    """The last block's tokens through the norm and the projection: the first is the picture, the others the patches."""
    encoder = load(kind, tmp_path, open_clip_name)
    visual = encoder.model.visual if kind == "open_clip" else encoder.model.vision_model
    block = visual.transformer.resblocks[-1] if kind == "open_clip" else visual.encoder.layers[-1]
    norm, seen = visual.ln_post if kind == "open_clip" else visual.post_layernorm, []
    block.register_forward_hook(lambda module, inputs, out: seen.append(out[0] if isinstance(out, tuple) else out))
    project = visual.proj if kind == "open_clip" else encoder.model.visual_projection.weight.T
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens, image = encoder.image_tokens(pixels), encoder.encode_images(pixels)
        whole = norm(seen[0]) @ project  # (2, 17, d)
    torch.testing.assert_close(tokens, whole[:, 1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(image, whole[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["siglip", "siglip2"])
def test_a_pooling_head_sees_each_patch_alone(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(f"hf:{save_dual(tmp_path / family, family)}")
    pixels = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        hidden = encoder.model.vision_model(**encoder._pixel_inputs(pixels)).last_hidden_state  # type: ignore[attr-defined]
        head = encoder.model.vision_model.head
        values = torch.nn.functional.linear(
            hidden[0], head.attention.in_proj_weight[64:], head.attention.in_proj_bias[64:]
        )
        one = head.attention.out_proj(values)  # attention over one token is that token's value
        expected = one + head.mlp(head.layernorm(one))
        torch.testing.assert_close(encoder.image_tokens(pixels)[0], expected)


def test_features_of_both_majors_of_transformers_are_read(tmp_path: Path) -> None:
    encoder = load_encoder(f"hf:{save_dual(tmp_path / 'm', 'clip')}")
    bare, wrapped = encoder.model.get_text_features, torch.randn(4, 24)

    class Output:
        pooler_output = wrapped

    encoder.model.get_text_features = lambda **tokens: wrapped  # transformers 4
    assert encoder.encode_text(TEXTS) is not None and torch.equal(encoder.encode_text(TEXTS), wrapped)
    encoder.model.get_text_features = lambda **tokens: Output()  # transformers 5
    assert torch.equal(encoder.encode_text(TEXTS), wrapped)
    encoder.model.get_text_features = bare
    assert encoder.encode_text(TEXTS).shape == (4, 24)


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "mean_sqrt_len_tokens"])
def test_a_sentence_encoder_is_pooled_as_its_folder_says(mode: str, tmp_path: Path, seed: int) -> None:
    keys = {short: long for long, short in encoders_hf._POOLING.items()}
    folder = save_bert(tmp_path / "bert", {key: key == keys[mode] for key in keys.values()}, seed % 1000)
    encoder = load_encoder(f"hf:{folder}")
    tokens = encoder.tokenize(["a red truck", "car"])
    with torch.no_grad():
        hidden = encoder.model(**tokens).last_hidden_state
        rows = [hidden[0, :5], hidden[1, :3]]  # <bos> ... <eos>
        expected = {
            "mean": [row.mean(0) for row in rows],
            "cls": [row[0] for row in rows],
            "max": [row.amax(0) for row in rows],
            "mean_sqrt_len_tokens": [row.sum(0) / len(row) ** 0.5 for row in rows],
        }[mode]
        torch.testing.assert_close(encoder.encode_text(["a red truck", "car"]), torch.stack(expected))
    assert encoder.image_tower is None and encoder.image_parameters() == []
    with pytest.raises(UserError, match="reads text alone"):
        encoder.encode_images(pictures(seed))
    with pytest.raises(UserError, match="reads text alone"):
        encoder.logit_scale


def test_without_a_pooling_file_it_is_the_mean_and_several_modes_are_refused(tmp_path: Path) -> None:
    plain = load_encoder(f"hf:{save_bert(tmp_path / 'plain', None)}")
    named = load_encoder(f"hf:{save_bert(tmp_path / 'named', {'pooling_mode': 'mean'})}")
    assert torch.equal(plain.encode_text(TEXTS), named.encode_text(TEXTS))
    both = save_bert(tmp_path / "both", MEAN | {"pooling_mode_cls_token": True})
    with pytest.raises(UserError, match=r"pooled by cls \+ mean; expected one of"):
        load_encoder(f"hf:{both}")


def test_real_minilm_knows_that_cats_and_dogs_are_closer_than_physics() -> None:
    folder = os.environ.get("HYPTREE_MINILM")
    if not folder:
        pytest.skip("set HYPTREE_MINILM to the folder of all-MiniLM-L6-v2")
    encoder = load_encoder(f"hf:{folder}")
    with torch.no_grad():
        cat, dog, physics = encoder.encode_text(["a cat", "a dog", "quantum field theory"], normalize=True)
    assert encoder.width == 384 and cat @ dog > 0.4 > cat @ physics


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2", "bert"])
def test_what_is_saved_loads_back_with_equal_embeddings(kind: str, tmp_path: Path, seed: int) -> None:
    folder = save_bert(tmp_path / "a", MEAN) if kind == "bert" else save_dual(tmp_path / "a", kind)
    encoder = load_encoder(f"hf:{folder}")
    with torch.no_grad():
        for p in encoder.model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    if encoder.pixels is not None:
        encoder.pixels = PixelFormat(encoder.pixels.size, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), encoder.pixels.whole)
    back = load_encoder(f"hf:{encoder.save(tmp_path / 'b')}")
    assert torch.equal(back.encode_text(TEXTS), encoder.encode_text(TEXTS))
    assert back.pixels == encoder.pixels
    if encoder.pixels is not None:
        assert torch.equal(back.encode_images(pictures(seed)), encoder.encode_images(pictures(seed)))


def test_open_clip_weights_are_saved_and_read_by_their_file(
    tmp_path: Path, open_clip_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (load_encoder(f"open_clip:{open_clip_name}", random_init=True, seed=s) for s in (0, 1))
    assert not torch.equal(first.root(), second.root())
    again = load_encoder(f"open_clip:{open_clip_name}", random_init=True, seed=1)
    assert torch.equal(again.root(), second.root())
    path = second.save(tmp_path) / "open_clip_model.safetensors"
    monkeypatch.setenv("HOME", str(tmp_path))
    for file in (path, "~/open_clip_model.safetensors"):
        back = load_encoder(f"open_clip:{open_clip_name}:{file}")
        assert torch.equal(back.encode_text(TEXTS), second.encode_text(TEXTS))


@pytest.mark.parametrize(
    ("kind", "space"),
    [
        ("open_clip", "weight"),
        ("open_clip", "embedding"),
        ("clip", "weight"),
        ("clip", "embedding"),
        ("bert", "weight"),
    ],
)
def test_adapters_belong_to_their_tower_and_are_not_saved_as_weights(
    kind: str, space: str, tmp_path: Path, open_clip_name: str
) -> None:
    encoder = load_encoder(f"hf:{save_bert(tmp_path / 'a', MEAN)}") if kind == "bert" else None
    encoder = encoder or load(kind, tmp_path, open_clip_name)
    before = [len(encoder.text_parameters()), len(encoder.image_parameters())]
    handle = attach(encoder, ScaleAdapterConfig(8, space=space))
    ours = {id(p): name for name, p in handle.named_parameters()}
    text, image = encoder.text_parameters(), encoder.image_parameters()
    assert {ours[id(p)].split(".")[1].split("_")[0] for p in text if id(p) in ours} == {"text"}
    assert {ours[id(p)].split(".")[1].split("_")[0] for p in image if id(p) in ours} <= {"image"}
    assert [len(text), len(image)] == [before[0] + 1, before[1] + (kind != "bert")]
    with pytest.raises(UserError, match=r"carries an adapter: save it alone by handle\.save\(folder\)") as error:
        encoder.save(tmp_path / "b")
    assert "\n" not in str(error.value) and not (tmp_path / "b").exists()
    handle.merge()  # its keys are still there
    with pytest.raises(UserError, match=r"handle\.merge_and_unload\(\)"):
        encoder.save(tmp_path / "b")
    handle.merge_and_unload()
    assert encoder.save(tmp_path / "b") == tmp_path / "b"


def test_a_random_model_needs_to_be_asked_for_and_leaves_torchs_numbers_alone(tmp_path: Path) -> None:
    folder = save_dual(tmp_path / "m", "clip")
    state = torch.get_rng_state()
    one, two = (load_encoder(f"hf:{folder}", random_init=True, seed=s) for s in (5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    trained = load_encoder(f"hf:{folder}")
    roots = [encoder.root().detach() for encoder in (one, two, trained)]
    assert not torch.equal(roots[0], roots[1]) and not torch.equal(roots[0], roots[2])
    assert torch.equal(roots[0], load_encoder(f"hf:{folder}", random_init=True, seed=5).root())
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"cannot read the weights.*--random-init") as error:
        load_encoder(f"hf:{folder}")
    assert "\n" not in str(error.value)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no model here .*; give a folder of save_pretrained") as error:
        load_encoder(f"hf:{tmp_path}", random_init=True)
    assert "\n" not in str(error.value)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def offline(*args: Any, **options: Any) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(UserError, match=r"mine: no such folder, and no model of the hub \(We couldn't") as error:
        load_encoder("hf:somebody/mine")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"train it first: hyptree train clip_world_tiny --out runs/clip_world_tiny$"):
        load_encoder("hf:runs/clip_world_tiny")
    with pytest.raises(
        UserError, match=r"^hf:runs/mine: no such folder; give a run of the task contrast or radial, or"
    ):
        load_encoder("hf:runs/mine")  # can only be a folder: the hub is not asked


def test_a_checkpoint_with_holes_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = save_dual(tmp_path / "m", "clip") / "model.safetensors"
    tensors = load_file(path)
    del tensors["text_projection.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"1 weights are missing, e\.g\. text_projection\.weight"):
        load_encoder(f"hf:{path.parent}")


def test_the_folder_of_a_run_is_read_through_its_hf_folder(tmp_path: Path) -> None:
    save_dual(tmp_path / "run" / "hf", "clip")
    assert load_encoder(f"hf:{tmp_path / 'run'}").width == 24


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ViT-B-32", "unknown encoder 'ViT-B-32'; expected open_clip:NAME:PRETRAINED or hf:"),
        ("openclip:ViT-B-32", "did you mean 'open_clip'"),
        ("hf:", "unknown encoder 'hf:'"),
        ("hf:./nowhere", "no such folder"),
        ("open_clip:ViT-B-33", "did you mean 'ViT-B-32'"),
        ("open_clip:ViT-B-32", r"no weights were named; add :PRETRAINED \(one of openai.*--random-init"),
        ("open_clip:ViT-B-32:openia", "did you mean 'openai'"),
    ],
)
def test_a_spec_that_names_nothing_is_one_line(spec: str, message: str) -> None:
    if spec.startswith("open_clip"):
        pytest.importorskip("open_clip")
    with pytest.raises(UserError, match=message) as error:
        load_encoder(spec)
    assert "\n" not in str(error.value)


def test_random_weights_beside_named_ones_are_refused(open_clip_name: str) -> None:
    with pytest.raises(UserError, match="names trained weights; leave 'openai' out"):
        load_encoder(f"open_clip:{open_clip_name}:openai", random_init=True)


def test_a_missing_tokenizer_is_one_line(tmp_path: Path) -> None:
    folder = save_dual(tmp_path / "m", "clip", tokenizer=False)
    with pytest.raises(UserError, match=r"has no tokenizer; put the files of tokenizer\.save_pretrained") as error:
        load_encoder(f"hf:{folder}")
    assert "\n" not in str(error.value)


def test_open_clip_without_its_tokenizer_is_one_line(open_clip_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip

    def offline(name: str) -> None:
        raise OSError("We couldn't connect to the hub. Check your connection.\nOr do something else.")

    monkeypatch.setattr(open_clip, "get_tokenizer", offline)
    with pytest.raises(UserError, match=r"has no tokenizer on this machine.*couldn't connect to the hub") as error:
        load_encoder(f"open_clip:{open_clip_name}", random_init=True)
    assert "\n" not in str(error.value)


class Broken:
    """An import hook: importing the package fails as it does beside the wrong torchvision, or without one."""

    def __init__(self, package: str, error: Exception):
        self.package, self.error = package, error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.package:
            raise self.error


@pytest.mark.parametrize(
    ("package", "spec", "error", "message"),
    [
        (
            "open_clip",
            "open_clip:ViT-B-32",
            RuntimeError("operator torchvision::nms does not exist"),
            "torchvision does not fit torch .*install both together",
        ),
        (
            "open_clip",
            "open_clip:ViT-B-32",
            ModuleNotFoundError("No module named 'torchvision'", name="torchvision"),
            "torchvision does not fit torch",
        ),
        (
            "open_clip",
            "open_clip:ViT-B-32",
            ModuleNotFoundError("No module named 'open_clip'", name="open_clip"),
            r"this needs open_clip: pip install hyptree\[vlm\]",
        ),
        (
            "transformers",
            "hf:some/model",
            ModuleNotFoundError("No module named 'transformers'", name="transformers"),
            r"this needs transformers: pip install hyptree\[vlm\]",
        ),
        (
            "transformers",
            "hf:some/model",
            RuntimeError("Failed to import transformers.models: operator torchvision::nms does not exist"),
            "torchvision does not fit torch",
        ),
    ],
)
def test_a_package_that_is_missing_or_does_not_fit_is_one_line(
    package: str, spec: str, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(package, error), *sys.meta_path])
    with pytest.raises(UserError, match=message) as actual:
        load_encoder(spec)
    assert "\n" not in str(actual.value)


def test_pictures_of_any_kind_become_the_same_pixels(seed: int) -> None:
    image = pytest.importorskip("PIL.Image")
    form = PixelFormat(32)
    inputs = pictures(seed)
    pixels = form.prepare(inputs)
    assert pixels.shape == (3, 3, 32, 32)
    for other in (
        inputs.numpy(),
        inputs.permute(0, 3, 1, 2),
        list(inputs),
        [image.fromarray(x) for x in inputs.numpy()],
    ):
        assert torch.equal(form.prepare(other), pixels)
    # Pillow's own bicubic filter on the same crop; it rounds between its two passes, hence one step of 256, and clips
    # there too, hence colours that do not overshoot.
    soft = inputs // 2 + 64
    pixels = form.prepare(soft)
    resized = image.fromarray(soft[0].numpy()).resize((42, 32), image.BICUBIC)
    plain = np.array(resized)[:, 5:37].transpose(2, 0, 1) / 255
    plain = (plain - np.array(CLIP_MEAN)[:, None, None]) / np.array(CLIP_STD)[:, None, None]
    assert np.abs(plain - pixels[0].numpy()).max() < 1.01 / 255 / min(CLIP_STD)


def test_a_picture_of_the_right_size_is_only_normalised(seed: int) -> None:
    inputs = pictures(seed, 2, 32, 32)
    expected = (inputs.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    for whole in (False, True):
        form = PixelFormat(32, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), whole)
        torch.testing.assert_close(form.prepare(inputs), expected)
    assert PixelFormat(16, whole=True).prepare(pictures(seed)).shape == (3, 3, 16, 16)
    assert PixelFormat(16).prepare([]).shape == (0, 3, 16, 16)


def test_pictures_and_texts_that_are_none_are_one_line(tmp_path: Path) -> None:
    encoder = load_encoder(f"hf:{save_dual(tmp_path / 'm', 'clip')}")
    with pytest.raises(UserError, match=r"must be bytes \(uint8, 0 to 255\), got float32"):
        encoder.encode_images([np.zeros((4, 4, 3), np.float32)])
    with pytest.raises(UserError, match=r"must be \(H, W, 3\), \(3, H, W\) or \(H, W\), got \(4, 4, 7\)"):
        encoder.encode_images([np.zeros((4, 4, 7), np.uint8)])
    with pytest.raises(UserError, match="at least one pixel"):
        encoder.encode_images([np.zeros((0, 4, 3), np.uint8)])
    with pytest.raises(UserError, match=r"prepared pictures must be \(n, 3, 32, 32\), got \(2, 32, 32\)"):
        encoder.encode_images(torch.randn(2, 32, 32))
    with pytest.raises(UserError, match="texts must be a list of strings, got 'a car'"):
        encoder.encode_text("a car")
