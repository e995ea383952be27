"""The pyramid and Semantic FPN: against loops written here, at odd sizes, over backbones of several kinds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.models.decoders import Pyramid, Segmenter, SemanticFPN, adopt_backbone, pyramid_backbone
from hyptree.models.decoders.semantic_fpn import NORM_GROUPS
from hyptree.models.detection import mask_rcnn
from hyptree.models.himapper.dense import HiMapperFeatures
from tests.models.toy import ToyBackbone, num_parameters

# --------------------------------------------------------------------------------------------- the decoder's definition


def naive_resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear interpolation of (C, h, w) pixel by pixel; pixel centres lie at half-integers."""
    out = torch.zeros(x.shape[0], *size, dtype=x.dtype)
    h, w = x.shape[1:]
    for i in range(size[0]):
        for j in range(size[1]):
            y = min(max((i + 0.5) * h / size[0] - 0.5, 0), h - 1)
            z = min(max((j + 0.5) * w / size[1] - 0.5, 0), w - 1)
            y0, z0 = math.floor(y), math.floor(z)
            y1, z1 = min(y0 + 1, h - 1), min(z0 + 1, w - 1)
            a, b = y - y0, z - z0
            upper = (1 - b) * x[:, y0, z0] + b * x[:, y0, z1]
            lower = (1 - b) * x[:, y1, z0] + b * x[:, y1, z1]
            out[:, i, j] = (1 - a) * upper + a * lower
    return out


