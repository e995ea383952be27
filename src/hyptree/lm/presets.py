"""Named configurations: the published sizes, sizes that GPUs like, and one small enough for a laptop.

``*-paper`` keeps the released numbers. ``*-aligned`` has the same budget in sizes that matrix products like: a stream
of 64 k components, heads of 63 components whose time makes 64, and hidden widths 8 short of a multiple of 64, because
a lifted row has its time, the one of the bias and padding behind it and is then exactly that multiple.
"""

from __future__ import annotations

from typing import Any

from hyptree.errors import UserError, suggest
from hyptree.lm.config import HelmConfig

_PAPER: dict[str, Any] = {"value_scale": 1.0, "embedding": "manifold", "initializer": "xavier"}
_D_115M: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 6}
_MICE_120M: dict[str, Any] = {"variant": "mice", **_D_115M, "n_routed_experts": 4}
_MICE_1B: dict[str, Any] = {
    "variant": "mice",
    "num_hidden_layers": 16,
    "num_attention_heads": 14,
    "n_routed_experts": 8,
}
_PICO: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 248,
    "max_position_embeddings": 256,
}

_PRESETS: dict[str, dict[str, Any]] = {
    "helm-d-115m-paper": {**_D_115M, **_PAPER, "hidden_size": 389, "head_dim": 64, "intermediate_size": 1559},
    "helm-mice-120m-paper": {
        **_MICE_120M,
        **_PAPER,
        "hidden_size": 389,
        "head_dim": 64,
        "intermediate_size": 1559,
        "moe_intermediate_size": 779,
        "kv_lora_rank": 65,
        "qk_nope_head_dim": 33,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    "helm-mice-1b-paper": {
        **_MICE_1B,
        "value_scale": 1.0,
        "initializer": "xavier",
        "hidden_size": 909,
        "head_dim": 64,
        "intermediate_size": 3639,
        "moe_intermediate_size": 1819,
        "kv_lora_rank": 257,
        "qk_nope_head_dim": 65,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
    "helm-d-115m-aligned": {**_D_115M, "hidden_size": 384, "intermediate_size": 1528},
    "helm-mice-120m-aligned": {
        **_MICE_120M,
        "hidden_size": 384,
        "intermediate_size": 1528,
        "moe_intermediate_size": 760,
        "kv_lora_rank": 62,
        "qk_nope_head_dim": 47,
        "qk_rope_head_dim": 16,
        "v_head_dim": 63,
    },
    "helm-d-1b-aligned": {
        "num_hidden_layers": 16,
        "num_attention_heads": 24,
        "hidden_size": 1536,
        "intermediate_size": 5624,
    },
    "helm-mice-1b-aligned": {
        **_MICE_1B,
        "hidden_size": 896,
        "intermediate_size": 3576,
        "moe_intermediate_size": 1784,
        "kv_lora_rank": 254,
        "qk_nope_head_dim": 31,
        "qk_rope_head_dim": 32,
        "v_head_dim": 63,
    },
    "helm-d-pico": {**_PICO, "num_hidden_layers": 4},
    "helm-mice-pico": {
        **_PICO,
        "variant": "mice",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 120,
        "kv_lora_rank": 30,
        "qk_nope_head_dim": 15,
        "qk_rope_head_dim": 16,
        "v_head_dim": 31,
    },
}


def presets() -> dict[str, HelmConfig]:
    """All named configurations, freshly made."""
    return {name: HelmConfig(**settings) for name, settings in _PRESETS.items()}


def preset(name: str, **changes: Any) -> HelmConfig:
    """The configuration of that name, with changes: ``preset("helm-d-pico", vocab_size=4096)``.

    What a configuration derives from its sizes (residual gain, value scale) follows the changes.
    """
    if name not in _PRESETS:
        raise UserError(f"unknown preset {name!r}; {suggest(name, _PRESETS) or 'there are ' + ', '.join(_PRESETS)}")
    known = set(HelmConfig().to_dict()) | {"attn_implementation"}
    for key in changes:
        if key not in known:
            raise UserError(f"unknown setting {key!r} of a HelmConfig; {suggest(key, known) or 'see its docstring'}")
    return HelmConfig(**{**_PRESETS[name], **changes})
