"""Dense outputs: every patch gets the token it was merged into, so maps keep their resolution."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from hyptree import tokens
from hyptree.cluster import cosine_distance
from hyptree.tokens import UnsupportedModel
from tests.tokens.small_models import LAYERS, NUM_PATCHES, images, small_model

SIDE = 6


def blocks_of(model: Any, x: Tensor) -> list[Tensor]:
    """What leaves each block, prefix tokens first."""
    seen: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda module, args, out: seen.append(out)) for block in model.blocks]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("kind", ["vit", "distilled", "registers_avg", "avg", "attention_pool", "clip"])
@pytest.mark.parametrize("norm", [False, True])
def test_intermediates_are_the_tokens_of_their_patches(kind: str, norm: bool) -> None:
    model: Any = small_model(kind)
    x = images()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS, trace=True)
    num_prefix = handle.adapter.num_prefix
    outputs = blocks_of(model, x)
    sources = [None, handle.sources[0], handle.sources[1], handle.sources[1]]
    final, maps = model.forward_intermediates(x, norm=norm)
    assert torch.equal(final, model.forward_features(x))
    assert len(maps) == 4
    for y, out, source in zip(maps, outputs, sources, strict=True):
        patches = (model.norm(out) if norm else out)[:, num_prefix:]
        expected = patches if source is None else tokens.unmerge(patches, source)
        assert torch.equal(y, expected.reshape(3, SIDE, SIDE, -1).permute(0, 3, 1, 2))


def test_unmerging_step_by_step_is_unmerging_at_once() -> None:
    model = small_model()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS, trace=True)
    model(images())
    first, composed = handle.sources
    y = torch.randn(3, 9, 5)
    representative = torch.stack([(first == c).int().argmax(1) for c in range(18)], 1)
    second = composed.gather(1, representative)
    assert torch.equal(tokens.unmerge(tokens.unmerge(y, second), first), tokens.unmerge(y, composed))


def test_maps_are_constant_on_clusters() -> None:
    model: Any = small_model()
    x = images()
    handle = tokens.patch(model, keep=0.25, layers=LAYERS, trace=True)
    maps = model.forward_intermediates(x, indices=1, intermediates_only=True, output_fmt="NLC")[0]
    source = handle.sources[-1]
    for image in range(3):
        rows = maps[image].unique(dim=0)
        assert len(rows) == len(source[image].unique()) == 2


def test_formats_of_intermediates() -> None:
    model: Any = small_model("registers")
    x = images()
    tokens.patch(model, keep=0.5, layers=LAYERS)
    maps = model.forward_intermediates(x, intermediates_only=True)
    flat = model.forward_intermediates(x, output_fmt="NLC", intermediates_only=True)
    for y, tokens_of in zip(maps, flat, strict=True):
        assert y.shape == (3, 48, SIDE, SIDE) and torch.equal(y.flatten(2).mT, tokens_of)
    pairs = model.forward_intermediates(x, [3, 1], return_prefix_tokens=True, intermediates_only=True)
    assert [torch.equal(pair[0], maps[i]) for pair, i in zip(pairs, (1, 3), strict=True)] == [True, True]
    assert all(pair[1].shape == (3, 5, 48) for pair in pairs)
    early = model.forward_intermediates(x, indices=[1], stop_early=True, intermediates_only=True)
    assert len(early) == 1 and torch.equal(early[0], maps[1])
    named = model.forward_intermediates(x, output_dict=True)
    assert named["image_features"].shape == (3, 5 + 9, 48)
    assert all(torch.equal(a, b) for a, b in zip(named["image_intermediates"], maps, strict=True))
    layers = model.get_intermediate_layers(x, n=2, reshape=True)
    assert all(torch.equal(a, b) for a, b in zip(layers, maps[2:], strict=True))


def test_feature_extractors_around_a_model() -> None:
    net: Any = timm.create_model(
        "vit_tiny_patch16_224", features_only=True, img_size=24, patch_size=4, embed_dim=48, depth=4, num_heads=3
    ).eval()
    with pytest.raises(UnsupportedModel, match=r"wraps a VisionTransformer, patch model\.model"):
        tokens.patch(net, keep=0.5)
    x = images()
    plain = net(x)
    handle = tokens.patch(net.model, keep=0.5, layers=LAYERS)
    maps = net(x)
    assert handle.num_tokens == [18, 9]
    assert [y.shape for y in maps] == [y.shape for y in plain] == [(3, 48, SIDE, SIDE)] * len(plain)
    assert not torch.equal(maps[-1], plain[-1])


def test_nothing_is_traced_afterwards() -> None:
    model: Any = small_model()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    model.forward_intermediates(images())
    model(images())
    assert all(record.source is None for record in handle._records.values())
    handle.enabled = False
    plain = model.forward_intermediates(images())[1]
    assert all(y.shape == (3, 48, SIDE, SIDE) for y in plain)


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_unpatched_and_identity_maps_are_equal(keep: float) -> None:
    model: Any = small_model()
    x = images()
    plain = model.forward_intermediates(x)[1]
    with tokens.patched(model, keep=keep, layers=LAYERS):
        maps = model.forward_intermediates(x)[1]
    equal = [torch.equal(a, b) for a, b in zip(plain, maps, strict=True)]
    assert equal == ([True] * 4 if keep == 1 else [True, False, False, False])
    again = model.forward_intermediates(x)[1]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_dropped_patches_are_zero_in_maps() -> None:
    model: Any = small_model()
    handle = tokens.patch(model, "topk", keep=0.5, layers=LAYERS, trace=True)
    y = model.forward_intermediates(images(), indices=1, output_fmt="NLC", intermediates_only=True)[0]
    is_dropped = handle.sources[-1] < 0
    assert is_dropped.sum(1).tolist() == [NUM_PATCHES - 9] * 3
    assert not y[is_dropped].any() and (y[~is_dropped].abs().amax(-1) > 0).all()


def test_maps_of_a_padded_batch() -> None:
    model: Any = small_model().double()
    x = images(3, torch.float64) * torch.tensor([0.01, 0.3, 2.0], dtype=torch.float64)[:, None, None, None]
    tokens.patch(model, threshold=0.25, layers=LAYERS)
    together = model.forward_intermediates(x)[1]
    for i in range(3):
        for y, alone in zip(together, model.forward_intermediates(x[i : i + 1])[1], strict=True):
            torch.testing.assert_close(y[i : i + 1], alone, atol=1e-6, rtol=1e-6)


def test_gradients_through_maps() -> None:
    model: Any = small_model()
    tokens.patch(model, keep=0.5, layers=LAYERS)
    x = images().requires_grad_()
    maps = model.forward_intermediates(x, intermediates_only=True)
    sum(y.square().mean() for y in maps).backward()
    assert x.grad is not None and x.grad.isfinite().all() and (x.grad.abs().amax((1, 2, 3)) > 0).all()


@pytest.mark.parametrize("num_merged", [1, 9, NUM_PATCHES])
def test_unmerge_of_merge_is_the_mean_of_each_cluster(num_merged: int) -> None:
    x = torch.randn(2, NUM_PATCHES, 5)
    size = torch.randint(1, 5, (2, NUM_PATCHES)).float()
    labels = tokens.agglomerate(cosine_distance(x), num_merged, linkage="complete")
    assert isinstance(labels, Tensor)
    merged, sizes = tokens.merge_weighted(x, size, labels, num_merged)
    back = tokens.unmerge(merged, labels)
    for i in range(2):
        for cluster in range(num_merged):
            members = labels[i] == cluster
            mean = (x[i, members] * size[i, members, None]).sum(0) / size[i, members].sum()
            torch.testing.assert_close(back[i, members], mean.expand(int(members.sum()), -1), atol=1e-5, rtol=1e-5)
            assert sizes[i, cluster] == size[i, members].sum()
