"""What latent attention keeps of a token, in the two slots of any transformers cache, and how many bytes that takes.

Key slot: the normed latent as it was lifted, and the rotated shared key, (B, 1, N, r + 2 + d_r). Value slot: per head
how far the times of key and value lie above the origin's, (B, 1, N, 2H). One head and plain tensors: cropping, beams
and static caches need to know nothing about it. A cache has one dtype; where that is half precision each of the 2H
times is kept as two numbers, ``high + low``, because scores are small differences of large products.

The latent's time and the one behind it could be made again from the latent. Kept, they let the two matrix products of a
step read the cache as it lies, and time and bias of the up-projection need no steps of their own.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hyptree.lm.ambient import aligned
from hyptree.ops.latent_decode.reference import HALF
from hyptree.ops.rounding import rounded

if TYPE_CHECKING:
    from hyptree.lm.config import HelmConfig


def split_high_low(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two tensors of ``dtype`` whose sum is ``x`` to twice the digits of ``dtype``."""
    high = rounded(x, dtype)
    return high.to(dtype), (x - high).to(dtype)


def pack(keys: Tensor, key_excess: Tensor, value_excess: Tensor) -> tuple[Tensor, Tensor]:
    """The key slot and the value slot of N new tokens for ``Cache.update``, in the dtype of ``keys``.

    Args:
        keys: (B, N, r + 2 + d_r) lifted latents and rotated keys.
        key_excess, value_excess: (B, N, H) times of each head's key and value above the origin's, float32 at least.
    """
    excess = torch.cat([key_excess, value_excess], -1)  # (B, N, 2H)
    times = split_high_low(excess, keys.dtype) if keys.dtype in HALF else (excess.to(keys.dtype),)
    return keys.unsqueeze(1), torch.cat(times, -1).unsqueeze(1)


def cache_bytes_per_token(config: "HelmConfig", dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that one token takes in the cache, all layers together, with all that is stored: times and padding too."""
    heads, times = config.num_attention_heads, 3 if config.time_columns == "split" else 1
    if config.variant == "dense":
        scalars = 2 * heads * aligned(int(config.head_dim or 0) + times)
    elif config.cache_mode == "full":
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        scalars = heads * (aligned(key_dim + times) + aligned(config.v_head_dim + 1))
    else:
        latent = config.kv_lora_rank + 1 + int(config.attention_bias) + config.qk_rope_head_dim
        scalars = latent + 2 * heads * (2 if dtype in HALF else 1)
    return scalars * dtype.itemsize * config.num_hidden_layers
