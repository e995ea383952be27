"""The clustering mixer equals its definition, values and gradients, for every switch, odd sizes and padding."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from hyptree.geometry import Lorentz
from hyptree.models.convs import ConvStem, Downsample, MapBatchNorm, NormedDownsample, Stem
from hyptree.models.hcformer import plain
from hyptree.nn import ClusterMixer
from hyptree.nn.cluster.level import PositionBias
from hyptree.ops.cluster_map.reference import distances
from hyptree.ops.map_norm import MapNorm
from hyptree.ops.windows import cut, join, plan, pool

CASES = {  # size of the map, fold, patch-level centres, window-level centres, switches
    "paper": ((6, 6), 3, 2, 2, {}),
    "one centre per window": ((6, 6), 3, 1, 2, {}),
    "overlapping cells": ((5, 7), 1, 3, 1, {}),
    "padding below and right": ((5, 7), 2, 2, 1, {}),
    "padding leaves a centre empty": ((7, 4), 2, 4, 1, {}),
    "fewer windows than the fold": ((5, 6), 4, 2, 2, {}),
    "no window level": ((4, 6), 2, 2, 0, {}),
    "shifted": ((6, 4), 2, 2, 0, {"shifted": True}),
    "shifted, odd": ((7, 5), 2, 3, 0, {"shifted": True}),
    "both hyperbolic": ((4, 4), 1, 2, 1, {"patch_geometry": "hyperbolic"}),
    "hyperbolic, padding": ((7, 8), 2, 2, 1, {"patch_geometry": "hyperbolic"}),
    "both euclidean": ((6, 4), 2, 2, 2, {"window_geometry": "euclidean"}),
    "hard": ((6, 6), 3, 2, 2, {"assignment": "hard"}),
    "hard, padding": ((5, 7), 2, 2, 1, {"assignment": "hard"}),
    "hard, euclidean": ((6, 6), 3, 2, 2, {"assignment": "hard", "window_geometry": "euclidean"}),
    "no bias, no norm": ((6, 6), 3, 2, 2, {"position_bias": False, "norm": False}),
    "learned curvature": ((6, 6), 3, 2, 2, {"curvature": 0.3, "learnable_curvature": True}),
    "clipped": ((6, 6), 3, 2, 2, {"clip": 0.05}),
}


def make(*layout, dim: int = 3, heads: int = 2, head_dim: int = 2, **options) -> ClusterMixer:
    """A mixer in float64 whose every parameter counts."""
    mixer = ClusterMixer(dim, heads, head_dim, *layout, **options).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    for level in (mixer.patch, mixer.window):
        if level is not None and level.alpha is not None:
            nn.init.constant_(level.alpha, 1.7)
    return mixer


@pytest.mark.parametrize("name", list(CASES))
def test_mixer_equals_its_definition(name: str):
    *layout, options = CASES[name]
    mixer = make(*layout, **options)
    slow = definition(*layout, **options)
    slow.load_state_dict(mixer.state_dict())
    x = torch.randn(2, *layout[0], 3, dtype=torch.float64, requires_grad=True)
    outs = mixer(x), slow(x)
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-10)
    cotangent = torch.randn_like(x)
    expected = dict(slow.named_parameters(), x=x)
    expected = dict(zip(expected, torch.autograd.grad(outs[1], list(expected.values()), cotangent), strict=True))
    actual = torch.autograd.grad(outs[0], [x, *mixer.parameters()], cotangent)
    for name, grad in zip(["x", *dict(mixer.named_parameters())], actual, strict=True):
        torch.testing.assert_close(grad, expected.pop(name), rtol=1e-7, atol=1e-8)
        assert grad.abs().sum() > 0
    assert not expected


def definition(size, fold, patch_centres, window_centres, shifted=False, norm=True, clip=1.0, **options) -> plain.Mixer:
    """What ``make`` makes, by its definition."""
    per_stage = {"num_heads": 2, "folds": fold, "patch_centres": patch_centres, "window_centres": window_centres}
    options |= {name: [value] for name, value in per_stage.items()}
    options = {**plain.DEFAULTS, "head_dim": 2, "mixer_norm": norm, "clip_norm": clip, **options}
    return plain.Mixer(options, 0, 3, size, shifted).double()


@pytest.mark.parametrize("name", list(CASES))
def test_rows_of_the_assignment_sum_to_one(name: str):
    *layout, options = CASES[name]
    size = layout[0]
    mixer = make(*layout, **options)
    record = []
    out = mixer(x := torch.randn(2, *size, 3, dtype=torch.float64), record)
    torch.testing.assert_close(out, mixer(x), rtol=0, atol=0)
    (seen,) = record
    (rows, columns), num_centres = seen.windows.grid, seen.patch_grid[0] * seen.patch_grid[1]
    assert seen.patch.shape == (2, 2, *size, num_centres)
    assert seen.patch_centres.shape == (2, 2, rows, columns, num_centres, 2)
    torch.testing.assert_close(seen.patch.sum(-1), torch.ones(2, 2, *size, dtype=torch.float64))
    assert (seen.patch >= 0).all()
    if layout[3]:
        m = seen.window_grid[0] * seen.window_grid[1]
        assert seen.window.shape == (2, 2, rows, columns, m)
        assert seen.window_points.shape == (2, 2, rows, columns, 2) and seen.window_centres.shape == (2, 2, m, 2)
        torch.testing.assert_close(seen.window.sum(-1), torch.ones(2, 2, rows, columns, dtype=torch.float64))
    else:
        assert seen.window is None and seen.lorentz_centres() is None
    if options.get("assignment") == "hard":
        assert ((seen.patch == 0) | (seen.patch == 1)).all()


def test_recorded_assignment_is_that_of_the_formula():
    mixer = make((4, 6), 2, 2, 2, curvature=0.7)
    x = torch.randn(1, 4, 6, 3, dtype=torch.float64)
    record = []
    mixer(x, record)
    (seen,) = record
    both = mixer.points_and_values(x)[0]
    head, window, patch = (
        1,
        (1, 0),
        (3, 2),
    )  # the patch in row 3, column 2 lies in the lower left window of 2 x 3 patches
    points = both[..., head * 2 : head * 2 + 2]
    centres = [points[2:3, 0:2], points[2:3, 1:3], points[3:4, 0:2], points[3:4, 1:3]]
    logits = torch.stack([F.cosine_similarity(points[patch], c.mean((0, 1)), dim=0) for c in centres])
    logits = mixer.patch.alpha * logits + mixer.patch.position.bias[2, head, :, 5]
    torch.testing.assert_close(seen.patch[0, head, 3, 2], logits.softmax(0))
    assert seen.labels()[0, head, 3, 2] == 2 * 4 + logits.argmax()
    assert seen.labels().unique().numel() > 4 and seen.labels().max() < 16
    point = seen.window_points[0, head][window]
    mean = points[2:4, 0:3].mean((0, 1))
    torch.testing.assert_close(point, mean / mean.norm().clamp_min(1))
    torch.testing.assert_close(Lorentz(0.7).logmap0(seen.lorentz_points()[0, head][window]), point)
    distance = Lorentz(0.7).pairwise_dist(seen.lorentz_points()[0, head].flatten(0, 1), seen.lorentz_centres()[0, head])
    expected = (-mixer.window.alpha * distance + mixer.window.position.bias[0, head].T).softmax(-1)
    torch.testing.assert_close(seen.window[0, head].flatten(0, 1), expected, rtol=1e-6, atol=1e-7)


def test_permuting_windows_permutes_outputs():
    """Without position bias and window level, a window does not know where it is."""
    mixer = make((6, 6), 3, 2, 0, position_bias=False, norm=False)
    x = torch.randn(2, 6, 6, 3, dtype=torch.float64)
    windows = plan((6, 6), fold=(3, 3))
    order = torch.randperm(9)

    def shuffle(t):
        return join(cut(t, windows, 1, 1)[0][:, order], windows)

    torch.testing.assert_close(mixer(shuffle(x)), shuffle(mixer(x)))
    assert not torch.allclose(mixer(shuffle(x)), mixer(x))


def test_window_level_tells_windows_about_each_other():
    lone, linked = (make((4, 4), 2, 2, m, norm=False) for m in (0, 2))
    x = torch.randn(1, 4, 4, 3, dtype=torch.float64)
    moved = x.clone()
    moved[0, 3, 3] += 1
    assert torch.equal(lone(x)[0, :2, :2], lone(moved)[0, :2, :2])
    assert (linked(x)[0, :2, :2] - linked(moved)[0, :2, :2]).abs().min() > 1e-8


def test_small_curvature_approaches_the_euclidean_distance():
    x, y = torch.randn(3, 5, 4, dtype=torch.float64) / 4, torch.randn(3, 2, 4, dtype=torch.float64) / 4
    limit = torch.cdist(y, x)
    errors = [(distances(y, x, c, 1.0) - limit).abs().max().item() for c in (1.0, 1e-2, 1e-4, 1e-6)]
    assert errors[0] > 1e-3 and errors[3] < 1e-6
    assert all(b < a / 50 for a, b in pairwise(errors))  # the error is linear in c


def test_padding_takes_no_part():
    """A map that fits and the same map inside a larger cut: what lies outside changes nothing."""
    mixer = make((3, 3), 1, 2, 1)
    x = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    padded = make((4, 4), 1, 2, 1, position_bias=False)
    padded.load_state_dict({k: v for k, v in mixer.state_dict().items() if "position" not in k})
    nn.init.zeros_(mixer.patch.position.bias)
    torch.testing.assert_close(mixer(x), padded(x))
    fixed = make((4, 4), 2, 2, 1, scaling="fold", position_bias=False)  # windows of 2 x 2 on a 3 x 3 map
    record = []
    fixed(x, record)
    assert record[0].windows.grid == (2, 2) and record[0].windows.is_padded
    corner = record[0].patch[:, :, 2, 2]  # alone in its window: three of four centres average nothing
    torch.testing.assert_close(corner, torch.tensor([1.0, 0, 0, 0], dtype=torch.float64).expand_as(corner))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("c", [0.1, 1.0, 7.0])
def test_distances_are_those_of_the_lorentz_model(c: float, dtype: torch.dtype):
    """Near and far ones, on one ray, at the origin, beyond the clip."""
    x = torch.randn(2, 7, 3, dtype=dtype)
    x[0, 0], x[0, 1] = 0, 2 * x[0, 2]
    shift = torch.tensor([[[1e-3]], [[0.0]]], dtype=dtype)
    y = torch.cat([x[:, :3] + shift, 30 * torch.randn(2, 2, 3, dtype=dtype)], 1)
    capped = [v.double() * (2.5 / v.double().norm(dim=-1, keepdim=True).clamp_min(1e-9)).clamp_max(1) for v in (y, x)]
    expected = Lorentz(c).pairwise_dist(*(Lorentz(c).expmap0(v) for v in capped))
    tolerance = torch.finfo(dtype).eps ** 0.5 * math.cosh(2.5 * c**0.5) / c**0.5  # of points that coincide
    torch.testing.assert_close(distances(y, x, c, 2.5).double(), expected, rtol=1e-4, atol=tolerance)


def test_map_norm_is_group_norm_with_one_group():
    norm = MapNorm(4).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64) + 1
    expected = F.group_norm(x.movedim(-1, 1), 1, norm.weight, norm.bias, norm.eps).movedim(1, -1)
    torch.testing.assert_close(norm(x), expected)
    on_another_device = MapNorm(4, device="meta", dtype=torch.float64)(x.to("meta"))
    assert on_another_device.shape == x.shape


@pytest.mark.parametrize("size", [(4, 4), (7, 5), (8, 12), (13, 3)])
@pytest.mark.parametrize("cells", [(1, 1), (2, 3), (4, 3)])
def test_pool_is_adaptive_average_pooling(size, cells):
    cells = (min(size[0], cells[0]), min(size[1], cells[1]))
    x = torch.randn(2, *size, 3, dtype=torch.float64)
    expected = F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), cells).permute(0, 2, 3, 1)
    torch.testing.assert_close(pool(x, cells), expected)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (5, 9), (16, 16), (57, 56)])
def test_every_patch_is_in_one_window_and_no_window_is_empty(size, shifted):
    for fold in (1, 2, 7):
        windows = plan(size, fold=(fold, fold), shifted=shifted)
        x = torch.arange(size[0] * size[1], dtype=torch.float64).reshape(1, *size, 1)
        parts = cut(x + 2, windows, 1, 1)
        assert torch.equal(join(parts[0], windows), x + 2)
        held = (parts[0] != 1).flatten(2).sum(-1)  # padding is one
        assert held.min() >= 1 and held.sum() == x.numel()
        assert windows.grid[0] <= fold + shifted and windows.grid[1] <= fold + shifted


# ------------------------------------------------------------------------------------------------------- position bias


def test_position_bias_at_its_own_size_is_the_parameter():
    position = PositionBias(2, ((2, 2), (3, 4), (2, 1)))
    assert position(((2, 2), (3, 4), (2, 1))) is position.bias


def test_position_bias_is_resized_by_bilinear_interpolation():
    position = PositionBias(2, ((2, 2), (2, 2), (1, 1))).double()
    nn.init.normal_(position.bias)
    larger = position(((2, 2), (4, 6), (1, 1))).reshape(4, 2, 4, 6)
    own = position.bias.reshape(4, 2, 2, 2)
    torch.testing.assert_close(larger, F.interpolate(own, (4, 6), mode="bilinear", align_corners=False))
    more = position(((4, 2), (2, 2), (1, 1))).reshape(4, 2, 2, 4)
    grid = position.bias.reshape(2, 2, 8).permute(2, 0, 1).unsqueeze(0)
    expected = F.interpolate(grid, (4, 2), mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
    torch.testing.assert_close(more.flatten(2), expected)
    position(((3, 3), (3, 3), (2, 2))).sum().backward()
    assert (position.bias.grad > 0).all()


def test_a_resized_position_bias_follows_the_parameter():
    position = PositionBias(1, ((1, 1), (2, 2), (1, 1))).eval()
    layout = ((1, 1), (3, 3), (1, 1))
    with torch.inference_mode():
        assert (position(layout) == 0).all()
        position.bias.data.fill_(1.0)  # which raises no version
        assert (position(layout) == 1).all()
    position.load_state_dict({"bias": torch.full_like(position.bias, 2.0)}, assign=True)
    with torch.no_grad():
        assert (position(layout) == 2).all()
    assert position(layout).requires_grad


# ----------------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patch_geometry": "hyperbolik"}, "did you mean 'hyperbolic'"),
        ({"window_geometry": "flat"}, "window_geometry 'flat'"),
        ({"assignment": "firm"}, "assignment 'firm'"),
        ({"scaling": "x"}, "scaling 'x'"),
        ({"fold": 0}, "fold must be 1 or more, got 0"),
        ({"patch_centres": 0}, "patch_centres"),
        ({"window_centres": -1}, "window_centres"),
        ({"shifted": True, "window_centres": 2}, "shifted windows replace the window level"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"curvature": -1.0}, "curvature"),
    ],
)
def test_bad_arguments_are_one_line(options, words):
    with pytest.raises(ValueError, match=words) as error:
        ClusterMixer(4, 2, 2, (4, 4), **{"fold": 2, "patch_centres": 2, "window_centres": 0, **options})
    assert "\n" not in str(error.value)


def test_wrong_maps_are_refused():
    mixer = ClusterMixer(4, 2, 2, (4, 4))
    with pytest.raises(ValueError, match=r"channels last.*\(2, 4, 6, 6\)"):
        mixer(torch.randn(2, 4, 6, 6))


# ---------------------------------------------------------------------------------------------------- stems and norms


@pytest.mark.parametrize("size", [(64, 64), (61, 50), (5, 9)])
def test_both_stems_round_up_to_the_same_map(size):
    x = torch.randn(2, 3, *size)
    plain, normed = Stem(3, 24)(x), ConvStem(3, 24, MapBatchNorm)(x)
    assert plain.shape == normed.shape == (2, -(-size[0] // 4), -(-size[1] // 4), 24)
    smaller = Downsample(24, 32)(plain), NormedDownsample(24, 32, MapNorm)(plain)
    assert smaller[0].shape == smaller[1].shape == (2, -(-plain.shape[1] // 2), -(-plain.shape[2] // 2), 32)


def test_normed_convolutions_are_convolution_norm_gelu():
    x = torch.randn(3, 6, 5, 8, dtype=torch.float64)
    layer = NormedDownsample(8, 4, MapBatchNorm, dtype=torch.float64)
    maps = F.conv2d(x.permute(0, 3, 1, 2), layer.conv.weight, stride=2, padding=1)
    mean, var = maps.mean((0, 2, 3), keepdim=True), maps.var((0, 2, 3), unbiased=False, keepdim=True)
    expected = F.gelu((maps - mean) / (var + 1e-5).sqrt()).permute(0, 2, 3, 1)
    torch.testing.assert_close(layer(x), expected)


def test_batch_norm_leaves_pictures_alone_in_evaluation():
    model = timm.create_model("hcformer_pico", num_classes=5).eval()
    x = torch.randn(3, 3, 64, 64)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "value"), [("convs", "normd"), ("norm", "layer")])
def test_unknown_convolutions_and_norms_are_one_line(name, value):
    with pytest.raises(ValueError, match=f"{name} '{value}' is unknown"):
        timm.create_model("hcformer_pico", **{name: value})


class Doubled(nn.Module):
    """Stands for a layer that somebody put in the place of a linear one, such as an adapter."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear, self.weight, self.bias = linear, linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.linear(x)


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_a_layer_in_the_place_of_the_mlps_is_called(layer: str):
    """The block computes the products of plain linear layers by itself; others it must ask."""
    model = timm.create_model("hcformer_pico", num_classes=5).double().eval()
    mlp = model.stages[1].blocks[0].mlp
    linear, x = getattr(mlp, layer), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before = model(x)
    setattr(mlp, layer, Doubled(linear))
    actual = model(x)
    setattr(mlp, layer, linear)
    with torch.no_grad():
        linear.weight.mul_(2)
        linear.bias.mul_(2)
    torch.testing.assert_close(actual, model(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(actual, before)
