"""Every family of backbones: the logits at the start, the grid of the maps, and where the classifier stands."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

from hyptree.models import HiMapper
from hyptree.models.himapper.backbone import Features, map_tokens
from tests.models.himapper.toy import ToyBackbone

# name -> size of the picture, grid, options of create_model. The smallest member of each family, cut where it can be.
QUICK = {
    "resnet10t": (64, (2, 2), {}),
    "test_efficientnet": (64, (2, 2), {}),
    "mobilenetv3_small_050": (64, (2, 2), {}),
    "test_convnext": (64, (2, 2), {}),
    "regnetx_002": (64, (2, 2), {}),
    "deit_tiny_patch16_224": ((64, 96), (4, 6), {"img_size": (64, 96), "depth": 2}),
    "deit_tiny_distilled_patch16_224": (64, (4, 4), {"img_size": 64, "depth": 2}),
    "vit_small_patch14_dinov2": (70, (5, 5), {"img_size": 70, "depth": 1}),
    "vit_small_patch14_reg4_dinov2": (70, (5, 5), {"img_size": 70, "depth": 1}),
    "vit_base_patch16_siglip_224": (64, (4, 4), {"img_size": 64, "depth": 1, "embed_dim": 48, "num_heads": 3}),
    "swin_tiny_patch4_window7_224": (
        56,
        (2, 2),
        {"img_size": 56, "depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 2, 3, 4)},
    ),
    "mixer_s32_224": (96, (3, 3), {"img_size": 96}),
    "pvt_v2_b0": ((64, 96), (2, 3), {"depths": (1, 1, 1, 1)}),
    "cait_xxs24_224": (64, (4, 4), {"img_size": 64, "depth": 2}),
    "xcit_nano_12_p16_224": (64, (4, 4), {"depth": 2}),
    "levit_128s": (224, (4, 4), {}),
    "mobilevit_xxs": (64, (2, 2), {}),
    "beit_base_patch16_224": (64, (4, 4), {"img_size": 64, "depth": 1, "embed_dim": 48, "num_heads": 3}),
    "eva02_tiny_patch14_224": (56, (4, 4), {"img_size": 56, "depth": 2}),
    "densenet121": (64, (2, 2), {"block_config": (1, 1, 1, 1), "growth_rate": 8}),
    "vgg11": (64, (2, 2), {"mlp_ratio": 0.02}),
    "swinv2_tiny_window8_256": (
        64,
        (2, 2),
        {"img_size": 64, "window_size": 4, "depths": (1, 1, 1, 1), "embed_dim": 24, "num_heads": (1, 2, 3, 4)},
    ),
    "maxvit_pico_rw_256": (64, (2, 2), {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 64, 64)}),
    "davit_tiny": (64, (2, 2), {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4)}),
    "hiera_tiny_224": (128, (4, 4), {"img_size": (128, 128), "stages": (1, 1, 1, 1), "embed_dim": 16}),
    "hcformer_pico": (64, (2, 2), {}),
}
SLOW = {
    "efficientnet_lite0": (64, (2, 2), {}),
    "convnext_atto": (64, (2, 2), {}),
    "resnetv2_50": (64, (2, 2), {}),  # its classifier is a convolution
    "sequencer2d_s": (64, (4, 4), {"img_size": 64}),  # get_classifier gives the whole head
    "volo_d1_224": (224, (14, 14), {}),  # a second classifier on the patches
    "coat_lite_tiny": (224, (7, 7), {}),
    "efficientformer_l1": (224, (7, 7), {}),
    "mambaout_femto": (64, (2, 2), {}),
    "vit_small_r26_s32_224": (64, (2, 2), {"img_size": 64}),
}
FAMILIES = [pytest.param(name, id=name) for name in QUICK]
FAMILIES += [pytest.param(name, id=name, marks=pytest.mark.slow) for name in SLOW]


LISTED = (
    *(
        "resnet",
        "efficientnet",
        "mobilenetv3",
        "convnext",
        "regnet",
        "densenet",
        "vgg",
        "deit",
        "dinov2",
        "siglip",
        "swin",
    ),
    *("swinv2", "mixer", "pvt_v2", "maxvit", "cait", "xcit", "levit", "mobilevit", "beit", "eva02", "davit", "hiera"),
)


def test_every_listed_family_is_tried() -> None:
    assert [family for family in LISTED if not any(family in name for name in QUICK)] == []


def backbone_of(name: str) -> tuple[nn.Module, Tensor, tuple[int, int]]:
    """A backbone in evaluation mode whose logits are of ordinary size, unlike those of some fresh ones."""
    size, grid, options = {**QUICK, **SLOW}[name]
    backbone = timm.create_model(name, num_classes=7, **options).eval()
    actual = backbone.get_classifier()
    for head in actual if isinstance(actual, tuple) else (actual,):
        for module in head.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.normal_(module.weight, std=0.2)
                nn.init.normal_(module.bias, std=1.0)
    height, width = (size, size) if isinstance(size, int) else size
    return backbone, torch.randn(2, 3, height, width), grid


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_family(name: str) -> None:
    backbone, x, grid = backbone_of(name)
    model = HiMapper(backbone, num_leaves=8, depth=3, width=16).eval()
    own = backbone(x)
    assert own.std() > 0.1

    start = model(x, return_maps=True)
    assert (start.logits - own).abs().max() < 1e-5
    assert model.grid == grid
    for maps, size in zip(start.maps, (8, 4, 2), strict=True):
        assert maps.shape == (2, size, *grid) and (maps.sum((-1, -2)) - 1).abs().max() < 1e-5

    # A step of the global feature moves the logits by the classifier's weights, the mean of them if there are two.
    step = torch.randn(model.reader.pooled_channels)
    model.encode.out_proj.bias.copy_(step)
    actual = backbone.get_classifier()
    heads = actual if isinstance(actual, tuple) else (actual,)
    expected = torch.stack([affine(head)(step) for head in heads]).mean(0)
    assert expected.abs().max() > 0.1
    assert torch.allclose(model(x).logits - own, expected.expand(2, -1), atol=1e-4)

    model.enabled = False
    assert torch.equal(model(x).logits, own)


def affine(head: nn.Module):
    """A classifier without its constant part."""
    if hasattr(head, "fc"):
        head = head.fc
    if isinstance(head, nn.Conv2d):
        return lambda v: head.weight.flatten(1) @ v
    return lambda v: (head(v[None]) - head(torch.zeros_like(v)[None]))[0]


def test_maps_have_the_places_of_the_features() -> None:
    """A map's cell (i, j) is the token of that cell: mark one cell of the feature map and see which map answers."""
    for channels_last in (False, True):
        f = torch.zeros(1, 5, 4, 6)
        f[0, :, 1, 4] = 1
        inputs = f.permute(0, 2, 3, 1) if channels_last else f
        tokens, grid = map_tokens(torch.nn.Identity(), inputs, 5, "NHWC" if channels_last else "")
        assert grid == (4, 6) and tokens[0].sum(-1).unflatten(0, grid).nonzero().tolist() == [[1, 4]]
    square = torch.zeros(1, 4, 6, 4)  # both axes could be channels: the format decides, channels first by default
    assert map_tokens(torch.nn.Identity(), square, 4)[1] == (6, 4) and map_tokens(
        torch.nn.Identity(), square, 4, "NHWC"
    )[1] == (4, 6)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_tokens_of_a_map_are_no_copy(memory_format: torch.memory_format) -> None:
    f = torch.randn(2, 5, 4, 6).to(memory_format=memory_format)
    tokens, _ = map_tokens(torch.nn.Identity(), f, 5)
    assert tokens.data_ptr() == f.data_ptr() and torch.equal(tokens, f.flatten(2).mT)
    assert tokens.is_contiguous() == (memory_format is torch.channels_last)


