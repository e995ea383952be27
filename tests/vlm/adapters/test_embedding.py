"""Adapters on embeddings, their radius, and the loss that holds it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hyptree.errors import UserError
from hyptree.geometry import poincare
from hyptree.vlm import OrthogonalConfig, RadiusLoss, ScaleAdapterConfig, attach, radius
from hyptree.vlm.radii import radius_summary, radius_table
from tests.vlm.adapters.small_clips import (
    CLIPS,
    SmallModel,
    encode,
    encode_image,
    encode_text,
    every_clip,
    pixels,
    shake,
    tokens,
)

MERGEABLE = [small for small in CLIPS if small.name != "hf-siglip"]


@torch.no_grad()  # else frozen attention goes another way than trained attention, and last bits differ
@every_clip
def test_the_adapter_acts_on_what_the_towers_give(small: SmallModel):
    model, words, pictures = small(), tokens(), pixels()
    text, image = encode_text(model, words), encode_image(model, pictures)
    handle = attach(model, ScaleAdapterConfig(8, space="embedding"))
    assert torch.equal(encode_text(model, words), text) and torch.equal(encode_image(model, pictures), image)
    assert handle.num_parameters() == 2 * text.shape[1] * 8
    shake(handle, 0.3)
    state = handle.state_dict()
    for tower, before, after in (
        ("text", text, encode_text(model, words)),
        ("image", image, encode_image(model, pictures)),
    ):
        (delta,) = (value for name, value in state.items() if tower in name)
        scale = torch.block_diag(*(torch.eye(8) + delta[0]))
        torch.testing.assert_close(after, before @ scale.mT, rtol=1e-4, atol=1e-5)
    with handle.disable_adapter():
        assert torch.equal(encode_text(model, words), text)
    handle.detach()
    assert torch.equal(encode_text(model, words), text) and torch.equal(encode_image(model, pictures), image)


@torch.no_grad()
@pytest.mark.parametrize("small", MERGEABLE, ids=lambda small: small.name)
def test_merging_into_the_projection(small: SmallModel):
    model, words, pictures = small(), tokens(), pixels()
    base = encode(model, words, pictures)
    handle = attach(model, ScaleAdapterConfig(8, space="embedding"))
    shake(handle, 0.3)
    adapted = encode(model, words, pictures)
    handle.merge()
    torch.testing.assert_close(encode(model, words, pictures), adapted, rtol=1e-4, atol=1e-5)
    handle.unmerge()
    torch.testing.assert_close(encode(model, words, pictures), adapted, rtol=0, atol=0)
    with handle.disable_adapter():
        assert torch.equal(encode(model, words, pictures), base)


def test_normalisation_comes_after_the_adapter():
    model, words, pictures = CLIPS[2](), tokens(), pixels()
    handle = attach(model, ScaleAdapterConfig(8, space="embedding", cap="paper", curvature=5.0))
    shake(handle, 0.3)
    raw = model.encode_text(words)
    torch.testing.assert_close(model.encode_text(words, normalize=True), F.normalize(raw, dim=-1))
    assert raw.norm(dim=1).max() <= 3.8003 / math.sqrt(5.0)
    image, text, _ = model(pictures, words)
    torch.testing.assert_close(text, F.normalize(raw, dim=-1))
    torch.testing.assert_close(image, F.normalize(model.encode_image(pictures), dim=-1))


def test_what_cannot_be_merged_says_why():
    handle = attach(CLIPS[2](), ScaleAdapterConfig(8, space="embedding", cap="paper"))
    with pytest.raises(UserError, match="cuts each one by its own length and cannot be merged"):
        handle.merge()
    assert not handle.merged
    handle = attach(CLIPS[1](), ScaleAdapterConfig(8, space="embedding"))
    with pytest.raises(UserError, match="the image tower does not end in a linear projection"):
        handle.merge()
    with pytest.raises(UserError, match="gives embeddings of text or image"):
        attach(nn.TransformerEncoderLayer(16, 2, 24), ScaleAdapterConfig(8, space="embedding"))


@pytest.mark.parametrize("c", [0.01, 1.0])
def test_radius_is_the_distance_to_the_origin_at_every_curvature(c: float):
    z = torch.randn(30, 7, dtype=torch.float64)
    torch.testing.assert_close(radius(z), poincare.dist0(poincare.expmap0(z, c), c), rtol=1e-9, atol=0)
    assert radius(z.bfloat16()).dtype == torch.float32


def test_radius_loss_pulls_embeddings_to_the_target():
    z = torch.tensor([[3.0, 4.0], [0.0, 1.0]], requires_grad=True)
    loss = RadiusLoss(7.2, weight=0.5)(z)
    assert loss.item() == pytest.approx(0.5 * ((10 - 7.2) ** 2 + (2 - 7.2) ** 2) / 2)
    loss.backward()
    expected = 0.5 * 2 / 2 * 2 * torch.tensor([[2.8 * 0.6, 2.8 * 0.8], [0.0, -5.2]])
    torch.testing.assert_close(z.grad, expected)
    with pytest.raises(UserError, match="a radius of 0 or more"):
        RadiusLoss(-1.0)


def test_radius_report_before_and_after():
    model, words, pictures = CLIPS[0](), tokens(5), pixels(4)
    handle = attach(model, ScaleAdapterConfig(8, space="embedding", towers=("text",)))
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.copy_(0.5 * torch.eye(8).expand_as(parameter))  # S = 1.5 I
    report = handle.radius_report(texts=words, images=pictures)
    before, after = report["text"]["before"], report["text"]["after"]
    with handle.disable_adapter(), torch.no_grad():
        norms = encode_text(model, words).norm(dim=1)
    assert before["count"] == 5 and before["norm"]["mean"] == pytest.approx(norms.mean().item(), rel=1e-5)
    assert before["radius"]["mean"] == pytest.approx(2 * norms.mean().item(), rel=1e-5)
    for key in ("mean", "sd", "min", "median", "max"):
        assert after["radius"][key] == pytest.approx(1.5 * before["radius"][key], rel=1e-4)  # exactly |a| times
    assert report["image"]["after"] == report["image"]["before"]
    table = radius_table(report)
    assert len(table) == 6 and f"{after['radius']['mean']:.4f}" in table[3] and "radius = 2 norm" in table[0]
    with pytest.raises(UserError, match="at least one text"):
        radius_summary(torch.empty(0, 4))


def test_orthogonal_blocks_keep_every_radius():
    model, words, pictures = CLIPS[2](), tokens(), pixels()
    before = encode(model, words, pictures)
    handle = attach(model, OrthogonalConfig(8, space="embedding"))
    shake(handle, 0.5)
    after = encode(model, words, pictures)
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(radius(after[:, :24]), radius(before[:, :24]), rtol=1e-4, atol=0)
