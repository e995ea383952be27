"""What timm's users expect of a model, over every size of HCFormer; much of it is slow for the large ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

import hyptree.models  # noqa: F401  registers the models
from hyptree.models import HCFormer
from hyptree.optim import param_groups

SIZES = ("pico", "nano", "tiny", "small", "medium")
PARAMETERS = {"nano": (5.1e6, 5.33e6), "tiny": (7.0e6, 7.0e6), "small": (16.1e6, 16.1e6), "medium": (33.7e6, 33.65e6)}
DIMS = {"pico": 160, "nano": 224, "tiny": 320, "small": 512, "medium": 512}
EVERY = pytest.mark.parametrize("name", SIZES)
PICO_FIRST = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "pico" else pytest.mark.slow) for n in SIZES]
)
QUICK_FIRST = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("pico", "nano") else pytest.mark.slow) for n in SIZES]
)


def create(name: str, **options) -> HCFormer:
    """A model whose branches and biases matter from the start, unlike a fresh one (LayerScale 1e-5, zero biases)."""
    model = timm.create_model(f"hcformer_{name}", **{"num_classes": 5, **options})
    for key, parameter in model.named_parameters():
        if "scale" in key:
            nn.init.constant_(parameter, 0.5)
        elif key.endswith("position.bias"):
            nn.init.normal_(parameter, std=0.3)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def picture(batch: int = 2, height: int = 64, width: int = 64, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, height, width)


# --------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_parameters_are_those_of_the_table(name):
    model = timm.create_model(f"hcformer_{name}")
    count = sum(p.numel() for p in model.parameters())
    paper, code = PARAMETERS[name]
    assert abs(count / paper - 1) < 0.05 and abs(count / code - 1) < 0.05


def test_pico_is_small():
    count = sum(p.numel() for p in timm.create_model("hcformer_pico").parameters())
    assert 0.5e6 < count < 1e6


@QUICK_FIRST
def test_every_parameter_gets_a_gradient(name):
    """A parameter without one stops distributed training."""
    model = create(name)
    model(picture()).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key


# --------------------------------------------------------------------------------------------------- timm's interface


@QUICK_FIRST
def test_forward_and_classifier(name):
    model = create(name).eval()
    x = picture()
    with torch.no_grad():
        features = model.forward_features(x)
        assert features.shape == (2, DIMS[name], 2, 2) and model.num_features == model.head_hidden_size == DIMS[name]
        torch.testing.assert_close(model(x), model.forward_head(features))
        pooled = model.forward_head(features, pre_logits=True)
        torch.testing.assert_close(pooled, features.mean((2, 3)))
        torch.testing.assert_close(model.get_classifier()(pooled), model(x))
        model.reset_classifier(7)
        assert model.num_classes == 7 and model(x).shape == (2, 7)
        model.reset_classifier(0)
        torch.testing.assert_close(model(x), pooled)
        model.reset_classifier(0, "")
        assert model(x).shape == features.shape
    assert model.pretrained_cfg["input_size"][1] == (64 if name == "pico" else 224)
    modules = dict(model.named_modules())
    first = modules[model.pretrained_cfg["first_conv"]]  # timm asks for its weight, to adapt it to other channels
    assert isinstance(first, _ConvNd) and first.weight.dim() == 4
    assert model.pretrained_cfg["classifier"] in dict(create(name).named_modules())


@QUICK_FIRST
def test_features_only(name):
    model = create(name, features_only=True)
    maps = model(picture(1, 96, 64))
    assert [m.shape[1] for m in maps] == model.feature_info.channels()
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    assert [tuple(m.shape[2:]) for m in maps] == [(24, 16), (12, 8), (6, 4), (3, 2)]
    some = create(name, features_only=True, out_indices=(-3, 2))
    assert [m.shape[1] for m in some(picture(1))] == some.feature_info.channels()
    assert len(some.model.stages) == 3 and some.feature_info.reduction() == [8, 16]
    assert all(p.grad is None for p in model.parameters())
    sum(m.square().mean() for m in maps).backward()
    missing = [key for key, p in model.named_parameters() if p.grad is None]
    assert missing == []


@QUICK_FIRST
def test_forward_intermediates(name):
    model = create(name).eval()
    x = picture()
    with torch.no_grad():
        features = model.forward_features(x)
        last, maps = model.forward_intermediates(x)
        torch.testing.assert_close(last, features)
        assert [m.shape[1] for m in maps] == [info["num_chs"] for info in model.feature_info]
        (normed,) = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)
        torch.testing.assert_close(normed, features)
        early = model.forward_intermediates(x, indices=[0, 1], stop_early=True, intermediates_only=True)
        torch.testing.assert_close(early[1], maps[1])
        nhwc = model.forward_intermediates(x, indices=[2], output_fmt="NHWC", intermediates_only=True)
        torch.testing.assert_close(nhwc[0].permute(0, 3, 1, 2), maps[2])
        assert model.prune_intermediate_layers([0, 1]) == [0, 1]
        torch.testing.assert_close(model.forward_intermediates(x, intermediates_only=True)[1], maps[1])


@pytest.mark.parametrize("pool", ["avg", "max", "avgmax", "catavgmax"])
def test_global_pool(pool):
    model = create("pico", global_pool=pool, drop_rate=0.1).eval()
    x = picture()
    with torch.no_grad():
        features = model.forward_features(x)
        average, largest = features.mean((2, 3)), features.amax((2, 3))
        both = {"avgmax": (average + largest) / 2, "catavgmax": torch.cat([average, largest], 1)}
        expected = {"avg": average, "max": largest, **both}[pool]
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), expected)
        assert model(x).shape == (2, 5)


def test_channels_and_classes():
    assert create("pico", in_chans=1, num_classes=3)(picture(channels=1)).shape == (2, 3)
    assert create("pico", num_classes=0)(picture()).shape == (2, 160)


@pytest.mark.parametrize("name", ["pico", "nano"])
@pytest.mark.parametrize("size", [(64, 64), (65, 63), (224, 96), (33, 100), (7, 5), (1, 1)])
@pytest.mark.parametrize("scaling", ["window", "fold"])
def test_any_input_size(name, size, scaling):
    model = create(name, scaling=scaling).eval()
    with torch.no_grad():
        maps = model.forward_intermediates(picture(1, *size), intermediates_only=True)
        assert torch.isfinite(model(picture(1, *size))).all()
    expected = [tuple(-(-n // step) for n in size) for step in (4, 8, 16, 32)]
    assert [tuple(m.shape[2:]) for m in maps] == expected


def test_scaling_keeps_the_fold_or_the_window():
    x = picture(1, 128, 192)
    for scaling, grid, window in (("window", (4, 4), (8, 12)), ("fold", (8, 12), (4, 4))):
        with torch.no_grad():
            first = create("pico", scaling=scaling).assignments(x)[0]
        assert first.windows.grid == grid and first.windows.window == window


def test_parameter_groups():
    model = create("nano", learnable_curvature=True)
    skipped = model.no_weight_decay()
    assert sum(key.endswith("position.bias") for key in skipped) == 16 and any("curvature" in key for key in skipped)
    decayed = {id(p) for g in param_groups_weight_decay(model, 0.05) if g["weight_decay"] > 0 for p in g["params"]}
    names = {id(p): key for key, p in model.named_parameters()}
    assert all(names[i].endswith(".weight") and model.get_parameter(names[i]).dim() > 1 for i in decayed)
    ours = {id(p) for g in param_groups(model, 0.05) if g["weight_decay"] > 0 for p in g["params"]}
    assert ours == decayed
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    scales = {names[id(p)]: g["lr_scale"] for g in groups for p in g["params"]}
    assert scales["head.fc.weight"] == 1.0
    assert scales["stages.0.downsample.weight"] < scales["stages.0.blocks.1.mlp.fc1.weight"]
    assert scales["stages.0.blocks.1.mlp.fc1.weight"] < scales["stages.2.blocks.0.mlp.fc1.weight"]
    assert scales["stages.2.blocks.0.mlp.fc1.weight"] < scales["stages.2.blocks.5.mlp.fc1.weight"]


@QUICK_FIRST
def test_grad_checkpointing_changes_nothing(name):
    model = create(name, img_size=64).train()
    x = picture(1)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.set_grad_checkpointing()
    assert all(stage.grad_checkpointing for stage in model.stages)
    for got, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(got, expected)


def test_stochastic_depth_is_linear_in_depth():
    model = create("nano", drop_path_rate=0.11)
    rates = [getattr(b.drop_path, "drop_prob", 0.0) for stage in model.stages for b in stage.blocks]
    torch.testing.assert_close(torch.tensor(rates), torch.linspace(0, 0.11, 12))


# ------------------------------------------------------------------------------------------------ torch's other doors


@PICO_FIRST
def test_compile_fullgraph_equals_eager(name):
    torch.compiler.reset()
    model = create(name, img_size=64).eval()
    x = picture(1).requires_grad_()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got, expected = compiled(x), model(x)
    torch.testing.assert_close(got, expected)
    cotangent = torch.randn_like(expected)
    a, b = (torch.autograd.grad(out, [x, *model.parameters()], cotangent) for out in (got, expected))
    for u, v in zip(a, b, strict=True):
        torch.testing.assert_close(u, v, rtol=1e-4, atol=1e-5 * (1 + v.abs().max().item()))


@pytest.mark.slow
@EVERY
def test_inductor_equals_eager(name):
    torch.compiler.reset()
    model = create(name, img_size=64).eval()
    x = picture(2)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), rtol=1e-3, atol=1e-4)


@PICO_FIRST
def test_export_with_a_dynamic_batch(name):
    model = create(name, img_size=64).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (picture(2),), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        x = picture(3)
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.slow
def test_export_at_a_size_that_needs_padding_and_interpolation():
    model = create("pico").eval()
    x = picture(1, 72, 50)
    with torch.no_grad():
        model(x)  # what is kept from here must not reach the graph
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@EVERY
def test_autocast_is_close(name):
    model = create(name, img_size=64).eval()
    x = picture()
    with torch.no_grad():
        expected = model.forward_features(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model.forward_features(x)
    assert torch.isfinite(got).all()
    assert (got.float() - expected).norm() < 0.05 * expected.norm()


@EVERY
def test_channels_last_is_the_same(name):
    model = create(name, img_size=64).eval()
    x = picture()
    with torch.no_grad():
        expected = model(x)
        model.to(memory_format=torch.channels_last)
        torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-5)


@QUICK_FIRST
def test_safetensors_round_trip(name, tmp_path):
    from safetensors.torch import load_file, save_model

    model = create(name, learnable_curvature=True).eval()
    save_model(model, tmp_path / "weights.safetensors")
    state = load_file(tmp_path / "weights.safetensors")
    assert set(state) == set(model.state_dict())  # nothing shared, nothing left out
    other = timm.create_model(f"hcformer_{name}", num_classes=5, learnable_curvature=True).eval()
    other.load_state_dict(state)
    x = picture(1)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))


def test_deepcopy_and_pickle():
    model = create("pico").eval()
    x = picture(1, 96, 96)  # another size, so that interpolated biases are kept
    with torch.no_grad():
        expected = model(x)
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(clone(x), expected)
            clone.stages[0].blocks[0].mixer.patch.position.bias += 1
        assert torch.equal(model(x), expected)


def test_same_seed_same_weights_same_result():
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        model = timm.create_model("hcformer_pico", num_classes=4, drop_path_rate=0.2).train()
        out = model(picture())
        out.sum().backward()
        results.append([out, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_empty_batch():
    assert create("pico")(picture(0)).shape == (0, 5)


# ------------------------------------------------------------------------------------------- assignments and switches


@QUICK_FIRST
def test_assignments_of_every_block_in_one_forward(name):
    model = create(name).eval()
    x = picture(2)
    calls = []
    model.stages[0].downsample.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        logits, seen = model.assignments(x, with_output=True)
        assert len(calls) == 1
        assert torch.equal(logits, model(x))
    assert [(a.stage, a.block) for a in seen] == [
        (s, b) for s, st in enumerate(model.stages) for b in range(len(st.blocks))
    ]
    heads = [stage.blocks[0].mixer.num_heads for stage in model.stages]
    for a in seen:
        height = 16 >> a.stage
        assert a.patch.shape[:4] == (2, heads[a.stage], height, height) and a.windows.size == (height, height)
        torch.testing.assert_close(a.patch.sum(-1), torch.ones_like(a.patch[..., 0]))
        assert (a.window is None) == (a.stage == 3)
        if a.window is not None:
            torch.testing.assert_close(a.window.sum(-1), torch.ones_like(a.window[..., 0]))
            assert a.window_centres.norm(dim=-1).max() <= 1 + 1e-6


SWITCHES = {
    "both hyperbolic": {"patch_geometry": "hyperbolic"},
    "both euclidean": {"window_geometry": "euclidean"},
    "hard": {"assignment": "hard"},
    "no position bias": {"position_bias": False},
    "shifted": {"context": "shifted", "depths": (2, 2, 2, 1)},
    "no context": {"context": "none"},
    "curvature": {"curvature": 10.0},
    "learned curvature": {"learnable_curvature": True},
    "window centres": {"window_centres": 1},
    "no mixer norm": {"mixer_norm": False},
    "input norm": {"input_norm": True},
    "layer scale": {"layer_scale": 1e-5},
}


@pytest.mark.parametrize("name", list(SWITCHES))
def test_every_switch_trains_and_matters(name):
    torch.manual_seed(5)
    plain = create("pico", depths=SWITCHES[name].get("depths", (1, 1, 2, 1)))
    torch.manual_seed(5)
    model = create("pico", **SWITCHES[name])
    x = picture()
    out = model(x)
    out.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    if name == "learned curvature":  # starts as the fixed one
        raw = [p for key, p in model.named_parameters() if key.endswith("curvature.raw")]
        assert len(raw) == 2 and all(p.grad != 0 for p in raw)
        return
    state = plain.state_dict()
    shared = {k: v for k, v in model.state_dict().items() if k in state and v.shape == state[k].shape}
    plain.load_state_dict(shared, strict=False)
    assert (plain(x) - out).abs().max() > 1e-6


def test_shifted_windows_alternate():
    with torch.no_grad():
        seen = create("pico", context="shifted", depths=(2, 1, 1, 1)).assignments(picture(1))
    assert [a.windows.offset for a in seen] == [(0, 0), (2, 2), (0, 0), (0, 0), (0, 0)]
    assert seen[1].windows.grid == (5, 5) and all(a.window is None for a in seen)


def test_one_number_of_window_centres_changes_the_stages_with_several_windows():
    with torch.no_grad():
        seen = create("nano", window_centres=7).assignments(picture(1, 224, 224))
    assert [a.window_grid for a in seen if a.block == 0] == [(7, 7), (7, 7), (1, 1), None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": "hierachy"}, "did you mean 'hierarchy'"),
        ({"window_geometry": "spherical"}, "window_geometry must be one of .*'spherical'"),
        ({"assignment": "none"}, "assignment must be one of .*'none'"),
        ({"depths": (1, 2)}, "depths needs one value for each of the 4 stages"),
        ({"folds": 7}, "folds needs one value"),
        ({"img_size": (64, 64, 3)}, "img_size"),
        ({"global_pool": "median"}, "global_pool must be one of .*'median'"),
        ({"global_pool": ""}, "set num_classes=0"),
        ({"curvature": 0.0}, "curvature"),
        ({"learnable_curvature": True, "window_geometry": "euclidean"}, "needs a hyperbolic level"),
        ({"context": "shifted", "window_centres": 4}, "window_centres"),
        ({"pretrained": True}, "no pretrained weights"),
    ],
)
def test_bad_values_are_one_line(options, words):
    with pytest.raises(ValueError, match=words) as error:
        timm.create_model("hcformer_pico", **options)
    assert "\n" not in str(error.value)


def test_wrong_pictures_are_refused():
    with pytest.raises(ValueError, match=r"expected pictures \(B, 3, H, W\), got \(2, 1, 64, 64\)"):
        create("pico")(picture(channels=1))
