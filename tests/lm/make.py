"""Small models for the tests of HELM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyptree.lm import HelmConfig, HelmForCausalLM
from hyptree.ops.residual_norm import reference
from hyptree.ops.rounding import gemm_dtype

VOCAB = 61

DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
MICE: dict[str, Any] = {
    **DENSE,
    "variant": "mice",
    "num_hidden_layers": 3,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 8,
    "v_head_dim": 9,
    "moe_intermediate_size": 22,
}
SHAPES = {"dense": DENSE, "mice": MICE}


def small(variant: str = "dense", dtype: torch.dtype = torch.float64, **changes: Any) -> HelmForCausalLM:
    """A tiny model in evaluation mode, its biases and gains moved away from where they start."""
    model = HelmForCausalLM(HelmConfig(**{**SHAPES[variant], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def lift(s: Tensor, c: float = 1.0, bias: bool = True) -> Tensor:
    """``[s, t, 1, 0, ...]``, what experts read."""
    return reference.lift(s, gemm_dtype(s), reference.padded_width(s.shape[-1], bias), c, bias)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape)
