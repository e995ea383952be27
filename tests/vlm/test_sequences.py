"""Random sequences of steps, writes and copies on heads, hosts and segmenters: nothing of before is ever used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyptree.vlm import LatentHierarchyHead, ScaleAdapterConfig, attach, load_encoder
from hyptree.vlm.lathadapter.hosts import JointHost
from hyptree.vlm.openvocab.segmenter import OpenVocabSegmenter
from hyptree.vlm.openvocab.settings import OpenVocabSettings
from tests.sequences import ACTIONS, bare, run_sequence
from tests.vlm.small_models import save_dual

NAMES = ["red truck", "car", "vehicle"]
PICTURES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32).sin()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dual(tmp_path_factory.mktemp("clip"), "clip")


def copied(twin: nn.Module, model: nn.Module) -> nn.Module:
    """A fresh module with the weights and buffers of another one."""
    model = bare(model)
    mine = dict(twin.named_parameters()) | dict(twin.named_buffers())
    for name, value in (dict(model.named_parameters()) | dict(model.named_buffers())).items():
        mine[name].data = value.detach().clone()
    return twin.train(model.training)


def head_look(head: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    images, text = torch.randn(5, 12, generator=generator), torch.randn(4, 12, generator=generator)
    return head(images, text)[0]


def run(build: Callable[[], nn.Module], look: Callable[[Any], Tensor], seed: int, without: set[str]) -> None:
    actions = {name: action for name, action in ACTIONS.items() if name not in without}
    run_sequence(build, lambda model: copied(build(), model), look, seed=seed, actions=actions)


@pytest.mark.parametrize("seed", range(4))
def test_a_head_is_its_weights(seed: int) -> None:
    def fresh() -> nn.Module:
        return LatentHierarchyHead(12, 3, lift="learned_scale", beta=0.5).eval()

    run(fresh, head_look, seed, {"to_dtype"})  # it computes in the dtype of its inputs


class Prompted(nn.Module):
    """A CLIP with an adapter, prompts in both towers and a head, in one module."""

    def __init__(self, folder: Path):
        super().__init__()
        self.encoder = load_encoder(f"hf:{folder}")
        attach(self.encoder, ScaleAdapterConfig(8))
        self.clip, self.host, self.head = self.encoder.model, JointHost(self.encoder), LatentHierarchyHead(24, 2)

    def forward(self) -> Tensor:
        logits, _ = self.head.eval()(self.host.image_features(PICTURES), self.host.text_features(NAMES))
        return logits


@pytest.mark.parametrize("seed", range(4))
def test_prompts_and_adapters_are_their_weights(seed: int, folder: Path) -> None:
    # Prompts are float32, and are read where no hook of the host runs.
    run(lambda: Prompted(folder), lambda model: model(), seed, {"to_dtype", "offload"})


def segmenter(folder: Path) -> Any:
    settings = OpenVocabSettings(method="scale", adapter={"block_size": 8})
    head = {"channels": 16, "guide": 8, "num_heads": 2, "window": 4, "decoder": [8, 8]}
    return OpenVocabSegmenter(load_encoder(f"hf:{folder}"), settings, window=32, head=head)


@pytest.mark.parametrize("seed", range(4))
def test_a_segmenter_is_its_weights(seed: int, folder: Path) -> None:
    # Its state dict holds what is trained, and accelerate looks there for what it takes away.
    run(lambda: segmenter(folder), lambda model: model(PICTURES, NAMES), seed, {"to_dtype", "load", "offload"})
