"""One clear line for input that a HELM cannot take; no check reads a value from a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hyptree.errors import UserError
from hyptree.lm.config import HelmConfig


def check_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raise unless ``input_ids`` is (B, N) and, where that costs nothing to know, within the vocabulary."""
    if input_ids.dim() != 2:
        raise ValueError(f"HelmModel: input_ids must be (B, N), got {tuple(input_ids.shape)}; add the batch axis")
    if input_ids.device.type != "cpu" or torch.compiler.is_compiling() or not input_ids.numel():
        return
    low, high = (int(value) for value in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"HelmModel: token ids must be between 0 and {vocab_size - 1}, got {low if low < 0 else high}; "
            "does the tokenizer belong to this model?"
        )


def check_lengths(config: HelmConfig, x: Tensor, past: Any, mask: Any, position_ids: Tensor | None) -> None:
    """Raise unless tokens, positions and mask fit each other and the context.

    Args:
        x: (B, N, n) embedded tokens. past: how many are cached, an int, or a tensor, which is not read.
        mask: (B, past + N), (B or 1, H or 1, N, keys), a BlockMask, or None.
    """
    batch, length = x.shape[:2]
    if x.shape[-1] != config.hidden_size:
        raise ValueError(f"HelmModel: inputs_embeds must be (B, N, {config.hidden_size}), got {tuple(x.shape)}")
    if not length:
        raise ValueError(f"HelmModel: ({batch}, 0) holds no token; give at least one, e.g. the tokenizer's bos")
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != length):
        raise ValueError(
            f"HelmModel: position_ids must be ({batch}, {length}) as the tokens, got {tuple(position_ids.shape)}"
        )
    _check_context(config, length, past, position_ids)
    if not isinstance(mask, Tensor):
        if mask is not None and not isinstance(mask, BlockMask | dict):
            raise ValueError(f"HelmModel: attention_mask must be a tensor, got {type(mask).__name__}")
        return
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        fits = shape[0] == batch and (not isinstance(past, int) or shape[1] == past + length)
    else:
        fits = mask.dim() == 4 and shape[0] in (1, batch) and shape[2] == length
    if not fits:
        tokens = f"{past} cached + {length}" if isinstance(past, int) and past else str(length)
        expected = f"(B, tokens) = ({batch}, {tokens}), or (B, 1, {length}, keys)"
        raise ValueError(f"HelmModel: attention_mask must be {expected}; got {shape}")


def _check_context(config: HelmConfig, length: int, past: Any, position_ids: Tensor | None) -> None:
    if (config.rope_parameters or {}).get("rope_type") in ("dynamic", "longrope"):
        return  # made for texts beyond the limit
    total = past + length if isinstance(past, int) else 0
    if position_ids is not None:  # padding and packed documents count apart
        if position_ids.device.type != "cpu" or torch.compiler.is_compiling() or not position_ids.numel():
            return
        total = int(position_ids.max()) + 1
    if total > config.max_position_embeddings:
        raise UserError(
            f"HelmModel: {total} tokens do not fit into max_position_embeddings {config.max_position_embeddings}; "
            "give fewer, or a configuration with rope_parameters for longer texts"
        )
