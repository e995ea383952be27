"""HCFormer equals its definition, values and gradients, for every switch, size of pictures and backend."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

from hyptree.models.hcformer.model import SIZES as NAMED
from hyptree.models.hcformer.model import HCFormer
from hyptree.models.hcformer.plain import PlainHCFormer
from hyptree.ops import backend as backends

SIZES: dict[str, Any] = {
    "img_size": 64, "depths": (1, 2, 1, 1), "dims": (8, 12, 16, 20), "num_heads": (2, 2, 2, 1),
    "head_dim": (4, 6, 4, 8), "mlp_ratios": (2, 1.5, 2, 2), "folds": (4, 3, 2, 1), "patch_centres": (2, 3, 2, 2),
    "window_centres": (3, 2, 1, 0), "num_classes": 5, "layer_scale": 1.0,
}  # fmt: skip
"""No window is a centre of the window level, where the distance has a kink and gradients are left to rounding."""
SWITCHES: dict[str, dict[str, Any]] = {
    "paper": {},
    "small pictures made for": {"img_size": (40, 56)},
    "both hyperbolic": {"patch_geometry": "hyperbolic", "curvature": 2.5, "clip_norm": 0.7},
    "both euclidean": {"window_geometry": "euclidean"},
    "hard": {"assignment": "hard"},
    "learned curvature": {"curvature": 0.3, "learnable_curvature": True},
    "shifted": {"context": "shifted"},
    "no context": {"context": "none"},
    "fixed windows": {"scaling": "fold"},
    "one number of window centres": {"window_centres": 2, "folds": (4, 3, 1, 1)},
    "no bias, no norm": {"position_bias": False, "mixer_norm": False},
    "normed convolutions": {"convs": "normed", "norm": "batch", "layer_scale": None},
    "other norms": {"input_norm": True, "convs": "normed", "act_layer": "relu"},
}
PICTURES = [(64, 64), (70, 45), (33, 100), (5, 3)]


def both(options: dict[str, Any], dtype: torch.dtype) -> tuple[HCFormer, PlainHCFormer]:
    """A model whose every parameter counts, and its definition with the same weights."""
    model, definition = HCFormer(**options).to(dtype), PlainHCFormer(**options).double()
    for name, parameter in model.named_parameters():
        if not name.endswith("raw"):
            nn.init.normal_(parameter, std=0.4)
    definition.load_state_dict(model.state_dict())
    return model, definition


def check(options: dict[str, Any], size: tuple[int, int], dtype: torch.dtype, values: float, gradients: float) -> None:
    """Logits, maps and gradients of everything, relative to the largest number of each."""
    model, definition = both(options, dtype)
    x = torch.randn(2, 3, *size, dtype=dtype, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    outcomes = []
    last, maps = model.train(options.get("norm") != "batch").forward_intermediates(x)
    outcomes.append(([model.forward_head(last), *maps], dict(model.named_parameters(), x=x)))
    logits, maps = definition.train(model.training)(exact)
    outcomes.append(([logits, *maps], dict(definition.named_parameters(), x=exact)))
    cotangents = [torch.randn_like(out) for out in outcomes[1][0]]
    grads = []
    for outs, leaves in outcomes:
        drawn = [c.to(out.dtype) for c, out in zip(cotangents, outs, strict=True)]
        grads.append(dict(zip(leaves, torch.autograd.grad(outs, list(leaves.values()), drawn), strict=True)))
    for one, other in zip(outcomes[0][0], outcomes[1][0], strict=True):
        assert (one - other).abs().max() <= values * other.abs().max()
    assert set(grads[0]) == set(grads[1])
    smallest = 1e-3 * max(grad.norm().item() for grad in grads[1].values())  # of smaller ones rounding is a large part
    for name, other in grads[1].items():
        assert (grads[0][name] - other).norm() <= gradients * max(other.norm().item(), smallest), name


@pytest.mark.parametrize("size", PICTURES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_the_model_is_its_definition(switch: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPTREE_BACKEND", "torch")
    check({**SIZES, **SWITCHES[switch]}, size, torch.float64, 1e-8, 1e-6)


@pytest.mark.parametrize("size", [(64, 64), (70, 45)])
def test_the_model_by_kernels_is_its_definition(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if not (backends.HAS_TRITON and backends.interpreted()):
        pytest.skip("TRITON_INTERPRET=1 runs the kernels on the CPU")
    monkeypatch.setenv("HYPTREE_BACKEND", "triton")
    check(
        {**SIZES, "head_dim": 8, "window_centres": (2, 0, 1, 0), "folds": (4, 2, 1, 1)}, size, torch.float32, 1e-4, 1e-3
    )


def test_a_window_that_is_a_centre_has_the_same_values(seed: int) -> None:
    model, definition = both({**SIZES, "folds": (4, 2, 1, 1), "window_centres": (4, 2, 1, 0)}, torch.float64)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(model(x), definition(x)[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["pico", "nano"])
def test_named_sizes_are_options_of_the_definition(name: str) -> None:
    model = timm.create_model(f"hcformer_{name}", num_classes=3).eval()
    definition = PlainHCFormer(**NAMED[f"hcformer_{name}"], num_classes=3).eval()
    definition.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), definition(x)[0], rtol=1e-4, atol=1e-5)


def test_an_unknown_option_is_one_line() -> None:
    with pytest.raises(ValueError, match="'drop_rate' is no option of the definition"):
        PlainHCFormer(drop_rate=0.1)
