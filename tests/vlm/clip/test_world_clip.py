"""The small CLIP of the built-in world: its words, its losses against plain definitions, its hyperbolic form."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hyptree.data.world import CLASSES, World
from hyptree.errors import UserError
from hyptree.geometry import lorentz
from hyptree.vlm.clip.contrast import chain_loss, contrastive_loss, entailment_loss, info_nce, similarity
from hyptree.vlm.clip.contrast_scores import score_embeddings
from hyptree.vlm.clip.world_clip import MAX_SCALE, WorldClip, as_encoder, build_clip, preset
from hyptree.vlm.clip.world_text import PROMPTS, captions_of, class_prompts, encode_table, world_tokenizer, world_words
from hyptree.vlm.encoders.encoder import load_encoder
from hyptree.vlm.encoders.pixels import PixelFormat
from tests.processes import forkserver
from tests.vlm.clip import two_processes

pytest.importorskip("transformers")
SMALL = {"patch": 8, "image_width": 32, "image_layers": 1, "text_width": 32, "text_layers": 1, "embed_dim": 16}


def small_model(geometry: Any = "cosine") -> WorldClip:
    return WorldClip(build_clip(preset("clip-world-tiny", **SMALL), len(world_tokenizer())), geometry).eval()


# ----------------------------------------------------------------------------------------------------------- language


def test_the_tokenizer_knows_every_word_that_the_world_says() -> None:
    tokenizer = world_tokenizer()
    world = World("val", num_images=500, size=32)
    texts = {text for true, wrong in captions_of(world) for text in (*true, *wrong)}
    texts |= {prompt.format(text) for prompt in PROMPTS for text in list(texts)}
    texts |= {text for prompts in class_prompts() for text in prompts}
    ids = [tokenizer(text)["input_ids"] for text in sorted(texts)]
    assert not any(tokenizer.unk_token_id in row for row in ids)
    assert max(map(len, ids)) <= tokenizer.model_max_length
    assert tokenizer.decode(tokenizer("A Red truck!")["input_ids"]) == "<bos> a red truck <eos>"
    assert tokenizer("a red zeppelin")["input_ids"][3] == tokenizer.unk_token_id
    assert tokenizer("")["input_ids"] == [1, 3]
    assert len(tokenizer) == 4 + len(world_words())


def test_captions_are_those_of_the_samples() -> None:
    world = World("val", num_images=20, size=32, seed=3)
    assert captions_of(world) == [(world[i].captions, world[i].contradictions) for i in range(20)]


def test_prompts_name_each_class() -> None:
    assert class_prompts(coloured=False)[CLASSES.index("owl")] == ["an owl"]
    coloured = class_prompts()[CLASSES.index("truck")]
    assert "a red truck" in coloured and "an orange truck" in coloured and len(coloured) == 12


# ------------------------------------------------------------------------------------------------------------- losses


def plain_loss(image: Tensor, text: Tensor, scale: float, true: Tensor, c: float | None) -> Tensor:
    """Loop by loop: minus the mean log share of the own text, then of the own picture."""
    n = len(image)
    total = image.new_zeros(())
    for i in range(n):
        for rows, columns, is_true in ((image, text, true[i]), (text, image, true[:, i])):
            scores = []
            for j in range(n):
                if j != i and is_true[j]:
                    continue
                if c is None:
                    near = (rows[i] @ columns[j]) / (rows[i].norm() * columns[j].norm())
                else:
                    times = [(1 / c + x @ x).sqrt() for x in (rows[i], columns[j])]
                    near = -torch.acosh(c * (times[0] * times[1] - rows[i] @ columns[j])) / c**0.5
                scores.append(scale * near)
                if j == i:
                    total = total - scores[-1]
            total = total + torch.stack(scores).logsumexp(0)
    return total / (2 * n)


@pytest.mark.parametrize("c", [None, 0.7])
def test_the_loss_and_its_gradients_are_the_plain_ones(c: float | None, seed: int) -> None:
    image, text = (torch.randn(7, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    captions = torch.randint(0, 9, (7, 4))
    chosen = captions[torch.arange(7), torch.randint(4, (7,))]
    true = torch.tensor([[int(chosen[j]) in captions[i].tolist() for j in range(7)] for i in range(7)])
    assert true.sum() > 7  # there is something to leave out
    for mask in (True, False):
        options: dict[str, Any] = {"captions": captions, "chosen": chosen} if mask else {}
        loss = contrastive_loss(image, text, 3.0, c=c, **options)
        expected = plain_loss(image, text, 3.0, true if mask else torch.eye(7, dtype=torch.bool), c)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(
            torch.autograd.grad(loss, (image, text)), torch.autograd.grad(expected, (image, text)), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_several_texts_of_a_picture_are_pairs_of_their_own(seed: int) -> None:
    image, text = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    captions = torch.randint(0, 7, (4, 3))
    actual = contrastive_loss(image, text.flatten(0, 1), 2.0, captions=captions, chosen=captions.flatten())
    near = 2.0 * torch.einsum("id,jkd->ijk", *(torch.nn.functional.normalize(x, dim=-1) for x in (image, text)))
    total = 0.0
    for i in range(4):
        for k in range(3):
            number = int(captions[i, k])
            texts = [(j, m) for j in range(4) for m in range(3) if int(captions[j, m]) not in captions[i].tolist()]
            images = [j for j in range(4) if number not in captions[j].tolist()]
            for others in ([near[i, j, m] for j, m in texts], [near[j, i, k] for j in images]):
                total += (torch.stack([near[i, i, k], *others]).logsumexp(0) - near[i, i, k]).item() / (2 * 12)
    assert actual.item() == pytest.approx(total, rel=1e-9)
    with pytest.raises(ValueError, match="equally many texts for each of 4 pictures, got 6 texts"):
        contrastive_loss(image, torch.randn(6, 5), 1.0)


def test_only_true_columns_of_others_are_left_out() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]])
    true = torch.tensor([[True, False, True], [False, True, False]])
    first = math.log(math.exp(1) + math.exp(2)) - 1
    second = math.log(math.exp(0.5) + 1 + math.exp(-1)) - 0
    actual = info_nce(logits, torch.tensor([0, 1]), true)
    assert actual.item() == pytest.approx((first + second) / 2, rel=1e-6)


def test_cones_are_those_of_the_geometry(seed: int) -> None:
    general, specific = torch.randn(2, 40, 6, dtype=torch.float64)
    c = 1.7
    time_x, time_y = ((1 / c + x.square().sum(-1)).sqrt() for x in (general, specific))
    u = c * ((general * specific).sum(-1) - time_x * time_y)
    norm = general.norm(dim=-1)
    angle = torch.acos((time_y + u * time_x) / (norm * (u.square() - 1).sqrt()))
    aperture = torch.asin((0.2 / (c**0.5 * norm)).clamp(max=1))
    torch.testing.assert_close(lorentz.exterior_angle(general, specific, c), angle, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(entailment_loss(general, specific, c), (angle - aperture).relu().mean())
    levels = torch.randn(9, 4, 6, dtype=torch.float64)
    pairs = [entailment_loss(levels[:, k], levels[:, k + 1], c) for k in range(3)]
    torch.testing.assert_close(chain_loss(levels, c), sum(pairs) / 3)
    inside = 0.5 * torch.randn(5, 6, dtype=torch.float64)
    assert entailment_loss(inside, 2 * inside, c).item() < 1e-12  # straight behind


def test_similarities_ignore_autocast() -> None:
    x, y = torch.randn(6, 32), torch.randn(5, 32)
    for c in (None, 0.5):
        plain = similarity(x, y, c)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(similarity(x, y, c), plain)
            assert similarity(x, y, c).dtype == torch.float32


def test_two_processes_give_loss_and_gradient_of_the_joint_batch(tmp_path: Path, seed: int) -> None:
    captions = torch.randint(0, 9, (6, 4))
    inputs = {
        "image": torch.randn(6, 5, dtype=torch.float64),
        "text": torch.randn(6, 2, 5, dtype=torch.float64),
        "weight": torch.randn(5, 4, dtype=torch.float64),
        "captions": captions,
        "chosen": captions[:, :2].clone(),
    }
    torch.save(inputs, tmp_path / "given.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [forkserver().Process(target=two_processes.run, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        assert process.exitcode == 0
    for c in two_processes.CURVATURES:
        weight = inputs["weight"].clone().requires_grad_()
        image, text = inputs["image"] @ weight, inputs["text"].flatten(0, 1) @ weight
        loss = contrastive_loss(image, text, 2.0, c=c, captions=captions, chosen=inputs["chosen"].flatten())
        loss.backward()
        actual = [torch.load(tmp_path / f"found-{c}-{rank}.pt") for rank in range(2)]
        torch.testing.assert_close(sum(part["loss"] for part in actual) / 2, loss.detach())
        torch.testing.assert_close(sum(part["grad"] for part in actual) / 2, weight.grad)  # what DDP averages


# -------------------------------------------------------------------------------------------------------------- model


def test_the_large_one_has_a_few_million_parameters() -> None:
    with torch.device("meta"):
        clip = build_clip(preset("clip-world"), len(world_tokenizer()))
    assert 5e6 < sum(p.numel() for p in clip.parameters()) < 10e6


def test_padding_changes_nothing() -> None:
    model, tokenizer = small_model(), world_tokenizer()
    with torch.no_grad():
        long = model.embed_texts(encode_table(tokenizer, ["a red truck"], 24))
        short = model.embed_texts(encode_table(tokenizer, ["a red truck"], 5))
    torch.testing.assert_close(long, short)


@pytest.mark.parametrize("geometry", ["cosine", "lorentz"])
def test_an_exported_model_gives_equal_embeddings_everywhere(geometry: str, tmp_path: Path, seed: int) -> None:
    model, tokenizer = small_model(geometry), world_tokenizer()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    form = PixelFormat(32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    as_encoder(model, tokenizer, form).save(tmp_path)
    encoder = load_encoder(f"hf:{tmp_path}")
    assert encoder.pixels == form and encoder.width == 16
    images = World("val", num_images=6, size=32).images()
    texts = ["a vehicle", "a red truck", "", "a red truck with three wheels by the sea at dusk"]
    with torch.no_grad():
        text, image = encoder.encode_text(texts), encoder.encode_images(images)
        if geometry == "lorentz":
            assert encoder.curvature == pytest.approx(model.curvature)
            text, image = (lorentz.expmap0(x, encoder.curvature) for x in (text, image))
        else:
            assert encoder.curvature is None
        torch.testing.assert_close(text, model.embed_texts(encode_table(tokenizer, texts, 24)))
        torch.testing.assert_close(image, model.embed_images(form.normalise(images)))
        torch.testing.assert_close(encoder.logit_scale, model.scale)


def test_points_start_at_a_radius_of_about_one_and_the_scale_is_bounded(seed: int) -> None:
    model = small_model("lorentz")
    with torch.no_grad():
        actual = model(torch.randn(64, 3, 32, 32), torch.randint(4, 60, (64, 8)).index_fill(1, torch.tensor([7]), 3))
        assert actual["c"].item() == pytest.approx(1.0)
        for name in ("image", "text"):
            radius = lorentz.dist0(actual[name], 1.0)
            assert 0.5 < radius.mean() < 2
        model.clip.logit_scale.fill_(9.0)
        assert model.scale.item() == pytest.approx(MAX_SCALE)


def test_a_shape_that_does_not_fit_is_one_line() -> None:
    with pytest.raises(UserError, match=r"unknown model 'clip-wrld'.*; did you mean 'clip-world'"):
        preset("clip-wrld")
    with pytest.raises(UserError, match=r"model clip-world: unknown key 'model\.args\.depth'; did you mean"):
        preset("clip-world", depth=3)
    with pytest.raises(UserError, match="the side of the pictures, 60, must be a multiple of patch, 8"):
        preset("clip-world", size=60)
    with pytest.raises(UserError, match="image_width must be a multiple of head_width 32, got 100"):
        preset("clip-world", image_width=100)


# ------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("c", [None, 1.0])
def test_scores_of_embeddings_that_know_everything_and_of_noise(c: float | None, seed: int) -> None:
    world = World("val", num_images=60, size=32)
    rows = captions_of(world)
    texts = sorted({text for true, wrong in rows for text in (*true, *wrong)})
    number = {text: i for i, text in enumerate(texts)}
    captions = torch.tensor([[number[text] for text in (*true, *wrong)] for true, wrong in rows])
    vocabulary = [*world_words(), "<root>"]

    def embed(inputs: Any) -> Tensor:
        """Words as axes: a picture is embedded as its most specific caption, so that is the nearest text."""
        actual = torch.zeros(len(inputs), len(vocabulary))
        actual[:, -1] = 1.0
        for i, text in enumerate(inputs):
            for word in text.split():
                actual[i, vocabulary.index(word)] += 1.0
        return actual

    image = embed([true[3] for true, _ in rows])
    scores = score_embeddings(image, captions, texts, embed, c=c)
    assert scores["i2t_r1"] == scores["t2i_r1"] == scores["r1"] == scores["t2i_r5"] == 1.0
    assert scores["zero_shot"] == 1.0 and scores["truth4"] == 1.0
    assert scores["tau_d"] > 0.8 and scores["tau_d"] <= 1
    assert scores["radius1"] < scores["radius3"] < scores["radius4"]
    words = np.array([[len(text.split()) for text in true] for true, _ in rows])
    signs = [np.sign(words[:, j] - words[:, i]) for i in range(4) for j in range(i + 1, 4)]
    assert scores["tau_words"] == pytest.approx(np.mean(signs))
    random = torch.randn(60, len(vocabulary))
    noise = score_embeddings(random, captions, texts, embed, c=c)
    assert noise["i2t_r1"] < 0.2 and noise["zero_shot"] < 0.3
    for level in range(4):
        true, wrong = (similarity(random, embed([row[part][level] for row in rows]), c).diagonal() for part in (0, 1))
        assert noise[f"truth{level + 1}"] == pytest.approx((true > wrong).double().mean().item())
    for name, coloured in (("zero_shot", True), ("zero_shot_bare", False)):
        best = [similarity(random, embed(prompts), c).amax(1) for prompts in class_prompts(coloured)]
        right = torch.stack(best, 1).argmax(1) == world.labels()
        assert noise[name] == pytest.approx(right.double().mean().item())


def test_equal_captions_of_two_pictures_both_count() -> None:
    texts = ["an animal", "a mammal", "a red dog", "a red dog with two legs", "a tree"]
    captions = torch.tensor([[0, 1, 2, 3, 4, 4, 4, 4]] * 2)
    vectors = torch.eye(5)
    image = torch.stack([vectors[3], vectors[3] + 0.1 * vectors[0]])
    places = {text: vectors[i] for i, text in enumerate(texts)}

    def embed(inputs: Any) -> Tensor:
        return torch.stack([places.get(text, vectors[4]) for text in inputs])

    scores = score_embeddings(image, captions, texts, embed)
    assert scores["i2t_r1"] == scores["t2i_r1"] == 1.0
