"""What a HELM has to compute and to move, counted from its configuration: the time that a GPU needs at least.

Each item takes the longer of its arithmetic at the peak of the tensor cores and its bytes at the bandwidth of memory,
and items follow each other. Every tensor between two items is written once and read once, as perfect fusion would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyptree.lm.ambient import aligned, padded_width
from hyptree.lm.config import HelmConfig
from hyptree.lm.loss import CHUNK_BYTES

PEAK = 989e12
"""Floating-point operations per second of an H200 in bfloat16, dense."""
BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory."""


@dataclass(frozen=True)
class Work:
    """One kind of item in all layers together."""

    name: str
    flops: float
    bytes: float

    @property
    def seconds(self) -> float:
        """The longer of arithmetic and memory."""
        return max(self.flops / PEAK, self.bytes / BANDWIDTH)


def total(items: Iterable[Work]) -> Work:
    """The sum of all; its ``seconds`` would be those of perfect overlap."""
    items = list(items)
    return Work("all", sum(item.flops for item in items), sum(item.bytes for item in items))


def step_work(config: HelmConfig, batch: int, length: int, element: int = 2) -> list[Work]:
    """Forward and backward of ``batch`` sequences of ``length`` tokens, numbers of ``element`` bytes."""
    tokens, layers, n = batch * length, config.num_hidden_layers, config.hidden_size

    def product(name: str, rows: float, k: int, m: int, times: float = 1, matrices: int = 1) -> Work:
        moved = rows * (k + m) + matrices * k * m
        return Work(name, 6.0 * times * rows * k * m, 3.0 * times * moved * element)

    heads, key, value = config.num_attention_heads, *_head_widths(config)
    items = [product(name, tokens, k, m, layers) for name, k, m in _attention_products(config)]
    scores = batch * heads * length**2 * (key + value)  # causal: half of both products
    around = tokens * heads * (key + value)
    items.append(Work("attention", 3.5 * layers * scores, 6.0 * layers * around * element))
    items.append(Work("rotation and lift of heads", 0, 5.0 * layers * around * element))
    for name, rows, hidden, count, experts in _networks(config, tokens):
        items.append(product(f"{name} in", rows, padded_width(n), 2 * hidden, count, experts))
        items.append(product(f"{name} out", rows, padded_width(hidden), n, count, experts))
        items.append(Work(f"{name} gating", 0, 8.0 * count * rows * hidden * element))
        if experts > 1:
            items.append(Work("to experts and back", 0, 6.0 * count * rows * n * element))
    items.append(Work("norms and residuals", 0, 28.0 * layers * tokens * n * element))
    if config.final_proj:
        items.append(product("last linear map", tokens, padded_width(n), n))
    items.append(Work("embedding", 0, (4.0 * tokens + config.vocab_size) * n * element))
    head, width = config.vocab_size, padded_width(n, bias=False)
    chunks = -(-tokens * head * element // CHUNK_BYTES)
    moved = 5.0 * tokens * head * element + head * width * (3.0 * element + 8.0 * chunks)
    items.append(Work("head and loss", 6.0 * tokens * head * width, moved))
    return items


def decode_work(config: HelmConfig, batch: int, cache_bytes: float, element: int = 2) -> list[Work]:
    """One token for each of ``batch`` sequences: every weight that is used is read once, and so is the cache."""
    n, layers = config.hidden_size, config.num_hidden_layers
    weights = layers * sum(k * m for _, k, m in _attention_products(config))
    for _, rows, hidden, count, experts in _networks(config, batch):
        weights += int(count * min(experts, rows) * (padded_width(n) * 2 * hidden + padded_width(hidden) * n))
    weights += config.vocab_size * padded_width(n, bias=False)
    return [Work("weights", 2.0 * weights * batch, weights * element), Work("cache", 0, cache_bytes)]


def _head_widths(config: HelmConfig) -> tuple[int, int]:
    """Columns of a head's keys and values, with their times."""
    if config.variant == "dense":
        return aligned(int(config.head_dim or 0) + 1), aligned(int(config.head_dim or 0) + 1)
    return aligned(config.qk_nope_head_dim + config.qk_rope_head_dim + 1), aligned(config.v_head_dim + 1)


def _attention_products(config: HelmConfig) -> list[tuple[str, int, int]]:
    """Name, columns read and columns written of the matrix products around attention."""
    heads, (key, value), width = config.num_attention_heads, _head_widths(config), padded_width(config.hidden_size)
    out = ("out of heads", heads * value, config.hidden_size)
    if config.variant == "dense":
        return [("queries, keys, values", width, heads * (2 * key + value)), out]
    query, rank = config.q_lora_rank, config.kv_lora_rank
    up = ("latent to heads", padded_width(rank), heads * (config.qk_nope_head_dim + config.v_head_dim))
    rows = (query or heads * key) + rank + config.qk_rope_head_dim
    more = [("queries", padded_width(query), heads * key)] if query else []
    return [("queries and latent", width, rows), *more, up, out]


def _networks(config: HelmConfig, tokens: int) -> list[tuple[str, float, int, int, int]]:
    """Name, tokens, hidden width, layers and number of matrices of the feed-forward networks."""
    dense = config.num_hidden_layers if config.variant == "dense" else config.num_dense_layers
    mixed = config.num_hidden_layers - dense
    networks: list[tuple[str, float, int, int, int]] = [("network", tokens, config.intermediate_size, dense, 1)]
    if mixed:
        hidden = config.moe_intermediate_size
        if config.n_shared_experts:
            networks.append(("shared experts", tokens, hidden, mixed * config.n_shared_experts, 1))
        networks.append(("experts", tokens * config.num_experts_per_tok, hidden, mixed, config.n_routed_experts))
    return [network for network in networks if network[3]]