@pytest.mark.parametrize(
    "name",
    ["swin_tiny_patch4_window7_224", "mixer_s32_224", "cait_xxs24_224", "deit_tiny_patch16_224"]
    + ["hiera_tiny_224"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("coat_lite_tiny", "volo_d1_224")],
)
@torch.no_grad()
def test_tokens_stand_row_by_row(name: str) -> None:
    """Where the picture changes, the token of that cell changes most."""
    backbone, x, (height, width) = backbone_of(name)
    reader = HiMapper(backbone, num_leaves=8, depth=3, width=16).reader
    cell_height, cell_width = x.shape[-2] // height, x.shape[-1] // width
    before = reader.checked(backbone, x[:1]).tokens
    for row, column in ((0, width - 1), (height - 1, 0), (height // 2, 1)):
        changed = x[:1].clone()
        cell = changed[..., row * cell_height :, column * cell_width :][..., :cell_height, :cell_width]
        cell += 3 * torch.randn_like(cell)
        moved = (reader.checked(backbone, changed).tokens - before).norm(dim=-1)[0]
        assert moved.argmax() == row * width + column


def test_tokens_in_front_are_left_out() -> None:
    """Registers and class token of a ViT, and the class token that XCiT does not declare."""
    for name in ("vit_small_patch14_reg4_dinov2", "xcit_nano_12_p16_224"):
        backbone, x, grid = backbone_of(name)
        model = HiMapper(backbone, num_leaves=8, depth=3, width=16).eval()
        with torch.no_grad():
            f, actual = backbone.forward_features(x), model.reader.read(backbone, x)
        assert torch.equal(actual.tokens, f[:, f.shape[1] - grid[0] * grid[1] :]) and f.shape[1] > grid[0] * grid[1]
        assert actual.row is not None and torch.equal(
            actual.row, f
        )  # which compiled code reads, and drops the first of


def test_pictures_of_another_size() -> None:
    backbone = timm.create_model("vit_tiny_patch16_224", depth=1, dynamic_img_size=True, num_classes=3).eval()
    model = HiMapper(backbone, num_leaves=8, depth=3, width=16).eval()
    for height, width in ((64, 96), (96, 64), (48, 48)):
        assert model(torch.randn(1, 3, height, width), return_maps=True).maps[0].shape == (
            1,
            8,
            height // 16,
            width // 16,
        )


def test_distilled_deit_while_distilling() -> None:
    """The backbone then gives a pair of logits; the mean of both is what it evaluates with."""
    backbone, x, _ = backbone_of("deit_tiny_distilled_patch16_224")
    own = backbone(x)
    model = HiMapper(backbone, num_leaves=8, depth=3, width=16).train()
    backbone.set_distilled_training(True)
    assert torch.allclose(model(x).logits, own, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("crossvit_tiny_240", TypeError, r"^CrossVit: forward_features gives a list, .*feature_fn="),
        ("pit_ti_224", ValueError, r"^PoolingVisionTransformer has no spatial features: 1 tokens"),
        pytest.param("coat_tiny", TypeError, r"^CoaT: forward_features gives a list", marks=pytest.mark.slow),
        pytest.param("pit_ti_distilled_224", ValueError, r"no spatial features: 2 tokens", marks=pytest.mark.slow),
    ],
)
def test_families_that_cannot_be_read(name: str, error: type[Exception], message: str) -> None:
    size = 240 if "240" in name else 224
    with pytest.raises(error, match=message), torch.no_grad():
        HiMapper(timm.create_model(name))(torch.randn(1, 3, size, size))


def test_a_backbone_of_features_only() -> None:
    with pytest.raises(ValueError, match="pass feature_fn="):
        HiMapper(timm.create_model("resnet10t", features_only=True))


@pytest.mark.parametrize("shape", [(2, 15, 24), (2, 17, 12), (2, 16 * 24)])
def test_a_row_that_does_not_end_with_the_tokens(shape: tuple[int, ...]) -> None:
    def read(backbone: nn.Module, x: torch.Tensor) -> Features:
        return Features(torch.zeros(2, 16, 24), (4, 4), torch.zeros(2, 24), row=torch.zeros(shape))

    model = HiMapper(ToyBackbone(), feature_fn=read, num_leaves=8, depth=3, width=16).eval()
    with pytest.raises(ValueError, match=rf"^ToyBackbone: the row \({shape[0]}, .*does not end with the tokens"):
        model(torch.zeros(2, 3, 16, 16))