def naive_layer(x: Tensor, layer: nn.Sequential) -> Tensor:
    """3x3 convolution, group norm and ReLU of (C, h, w), from their formulas."""
    conv, norm = layer[0], layer[1]
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.GroupNorm)
    padded = F.pad(x, (1, 1, 1, 1))
    h, w = x.shape[1:]
    out = torch.zeros(conv.out_channels, h, w, dtype=x.dtype)
    for dy in range(3):
        for dx in range(3):
            out += torch.einsum("oc,chw->ohw", conv.weight[:, :, dy, dx], padded[:, dy : dy + h, dx : dx + w])
    groups = out.view(norm.num_groups, -1)
    groups = (groups - groups.mean(1, keepdim=True)) / (groups.var(1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    out = groups.view_as(out) * norm.weight[:, None, None] + norm.bias[:, None, None]
    return out.clamp_min(0)


def naive_decoder(decoder: SemanticFPN, levels: list[Tensor]) -> Tensor:
    """The decoder on one picture's (C, h, w) maps."""
    sizes = [tuple(level.shape[1:]) for level in levels]
    total = torch.zeros(decoder.classifier.in_channels, *sizes[0], dtype=levels[0].dtype)
    for i, level in enumerate(levels):
        x, at = level, i
        for layer in decoder.chains[i]:
            x = naive_layer(x, layer)
            at = max(at - 1, 0)
            x = naive_resize(x, sizes[at])
        total = total + x
    classify = decoder.classifier
    return torch.einsum("oc,chw->ohw", classify.weight[:, :, 0, 0], total) + classify.bias[:, None, None]


@pytest.mark.parametrize(
    "sizes", [[(8, 12), (4, 6), (2, 3), (1, 2)], [(7, 9), (4, 5), (2, 3), (1, 2)], [(5, 5), (3, 2)]]
)
def test_decoder_equals_its_definition(sizes: list[tuple[int, int]]) -> None:
    decoder = SemanticFPN(len(sizes), in_channels=6, num_classes=5, channels=NORM_GROUPS).double().eval()
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    fast_levels = [torch.randn(2, 6, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    slow_levels = [level.detach().clone().requires_grad_() for level in fast_levels]

    fast = decoder(fast_levels)
    slow = torch.stack([naive_decoder(decoder, [level[b] for level in slow_levels]) for b in range(2)])
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)

    weight = torch.randn_like(fast)
    fast_grads = torch.autograd.grad((fast * weight).sum(), [*fast_levels, *decoder.parameters()])
    slow_grads = torch.autograd.grad((slow * weight).sum(), [*slow_levels, *decoder.parameters()])
    for a, b in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_chains_have_one_step_per_halving() -> None:
    decoder = SemanticFPN(4, in_channels=256, num_classes=150)
    assert [len(chain) for chain in decoder.chains] == [1, 1, 2, 3]
    convolutions = 4 * 256 * 128 * 9 + 3 * 128 * 128 * 9
    assert num_parameters(decoder) == convolutions + 7 * 2 * 128 + 128 * 150 + 150


# ------------------------------------------------------------------------------------------------- the whole segmenter


@pytest.mark.parametrize("size", [(64, 64), (61, 83), (33, 70)])
def test_scores_have_the_size_of_the_input(size: tuple[int, int]) -> None:
    model = Segmenter(pyramid_backbone("resnet10t"), 5, pyramid_channels=32, channels=32).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, *size)).shape == (2, 5, *size)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet10t", {}),  # has a level of stride 2 too
        ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 40)}),
        (
            "swin_tiny_patch4_window7_224",  # gives channels last
            {"img_size": (64, 96), "window_size": 4, "embed_dim": 16, "depths": (1,) * 4, "num_heads": (1, 1, 2, 2)},
        ),
    ],
)
def test_backbones_of_several_kinds_train(name: str, options: dict[str, object]) -> None:
    model = Segmenter(pyramid_backbone(name, **options), 4, pyramid_channels=32, channels=32)
    assert model.pyramid.strides == [4, 8, 16, 32]
    levels = model.pyramid(torch.randn(2, 3, 64, 96))
    assert [tuple(level.shape) for level in levels] == [(2, 32, 64 // s, 96 // s) for s in (4, 8, 16, 32)]
    loss = F.cross_entropy(model(torch.randn(2, 3, 64, 96)), torch.randint(4, (2, 64, 96)))
    loss.backward()
    # Several processes wait for every gradient.
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []


def test_any_sizes_of_maps_meet() -> None:
    model = Segmenter(ToyBackbone(), 3, pyramid_channels=8, channels=64)
    for size in [(1, 1), (5, 200), (127, 129)]:
        assert model(torch.randn(1, 3, *size)).shape == (1, 3, *size)


def test_the_deepest_map_of_each_stride_from_four_on_is_taken() -> None:
    pyramid = Pyramid(ToyBackbone((2, 4, 4, 8, 16, 16), (3,) * 6), channels=8)
    assert pyramid.taken == [2, 3, 5]
    assert pyramid.strides == [4, 8, 16]


def test_dropout_acts_while_training_alone() -> None:
    model = Segmenter(ToyBackbone(), 3, pyramid_channels=8, channels=64, dropout=0.5)
    x = torch.randn(1, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_weights_survive_a_copy_and_a_round_trip() -> None:
    model = Segmenter(ToyBackbone(), 3, pyramid_channels=8, channels=64).eval()
    twin = Segmenter(ToyBackbone(), 3, pyramid_channels=8, channels=64).eval()
    x = torch.randn(1, 3, 20, 30)
    assert not torch.equal(model(x), twin(x))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(x), twin(x))
    assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_exported_autocast_and_channels_last_give_the_same() -> None:
    model = Segmenter(ToyBackbone(), 3, pyramid_channels=8, channels=64).eval()
    x = torch.randn(2, 3, 33, 47)
    with torch.no_grad():
        expected = model(x)
        exported = torch.export.export(model, (x,)).module()(x)
        torch.testing.assert_close(exported, expected)
        with torch.autocast("cpu", torch.bfloat16):
            half = model(x)
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), expected, rtol=0, atol=0.03 * float(expected.abs().max()))
        last = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(last, expected)


