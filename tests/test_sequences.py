"""Random sequences of actions on every model: outputs are always those of a fresh one of the same weights.

``tests/vlm/adapters/test_sequences.py`` does the same to attached adapters of CLIP.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import peft
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree import nn as points
from hyptree.geometry import Lorentz
from hyptree.models import HCFormer, HiMapper
from tests.lm.make import small, tokens
from tests.sequences import ACTIONS, Bench, bare, look_again, run_sequence, wrapped_like

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS, PICTURES, POINTS = tokens(2, 7), torch.randn(2, 3, 40, 40, dtype=torch.float64), torch.randn(2, 4, 6)


def like(model: nn.Module, x: Tensor) -> Tensor:
    """Where and as the weights are; offloaded ones come to any input."""
    weight = next(model.parameters())
    return x.to("cpu" if weight.is_meta else weight.device, weight.dtype if x.is_floating_point() else None)


def speak(model: Any) -> Tensor:
    """Logits of a text, and of what is written behind it with a cache."""
    ids = like(model, IDS)
    logits = model(ids).logits.flatten()
    if model.training:
        return logits
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "output_logits": True}
    written = model.generate(ids, return_dict_in_generate=True, **options)
    return torch.cat([logits, *(step.flatten() for step in written.logits)])


def see(model: Any) -> Tensor:
    torch.manual_seed(0)  # while training, queries of a tree are drawn
    x = like(model, PICTURES)
    out = model(x)
    return out if isinstance(out, Tensor) else torch.cat([out.logits.flatten(), out.pre_logits.flatten()])


def himapper(backbone: Callable[[], nn.Module]) -> nn.Module:
    model = HiMapper(backbone(), num_leaves=4, depth=2, width=16, heads=2, learn_tau=True)
    nn.init.normal_(model.encode.out_proj.weight, std=0.3)
    return model.eval()


def hcformer(**options: Any) -> Callable[[], nn.Module]:
    """Made for other pictures than it sees, so that its position biases are resized."""
    sizes = {"img_size": 64, "depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20), "num_heads": (2, 2, 2, 2), "head_dim": 4}
    sizes |= {"mlp_ratios": (2, 2, 2, 2), "folds": (4, 3, 1, 1), "patch_centres": (2, 2, 2, 2), "num_classes": 5}
    return lambda: HCFormer(**{**sizes, "window_centres": (3, 2, 1, 0), "layer_scale": 0.5, **options}).eval()


class OfPoints(nn.Module):
    """Layers of points that share a learned curvature, attention to a context among them."""

    def __init__(self) -> None:
        super().__init__()
        space, heads = Lorentz(0.7, learnable=True), Lorentz(torch.tensor([0.5, 2.0]).view(2, 1, 1), learnable=True)
        self.first = points.LorentzLinear(6, 8, space)
        self.attention = points.LorentzAttention(8, 2, space, heads, learnable_tau=True)
        self.second = points.LorentzFC(8, 8, space)
        self.residual = points.LorentzResidual(space, learnable=True)
        self.norm = points.OnSpace(nn.LayerNorm(8), space)
        self.head = points.LorentzMLR(8, 5, space)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(self.residual(x, self.second(self.attention(self.norm(x), context=x))))


def vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", num_classes=5, img_size=40, patch_size=8, depth=2, embed_dim=24, num_heads=2
    )


def float32(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().float()


OTHER = {"q_lora_rank": 12, "cache_mode": "full", "expert_norm": True, "shared_curvature": True, "gate": "softmax"}
SYSTEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "helm": (float32(small), speak),
    "helm, tied points": (float32(lambda: small(head="lorentz", tie_word_embeddings=True)), speak),
    "mice": (float32(lambda: small("mice")), speak),
    "mice, other settings": (float32(lambda: small("mice", **OTHER)), speak),
    "hcformer": (hcformer(learnable_curvature=True), see),
    "hcformer, other settings": (hcformer(window_geometry="euclidean", mixer_norm=False, input_norm=True), see),
    "hcformer as published": (hcformer(convs="plain", norm="batch"), see),
    "himapper on a vit": (lambda: himapper(vit), see),
    "himapper on a resnet": (lambda: himapper(lambda: timm.create_model("test_resnet", num_classes=5)), see),
    "layers of points": (OfPoints, lambda model: model(like(model, POINTS))),
}


WITHOUT = {
    "helm, tied points": {"offload"},  # accelerate brings tied weights back one by one
}


def fresh(build: Callable[[], nn.Module]) -> Callable[[Any], Any]:
    def twin_of(model: nn.Module) -> nn.Module:
        inner, weight = bare(model), next(model.parameters())
        twin = build().to(weight.device, weight.dtype).train(inner.training)
        twin.load_state_dict(inner.state_dict())
        return twin

    return twin_of


def lora(bench: Bench) -> None:
    """peft's adapters on some layers or all: they act at once, learn, and are merged into the weights or taken away."""
    names = [name for name, layer in bench.model.named_modules() if isinstance(layer, nn.Linear)]
    if not names:
        return
    trained = {name: p.requires_grad for name, p in bench.model.named_parameters()}
    chosen = "all-linear" if bench.random.random() < 0.5 else bench.random.sample(names, max(1, len(names) // 3))
    config = peft.LoraConfig(r=2, target_modules=chosen, init_lora_weights=False)
    plain, before = bench.fresh, copy_of(bench.look(bench.model))
    twin = peft.get_peft_model(wrapped_like(bench.model, plain(bench.model)), config)
    adapted = peft.get_peft_model(bench.model, config)

    def same(_: nn.Module) -> nn.Module:
        twin.load_state_dict(adapted.state_dict())
        return twin.train(bench.model.training).get_base_model()

    bench.fresh = same
    look_again(bench)
    ACTIONS[bench.random.choice(("plain_step", "foreach_step", "fused_step"))](bench)
    look_again(bench)
    out = copy_of(bench.look(bench.model))
    bench.fresh = plain
    if bench.random.random() < 0.5:
        bench.model = adapted.merge_and_unload()
        bench.compare(bench.look(bench.model), out, "merged", slack=5)
    else:
        adapted.merge_adapter()
        bench.compare(bench.look(bench.model), out, "merged for a while", slack=5)
        adapted.unmerge_adapter()
        bench.model = adapted.unload()
        bench.compare(bench.look(bench.model), before, "unloaded", slack=5)
    for name, parameter in bench.model.named_parameters():
        parameter.requires_grad_(trained[name])


def copy_of(x: Tensor) -> Tensor:
    return x.detach().clone()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("system", SYSTEMS)
def test_outputs_are_those_of_a_fresh_model(system: str, seed: int) -> None:
    build, look = SYSTEMS[system]
    actions = {name: act for name, act in (ACTIONS | {"lora": lora}).items() if name not in WITHOUT.get(system, ())}
    run_sequence(build, fresh(build), lambda model: look(bare(model)), seed=seed, length=16, actions=actions)


class Keeps(nn.Module):
    """A linear layer that keeps what it makes of its weight, while ``key`` of the layer stays the same."""

    def __init__(self, key: Callable[[Keeps], Hashable]):
        super().__init__()
        self.weight, self.key, self.kept = nn.Parameter(torch.randn(5, 6)), key, (None, None)

    def forward(self, x: Tensor) -> Tensor:
        key = self.key(self)
        if torch.is_grad_enabled():
            return F.linear(x, 2 * self.weight)
        if self.kept[0] != key:
            self.kept = key, 2 * self.weight.detach()
        return F.linear(x, self.kept[1])


def place(layer: Keeps) -> Hashable:
    return layer.weight.dtype, layer.weight.device


def version(layer: Keeps) -> Hashable:
    return *place(layer), None if layer.weight.is_inference() else layer.weight._version


def address(layer: Keeps) -> Hashable:
    return *place(layer), layer.weight.data_ptr()


def version_and_address(layer: Keeps) -> Hashable:
    return *version(layer), layer.weight.data_ptr(), id(layer.weight), layer.training


def value(layer: Keeps) -> Hashable:
    return *place(layer), layer.weight.detach().double().numpy().tobytes()


def search(key: Callable[[Keeps], Hashable]) -> None:
    for seed in range(12):

        def build() -> nn.Module:
            return Keeps(key)

        def look(model: Any) -> Tensor:
            return bare(model)(like(model, POINTS))

        run_sequence(build, fresh(build), look, seed=seed, length=16)


@pytest.mark.parametrize("key", [place, version, address, version_and_address])
def test_weights_of_before_are_found(key: Callable[[Keeps], Hashable]) -> None:
    with pytest.raises(AssertionError, match=r"off a fresh torch\.\w+ model of the same weights"):
        search(key)


def test_a_layer_that_looks_at_its_weight_passes() -> None:
    search(value)
