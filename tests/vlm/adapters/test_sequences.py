"""Random sequences of steps, looks, loads, merges and copies: an attached model never uses weights of before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from hyptree.vlm import LoraConfig, OrthogonalConfig, ScaleAdapterConfig, attach
from hyptree.vlm.adapters.handle import handle_of
from tests.sequences import ACTIONS, Bench, Wrapper, bare, run_sequence
from tests.vlm.adapters.small_clips import CLIPS, SmallModel, encode, pixels, shake, tokens

CONFIGS = {
    "scale": ScaleAdapterConfig(8, share="layers"),
    "lora": LoraConfig(2, targets=("q", "v", "mlp")),
    "turn": OrthogonalConfig(8, targets=("k", "out")),
    "end": ScaleAdapterConfig(8, space="embedding"),
}
WORDS, PICTURES = tokens(2), pixels(2)


def attached(model: nn.Module) -> nn.Module:
    """The module that carries the adapters: the wrapper, if they were attached to that."""
    while "hyptree_adapters" not in model._modules and isinstance(model, Wrapper):
        model = model.inner
    return model


def look(model: nn.Module) -> Tensor:
    clip = bare(model)
    weight = next(clip.parameters())
    device = "cpu" if weight.is_meta else weight.device  # offloaded weights come to any input
    return encode(clip, WORDS.to(device), PICTURES.to(device, weight.dtype))


def fresh(small: SmallModel) -> Callable[[Any], Any]:
    """A function to a model built anew, with the base weights and adapters that another one has now."""

    def twin_of(model: nn.Module) -> nn.Module:
        source = handle_of(attached(model))
        if source._container.merged:
            source = handle_of(copy.deepcopy(attached(model)))
            source._container.unmerge()
        clip, carrier = bare(model), source.model
        twin = small().to(next(clip.parameters()).dtype).train(clip.training)
        base = bare(carrier).state_dict()
        twin.load_state_dict({key: value for key, value in base.items() if not key.startswith("hyptree_adapters")})
        for name in source.adapters:
            one = source._container[name]
            attach(twin, one.config, name).load_state_dict(one.state_dict())
        twin.get_submodule("hyptree_adapters").to(next(source.parameters()).dtype)
        handle_of(twin).set_adapter(source.active)
        for mine, other in zip(twin.parameters(), model.parameters(), strict=True):
            mine.requires_grad_(other.requires_grad)  # attention chooses its way by that
        return twin

    return twin_of


def handle(bench: Bench) -> Any:
    return handle_of(attached(bench.model))


def merge(bench: Bench) -> None:
    one = handle(bench)
    merged = one._container.merged
    if merged:
        one._container.unmerge()
    else:
        one.merge()


def choose(bench: Bench) -> None:
    unmerged(lambda bench: handle(bench).set_adapter(bench.random.choice(handle(bench).adapters)))(bench)


def disable(bench: Bench) -> None:
    with handle(bench).disable_adapter():
        bench.look(bench.model)


def checkpoint(bench: Bench) -> None:
    """The adapter's file of another training, over the one that is there."""
    one = handle(bench)
    one.load_state_dict({name: value * 0.9 + 0.01 for name, value in one.state_dict().items()})


def wrap(bench: Bench) -> None:
    if isinstance(bench.model, Wrapper):
        bench.model = bench.model.inner if "hyptree_adapters" not in bench.model._modules else bench.model
    else:
        bench.model = Wrapper(bench.model)


def unmerged(action: Callable[[Bench], None]) -> Callable[[Bench], None]:
    """Base weights that are written to while an adapter is merged are lost with ``unmerge``: come back first."""

    def run(bench: Bench) -> None:
        if handle(bench)._container.merged:
            handle(bench)._container.unmerge()
        action(bench)

    return run


SAFE = {"look_again", "deep_copy", "switch_training"}
EVERY = {name: act if name in SAFE else unmerged(act) for name, act in ACTIONS.items()} | {
    "merge": merge,
    "set_adapter": choose,
    "disable_adapter": disable,
    "load_adapter": unmerged(checkpoint),
    "wrap": wrap,
}


def build(small: SmallModel, is_wrapped: bool) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        clip = small()
        for module in clip.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        carrier = Wrapper(clip) if is_wrapped else clip
        for name, config in CONFIGS.items():
            if name != "end" or not (is_wrapped or small is CLIPS[1]):  # SigLIP has no projection to merge into
                shake(attach(carrier, config, name), 0.05)
        return carrier

    return model


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(
    ("small", "seed"),
    [(CLIPS[number], seed) for number, seeds in ((0, 6), (1, 2), (2, 6), (4, 2)) for seed in range(seeds)],
    ids=lambda value: getattr(value, "name", None),
)
def test_outputs_are_those_of_a_fresh_model(small: SmallModel, is_wrapped: bool, seed: int):
    without = set()
    if is_wrapped:  # the adapters' names are those of a wrapper, a fresh model has none
        without |= {"functional"}
    if small is not CLIPS[0]:  # torch's attention, and open_clip past its forward pass, read weights by themselves
        without |= {"offload"}
    actions = {name: act for name, act in EVERY.items() if name not in without}
    run_sequence(build(small, is_wrapped), fresh(small), look, seed=seed, length=14, actions=actions)
