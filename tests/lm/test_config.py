"""Configurations and presets: what they derive, what they refuse, that files keep them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hyptree.errors import UserError
from hyptree.lm.ambient import padded_width
from hyptree.lm.config import HelmConfig
from hyptree.lm.presets import preset, presets

NAMES = [
    *("helm-d-115m-paper", "helm-mice-120m-paper", "helm-mice-1b-paper"),
    *("helm-d-115m-aligned", "helm-mice-120m-aligned", "helm-d-1b-aligned", "helm-mice-1b-aligned"),
    *("helm-d-pico", "helm-mice-pico"),
]


def test_presets_are_the_promised_ones() -> None:
    assert sorted(presets()) == sorted(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("paper")])
def test_aligned_widths_are_what_matrix_products_like(name: str) -> None:
    config = preset(name)
    step = 64 if "aligned" in name else 8
    assert config.hidden_size % 64 == 0
    assert padded_width(config.intermediate_size) % step == 0
    if config.variant == "dense":
        assert (config.head_dim + 1) * config.num_attention_heads == config.hidden_size
        assert config.rotary_dim == config.head_dim - 1
    else:
        assert padded_width(config.moe_intermediate_size) % step == 0
        assert padded_width(config.kv_lora_rank) == config.kv_lora_rank + 2
        head = config.qk_nope_head_dim + config.qk_rope_head_dim
        assert head == config.v_head_dim and (head + 1) % 32 == 0


def test_what_follows_from_sizes_follows_changes() -> None:
    config = preset("helm-d-115m-paper")
    assert config.residual_gain == pytest.approx(4 * math.sqrt(390)) and config.value_scale == 1.0
    assert preset("helm-mice-1b-paper").residual_gain == pytest.approx(math.sqrt(910))
    wide = preset("helm-d-pico", hidden_size=256)
    assert wide.head_dim == 63 and wide.value_scale == pytest.approx(63**-0.5)
    assert wide.residual_gain == pytest.approx(4 * math.sqrt(257))
    assert HelmConfig(variant="mice", v_head_dim=16).value_scale == 0.25


@pytest.mark.parametrize("name", NAMES)
def test_files_keep_everything(name: str, tmp_path: Path) -> None:
    config = preset(name, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}, curvature=0.5)
    config.save_pretrained(tmp_path)
    loaded = HelmConfig.from_pretrained(tmp_path)
    ours, theirs = config.to_dict(), loaded.to_dict()
    assert ours.pop("transformers_version", None) is None or theirs.pop("transformers_version")
    theirs.pop("transformers_version", None)
    assert ours == theirs and theirs["curvature"] == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "mic"}, "unknown variant 'mic'; did you mean 'mice'"),
        ({"gate": "relu"}, "unknown gate 'relu'; expected one of sigmoid, softmax, softmax_raw"),
        ({"hidden_size": 0}, "head_dim must be at least 2"),
        ({"num_attention_heads": 200}, r"head_dim must be at least 2.*got 0 \(hidden_size 384, 200 heads\)"),
        ({"vocab_size": "many"}, "vocab_size must be a positive number, got 'many'"),
        ({"curvature": -1.0}, "curvature must be a positive number, got -1.0"),
        ({"rope_parameters": {"rope_type": "yarm"}}, "unknown rope_type 'yarm'; did you mean 'yarn'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings needs head='lorentz'"),
        ({"variant": "mice", "num_experts_per_tok": 9}, "between 1 and n_routed_experts 4, got 9"),
        ({"variant": "mice", "num_dense_layers": 7}, "between 0 and num_hidden_layers 6, got 7"),
        ({"variant": "mice", "expert_curvature_range": (2.0, 1.0)}, "0 < low <= high, got 2.0 and 1.0"),
        ({"variant": "mice", "qk_rope_head_dim": 1}, "qk_rope_head_dim must be at least 2"),
    ],
)
def test_wrong_settings_get_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        HelmConfig(**changes)
    assert "\n" not in str(caught.value)


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(UserError, match="unknown preset 'helm-d-pic'; did you mean 'helm-d-pico'"):
        preset("helm-d-pic")
    with pytest.raises(UserError, match="there are helm-d-115m-paper"):
        preset("gpt")
    with pytest.raises(UserError, match=r"unknown setting 'hidden_sise'.*did you mean 'hidden_size'"):
        preset("helm-d-pico", hidden_sise=3)
