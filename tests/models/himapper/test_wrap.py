"""The wrapper: identity at the start, repeatable evaluation, gradients, options, what others ask of it."""

from __future__ import annotations

import pytest
import timm
import torch

from ramify.models import HiMapper


def small(name: str = "resnet10t", classes: int = 5, **options) -> HiMapper:
    return HiMapper(
        timm.create_model(name, num_classes=classes), **{"num_leaves": 8, "depth": 3, "width": 32, **options}
    )


@pytest.mark.parametrize("name", ["resnet10t", "deit_tiny_patch16_224"])
def test_the_start_is_the_backbone(name: str) -> None:
    options = {"img_size": 64} if "deit" in name else {}
    backbone = timm.create_model(name, num_classes=5, **options).eval()
    model = HiMapper(backbone).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        out = model(x)
        assert (out.logits - backbone(x)).abs().max() < 1e-5
    assert [tuple(level.shape) for level in out.nodes] == [(2, n, 128) for n in (32, 16, 8, 4)]
