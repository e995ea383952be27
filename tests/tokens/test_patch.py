"""Patching: switches at run time, copies, gradient checkpointing, precision."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from hyptree import tokens
from hyptree.cluster import agglomerate, cosine_distance, density_peaks, kmeans, kmedoids
from hyptree.errors import UserError
from hyptree.geometry import Euclidean, Lorentz
from tests.tokens.small_models import LAYERS, NUM_PATCHES, hooks_of, images, small_model


# ---------------------------------------------------------------------- switches
def test_switches_act_on_the_next_forward_pass() -> None:
    model = small_model()
    x = images()
    handle = tokens.patch(model, keep=0.5)
    assert handle.layers == (1, 2, 3)
    model(x)
    assert handle.num_tokens == [18, 9, 4]
    handle.keep = 0.7
    model(x)
    assert handle.num_tokens == [25, 17, 12] and handle.keep == 0.7
    handle.r = 5
    model(x)
    assert handle.num_tokens == [31, 26, 21, 16] and handle.r == 5 and handle.keep is None
    handle.r = (5, -1.0)
    model(x)
    assert handle.num_tokens == [26, 20, 17, 17] and handle.r == (5, -1.0)
    handle.r = [10, 1]
    model(x)
    assert handle.num_tokens == [26, 25, 25, 25]
    handle.counts = (30, 3, 2)
    model(x)
    assert handle.num_tokens == [30, 3, 2] and handle.counts == (30, 3, 2) and handle.r is None
    handle.threshold = 0.3
    model(x)
    assert handle.threshold == 0.3 and handle.counts is None
    assert [number.shape for number in handle.num_tokens] == [(3,)] * 3  # type: ignore[union-attr]


def test_a_switched_handle_gives_what_a_new_one_gives() -> None:
    model = small_model()
    x = images()
    handle = tokens.patch(model, r=4)
    model(x)
    handle.keep = 0.5
    switched = model(x)
    tokens.patch(model, keep=0.5)
    assert torch.equal(model(x), switched)


def test_disabled_handle_is_the_plain_model() -> None:
    model = small_model("registers_avg")
    x = images()
    plain = model(x)
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    reduced = model(x)
    handle.enabled = False
    assert torch.equal(model(x), plain)
    handle.enabled = True
    assert torch.equal(model(x), reduced) and not torch.equal(reduced, plain)


def test_a_refused_value_leaves_the_switch_as_it_was() -> None:
    model = small_model()
    handle = tokens.patch(model, "tome", keep=0.5, layers=LAYERS)
    for name, value in {"keep": 0.0, "r": -1, "counts": (1,), "threshold": 0.3}.items():
        with pytest.raises(UserError):
            setattr(handle, name, value)
    model(images())
    assert handle.keep == 0.5 and handle.num_tokens == [18, 9]


def test_relative_keep_follows_the_tokens_that_are_left() -> None:
    model = small_model()
    handle = tokens.patch(model, keep=0.7, relative=True)
    model(images())
    assert handle.num_tokens == [25, 17, 11]


@pytest.mark.parametrize("counts", [(1, 1), (NUM_PATCHES, 2), (1000, 1000)])
def test_extreme_counts(counts: tuple[int, int]) -> None:
    model = small_model("registers")
    x = images()
    plain = model(x)
    handle = tokens.patch(model, counts=counts, layers=LAYERS, trace=True)
    out = model(x)
    assert handle.num_tokens == [min(counts[0], NUM_PATCHES), min(counts[1], NUM_PATCHES)]
    assert torch.equal(out, plain) == (counts[1] > NUM_PATCHES)
    assert out.isfinite().all()
    if counts[0] == 1:
        assert torch.equal(handle.sizes[0], torch.full((3, 1), float(NUM_PATCHES)))


def test_sources_compose_and_start_from_the_identity() -> None:
    model = small_model()
    handle = tokens.patch(model, counts=(NUM_PATCHES, 12, 5), trace=True)
    model(images())
    first, second, third = handle.sources
    assert torch.equal(first, torch.arange(NUM_PATCHES).expand(3, -1))
    for image in range(3):  # whoever is together stays together
        for cluster in range(12):
            assert third[image][second[image] == cluster].unique().numel() == 1
    labels = torch.stack([second[:, i] for i in range(NUM_PATCHES)], 1)
    step = torch.stack([third.gather(1, (labels == c).int().argmax(1, keepdim=True)).squeeze(1) for c in range(12)], 1)
    assert torch.equal(tokens.compose(second, step), third)


def test_without_trace_nothing_large_is_kept() -> None:
    model = small_model()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    model(images())
    assert [size.shape for size in handle.sizes] == [(3, 18), (3, 9)]
    kept = [value for record in handle._records.values() for value in record if isinstance(value, torch.Tensor)]
    assert sum(value.numel() for value in kept) == 3 * (1 + 18) + 3 * (1 + 9)  # the sizes
    for hooks in (hook.__self__ for m in model.modules() for hook in m._forward_hooks.values()):
        assert not getattr(hooks, "_work", None)
    for what in (lambda: handle.sources, lambda: handle.dendrogram(1)):
        with pytest.raises(UserError, match="trace=True"):
            what()


def test_dendrogram_cuts_to_the_labels_in_use() -> None:
    model = small_model()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS, trace=True, linkage="complete")
    model(images())
    hierarchy = handle.dendrogram(1)
    assert torch.equal(hierarchy.cut(18), handle.sources[0])
    assert hierarchy.linkage(2).shape == (NUM_PATCHES - 1, 4)
    with pytest.raises(UserError, match=r"layer 3 reduced no tokens.*\[1, 2\]"):
        handle.dendrogram(3)


def test_hyperbolic_metric_clusters_by_its_distances() -> None:
    model: Any = small_model()
    keys: list[torch.Tensor] = []
    model.blocks[1].attn.k_norm.register_forward_hook(lambda module, args, out: keys.append(out.detach()))
    handle = tokens.patch(model, counts=(12,), layers=(1,), metric=Lorentz(4.0), trace=True)
    model(images())
    from hyptree.cluster import manifold_distance

    features = keys[0][:, :, 1:].mean(1)
    assert torch.equal(agglomerate(manifold_distance(features, Lorentz(4.0)), 12), handle.sources[0])


@pytest.mark.parametrize("method", ["kmedoids", "dpcknn", "kmeans"])
def test_rivals_on_the_tokens_themselves_by_euclidean_distance(method: str) -> None:
    model: Any = small_model("avg").double()
    block = model.blocks[1]
    seen: dict[str, torch.Tensor] = {}
    block.norm2.register_forward_pre_hook(lambda module, args: seen.update(x=args[0].detach()))
    block.attn.q_norm.register_forward_hook(lambda module, args, out: seen.update(q=out.detach()))
    block.attn.k_norm.register_forward_hook(lambda module, args, out: seen.update(k=out.detach()))
    options: dict[str, Any] = {"metric": Euclidean(), "features": "tokens", "trace": True}
    handle = tokens.patch(model, method, counts=(12,), layers=(1,), **options)
    model(images(3, torch.float64))
    x = seen["x"]
    distance = (x[:, :, None] - x[:, None]).norm(dim=-1) / 48**0.5  # of features that are lifted at this scale
    # Without a class token all tokens say what they attend to.
    scores = (seen["q"] @ seen["k"].mT * block.attn.scale).softmax(-1).mean((1, 2))
    expected = {
        "kmedoids": lambda: kmedoids(distance, 12, start=scores),
        "dpcknn": lambda: density_peaks(distance, 12),
        "kmeans": lambda: kmeans(x, 12, start=scores, metric="euclidean"),
    }
    assert torch.equal(handle.sources[0], expected[method]())


def test_random_draws_anew_in_every_pass_and_the_same_for_a_seed() -> None:
    x = images()
    sources = []
    for _ in range(2):
        model = small_model()
        handle = tokens.patch(model, "random", keep=0.5, layers=LAYERS, trace=True, seed=3)
        for _ in range(2):
            model(x)
            sources.append(handle.sources[0])
    assert torch.equal(sources[0], sources[2]) and torch.equal(sources[1], sources[3])
    assert not torch.equal(sources[0], sources[1])


def test_topk_keeps_what_the_class_token_attends_to() -> None:
    model: Any = small_model("distilled")
    seen: dict[str, torch.Tensor] = {}
    attention = model.blocks[1].attn
    attention.q_norm.register_forward_hook(lambda module, args, out: seen.update(q=out.detach()))
    attention.k_norm.register_forward_hook(lambda module, args, out: seen.update(k=out.detach()))
    handle = tokens.patch(model, "topk", counts=(7,), layers=(1,), trace=True)
    model(images())
    scores = (seen["q"] @ seen["k"].mT * attention.scale).softmax(-1)[:, :, 0, 2:].mean(1)
    for image in range(3):
        kept = (handle.sources[0][image] >= 0).nonzero().flatten()
        assert set(kept.tolist()) == set(scores[image].topk(7).indices.tolist())


def test_scores_count_merged_tokens_as_attention_does() -> None:
    model: Any = small_model("distilled").double()
    seen: dict[str, torch.Tensor] = {}
    attention = model.blocks[2].attn
    attention.q_norm.register_forward_hook(lambda module, args, out: seen.update(q=out.detach()))
    attention.k_norm.register_forward_hook(lambda module, args, out: seen.update(k=out.detach()))
    handle = tokens.patch(model, "kmedoids", counts=(12, 4), layers=LAYERS, trace=True)
    model(images(8, torch.float64))
    logits = seen["q"] @ seen["k"].mT * attention.scale
    logits[..., 2:] += handle.sizes[0].double().log()[:, None, None]
    scores = logits.softmax(-1)[:, :, 0, 2:].mean(1)
    labels = kmedoids(cosine_distance(seen["k"][:, :, 2:].mean(1)), 4, start=scores)
    assert torch.equal(tokens.compose(handle.sources[0], labels), handle.sources[1])


# ---------------------------------------------------------------------- on and off
def test_patching_twice_replaces() -> None:
    model = small_model()
    x = images()
    plain = model(x)
    first = tokens.patch(model, keep=0.9)
    num_hooks = len(hooks_of(model))
    second = tokens.patch(model, "tome", keep=0.5)
    assert len(hooks_of(model)) == num_hooks and tokens.handle_of(model) is second
    model(x)
    assert second.num_tokens == [18, 9, 4] and not first._records
    first.unpatch()  # of a patch that is gone
    assert tokens.handle_of(model) is second and len(hooks_of(model)) == num_hooks
    second.unpatch()
    assert torch.equal(model(x), plain) and not hooks_of(model) and tokens.handle_of(model) is None


def test_context_unpatches_also_after_an_error() -> None:
    model = small_model()
    with tokens.patched(model, keep=0.5):
        assert hooks_of(model)
    assert not hooks_of(model)
    with pytest.raises(ZeroDivisionError), tokens.patched(model, keep=0.5):
        1 / 0
    assert not hooks_of(model)
    with tokens.patch(model, keep=0.5):
        assert hooks_of(model)
    assert not hooks_of(model)


def test_contexts_nest() -> None:
    model = small_model()
    x = images()
    plain = model(x)
    with tokens.patched(model, keep=0.9) as outer:
        expected = model(x)
        with tokens.patched(model, "tome", keep=0.5) as inner:
            assert tokens.handle_of(model) is inner
            assert not torch.equal(model(x), expected)
        assert tokens.handle_of(model) is outer and torch.equal(model(x), expected)
    assert torch.equal(model(x), plain) and not hooks_of(model)


def test_hooks_of_others_survive() -> None:
    model: Any = small_model()
    calls: list[str] = []
    model.blocks[1].norm2.register_forward_hook(lambda *_: calls.append("norm"))
    model.register_forward_hook(lambda *_: calls.append("model"))
    handle = tokens.patch(model, keep=0.5)
    model(images())
    handle.unpatch()
    model(images())
    assert calls == ["norm", "model"] * 2


def test_a_copy_has_a_handle_of_its_own() -> None:
    model = small_model("registers_avg")
    x = images()
    plain = model(x)
    handle = tokens.patch(model, keep=0.5, layers=LAYERS, trace=True)
    reduced = model(x)
    twin = copy.deepcopy(model)
    own = tokens.handle_of(twin)
    assert own is not None and own is not handle and own.adapter.model is twin
    assert torch.equal(twin(x), reduced)
    own.keep = 0.25
    twin(x)
    assert own.num_tokens == [9, 2]
    own.unpatch()
    assert torch.equal(twin(x), plain) and not hooks_of(twin)
    assert torch.equal(model(x), reduced) and handle.num_tokens == [18, 9]
    for weight, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert weight is not other


def test_pickling_with_and_without_patch() -> None:
    model = small_model()
    x = images()
    plain = model(x)
    handle = tokens.patch(model, keep=0.5)
    reduced = model(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), reduced)
    handle.unpatch()
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(x), plain) and tokens.handle_of(loaded) is None


@pytest.mark.parametrize("kind", ["vit", "avg"])
def test_features_are_plain_tensors_that_can_be_saved_and_copied(kind: str, tmp_path: Path) -> None:
    model: Any = small_model(kind)
    tokens.patch(model, keep=0.5, layers=LAYERS)
    with torch.no_grad():
        features = model.forward_features(images())
    assert not features.__dict__
    torch.save(features, tmp_path / "features.pt")
    assert torch.equal(torch.load(tmp_path / "features.pt", weights_only=True), features)
    assert (tmp_path / "features.pt").stat().st_size < 4 * features.numel() + 4096
    assert torch.equal(copy.deepcopy(features), features)


def test_nothing_of_a_pass_outlives_its_tokens() -> None:
    model: Any = small_model()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    features = model.forward_features(images())
    assert len(handle._flows) > 1  # the graph holds the tokens between the blocks
    del features
    assert len(handle._flows) == 0


def test_the_handle_says_what_it_does() -> None:
    handle = tokens.patch(small_model(), keep=0.5, layers=LAYERS)
    assert repr(handle) == "Handle(VisionTransformer, 'atc', keep=0.5, layers=(1, 2))"
    handle.unpatch()
    assert repr(handle).endswith("layers=(1, 2), unpatched)")


def test_weights_go_to_and_from_a_patched_model() -> None:
    model, other = small_model(), small_model()
    tokens.patch(model, keep=0.5)
    nn.init.normal_(model.get_parameter("head.weight"))
    other.load_state_dict(model.state_dict())
    tokens.patch(other, keep=0.5)
    x = images()
    assert torch.equal(model(x), other(x))


def replica_of(model: Any, factor: float) -> Any:
    """A replica as DataParallel makes them: shallow copies of all modules, with weights of their own (here scaled)."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, weight in module._parameters.items():
            setattr(replica, name, None if weight is None else weight.detach() * factor)
    return replicas[model]


