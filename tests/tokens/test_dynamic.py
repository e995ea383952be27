"""A threshold instead of a number: images keep different numbers of tokens, and padding changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from hyptree import tokens
from hyptree.cluster import cosine_distance
from hyptree.tokens.methods import Site, merge_below
from hyptree.tokens.schedule import Threshold
from tests.tokens.small_models import LAYERS, NUM_PATCHES, images, small_model

# Every kind of pooling with the default attention; attention without sizes is the same code for all of them.
KINDS: list[tuple[str, bool | str]] = [
    *((kind, True) for kind in ("vit", "distilled", "registers_avg", "max", "attention_pool", "qk_norm")),
    *((kind, way) for kind in ("registers_avg", "attention_pool") for way in (False, "channel")),
]


def uneven_images(num: int = 4) -> Tensor:
    """Pictures from nearly flat to pure noise, so that the same threshold leaves different numbers of tokens."""
    x = images(num, torch.float64)
    return x * torch.logspace(-2, 0.3, num, dtype=torch.float64)[:, None, None, None]


def number_of_tokens(handle: tokens.Handle, layer: int = -1) -> list[int]:
    number = handle.num_tokens[layer]
    assert isinstance(number, Tensor)
    return number.tolist()


@pytest.mark.parametrize(("kind", "prop_attn"), KINDS)
def test_padded_batch_equals_image_by_image(kind: str, prop_attn: bool | str) -> None:
    model = small_model(kind).double()
    x = uneven_images()
    handle = tokens.patch(model, threshold=0.25, layers=LAYERS, trace=True, prop_attn=prop_attn)
    with torch.no_grad():
        together = model(x)
        numbers = [number_of_tokens(handle, i) for i in range(2)]
        sizes, sources = handle.sizes, handle.sources
        assert len(set(numbers[1])) > 1 and min(numbers[1]) < NUM_PATCHES
        for i in range(len(x)):
            alone = model(x[i : i + 1])
            torch.testing.assert_close(together[i : i + 1], alone, atol=1e-6, rtol=1e-6)
            for layer in range(2):
                num = numbers[layer][i]
                assert number_of_tokens(handle, layer) == [num]
                assert torch.equal(sizes[layer][i, :num], handle.sizes[layer][0])
                assert not sizes[layer][i, num:].any()
                assert torch.equal(sources[layer][i], handle.sources[layer][0])


@pytest.mark.parametrize("pool", ["weighted", "plain"])
def test_padding_is_left_out_of_means(pool: str) -> None:
    model: Any = small_model("registers_avg").double()
    x = uneven_images()
    handle = tokens.patch(model, threshold=0.25, layers=LAYERS, pool=pool)
    with torch.no_grad():
        features = model.forward_features(x)
        pooled = model.pool(features)
    for i, num in enumerate(number_of_tokens(handle)):
        patches = features[i, 4 : 4 + num]
        weight = handle.sizes[-1][i, :num, None] if pool == "weighted" else torch.ones(num, 1)
        torch.testing.assert_close(pooled[i], (patches * weight).sum(0) / weight.sum(), atol=1e-9, rtol=1e-9)


def test_a_threshold_below_every_distance_merges_nothing() -> None:
    model = small_model()
    x = images()
    plain = model(x)
    handle = tokens.patch(model, threshold=0.0, layers=LAYERS)
    torch.testing.assert_close(model(x), plain, atol=1e-5, rtol=1e-5)
    assert [number.tolist() for number in handle.num_tokens] == [[NUM_PATCHES] * 3] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("linkage_name", ["average", "complete", "single"])
def test_the_largest_threshold_leaves_one_token(linkage_name: str) -> None:
    model = small_model("registers")
    handle = tokens.patch(model, threshold=2.0, layers=LAYERS, linkage=linkage_name)
    assert model(images()).isfinite().all()
    assert number_of_tokens(handle, 0) == [1, 1, 1]
    assert torch.equal(handle.sizes[-1], torch.full((3, 1), float(NUM_PATCHES)))


@pytest.mark.parametrize("linkage_name", ["average", "complete", "single"])
def test_labels_are_those_of_scipy_below_the_threshold(linkage_name: str) -> None:
    features = torch.randn(3, 20, 4) + torch.tensor([0.0, 0.7, 2.0])[:, None, None]
    site = Site(features, 20, linkage=linkage_name)
    threshold = 0.3
    reduction, longest = merge_below(site, Threshold((0,), threshold), 20, None)
    assert reduction.labels is not None and reduction.num is not None and longest == int(reduction.num.max())
    for i, distance in enumerate(cosine_distance(features).double().numpy()):
        expected = fcluster(linkage(squareform(distance), linkage_name), threshold, "distance")
        same = expected[:, None] == expected
        assert np.array_equal((reduction.labels[i][:, None] == reduction.labels[i]).numpy(), same)
        assert int(reduction.num[i]) == len(set(expected.tolist()))


@pytest.mark.parametrize("linkage_name", ["average", "complete", "single"])
def test_bounds_hold_image_by_image_and_change_nothing_else(linkage_name: str) -> None:
    features = torch.randn(4, 20, 4) + torch.tensor([0.0, 0.5, 1.5, 5.0])[:, None, None]
    site = Site(features, 20, linkage=linkage_name)
    free, _ = merge_below(site, Threshold((0,), 0.2), 20, None)
    bound, longest = merge_below(site, Threshold((0,), 0.2, min_keep=0.25, max_keep=0.5), 20, None)
    assert free.num is not None and bound.num is not None and free.labels is not None and bound.labels is not None
    assert free.num.max() > 10 and free.num.min() < 5  # both bounds have something to do
    assert torch.equal(bound.num, free.num.clamp(5, 10)) and longest == 10
    distance = cosine_distance(features)
    for i, num in enumerate(bound.num.tolist()):
        labels = tokens.agglomerate(distance[i], num, linkage=linkage_name, backend="torch")
        assert torch.equal(bound.labels[i], labels)


@pytest.mark.parametrize(
    "schedule",
    [
        Threshold((0,), 0.25),
        Threshold((0,), 0.25, min_keep=0.2, max_keep=0.6),
        Threshold((0,), 0.9, min_keep=0.5),  # more than the smallest image has
        Threshold((0,), 0.05, max_keep=0.1),  # forces merges far above the threshold
    ],
)
def test_padding_stays_apart(schedule: Threshold) -> None:
    features = torch.randn(3, 20, 4) + 0.3
    numbers = torch.tensor([20, 13, 7])
    is_token = torch.arange(20) < numbers[:, None]
    padded, _ = merge_below(Site(features, 20), schedule, 20, is_token)
    assert padded.labels is not None and padded.num is not None
    for i, num in enumerate(numbers.tolist()):
        alone, _ = merge_below(Site(features[i : i + 1, :num], num), schedule, 20, None)
        assert alone.labels is not None and alone.num is not None
        assert int(padded.num[i]) == int(alone.num[0]) <= num
        assert torch.equal(padded.labels[i, :num], alone.labels[0])


def test_caps_of_a_model() -> None:
    model = small_model()
    x = uneven_images().float()
    handle = tokens.patch(model, threshold=0.25, layers=LAYERS, min_keep=0.5, max_keep=0.75)
    assert model(x).isfinite().all()
    for layer in range(2):
        assert all(18 <= number <= 27 for number in number_of_tokens(handle, layer))
    handle.keep = 0.25
    model(x)
    assert handle.num_tokens == [9, 2]


def test_gradients_of_a_padded_batch() -> None:
    model = small_model("registers_avg").double()
    tokens.patch(model, threshold=0.25, layers=LAYERS)
    x = uneven_images().requires_grad_()
    model(x).square().sum().backward()
    together = x.grad
    assert together is not None and together.isfinite().all()
    for i in range(len(x)):
        alone = x.detach()[i : i + 1].requires_grad_()
        model(alone).square().sum().backward()
        torch.testing.assert_close(together[i : i + 1], alone.grad, atol=1e-6, rtol=1e-6)
