"""The wrapper: identity at the start, repeatable evaluation, gradients, options, what others ask of it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import warnings

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hyptree
from hyptree.errors import UserError
from hyptree.geometry import Euclidean, Lorentz
from hyptree.models import HiMapper, HiMapperOutput
from hyptree.models.himapper import Features
from hyptree.models.himapper.output import image_dependence
from tests.models.himapper.toy import ToyBackbone, mapper

STATS = {
    "parent_retrieval",
    "parent_distance",
    "level_distance",
    "distance_ratio",
    "image_dependence",
    "curvature",
}


def pictures(batch: int = 3, size: int = 32) -> Tensor:
    return torch.randn(batch, 3, size, size)


# ------------------------------------------------------------------------------------------------- forward and modes


def test_what_comes_out() -> None:
    model = HiMapper(ToyBackbone(classes=7)).train()
    out = model(pictures(), return_maps=True)
    assert isinstance(out, HiMapperOutput) and out.logits.shape == (3, 7) and out.pre_logits.shape == (3, 24)
    for level, size in enumerate((32, 16, 8, 4)):
        assert out.nodes[level].shape == (3, size, 128) and out.hyperbolic[level].shape == (3, size, 128)
        assert out.maps[level].shape == (3, size, 8, 8)
        assert (out.maps[level].sum((-1, -2)) - 1).abs().max() < 1e-5
    assert set(out.losses) == {"contrastive", "kl", "aux_total"} and out.curvature == 1
    total = 0.1 * out.losses["contrastive"] + 0.01 * out.losses["kl"]
    assert torch.allclose(out.losses["aux_total"], total)
    assert set(out.stats) == STATS | {"map_entropy"}
    assert all(value.dim() == 0 and not value.requires_grad for value in out.stats.values())
    assert 0.3 < out.stats["map_entropy"] <= 1
    assert model.levels == (32, 16, 8, 4) and model.grid == (8, 8)


def test_arguments_and_defaults_are_those_of_the_design() -> None:
    defaults = {
        "num_leaves": 32,
        "depth": 4,
        "width": 128,
        "heads": 4,
        "hyp_dim": None,
        "geometry": "lorentz",
        "probabilistic": True,
        "sibling_std": 0.75,
        "query_residual": False,
        "tau": 0.2,
        "alpha": 0.1,
        "beta": 0.01,
        "enabled": True,
        "mixture": "moment",
        "noise": "shared",
        "attention": "cosine",
        "sign": "corrected",
        "learn_tau": False,
        "dropout": 0.0,
    }
    arguments = inspect.signature(HiMapper).parameters
    assert {name: arguments[name].default for name in defaults} == defaults
    assert list(arguments)[:14] == ["backbone", *list(defaults)[:13]]  # those of the design come first, in its order
    assert [f.name for f in dataclasses.fields(HiMapperOutput)] == [
        *("logits", "pre_logits", "losses", "nodes", "hyperbolic", "curvature", "maps", "stats"),
    ]
    model = HiMapper(ToyBackbone())
    assert model.tree.sibling_std == 0.75 and not model.decompose.query_residual and model.loss.tau == 0.2
    assert model.decompose.log_scale is not None and model.space.proj.weight.shape == (128, 128)
    assert HiMapper(ToyBackbone(), hyp_dim=2).space.proj.weight.shape == (2, 128) and model.space.proj.bias is None


def test_what_is_computed_when() -> None:
    model = mapper()
    x = pictures()
    assert set(model.train()(x).stats) == STATS and model(x).losses is not None
    assert model(x, compute_losses=False).losses is None and model(x, compute_losses=False).maps is None
    model.eval()
    assert model(x).losses is None and model(x).stats == {}
    losses = model(x, compute_losses=True).losses
    assert set(losses) == {"contrastive", "kl", "aux_total"} and losses["kl"] == model.tree(3)[1] > 0
    assert set(model(x, return_maps=True).stats) == STATS | {"map_entropy"}


def test_evaluation_repeats_bit_by_bit_and_training_does_not() -> None:
    model = mapper().eval()
    x = pictures()
    first, second = model(x), model(x)
    assert torch.equal(first.logits, second.logits)
    assert all(torch.equal(a, b) for a, b in zip(first.nodes, second.nodes, strict=True))
    model.train()
    torch.manual_seed(1)
    one = model(x).logits
    torch.manual_seed(2)
    two = model(x).logits
    torch.manual_seed(1)
    again = model(x).logits
    assert not torch.allclose(one, two, atol=1e-4) and torch.equal(one, again)


def test_a_tree_without_variances_has_no_noise() -> None:
    model = mapper(probabilistic=False).train()
    x = pictures()
    first, second = model(x), model(x)
    assert torch.equal(first.logits, second.logits) and first.losses["kl"] == 0
    assert torch.allclose(first.logits, model.eval()(x).logits, atol=1e-6)
    assert not any("logvar" in name for name, _ in model.named_parameters())


def test_without_noise_training_is_evaluation() -> None:
    """As the variances shrink the samples become the means."""
    model = mapper(mixture="moment")
    with torch.no_grad():
        model.tree.mu.copy_(model.tree.mu[:1].expand(8, -1))  # no variance between siblings either
        model.tree.logvar.fill_(-40)
    x = pictures()
    assert torch.allclose(model.train()(x).logits, model.eval()(x).logits, atol=1e-5)


def test_switched_off_it_is_the_backbone() -> None:
    backbone = ToyBackbone()
    model = mapper(backbone, enabled=False)
    x = pictures()
    out = model(x)
    assert torch.equal(out.logits, backbone(x)) and out.losses is None and out.nodes == [] and out.stats == {}
    model.enabled = True
    assert not torch.allclose(model(x).logits, backbone(x), atol=1e-3)
    with pytest.raises(UserError, match="switched off"):
        model.to_tree(out)


def test_what_was_read_enters_by_the_classifier() -> None:
    backbone = ToyBackbone()
    model = mapper(backbone).eval()
    x = pictures()
    out = model(x)
    delta = out.pre_logits - backbone.forward_head(backbone.forward_features(x), pre_logits=True)
    assert delta.abs().max() > 0.1
    assert torch.allclose(out.logits, backbone(x) + delta @ backbone.head.weight.T, atol=1e-5)


def test_image_dependence_by_hand() -> None:
    nodes = torch.tensor([[[0.0], [2.0], [1.0]], [[4.0], [6.0], [1.0]]])  # two images, two leaves and their parent
    assert image_dependence(nodes, (2, 1)).item() == pytest.approx(((4 * 4) / 6) / ((4 * 1) / 6))
    assert image_dependence(nodes[:1], (2, 1)) == 0
    queries_only = torch.randn(1, 3, 5).expand(4, -1, -1)
    assert image_dependence(queries_only, (2, 1)) < 1e-6


# -------------------------------------------------------------------------------------------------------- gradients

ARMS: dict[str, dict[str, object]] = {
    "defaults": {},
    "no losses": {"alpha": 0.0, "beta": 0.0},
    "euclidean": {"geometry": "euclidean"},
    "deterministic": {"probabilistic": False},
    "official": {"sibling_std": 0.01, "query_residual": True, "attention": "scaled"},
    "paper": {"sign": "paper"},
    "stratified": {"mixture": "stratified", "noise": "per_image", "learn_tau": True, "dropout": 0.1, "hyp_dim": 3},
}


@pytest.mark.parametrize("arm", list(ARMS))
def test_gradients_reach_everything(arm: str) -> None:
    """A parameter without gradient stops distributed training; one with a gradient that is always zero is dead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mapper(**ARMS[arm]).train()
    out = model(pictures())
    (out.logits.square().sum() + out.losses["aux_total"]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        if arm == "no losses" and name.startswith("space."):
            assert parameter.grad.abs().max() == 0, name
        else:
            assert parameter.grad.abs().max() > 0, name
    assert set(out.stats) == STATS
    assert out.stats["curvature"].item() == (0 if arm == "euclidean" else 1)


def test_the_printed_sign_warns() -> None:
    with pytest.warns(UserWarning, match="away from their parents"):
        mapper(sign="paper")


# ---------------------------------------------------------------------------------------------------- what others ask


def test_parameter_groups() -> None:
    model = mapper()
    backbone, plugin = model.param_groups(1e-4)
    assert (backbone["name"], plugin["name"]) == ("backbone", "plugin") and backbone["lr"] == plugin["lr"] == 1e-4
    assert model.param_groups(1e-4, 1e-3)[1]["lr"] == 1e-3
    assert {id(p) for p in backbone["params"]} == {id(p) for p in model.backbone.parameters()}
    groups = model.param_groups(1e-4, 1e-3, weight_decay=0.05)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    spared = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    own = dict(model.named_parameters())
    for name in (
        "tree.mu",
        "tree.logvar",
        "space.log_c",
        "decompose.log_scale",
        "encode.in_norm.weight",
        "backbone.stem.bias",
    ):
        assert id(own[name]) in spared, name
    assert id(own["backbone.stem.bias"]) in spared
    assert id(own["space.proj.weight"]) not in spared and id(own["backbone.stem.weight"]) not in spared
    model.backbone.no_weight_decay = lambda: {"stem.weight"}  # timm's way to say it
    assert {"backbone.stem.weight", "tree.mu"} <= model.no_weight_decay()
    torch.optim.AdamW(groups)


def test_weights_keep_their_names_and_copies_are_free() -> None:
    backbone = ToyBackbone()
    model = mapper(backbone).eval()
    assert model.to_plain() is backbone
    state = model.state_dict()
    assert {name[9:] for name in state if name.startswith("backbone.")} == set(backbone.state_dict())
    assert not any("parent" in name or "pooling" in name for name in state)  # the forest is no weight
    x = pictures()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x).logits, model(x).logits)
        nn.init.zeros_(twin.backbone.head.weight)
        assert not torch.equal(twin(x).logits, model(x).logits)
    fresh = mapper(ToyBackbone()).eval()
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x).logits, model(x).logits)


