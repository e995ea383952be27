"""``torch.compile(model)`` as users call it: one more graph for batches of every size, not one for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import hyptree.tokens
from hyptree.lm import HelmForCausalLM, presets
from hyptree.models import HCFormer, HiMapper

SMALL = {"img_size": 32, "dims": (8, 16, 16, 24), "depths": (1, 1, 1, 1), "head_dim": 8, "num_classes": 5}


def hcformer() -> nn.Module:
    return HCFormer(**SMALL, num_heads=(1, 1, 1, 1), folds=(2, 2, 1, 1), mlp_ratios=(2, 2, 2, 2))  # type: ignore[arg-type]


def fewer_tokens() -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, depth=3)
    hyptree.tokens.patch(model, method="tome", keep=0.5, layers=[1])
    return model


def himapper() -> nn.Module:
    return HiMapper(timm.create_model("resnet10t", num_classes=5))


def language(name: str) -> Callable[[], nn.Module]:
    return lambda: HelmForCausalLM(presets()[name])


def pictures(side: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, 3, side, side)


def words(batch: int) -> Tensor:
    return torch.randint(0, 100, (batch, 24))


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        pytest.param(hcformer, pictures(32), id="hcformer"),
        pytest.param(fewer_tokens, pictures(64), id="tokens", marks=pytest.mark.slow),
        pytest.param(himapper, pictures(64), id="himapper", marks=pytest.mark.slow),
        pytest.param(language("helm-d-pico"), words, id="helm", marks=pytest.mark.slow),
        pytest.param(language("helm-mice-pico"), words, id="mice", marks=pytest.mark.slow),
    ],
)
def test_a_second_size_is_compiled_for_all(
    make: Callable[[], nn.Module], inputs: Callable[[int], Tensor], train: bool
) -> None:
    torch.compiler.reset()
    model, counter = make().train(train), CompileCounter()
    compiled = torch.compile(model, backend=counter)
    with torch.set_grad_enabled(train):
        for batch in (2, 3, 5, 7):
            compiled(inputs(batch))
    assert counter.frame_count <= 2
