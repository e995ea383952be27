"""What a HELM is: every size and switch of the model, checked when it is made."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hyptree.errors import UserError, suggest
from hyptree.lm.rotary import PAIRINGS

_CHOICES: dict[str, tuple[str, ...]] = {
    "variant": ("dense", "mice"),
    "rope_pairing": PAIRINGS,
    "time_columns": ("single", "split"),
    "head": ("linear", "lorentz"),
    "embedding": ("lifted", "manifold"),
    "initializer": ("small", "xavier"),
    "cache_mode": ("latent", "full"),
    "gate": ("sigmoid", "softmax", "softmax_raw"),
    "expert_curvature": ("learned", "const"),
    "balance_rule": ("sign", "proportional"),
}
_POSITIVE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size"),
    *("max_position_embeddings", "rms_norm_eps", "curvature", "residual_gain", "value_scale"),
)
_POSITIVE_MICE = (
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "route_scale"),
)


class HelmConfig(PreTrainedConfig):
    """Configuration of a HELM language model; all widths count space components, the time comes on top.

    Args:
        variant: "dense" (HELM-D), or "mice" (latent attention, mixture of curvature experts).
        hidden_size: n. intermediate_size: hidden components of the dense feed-forward part.
        head_dim: components of a dense head, by default ``(n + 1) // num_attention_heads - 1``.
        rope_parameters: as everywhere in transformers 5, ``{"rope_type": "default", "rope_theta": 10000.0}``.
        rope_pairing: which components turn together, see :func:`hyptree.ops.heads.reference.rotate`.
        curvature: c > 0 of the stream, the sectional curvature is -c.
        residual_gain: sigma of the residual; by default ``4 sqrt(n + 1)`` for dense and ``sqrt(n + 1)`` for mice.
        value_scale: factor on the values; by default ``head_dim**-0.5`` (``v_head_dim`` for mice), which keeps them
            near enough to the origin for bfloat16.
        time_columns: "split" carries times of queries and keys as two bfloat16 numbers each.
        final_proj: one more linear map before the last norm.
        head: "linear" over space and time, or "lorentz" (distances to one point per token, may be tied).
        embedding: "lifted" is an ordinary table, "manifold" a table of points for Riemannian optimisers.
        initializer: "xavier" starts as published, "small" with a quarter of that and without time columns, which
            trains better (docs/helm.md).
        q_lora_rank: components of the query's latent, 0 for none. kv_lora_rank: r, of the latent of keys and values.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: components per head of latent attention.
        cache_mode: what latent attention caches.
        num_dense_layers: leading layers of mice with a dense feed-forward part.
        gate, route_scale, expert_norm, shared_curvature, expert_curvature, expert_curvature_range: see
            :mod:`hyptree.lm.experts.mixture`.
        balance_rate, balance_rule, balance_loss: how the load of experts is kept even.
        output_logits: give logits back in training too; without, the loss never builds them whole.
    """

    model_type = "helm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "aux_loss"]

    variant: str = "dense"
    vocab_size: int = 128256
    hidden_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    head_dim: int | None = None
    intermediate_size: int = 1528
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    rope_pairing: str = "interleaved"
    rms_norm_eps: float = 1e-6
    curvature: float = 1.0
    attention_bias: bool = True
    ffn_bias: bool = True
    residual_gain: float | None = None
    value_scale: float | None = None
    time_columns: str = "single"
    final_proj: bool = True
    head: str = "linear"
    embedding: str = "lifted"
    initializer: str = "small"
    tie_word_embeddings: bool = False
    output_logits: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    q_lora_rank: int = 0
    kv_lora_rank: int = 62
    qk_nope_head_dim: int = 47
    qk_rope_head_dim: int = 16
    v_head_dim: int = 63
    cache_mode: str = "latent"

    num_dense_layers: int = 1
    n_routed_experts: int = 4
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    moe_intermediate_size: int = 760
    gate: str = "sigmoid"
    route_scale: float = 1.0
    expert_curvature: str = "learned"
    expert_curvature_range: tuple[float, float] | list[float] = (0.1, 2.0)
    expert_norm: bool = False
    shared_curvature: bool = False
    balance_rate: float = 1e-3
    balance_rule: str = "sign"
    balance_loss: float = 1e-4

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = (self.hidden_size + 1) // max(self.num_attention_heads, 1) - 1
        if self.residual_gain is None:
            self.residual_gain = (4.0 if self.variant == "dense" else 1.0) * math.sqrt(self.hidden_size + 1)
        if self.value_scale is None:
            size = self.head_dim if self.variant == "dense" else self.v_head_dim
            self.value_scale = max(size, 1) ** -0.5
        self.rope_parameters = dict(self.rope_parameters or {})
        self.expert_curvature_range = list(self.expert_curvature_range)
        super().__post_init__(**kwargs)
        self.validate()

    @property
    def rotary_dim(self) -> int:
        """Components of a head that turn with the position, an even number."""
        size = self.head_dim if self.variant == "dense" else self.qk_rope_head_dim
        return int(size or 0) // 2 * 2

    def validate_rope(self) -> None:
        """One line for a wrong kind of rotary scaling. An odd head is fine here: its last component does not turn."""
        parameters = self.rope_parameters or {}
        kind = parameters.get("rope_type", "default")
        kinds = sorted({"default", *ROPE_INIT_FUNCTIONS})
        if kind not in kinds:
            raise _wrong("rope_parameters", "rope_type", kind, kinds)
        check = getattr(self, f"_validate_{kind}_rope_parameters", None)
        if check is not None:
            check(parameters, ignore_keys=None)

    def validate(self) -> None:
        """Raise one line about the first setting that cannot be; transformers calls this before it saves."""
        self.validate_output_attentions()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _wrong("HelmConfig", name, getattr(self, name), choices)
        if self.rotary_dim < 2:
            name = "head_dim" if self.variant == "dense" else "qk_rope_head_dim"
            raise UserError(
                f"HelmConfig: {name} must be at least 2, so that one pair can turn with the position; got "
                f"{getattr(self, name)} (hidden_size {self.hidden_size}, {self.num_attention_heads} heads)"
            )
        for name in _POSITIVE + (_POSITIVE_MICE if self.variant == "mice" else ()):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise UserError(f"HelmConfig: {name} must be a positive number, got {value!r}")
        if self.tie_word_embeddings and self.head != "lorentz":
            raise UserError(
                "HelmConfig: tie_word_embeddings needs head='lorentz', whose rows are points as the embedding's are; "
                f"got head={self.head!r}"
            )
        if self.variant == "mice":
            self._check_experts()
        self.validate_rope()

    def _check_experts(self) -> None:
        if not 0 < self.num_experts_per_tok <= self.n_routed_experts:
            raise UserError(
                f"HelmConfig: num_experts_per_tok must be between 1 and n_routed_experts {self.n_routed_experts}, got "
                f"{self.num_experts_per_tok}"
            )
        if not 0 <= self.num_dense_layers <= self.num_hidden_layers:
            raise UserError(
                f"HelmConfig: num_dense_layers must be between 0 and num_hidden_layers {self.num_hidden_layers}, got "
                f"{self.num_dense_layers}"
            )
        if self.n_shared_experts < 0 or self.q_lora_rank < 0:
            raise UserError(
                "HelmConfig: n_shared_experts and q_lora_rank must not be negative, got "
                f"{self.n_shared_experts} and {self.q_lora_rank}"
            )
        low, high = self.expert_curvature_range
        if not 0 < low <= high:
            raise UserError(f"HelmConfig: expert_curvature_range must be 0 < low <= high, got {low} and {high}")


def _wrong(where: str, name: str, value: Any, choices: Any) -> UserError:
    hint = suggest(str(value), choices)
    return UserError(f"{where}: unknown {name} {value!r}; " + (hint or f"expected one of {', '.join(choices)}"))