def test_precision_follows_the_backbone() -> None:
    model = mapper(ToyBackbone().double()).eval()
    assert model(pictures().double()).logits.dtype == torch.float64
    half = mapper(ToyBackbone().bfloat16())
    for mode in (True, False):
        out = half.train(mode)(pictures().bfloat16(), return_maps=True, compute_losses=True)
        assert out.logits.dtype == torch.bfloat16 and out.losses["contrastive"].dtype == torch.float32
        assert all((level.sum((-1, -2)) - 1).abs().max() < 1e-5 for level in out.maps)


@pytest.mark.parametrize("geometry", ["lorentz", "euclidean"])
def test_the_tree_of_a_picture(geometry: str) -> None:
    model = mapper(geometry=geometry).eval()
    out = model(pictures(), return_maps=True)
    tree = model.to_tree(out, 1)
    assert tree.num_nodes == 14 and len(tree.roots) == 2 and tree.is_binary
    assert tree.parent[:4].tolist() == [8, 8, 9, 9] and tree.parent[8:].tolist() == [12, 12, 13, 13, -1, -1]
    assert tree.height.tolist() == [0] * 8 + [1] * 4 + [2] * 2
    assert np.allclose(tree.embedding, torch.cat([h[1] for h in out.hyperbolic]).detach().numpy())
    assert np.allclose(tree.support, torch.cat([m[1] for m in out.maps]).detach().numpy())
    assert isinstance(tree.manifold, Lorentz if geometry == "lorentz" else Euclidean)
    assert tree.label[9] == "level 2 node 1"
    assert model.to_tree(model(pictures())).support is None


