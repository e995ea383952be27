"""What holds for every model that can be patched and for every method: one table of models, one of promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hyptree import tokens
from hyptree.tokens import METHODS
from tests.tokens.definition import reduced_forward
from tests.tokens.small_models import KINDS, LAYERS, NUM_PATCHES, images, small_model

CLUSTERINGS = ("atc", "tome", "kmeans", "kmedoids", "dpcknn")
NUM_PREFIX = {"distilled": 2, "registers": 5, "registers_avg": 4, "avg": 0, "attention_pool": 0}


def watch_reductions(model: Any, seen: dict[str, dict[int, Tensor]], name: str) -> None:
    """Notes what reaches the MLP branch of each reducing block, at this place among the hooks."""
    for layer in LAYERS:
        model.blocks[layer].norm2.register_forward_pre_hook(
            lambda module, args, layer=layer: seen[name].__setitem__(layer, args[0].detach())
        )


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_that_of_the_definition(kind: str) -> None:
    model = small_model(kind).double()
    x = images(2, torch.float64)
    num_prefix = NUM_PREFIX.get(kind, 1)
    with torch.no_grad(), tokens.patched(model, keep=0.5, layers=LAYERS) as handle:
        logits = model(x)
        sizes = handle.sizes[-1]
        assert handle.num_tokens == [18, 9]
    with torch.no_grad():
        for i, image in enumerate(x):
            expected, size = reduced_forward(model, image, {1: 18, 2: 9}, num_prefix)
            torch.testing.assert_close(logits[i : i + 1], expected, atol=1e-6, rtol=1e-6)
            assert torch.equal(sizes[i].double(), size)


@pytest.mark.parametrize(
    ("linkage", "prop_attn"),
    [("single", True), ("complete", True), ("ward", True), ("complete", False), ("single", "channel")],
)
def test_linkages_and_attention_follow_the_definition(linkage: str, prop_attn: bool | str) -> None:
    model = small_model().double()
    x = images(1, torch.float64)
    options = {"linkage": linkage, "prop_attn": prop_attn}
    with torch.no_grad(), tokens.patched(model, counts=(20, 6), layers=LAYERS, **options):
        logits = model(x)
    with torch.no_grad():
        expected, _ = reduced_forward(model, x[0], {1: 20, 2: 6}, 1, linkage, bool(prop_attn))
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["vit", "distilled", "registers", "registers_avg", "avg", "attention_pool", "qk_norm"])
def test_every_method_on_every_model(kind: str, method: str) -> None:
    model = small_model(kind)
    seen: dict[str, dict[int, Tensor]] = {"before": {}, "after": {}}
    watch_reductions(model, seen, "before")
    handle = tokens.patch(model, method, keep=0.5, layers=LAYERS, trace=True)
    watch_reductions(model, seen, "after")
    x = images()
    out = model(x)
    assert out.shape == (3, 7) and out.isfinite().all()
    assert handle.num_tokens == [18, 9]
    num_prefix = NUM_PREFIX.get(kind, 1)
    size = torch.ones(3, NUM_PATCHES)
    for layer, new_size, source in zip(LAYERS, handle.sizes, handle.sources, strict=True):
        before, after = seen["before"][layer], seen["after"][layer]
        assert torch.equal(before[:, :num_prefix], after[:, :num_prefix])  # protected tokens, first and untouched
        assert after.shape[1] == num_prefix + new_size.shape[1]
        assert source.shape == (3, NUM_PATCHES) and source.max() == new_size.shape[1] - 1
        if method in CLUSTERINGS:
            assert torch.equal(new_size.sum(1), torch.full((3,), float(NUM_PATCHES)))
            counted = torch.zeros_like(new_size).scatter_add(1, source, torch.ones(3, NUM_PATCHES))
            assert torch.equal(counted, new_size)
            mass = (before[:, num_prefix:] * size[..., None]).sum(1)
            new_mass = (after[:, num_prefix:] * new_size[..., None]).sum(1)
            torch.testing.assert_close(new_mass, mass, atol=1e-5 * float(mass.abs().max()), rtol=0)
        else:
            assert torch.equal(new_size, torch.ones_like(new_size))
        size = new_size


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_all_changes_no_bit_and_unpatching_leaves_nothing(kind: str) -> None:
    model = small_model(kind)
    x = images()
    plain, state = model(x), set(model.state_dict())
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    handle = tokens.patch(model, keep=1.0, layers=LAYERS)
    assert torch.equal(model(x), plain)
    assert handle.num_tokens == [NUM_PATCHES, NUM_PATCHES]
    handle.keep = 0.25
    assert not torch.equal(model(x), plain)
    assert set(model.state_dict()) == state
    handle.unpatch()
    assert torch.equal(model(x), plain)
    for name, module in model.named_modules():
        assert set(module.__dict__) == attributes[name]
        for hooks in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_pre_hooks_with_kwargs",
        ):
            assert not getattr(module, hooks), f"{name}.{hooks}"


@pytest.mark.parametrize("kind", ["vit", "distilled", "registers_avg", "attention_pool", "dinov2"])
def test_forward_features_and_head_compose_to_forward(kind: str) -> None:
    model: Any = small_model(kind)
    tokens.patch(model, keep=0.5, layers=LAYERS)
    x = images()
    features = model.forward_features(x)
    assert features.shape[1] == NUM_PREFIX.get(kind, 1) + 9
    assert torch.equal(model.forward_head(features), model(x))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_reach_the_input_through_every_method(method: str) -> None:
    model = small_model("registers").train()
    tokens.patch(model, method, keep=0.5, layers=LAYERS)
    x = images().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    reached = x.grad.abs().amax((1, 2, 3))
    assert (reached > 0).all()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
