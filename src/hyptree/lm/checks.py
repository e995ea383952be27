"""One clear line for input that a HELM cannot take; no check reads a value from a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hyptree.errors import UserError
from hyptree.lm.config import HelmConfig


def check_input(config: HelmConfig, input_ids: Any, embeds: Any, past: Any, mask: Any, position_ids: Any) -> None:
    """Raise unless there are tokens of the vocabulary, and positions and mask that fit them and the context.

    Args:
        input_ids: (B, N), or None for ``embeds`` (B, N, n).
        past: how many tokens are cached, an int, or a tensor, which is not read.
        mask: (B, past + N), (B or 1, H or 1, N, keys), a BlockMask, or None.
        position_ids: (B or 1, N), or None.
    """
    readable = [
        x is not None and x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel() > 0
        for x in (input_ids, position_ids)
    ]
    if (input_ids is None) == (embeds is None):
        count = "none" if input_ids is None else "both"
        raise ValueError(f"HelmModel: give either input_ids or inputs_embeds, got {count}")
    if embeds is not None and embeds.shape[-1] != config.hidden_size:
        raise ValueError(f"HelmModel: inputs_embeds must be (B, N, {config.hidden_size}), got {tuple(embeds.shape)}")
    if input_ids is not None and input_ids.dim() != 2:
        raise ValueError(f"HelmModel: input_ids must be (B, N), got {tuple(input_ids.shape)}; add the batch axis")
    if readable[0]:
        low, high = (int(value) for value in input_ids.aminmax())
        if low < 0 or high >= config.vocab_size:
            raise UserError(
                f"HelmModel: token ids must be between 0 and {config.vocab_size - 1}, got {low if low < 0 else high}; "
                "does the tokenizer belong to this model?"
            )
    batch, length = (input_ids if embeds is None else embeds).shape[:2]
    if not length:
        raise ValueError(f"HelmModel: ({batch}, 0) holds no token; give at least one, e.g. the tokenizer's bos")
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != length):
        raise ValueError(
            f"HelmModel: position_ids must be ({batch}, {length}) as the tokens, got {tuple(position_ids.shape)}"
        )
    total = past + length if isinstance(past, int) else 0
    if position_ids is not None:  # padding and packed documents count apart
        total = int(position_ids.max()) + 1 if readable[1] else 0
    is_made_for_more = (config.rope_parameters or {}).get("rope_type") in ("dynamic", "longrope")
    if total > config.max_position_embeddings and not is_made_for_more:
        raise UserError(
            f"HelmModel: {total} tokens do not fit into max_position_embeddings {config.max_position_embeddings}; "
            "give fewer, or a configuration with rope_parameters for longer texts"
        )
    if mask is None or isinstance(mask, BlockMask | dict):
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"HelmModel: attention_mask must be a tensor, got {type(mask).__name__}")
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        fits = shape[0] == batch and (not isinstance(past, int) or shape[1] == past + length)
    else:
        fits = mask.dim() == 4 and shape[0] in (1, batch) and shape[2] == length
    if not fits:
        tokens = f"{past} cached + {length}" if isinstance(past, int) and past else str(length)
        expected = f"(B, tokens) = ({batch}, {tokens}), or (B, 1, {length}, keys)"
        raise ValueError(f"HelmModel: attention_mask must be {expected}; got {shape}")
