"""Euclidean twins of HELMs, for honest comparison: transformers' Llama and DeepSeek-V3 of equal shape.

A twin has the layers, heads, experts, vocabulary and latent sizes of its HELM, and the same head: the loss comes from
``linear_cross_entropy``. Widths are rounded to multiples of 8, which the twin's matrix products want. So it is the
fastest Euclidean model of that shape that a user of transformers has.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hyptree.lm.ambient import padded_width
from hyptree.lm.experts.routing import balance_step
from hyptree.lm.head import next_token_loss
from hyptree.lm.modeling import HelmOutput
from hyptree.nn.precision import gemm_dtype
from hyptree.ops.experts.grouped import dispatch, grouped_linear, sort_by_expert, unpermute

if TYPE_CHECKING:
    from hyptree.lm.config import HelmConfig

Experts = Literal["hyptree", "grouped_mm"]
"""Who runs the twin's experts, both sorted by expert with one grouped product: this package as in a HELM, in every
dtype and compiled, or transformers, whose way compiles in bfloat16 only."""


def euclidean_twin(
    config: HelmConfig, device: torch.device | str | None = None, experts: Experts = "hyptree"
) -> LlamaTwin | DeepseekTwin:
    """The Euclidean model of the same shape, with random weights: a Llama for "dense", a DeepSeek-V3 for "mice".

    Args:
        config: of the HELM.
        device: where to build it; "meta" to count parameters.
        experts: who runs the experts of a DeepSeek.
    """
    with torch.device(device or "cpu"):
        if config.variant == "dense":
            return LlamaTwin(llama_config(config))
        twin = DeepseekTwin(deepseek_config(config))
        twin.config._experts_implementation = experts
        return twin


def attend_plainly(twin: Any) -> Any:
    """Give a twin the kernels of plain causal order, for whole sequences without padding, documents or cache.

    A compiled model of transformers cannot look whether positions start again, so it builds a mask for documents, and
    attention over that takes twice the time of plain causal order.
    """
    twin.config._attn_implementation = _PLAIN
    return twin


_PLAIN = "hyptree_plain"
# Without an entry among the mask functions transformers makes no mask, and its attention is then causal.
AttentionInterface.register(_PLAIN, sdpa_attention_forward)


def llama_config(config: HelmConfig) -> LlamaConfig:
    """Shape of the dense twin."""
    heads = config.num_attention_heads
    return LlamaConfig(
        **_shared(config),
        hidden_size=_near(config.hidden_size, math.lcm(8, heads)),  # transformers wants a multiple of the heads
        num_key_value_heads=heads,
        head_dim=_near(int(config.head_dim or 0) + 1),
    )


def deepseek_config(config: HelmConfig) -> DeepseekV3Config:
    """Shape of the twin with latent attention and experts."""
    if config.n_shared_experts < 1:
        raise ValueError("the DeepSeek twin always has shared experts; set n_shared_experts to 1 or more")
    rotary = config.qk_rope_head_dim
    return DeepseekV3Config(
        **_shared(config),
        hidden_size=_near(config.hidden_size),
        num_key_value_heads=config.num_attention_heads,
        q_lora_rank=_near(config.q_lora_rank) if config.q_lora_rank else None,
        kv_lora_rank=_near(config.kv_lora_rank),
        qk_rope_head_dim=rotary,
        qk_nope_head_dim=_near(config.qk_nope_head_dim + rotary + 1) - rotary,
        v_head_dim=_near(config.v_head_dim + 1),
        rope_interleave=config.rope_pairing == "interleaved",
        first_k_dense_replace=config.num_dense_layers,
        n_routed_experts=config.n_routed_experts,
        n_shared_experts=config.n_shared_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=padded_width(config.moe_intermediate_size),
        routed_scaling_factor=config.route_scale,
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        num_mtp_layers=0,
    )


def _shared(config: HelmConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": padded_width(config.intermediate_size),
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope_parameters or {}),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "attn_implementation": "sdpa",
    }


def _near(width: int, step: int = 8) -> int:
    """The multiple of ``step`` nearest to ``width``: 65 -> 64, 389 -> 392."""
    return max(1, (width + step // 2) // step) * step


class _Twin:
    """What both twins answer like a HELM: the loss in chunks in ``forward``, and ``post_step``."""

    model: Any
    lm_head: nn.Linear
    training: bool

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> HelmOutput:
        """As any causal model of transformers; with labels while training there are no logits, only their loss."""
        kwargs.pop("return_dict", None)
        shift_labels = kwargs.pop("shift_labels", None)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        hidden = output.last_hidden_state
        loss = logits = None
        if labels is not None or shift_labels is not None:
            loss = next_token_loss(hidden, self.lm_head, labels, shift_labels, num_items_in_batch)
        if loss is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        return HelmOutput(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )

    def post_step(self) -> None:
        """What follows an optimiser step; nothing for a dense model."""


class LlamaTwin(_Twin, LlamaForCausalLM):
    """A Llama whose loss needs no logits."""


class DeepseekTwin(_Twin, DeepseekV3ForCausalLM):
    """A DeepSeek-V3 whose loss needs no logits, and whose experts are kept balanced by ``post_step``."""

    balance_rate = 1e-3

    def __init__(self, config: DeepseekV3Config):
        super().__init__(config)
        for mlp in self._mixtures():
            load = torch.zeros(config.n_routed_experts, device=mlp.gate.weight.device)
            mlp.gate.register_buffer("load", load, persistent=False)
            mlp.experts.register_forward_pre_hook(_Count(mlp.gate))

    def _mixtures(self) -> list[Any]:
        return [layer.mlp for layer in self.model.layers if hasattr(layer.mlp, "experts")]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return DeepseekV3ForCausalLM._can_set_experts_implementation()  # transformers looks into the class's own file

    @torch.no_grad()
    def post_step(self) -> None:
        """Make experts that had less than their share more likely: DeepSeek's rule, over all processes."""
        for mlp in self._mixtures():
            gate = mlp.gate
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(gate.load)
            gate.e_score_correction_bias += self.balance_rate * balance_step(gate.load)
            gate.load.zero_()


class _Count:
    """Adds the tokens of each expert to the ``load`` of its gate, while training."""

    def __init__(self, gate: Any):
        self.gate = gate

    def __call__(self, experts: nn.Module, arguments: tuple[Any, ...]) -> None:
        if experts.training:
            load: Tensor = self.gate.load
            index = arguments[1].reshape(-1)  # (hidden, index of the chosen experts, their weights)
            load.scatter_add_(0, index, load.new_ones(()).expand(index.shape))


def _grouped_experts(experts: Any, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """The experts of transformers' mixtures: (T, n), (T, k), (T, k) -> (T, n)."""
    counts = (index.unsqueeze(-1) == torch.arange(experts.num_experts, device=index.device)).sum((0, 1))
    order, inverse, ends = sort_by_expert(index, counts)
    dtype = gemm_dtype(hidden)
    rows = dispatch(hidden.to(dtype), order, inverse, index.shape[-1])  # (T k, n)
    gate, up = grouped_linear(rows, experts.gate_up_proj.to(dtype), ends).chunk(2, dim=-1)
    rows = grouped_linear(experts.act_fn(gate) * up, experts.down_proj.to(dtype), ends)
    chosen = unpermute(rows, order, inverse).unflatten(0, index.shape)  # (T, k, n)
    return (chosen * weight.unsqueeze(-1)).sum(1).to(hidden.dtype)


ExpertsInterface.register("hyptree", _grouped_experts)
