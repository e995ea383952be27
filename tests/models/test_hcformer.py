"""The clustering mixer equals loops in float64, values and gradients, for every switch, odd sizes and padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ramify.nn import ClusterMixer

from . import naive_hcformer as naive

CASES = {  # size of the map, fold, patch-level centres, window-level centres, switches
    "paper": ((8, 8), 4, 2, 2, {}),
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


def make(*layout, dim: int = 5, heads: int = 2, head_dim: int = 3, **options) -> ClusterMixer:
    """A mixer in float64 whose every parameter counts."""
    mixer = ClusterMixer(dim, heads, head_dim, *layout, **options).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    for level in (mixer.patch, mixer.window):
        if level is not None and level.alpha is not None:
            nn.init.constant_(level.alpha, 1.7)
    return mixer


@pytest.mark.parametrize("name", list(CASES))
def test_mixer_equals_loops(name: str):
    *layout, options = CASES[name]
    size, fold = layout[:2]
    mixer = make(*layout, **options)
    x = torch.randn(2, *size, 5, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn_like(x)
    wanted = [x, *mixer.parameters()]
    fast = mixer(x)
    slow = torch.stack([naive.mixer(mixer, image, fold) for image in x])
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)
    fast_grads = torch.autograd.grad(fast, wanted, cotangent)
    slow_grads = torch.autograd.grad(slow, wanted, cotangent)
    for got, expected in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)
    assert all(g.abs().sum() > 0 for g in fast_grads)
