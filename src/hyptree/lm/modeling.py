"""HELM as Hugging Face models: ``HelmModel`` gives points, ``HelmForCausalLM`` logits, losses and ``generate``.

embed -> L x { x = x (+) attention(norm x);  x = x (+) ffn(norm x) } -> projection -> norm -> head, where (+) is the
Lorentz residual, and every arrow carries the n space components of points.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, TrainerCallback
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from hyptree.errors import UserError
from hyptree.lm.ambient import GAIN_FACTORS, AmbientLinear, WeightCache, aligned, constant_weights
from hyptree.lm.attention import ATTENTION
from hyptree.lm.blocks import HelmBlock, PointEmbedding
from hyptree.lm.checks import check_input
from hyptree.lm.config import HelmConfig
from hyptree.lm.head import LorentzHead, head_matrix, next_token_loss
from hyptree.lm.rotary import HelmRotary
from hyptree.ops.bare import is_bare
from hyptree.ops.residual_norm.reference import lift, rms_norm
from hyptree.ops.rounding import gemm_dtype, wide

_WITHOUT_EFFECT = {"cache_position", "return_dict"}
"""What transformers hands to every model and ours needs not."""
_MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
"""They differ between versions of transformers."""


@dataclass
class HelmModelOutput(BaseModelOutputWithPast):
    """Points after the last norm, the cache, and what the experts' balance adds to the loss."""

    aux_loss: Tensor | None = None


@dataclass
class HelmOutput(CausalLMOutputWithPast):
    """Loss, logits, the cache, and what the experts' balance added to the loss."""

    aux_loss: Tensor | None = None