def test_hyptree_explains_it() -> None:
    model = mapper().train()
    picture = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    tree = hyptree.explain(model, picture, size=32)
    assert tree.num_nodes == 14 and tree.support.shape == (14, 8, 8) and model.training
    assert np.array_equal(tree.embedding, hyptree.explain(model, picture, size=32).embedding)
    with pytest.raises(UserError, match="one tree, head cannot be chosen"):
        hyptree.explain(model, picture, size=32, head=1)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet50", 1.89), ("deit_tiny_patch16_224", 1.17), ("deit_small_patch16_224", 1.25)]
    + [("deit_base_patch16_224", 1.40), ("swin_tiny_patch4_window7_224", 1.40), ("efficientnet_b4", 1.79)],
)
def test_added_parameters_are_those_of_the_table(name: str, millions: float) -> None:
    with torch.device("meta"):
        backbone = timm.create_model(name)
        own = sum(p.numel() for p in backbone.parameters())
        model = HiMapper(backbone)
    assert all(p.is_meta for p in model.parameters())
    added = sum(p.numel() for p in model.parameters()) - own
    assert abs(added / (millions * 1e6) - 1) < 0.02


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet50", 49), ("deit_small_patch16_224", 50), ("swin_tiny_patch4_window7_224", 41)]
)
@torch.no_grad()
def test_added_work_is_at_most_that_of_the_table(name: str, millions: float) -> None:
    with torch.device("meta"):
        model, x = HiMapper(timm.create_model(name)).eval(), torch.empty(1, 3, 224, 224)
    counts = []
    for call in (model.backbone, model):
        with FlopCounterMode(display=False) as counter:
            call(x)
        counts.append(counter.get_total_flops() / 2e6)
    assert 0.7 * millions < counts[1] - counts[0] < millions


