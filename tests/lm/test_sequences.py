"""Random sequences of what people do with a HELM: logits, cached steps and text stay those of a fresh model."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from hyptree.lm import HelmForCausalLM
from tests.lm.make import small, tokens
from tests.sequences import ACTIONS, Bench, plain_step, run_sequence

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"head": "lorentz", "tie_word_embeddings": True},
    "mice": {"variant": "mice", "shared_curvature": True},
    "mice, full cache": {"variant": "mice", "cache_mode": "full", "q_lora_rank": 10, "expert_norm": True},
}
IDS = torch.arange(14).reshape(2, 7) * 4 % 61


def look(model: Any) -> Tensor:
    """Logits of one pass, and those of text that is written with matrices kept while it is."""
    logits = model(IDS, use_cache=False).logits
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    text = model.generate(IDS, return_dict_in_generate=True, output_logits=True, **settings)
    return torch.cat([logits.flatten(), torch.stack(text.logits).clone().flatten().to(logits.dtype)])


def fresh(model: HelmForCausalLM) -> HelmForCausalLM:
    twin = HelmForCausalLM(model.config).to(next(model.parameters()).dtype).train(model.training)
    twin.load_state_dict(model.state_dict())
    return twin


def linear_layers(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


def hook(bench: Bench) -> None:
    """Somebody listens to a layer, or no longer does."""
    layer = bench.random.choice(linear_layers(bench.model))
    if layer._forward_hooks:
        layer._forward_hooks.clear()
    else:
        layer.register_forward_hook(lambda *_: None)


def adapt_and_merge(bench: Bench) -> None:
    """Adapters on all layers learn for a step and are merged: the model goes on with other weights."""
    settings = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    inner = Bench(peft.get_peft_model(bench.model, settings), fresh, look, bench.random.randrange(2**31))
    inner.check = lambda mode: None  # type: ignore[method-assign]
    plain_step(inner)
    bench.model = inner.model.merge_and_unload()
    for parameter in bench.model.parameters():
        parameter.requires_grad_(True)


def write_text(bench: Bench) -> None:
    """Whatever was kept while one text was written is forgotten after it."""
    bench.model.generate(tokens(1, 3), max_new_tokens=2, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        for parameter in bench.model.parameters():
            parameter.data = parameter.data * 1.01


EVERY = ACTIONS | {action.__name__: action for action in (hook, adapt_and_merge, write_text)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_a_fresh_model(case: str, seed: int) -> None:
    def build() -> HelmForCausalLM:
        return small(dtype=torch.float32, **CASES[case])

    run_sequence(build, fresh, look, seed=seed, length=10, actions=EVERY)