@pytest.mark.parametrize("kind", ["vit", "registers_avg", "attention_pool"])
def test_replicas_compute_with_their_own_weights(kind: str) -> None:
    model = small_model(kind)
    x = images()
    tokens.patch(model, keep=0.5, layers=LAYERS)
    before = model(x)
    out = replica_of(model, 1.25)(x)
    scaled = small_model(kind)
    for weight in scaled.requires_grad_(False).parameters():  # torch 2.11 rounds otherwise with them
        weight.data *= 1.25
    tokens.patch(scaled, keep=0.5, layers=LAYERS)
    assert torch.equal(out, scaled(x)) and not torch.equal(out, before)
    assert torch.equal(model(x), before)


# ---------------------------------------------------------------------- training
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm.layers.config, "_USE_REENTRANT_CKPT", use_reentrant)
    first, second = images().requires_grad_(), images().requires_grad_()
    for options in ({"keep": 0.5, "layers": LAYERS}, {"counts": [20, 7], "layers": (0, 2)}):
        gradients = []
        for checkpointing in (False, True):
            model: Any = small_model("registers_avg").train()
            model.set_grad_checkpointing(checkpointing)
            handle = tokens.patch(model, trace=True, **options)
            # Two passes in flight: the blocks of the first are computed again after the second one has run.
            loss = model(first).square().sum() + model(second[:2]).sum()
            sources = handle.sources
            loss.backward()
            assert all(torch.equal(a, b) for a, b in zip(sources, handle.sources, strict=True))
            gradients.append([weight.grad for weight in model.parameters()])
        for plain, recomputed in zip(*gradients, strict=True):
            assert torch.equal(plain, recomputed)


