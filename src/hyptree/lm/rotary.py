"""HOPE, rotary positions on the hyperboloid: pairs of space components turn by an angle that grows with the position.

A rotation of the space components keeps their norm and with it the time: it is an isometry, and ``<q_i, k_j>_L``
depends on positions through j - i alone. Frequencies of all scaled variants (linear, dynamic, yarn, longrope, llama3)
are those of transformers. What those variants multiply queries and keys by, to sharpen attention over longer texts,
belongs to the temperature here (:func:`score_scale`), because a scaled rotation would not be an isometry.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

if TYPE_CHECKING:
    from hyptree.lm.config import HelmConfig

PAIRINGS = ("interleaved", "half")


def _frequency_settings(config: HelmConfig) -> Any:
    """What transformers' functions read of a configuration, with the head's width made even."""
    return SimpleNamespace(
        rope_parameters=config.rope_parameters,
        head_dim=config.rotary_dim,
        hidden_size=config.rotary_dim * config.num_attention_heads,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        standardize_rope_params=dict,  # the configuration did when it was made; a lambda could not be pickled
    )


def _default_frequencies(settings: Any, device: Any = None, **_: Any) -> tuple[Tensor, float]:
    base, d = settings.rope_parameters["rope_theta"], settings.head_dim
    exponent = torch.arange(0, d, 2, dtype=torch.int64).to(device=device, dtype=torch.float32) / d
    return 1.0 / base**exponent, 1.0


def _frequencies(settings: Any, device: Any = None) -> tuple[Tensor, float]:
    kind = settings.rope_parameters["rope_type"]
    function: Callable[..., tuple[Tensor, float]] = _default_frequencies
    if kind != "default":
        function = ROPE_INIT_FUNCTIONS[kind]
    return function(settings, device)


def score_scale(config: HelmConfig) -> float:
    """Factor on attention scores that goes with the kind of rotary scaling; 1 without scaling."""
    with torch.device("cpu"):  # a model may be built without memory, this number not
        return float(_frequencies(_frequency_settings(config), "cpu")[1]) ** 2


class HelmRotary(nn.Module):
    """Cosines and signed sines of all positions, the tables that :func:`hyptree.ops.heads.reference.rotate` takes.

    Shape:
        x (anything of the model's device and dtype), position_ids (B, N) -> cos, sin (B, N, rotary_dim), float32, or
        float64 for a float64 model.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: HelmConfig, device: Any = None):
        super().__init__()
        self.config = _frequency_settings(config)
        self.pairing = config.rope_pairing
        self.rope_type = self.config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        frequency, self.attention_scaling = _frequencies(self.config, device)
        self.register_buffer("inv_freq", frequency, persistent=False)
        self.register_buffer("original_inv_freq", frequency.clone(), persistent=False)

    def reset_parameters(self) -> None:
        """Compute the frequencies again, on whatever device the module lies: they are in no file."""
        frequency, self.attention_scaling = _frequencies(self.config, self.inv_freq.device)
        self.inv_freq, self.original_inv_freq = frequency, frequency.clone()
        self.max_seq_len_cached = self.original_max_seq_len

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HelmRotary:
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:  # angles of far positions need all digits, whatever the model's dtype
            self.reset_parameters()
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            angle = position_ids[..., None].to(dtype) * self.inv_freq.to(device=x.device, dtype=dtype)
            cos, sin = angle.cos(), angle.sin()
        if self.pairing == "interleaved":
            return cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