@pytest.mark.parametrize("name", ["resnet10t", "hcformer_pico", "convnext_atto"])
def test_a_classifiers_weights_fill_the_backbone(name: str) -> None:
    import hyptree.models  # noqa: F401

    classifier = timm.create_model(name, num_classes=7)
    for parameter in classifier.parameters():
        nn.init.normal_(parameter)  # so that none is equal by being fresh
    model = Segmenter(pyramid_backbone(name), 5, pyramid_channels=8, channels=64)
    adopted = adopt_backbone(classifier.state_dict(), model.state_dict())
    backbone = {n for n, _ in model.named_parameters() if n.startswith("pyramid.backbone.")}
    assert backbone <= set(adopted)
    assert all(n.startswith("pyramid.backbone.") for n in adopted)
    model.load_state_dict(adopted, strict=False)
    x = torch.randn(1, 3, 64, 64)
    ours, theirs = model.eval().pyramid.backbone(x), classifier.eval().forward_intermediates(x, intermediates_only=True)
    torch.testing.assert_close(ours[-1], theirs[-1])
    # And from one dense model to another.
    twin = Segmenter(pyramid_backbone(name), 3, pyramid_channels=16, channels=64)
    assert set(adopt_backbone(model.state_dict(), twin.state_dict())) == set(adopted)


@pytest.mark.parametrize(("name", "millions"), [("nano", 8.8), ("tiny", 10.3), ("small", 18.9), ("medium", 35.7)])
def test_parameters_with_hcformer_are_near_the_papers_table(name: str, millions: float) -> None:
    """Ours is the usual decoder (4.1 M, counted below); the paper's totals are up to 5 % smaller."""
    import hyptree.models  # noqa: F401

    backbone = pyramid_backbone(f"hcformer_{name}")
    with torch.device("meta"):  # to count needs no memory
        model = Segmenter(backbone, 150)
    assert num_parameters(model) / 1e6 == pytest.approx(millions, rel=0.06)
    widths = sum(backbone.feature_info.channels())
    # laterals and smoothing of the pyramid, then the decoder counted above
    pyramid = 256 * widths + 4 * 256 + 4 * (256 * 256 * 9 + 256)
    assert num_parameters(model) - num_parameters(backbone) == pyramid + 1643158


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pyramid_backbone("resnet81"), "unknown backbone 'resnet81'; did you mean 'resnet18'?"),
        (lambda: pyramid_backbone("resnet10t", no_such_option=1), "does not take these options"),
        (lambda: Segmenter(timm.create_model("resnet10t"), 3), "backbone must give features, got ResNet"),
        (lambda: Pyramid(ToyBackbone((16, 16), (3, 3))), r"strides \[16, 16\]; a pyramid needs two or more"),
        (lambda: SemanticFPN(4, 8, 3, channels=48), "multiple of 32"),
        (lambda: SemanticFPN(4, 8, 0), "num_classes must be at least 1"),
        (lambda: SemanticFPN(4, 8, 3, dropout=1.0), r"dropout must be in \[0, 1\)"),
        (lambda: SemanticFPN(4, 8, 3)([torch.zeros(1, 8, 4, 4)]), "expected 4 feature maps, got 1"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_misspelt_backbone_is_the_users_error() -> None:
    with pytest.raises(UserError):
        pyramid_backbone("resnet81")


@pytest.mark.parametrize(
    "make",
    [Pyramid, partial(Segmenter, num_classes=3), partial(mask_rcnn, num_classes=3), HiMapperFeatures],
    ids=["pyramid", "segmenter", "detector", "features of a tree"],
)
def test_checkpointing_reaches_the_backbone_or_is_refused(make: Callable[[nn.Module], nn.Module]) -> None:
    backbone = pyramid_backbone("test_resnet", out_indices=(1, 2, 3, 4))
    model = make(backbone)
    model.set_grad_checkpointing()
    assert backbone.grad_checkpointing
    model.set_grad_checkpointing(False)
    assert not backbone.grad_checkpointing
    with pytest.raises(UserError, match="ToyBackbone cannot compute activations again"):
        make(ToyBackbone()).set_grad_checkpointing()
