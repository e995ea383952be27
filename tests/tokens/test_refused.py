"""What cannot be patched, and wrong arguments: one line that names the layer or the argument, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

from hyptree import tokens
from hyptree.errors import UserError
from hyptree.geometry import Lorentz
from hyptree.tokens import METHODS, UnsupportedModel
from hyptree.tokens.hooks import BlockHooks
from tests.tokens.small_models import LAYERS, NUM_PATCHES, hooks_of, images, small_model


def tiny(name: str, **options: Any) -> nn.Module:
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "weight_init": "skip"}
    return timm.create_model(name, **{**size, **options})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny("vit_relpos_small_patch16_224"), r"blocks\.0 \(RelPosBlock\) has relative positions"),
        (lambda: tiny("vit_srelpos_small_patch16_224"), r"relative positions"),
        (
            lambda: tiny("vit_base_patch16_plus_clip_240", block_fn=_block("ResPostBlock")),
            r"blocks\.0 \(ResPost.*post-norm",
        ),
        (lambda: tiny("vit_tiny_patch16_224", block_fn=_block("ParallelScalingBlock")), r"blocks\.0 .*parallel"),
        (lambda: tiny("vit_tiny_patch16_224", block_fn=_block("ParallelThingsBlock")), r"blocks\.0 .*parallel"),
        (lambda: tiny("vit_tiny_patch16_224", attn_layer="diff", num_heads=4), r"blocks\.0\.attn \(DiffAttention\)"),
        (lambda: timm.create_model("eva02_tiny_patch14_224", depth=2), r"rotary positions"),
        (
            lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=24),
            r"layers\.0\.blocks\.0\.attn \(WindowAttention\) uses window attention",
        ),
        (lambda: timm.create_model("resnet10t"), "ResNet cannot be reduced: it is not timm's VisionTransformer"),
        (lambda: nn.Linear(3, 3), "neither timm nor transformers"),
        (lambda: nn.DataParallel(nn.Linear(3, 3)), r"wrapped in DataParallel: patch model\.module"),
        (lambda: "deit", "got str"),
    ],
)
def test_unsupported_models_name_the_layer(make: Any, message: str) -> None:
    model = make()
    with pytest.raises(UnsupportedModel, match=message):
        tokens.patch(model, keep=0.5)
    if isinstance(model, nn.Module):
        assert not hooks_of(model) and tokens.handle_of(model) is None


def _block(name: str) -> Any:
    from timm.models import vision_transformer

    return getattr(vision_transformer, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.5, "layers": (1, 4)}, "layer 4 does not exist: the model has 4 blocks"),
        ({"keep": 0.5, "r": 3}, "keep and r are given"),
        ({"keep": 2.0}, "keep is 2.0"),
        ({"counts": (3,)}, "1 numbers for the 3 layers"),
        ({"method": "atk", "keep": 0.5}, "got 'atk'; did you mean 'atc'"),
        ({"method": "tome", "threshold": 0.5}, "'tome' knows no threshold"),
        ({"keep": 0.5, "linkage": "averag"}, "got 'averag'; did you mean 'average'"),
        ({"keep": 0.5, "prop_attn": "chanel"}, "got 'chanel'; did you mean 'channel'"),
        ({"keep": 0.5, "pool": "mean"}, "pool must be one of weighted, plain, got 'mean'"),
        ({"keep": 0.5, "backend": "cuda"}, "backend must be one of auto, torch, triton, .*, got 'cuda'"),
        ({"keep": 0.5, "metric": "euclid"}, "metric is 'euclid'"),
        ({"keep": 0.5, "metric": Lorentz(), "method": "tome"}, "'tome' cannot compare on it"),
        ({"keep": 0.5, "metric": Lorentz(), "method": "kmeans"}, "'kmeans' cannot compare on it"),
        ({"keep": 0.5, "features": "key"}, "got 'key'; did you mean 'keys'"),
    ],
)
def test_wrong_arguments_change_nothing(options: dict[str, Any], message: str) -> None:
    model = small_model()
    before = tokens.patch(model, keep=0.9)
    with pytest.raises(UserError, match=message):
        tokens.patch(model, **options)
    assert tokens.handle_of(model) is before
    before.unpatch()
    with pytest.raises(UserError, match=message):
        tokens.patch(model, **options)
    assert not hooks_of(model)


def test_a_family_that_fails_while_attaching_leaves_the_patch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    before = tokens.patch(model, keep=0.5, layers=LAYERS)
    x = images()
    expected = model(x)
    attach = BlockHooks.attach

    def fail_late(self: BlockHooks, *args: bool) -> Any:
        return attach(self, *args) if self.handle is before or self.index < 2 else 1 / 0

    monkeypatch.setattr(BlockHooks, "attach", fail_late)
    with pytest.raises(ZeroDivisionError):
        tokens.patch(model, keep=0.9)
    assert tokens.handle_of(model) is before and torch.equal(model(x), expected)
    before.unpatch()
    with pytest.raises(ZeroDivisionError):
        tokens.patch(model, keep=0.9)
    assert tokens.handle_of(model) is None and not hooks_of(model)


def test_nan_names_the_layer_where_it_starts() -> None:
    model: Any = small_model()
    tokens.patch(model, keep=0.5, layers=LAYERS)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[60, 0] = float("nan")
    with pytest.raises(UserError, match=r"layer 1 \(blocks\.1\): NaN in the features"):
        model(images())
    x = images()
    x[1, 0, 3, 3] = float("inf")
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[60, 0] = 0.0
    with pytest.raises(UserError, match=r"layer 1 .*of image 1"):
        model(x)
    assert model(images()).isfinite().all()  # an error leaves nothing behind
    plain = small_model()
    for method in METHODS:  # without the check, the other images of the batch are not disturbed
        with tokens.patched(plain, method, keep=0.5, layers=LAYERS, check=False):
            out = plain(x)
            assert out[[0, 2]].isfinite().all() and out[1].isnan().all()


def test_masks_of_the_caller_are_refused_where_tokens_are_merged() -> None:
    model: Any = small_model()
    x = images()
    handle = tokens.patch(model, keep=0.5, layers=LAYERS)
    mask = torch.rand(1 + NUM_PATCHES, 1 + NUM_PATCHES) < 0.8
    for options in ({"is_causal": True}, {"attn_mask": mask}):
        with pytest.raises(UserError, match=rf"blocks\.1: .*leave out {next(iter(options))}"):
            model.forward_features(x, **options)
        handle.keep = 1.0  # nothing is merged, so anything goes
        assert model.forward_features(x, **options).isfinite().all()
        handle.keep = 0.5


def test_attention_pooling_without_a_mask_counts_tokens() -> None:
    model: Any = small_model("attention_pool")
    prr = small_model("avg", global_pool="prr", fc_norm=False)
    for each in (model, prr):
        handle = tokens.patch(each, keep=0.5, layers=LAYERS)
        assert each(images()).isfinite().all() and handle.num_tokens == [18, 9]
    handle.threshold = 0.3
    with pytest.raises(UserError, match=r"attn_pool \(AttentionPoolPrr\) takes no mask"):
        prr(images())


@pytest.mark.parametrize("prop_attn", ["mask", "channel"])
def test_attention_that_is_not_fused(prop_attn: str) -> None:
    model: Any = small_model()
    x = images()
    tokens.patch(model, keep=0.5, layers=LAYERS, prop_attn=prop_attn)
    fused = model(x)
    for block in model.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(model(x), fused, atol=1e-5, rtol=1e-5)