def test_checkpointing_with_copies_of_the_tokens_is_refused() -> None:
    model: Any = small_model().train()
    model.set_grad_checkpointing(True)
    tokens.patch(model, keep=0.5, layers=LAYERS)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        loss = model(images()).sum()
    with pytest.raises(UserError, match="computed again for its gradient from a copy of its tokens"):
        loss.backward()


@pytest.mark.parametrize("is_patched_first", [False, True])
@pytest.mark.parametrize("way", CheckpointImpl)
def test_blocks_in_wrappers_that_compute_them_again(way: CheckpointImpl, is_patched_first: bool) -> None:
    model: Any = small_model().train()
    first, second = images(), images()

    def patch_and_grad(is_wrapped: bool) -> list[Tensor]:
        def wrap() -> None:
            apply_activation_checkpointing(
                model,
                checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=way),
                check_fn=lambda module: isinstance(module, timm.models.vision_transformer.Block),
            )

        if is_wrapped and not is_patched_first:
            wrap()
        tokens.patch(model, "random", keep=0.5, layers=LAYERS)
        if is_wrapped and is_patched_first:
            wrap()
        x, y = first.clone().requires_grad_(), second.clone().requires_grad_()
        (model(x).square().sum() + model(y).sum()).backward()
        return [x.grad, y.grad]  # type: ignore[list-item]

    for plain, again in zip(patch_and_grad(False), patch_and_grad(True), strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("method", ["atc", "random"])
def test_a_whole_pass_computed_again(method: str, use_reentrant: bool) -> None:
    model: Any = small_model().train()
    tokens.patch(model, method, keep=0.5, layers=LAYERS)
    x, y = images().requires_grad_(), images()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    loss = checkpoint(model, x, use_reentrant=use_reentrant).square().sum() + model(y).sum()
    if method == "random":  # it cannot know which tokens it drew
        with pytest.raises(UserError, match="'random' would draw other tokens than before"):
            loss.backward()
    else:
        loss.backward()
        assert x.grad is not None and torch.equal(x.grad, expected)


def test_tokens_changed_between_checkpointed_blocks() -> None:
    gradients = []
    first, second = images(), images()
    for checkpointing in (False, True):
        model: Any = small_model().train()
        model.set_grad_checkpointing(checkpointing)
        tokens.patch(model, keep=0.5, layers=LAYERS)
        for block in model.blocks:
            block.register_forward_hook(lambda _, args, output: output * 1.01)
        (model(first).square().sum() + model(second).sum()).backward()
        gradients.append(model.patch_embed.proj.weight.grad)
    assert torch.equal(*gradients)


def test_random_tokens_are_the_same_when_computed_again() -> None:
    gradients = []
    x = images()
    for checkpointing in (False, True):
        model: Any = small_model().train()
        model.set_grad_checkpointing(checkpointing)
        tokens.patch(model, "random", keep=0.5, layers=LAYERS)
        (model(x).square().sum() + model(x + 1).sum()).backward()
        gradients.append(model.patch_embed.proj.weight.grad)
    assert torch.equal(*gradients)


def test_drop_path_and_layer_scale_in_training() -> None:
    model: Any = small_model("deit3", drop_path_rate=0.5).train()
    tokens.patch(model, keep=0.5, layers=LAYERS)
    x = images(4)
    torch.manual_seed(0)
    one = model(x)
    torch.manual_seed(1)
    other = model(x)
    assert one.isfinite().all() and not torch.equal(one, other)
    torch.manual_seed(0)
    assert torch.equal(model(x), one)
    one.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


# ---------------------------------------------------------------------- pooling
@pytest.mark.parametrize("pool_type", ["avg", "avgmax"])
def test_means_over_tokens_count_patches(pool_type: str) -> None:
    model: Any = small_model("avg_with_class", global_pool=pool_type)
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    features = model.forward_features(images())
    patches, size = features[:, 1:], handle.sizes[-1]
    mean = (patches * size[..., None]).sum(1) / NUM_PATCHES
    expected = mean if pool_type == "avg" else 0.5 * (mean + patches.amax(1))
    torch.testing.assert_close(model.pool(features), expected, atol=1e-5, rtol=1e-5)
    handle.unpatch()
    plain = tokens.patch(model, keep=0.5, layers=LAYERS, pool="plain")
    features = model.forward_features(images())
    assert torch.equal(model.pool(features), type(model).pool(model, features))
    plain.unpatch()


def test_head_on_other_features_pools_plainly() -> None:
    model: Any = small_model("avg")
    tokens.patch(model, keep=0.5, layers=LAYERS)
    model(images())
    features = torch.randn(3, NUM_PATCHES, 48)
    torch.testing.assert_close(model.pool(features), features.mean(1))


# ---------------------------------------------------------------------- precision
@pytest.mark.parametrize("prop_attn", ["mask", "channel"])
def test_autocast_clusters_float32_distances_of_half_precision_keys(prop_attn: str) -> None:
    model: Any = small_model("qk_norm")
    keys: dict[int, torch.Tensor] = {}
    for layer in LAYERS:
        model.blocks[layer].attn.k_norm.register_forward_hook(
            lambda module, args, out, layer=layer: keys.__setitem__(layer, out.detach())
        )
    handle = tokens.patch(model, keep=0.5, layers=LAYERS, trace=True, prop_attn=prop_attn)
    x = images()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.isfinite().all()
    assert keys[1].dtype in (torch.bfloat16, torch.float32)
    for layer, k in zip(LAYERS, (18, 9), strict=True):
        features = keys[layer].float()[:, :, 1:].mean(1)
        labels = agglomerate(cosine_distance(features), k)
        record = handle._records[layer]
        assert record.features is not None and torch.equal(record.features, features)
        if layer == LAYERS[0]:
            assert torch.equal(record.source, labels)


def test_half_precision_weights() -> None:
    model = small_model().bfloat16()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    out = model(images().bfloat16())
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    assert all(size.dtype == torch.float32 for size in handle.sizes)