class HelmPreTrainedModel(PreTrainedModel):
    """What both models share: how weights start, what transformers may do with them."""

    config: HelmConfig
    config_class = HelmConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HelmBlock"]  # noqa: RUF012  (transformers' names)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PointEmbedding):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)  # |x| is near 1
        elif type(module).__module__.startswith("hyptree.lm."):
            if hasattr(module, "gain_factors"):
                module.gain_factors = GAIN_FACTORS[self.config.initializer]  # type: ignore[assignment]
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        elif isinstance(module, nn.Linear):
            bound = module.weight.shape[-1] ** -0.5
            nn.init.uniform_(module.weight, -bound, bound)

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> str:
        if isinstance(attn_implementation, str) and attn_implementation not in ATTENTION:
            raise UserError(f"a HELM has attn_implementation {', '.join(ATTENTION)}, got {attn_implementation!r}")
        return str(super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs))

    def post_step(self) -> None:
        """Move the balance biases of all gates. Call it after every optimiser step, in every process."""
        if self.config.variant == "mice":
            from hyptree.lm.experts.routing import gates_of, update_biases

            update_biases(gates_of(self))

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that no optimiser should decay: gains, weights of residuals, temperatures, biases."""
        spared = ("norm", "attention_weight", "ffn_weight", "tau", "bias", "gain", "log_curvature")
        return {name for name, _ in self.named_parameters() if name.rsplit(".", 1)[-1].endswith(spared)}


class HelmModel(HelmPreTrainedModel):
    """The stack without a head: token ids (B, N) -> points (B, N, n) after the last norm."""

    def __init__(self, config: HelmConfig):
        super().__init__(config)
        self.c, n = float(config.curvature), config.hidden_size
        if config.embedding == "manifold":
            self.embed_tokens: nn.Embedding = PointEmbedding(config.vocab_size, n, self.c, config.pad_token_id)
        else:
            self.embed_tokens = nn.Embedding(config.vocab_size, n, config.pad_token_id)
        self.layers = nn.ModuleList([HelmBlock(config, i) for i in range(config.num_hidden_layers)])
        self.final_proj = AmbientLinear(n, n, c=self.c) if config.final_proj else None
        self.norm = nn.Parameter(torch.empty(n))
        self.rotary = HelmRotary(config)
        self.gradient_checkpointing = False
        self.reset_parameters()
        self.post_init()

    def reset_parameters(self) -> None:
        """Unit gain of the last norm; the layers draw themselves."""
        nn.init.ones_(self.norm)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> HelmModelOutput:
        """Points after the last norm.

        Args:
            input_ids: (B, N). inputs_embeds: (B, N, n) points in their place.
            attention_mask: (B, past + N), 0 for padding, on the left or on the right; or a mask (B, 1, N, M) made by
                hand, or FlexAttention's BlockMask.
            position_ids: (B, N). Without attention mask and cache, positions that start again are documents of their
                own, which do not see each other.
            past_key_values: any cache of transformers.
        """
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        check_input(self.config, input_ids, inputs_embeds, past, attention_mask, position_ids)
        x: Any = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        use_cache = bool(use_cache) and not (self.gradient_checkpointing and self.training)
        with_states = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        with_weights = bool(self.config.output_attentions if output_attentions is None else output_attentions)
        places = torch.arange(x.shape[1], device=x.device) + past
        mask = None  # plain causal order, so that the fastest kernels are used
        if not (attention_mask is None and position_ids is None and past_key_values is None):
            settings = {
                "config": self.config,
                "inputs_embeds": x,
                "input_embeds": x,
                "attention_mask": attention_mask,
                "cache_position": places,
                "past_key_values": past_key_values,
                "position_ids": position_ids,
            }
            mask = create_causal_mask(**{name: value for name, value in settings.items() if name in _MASK_ARGUMENTS})
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.config)
        position_embeddings = self.rotary(x, places[None] if position_ids is None else position_ids)

        states: list[Any] = [x]
        attentions: list[Any] = []
        aux_losses: list[Tensor] = []
        for layer in self.layers:
            x, aux_loss, weights = layer(
                x,
                position_embeddings,
                attention_mask=mask,
                past_key_values=past_key_values,
                output_attentions=with_weights,
            )
            states.append(x)
            attentions.append(weights)
            if aux_loss is not None:
                aux_losses.append(aux_loss)
        if self.final_proj is not None:
            x = self.final_proj(x).to(x.dtype)
        x = rms_norm(x, self.norm, self.config.rms_norm_eps)
        return HelmModelOutput(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=tuple(states) if with_states else None,
            attentions=tuple(attentions) if with_weights else None,
            aux_loss=torch.stack(aux_losses).sum() if aux_losses else None,
        )


class HelmForCausalLM(HelmPreTrainedModel, GenerationMixin):
    """A HELM with its head: logits, the loss of the next token, ``generate``.

    With labels in training the loss is computed in chunks and logits are None (``config.output_logits`` brings them
    back): the logits of a large vocabulary would take more memory than everything else.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True

    def __init__(self, config: HelmConfig):
        super().__init__(config)
        self.model = HelmModel(config)
        self.vocab_size = config.vocab_size
        n, c, self.log_head_tau = config.hidden_size, self.model.c, None
        if config.head == "linear":
            self.lm_head: nn.Module = nn.Linear(n + 1, config.vocab_size, bias=False)
        else:  # a row is a point, and its time is derived
            self.lm_head, self.log_head_tau = LorentzHead(n, config.vocab_size, c), nn.Parameter(torch.empty(1))
        self._head_cache = WeightCache()
        self.reset_parameters()
        self.post_init()

    def reset_parameters(self) -> None:
        """Set the temperature of a Lorentz head so that first logits have a spread near 1."""
        if self.log_head_tau is not None:
            nn.init.constant_(self.log_head_tau, math.log(2.0))

    def _logits(self, rows: Tensor, factor: Tensor | None) -> Tensor:
        if is_bare(self.lm_head):
            matrix = self._head_cache.get(rows.dtype, lambda: head_matrix(self.lm_head, rows))
            logits = wide(F.linear(rows, matrix))
        else:
            logits = wide(self.lm_head(rows))
        if factor is None:
            return logits
        origin = 1 / math.sqrt(self.model.c)  # the head's products lack 2/tau (1/c - t/sqrt(c))
        return logits + origin * (origin * factor - wide(rows[..., self.config.hidden_size, None]))

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``generate`` of transformers; matrices that are made from weights are made once."""
        parent: Any = super()
        with constant_weights(self):
            return parent.generate(*args, **kwargs)

    def _get_resized_lm_head(self, old_lm_head: Any, *args: Any, **kwargs: Any) -> Any:
        """That of transformers, which knows ``nn.Linear`` alone."""
        parent: Any = super()
        if not isinstance(old_lm_head, LorentzHead):
            return parent._get_resized_lm_head(old_lm_head, *args, **kwargs)
        as_linear = nn.Linear(1, 1, bias=False, device="meta")
        as_linear.weight = old_lm_head.weight
        old_lm_head.weight = parent._get_resized_lm_head(as_linear, *args, **kwargs).weight
        return old_lm_head

    def _get_static_cache_init_shape(self) -> None:
        """Let a static cache take its shape from the first keys and values: ours have their times with them."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> HelmOutput:
        """Logits of the next token, and the loss if there are labels.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds: see :class:`HelmModel`.
            labels: (B, N), usually the input; shifted here, -100 does not count.
            logits_to_keep: only the logits of the last so many tokens (0: all), or of the tokens at these places.
            num_items_in_batch: what the summed loss is divided by, for accumulated steps.
            kwargs: ``shift_labels`` (B, N), labels that are shifted already, in place of ``labels``. (An argument of
                that name in the signature would make a Trainer ask for both.)
        """
        shift_labels = kwargs.pop("shift_labels", None)
        if unknown := [name for name, value in kwargs.items() if value is not None and name not in _WITHOUT_EFFECT]:
            raise TypeError(f"HelmForCausalLM takes no {', '.join(unknown)}; leave it out")
        if use_cache is None and labels is not None and past_key_values is None:
            use_cache = False  # who measures a loss writes no text, and keys and values of all layers are large
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        hidden: Any = outputs.last_hidden_state
        loss: Any = None
        logits: Any = None
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        targets = labels if shift_labels is None else shift_labels
        if targets is None:
            hidden, kept = hidden[:, kept], slice(None)
        elif targets.shape != hidden.shape[:2]:
            shapes = f"{tuple(hidden.shape[:2])} as the tokens, got {tuple(targets.shape)}"
            raise ValueError(f"HelmForCausalLM: labels must be {shapes}")
        # What the head reads, [s, t] of the points; on a GPU with zeros behind, up to a multiple of 8 columns.
        width, c, factor, dtype = hidden.shape[-1] + 1, self.model.c, None, gemm_dtype(hidden)
        if hidden.is_cuda and is_bare(self.lm_head):
            width = aligned(width)
        if self.log_head_tau is not None:  # a scaled point is a point of another curvature
            factor = 2 * torch.exp(-wide(self.log_head_tau))
            hidden, c = factor * wide(hidden), c / (factor * factor)
        rows = lift(hidden, dtype, width, c, bias=False)
        if targets is not None:
            loss = next_token_loss(rows, self.lm_head, labels, shift_labels, num_items_in_batch)
            if outputs.aux_loss is not None:
                loss = loss + outputs.aux_loss
        if loss is None or not self.training or self.config.output_logits:
            logits = self._logits(rows[:, kept], factor)
        return HelmOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            aux_loss=outputs.aux_loss,
        )


class BalanceCallback(TrainerCallback):
    """For Hugging Face's ``Trainer``: keeps the load of experts even after every optimiser step."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model = getattr(model, "module", model)  # as DistributedDataParallel wraps it
        if isinstance(model, HelmPreTrainedModel):
            model.post_step()