# ------------------------------------------------------------------------------------------------- one line each


class Flat(ToyBackbone):
    def forward_features(self, x: Tensor) -> Tensor:
        return super().forward_features(x).mean((2, 3))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return x if pre_logits else self.head(x)


class TokenOnly(Flat):
    def forward_features(self, x: Tensor) -> Tensor:
        return super().forward_features(x)[:, None]


class Pyramid(ToyBackbone):
    def forward_features(self, x: Tensor) -> list[Tensor]:
        return [super().forward_features(x)]


def last_of_pyramid(backbone: nn.Module, x: Tensor) -> Features:
    f = backbone.forward_features(x)[-1]
    return Features(f.flatten(2).mT, (f.shape[2], f.shape[3]), f.mean((2, 3)))


def test_lists_need_a_hook() -> None:
    backbone = Pyramid()
    with pytest.raises(TypeError, match=r"^Pyramid: forward_features gives a list, .*pass feature_fn="):
        HiMapper(backbone)(pictures())
    model = HiMapper(backbone, feature_fn=last_of_pyramid).eval()
    x = pictures()
    expected = backbone.head(ToyBackbone.forward_features(backbone, x).mean((2, 3)))
    assert torch.allclose(model(x).logits, expected, atol=1e-6)
    with pytest.raises(TypeError, match="feature_fn returned Tensor"):
        HiMapper(backbone, feature_fn=lambda backbone, x: x)(pictures())


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (Flat, r"^Flat has no spatial features: forward_features gives \(3, 24\)"),
        (TokenOnly, r"^TokenOnly has no spatial features: 1 tokens of a \(32, 32\) picture fill no grid"),
    ],
)
def test_backbones_without_a_map(backbone: type[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        HiMapper(backbone())(pictures())
    assert "\n" not in str(caught.value)


def test_other_mistakes() -> None:
    with pytest.raises(ValueError, match=r"^Linear is neither a timm model .* nor a vision model of transformers"):
        HiMapper(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="num_leaves=20, depth=4"):
        HiMapper(ToyBackbone(), num_leaves=20)
    with pytest.raises(ValueError, match=r"no axis of the map \(3, 24, 8, 8\) has the expected 32 channels"):
        HiMapper(ToyBackbone(), channels=32)(pictures())
    with pytest.raises(ValueError, match=r"expected 24 and \(B, 32\); pass channels=24, pooled_channels=24"):
        HiMapper(ToyBackbone(), pooled_channels=32)(pictures())
    with pytest.raises(ValueError, match=r"must be one of lorentz, euclidean, got 'lorenz'; did you mean 'lorentz'"):
        HiMapper(ToyBackbone(), geometry="lorenz")
    with pytest.raises(ValueError, match="width must be a multiple of heads, got width=130, heads=4"):
        HiMapper(ToyBackbone(), width=130)
    with pytest.raises(ValueError, match="tau must be positive, got 0"):
        HiMapper(ToyBackbone(), tau=0)
