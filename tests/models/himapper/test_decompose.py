"""Decomposition: the batched form is the loop over levels, one row per node is enough, SDPA is the plain softmax."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.models.himapper.plain import Decomposition, Encoding
from hyptree.models.himapper.tree import ProbabilisticTree, TreeShape

SHAPE = TreeShape(8, 3)
KINDS = pytest.mark.parametrize("attention", ["cosine", "scaled"])


def made(**options) -> Decomposition:
    """Weights so large that nodes differ, and no gain or bias at its first value."""
    module = Decomposition(SHAPE, channels=20, width=16, heads=4, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2 if parameter.dim() > 1 else 1).add_(0.2 * torch.randn_like(parameter))
    return module


def loop(module: Decomposition, rows: Tensor, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Level by level, image by image, head by head, with plain softmaxes: nodes and maps. ``rows`` is (L, N, w)."""
    levels, maps = [], []
    for level, queries in enumerate(rows):
        actual, looked = [], []
        for image in tokens:
            q = module.query_proj(module.query_norm(queries))
            memory = module.memory_norm(module.token_proj(module.token_norm(image)))
            ask = module.cross_query(module.cross_norm(q)).chunk(4, -1)
            key, value = (part.chunk(4, -1) for part in module.cross_key_value(memory).chunk(2, -1))
            heads, weights = [], []
            for a, k, v in zip(ask, key, value, strict=True):
                if module.log_scale is None:
                    scores = a @ k.T / 0.07
                else:
                    scores = F.normalize(a, dim=-1) @ F.normalize(k, dim=-1).T * module.log_scale.exp().clamp(max=100)
                weights.append(scores.softmax(-1))
                heads.append(weights[-1] @ v)
            x = module.cross_out(torch.cat(heads, -1))
            x = q + x if module.query_residual else x
            parts = [part.chunk(4, -1) for part in module.self_in(module.self_norm(x)).chunk(3, -1)]
            heads = [(a @ k.T / 2).softmax(-1) @ v for a, k, v in zip(*parts, strict=True)]  # 4 channels per head
            x = x + module.self_out(torch.cat(heads, -1))
            x = module.out_norm(x + module.mlp(module.mlp_norm(x)))
            actual.append(x.unflatten(0, (SHAPE.sizes[level], 2**level)).mean(1))
            looked.append(torch.stack(weights).mean(0).unflatten(0, (SHAPE.sizes[level], 2**level)).mean(1))
        levels.append(torch.stack(actual))
        maps.append(torch.stack(looked))
    return levels, maps


@KINDS
@pytest.mark.parametrize("query_residual", [False, True])
def test_the_batched_form_is_the_loop(attention: str, query_residual: bool) -> None:
    module = made(attention=attention, query_residual=query_residual)
    rows, tokens = torch.randn(3, 8, 16), torch.randn(2, 7, 20)
    nodes, maps = module(rows, tokens)
    assert maps is None and nodes.shape == (2, 14, 16)
    expected, looked = loop(module, rows, tokens)
    for batched, single in zip(SHAPE.split(nodes), expected, strict=True):
        assert torch.allclose(batched, single, atol=1e-5)
    _, maps = module(rows, tokens, return_maps=True)
    for batched, single in zip(SHAPE.split(maps), looked, strict=True):  # means over heads and over a node's rows
        assert torch.allclose(batched, single, atol=1e-5)


def test_rows_of_each_image_are_read_by_that_image() -> None:
    module = made()
    rows, tokens = torch.randn(2, 3, 8, 16), torch.randn(2, 7, 20)
    nodes, _ = module(rows, tokens)
    for b in range(2):
        assert torch.allclose(nodes[b : b + 1], module(rows[b], tokens[b : b + 1])[0], atol=1e-5)
    assert torch.allclose(module(rows[0], tokens)[0], module(rows[:1].expand(2, -1, -1, -1), tokens)[0], atol=1e-5)


@KINDS
def test_one_row_per_node_is_enough_where_nothing_is_random(attention: str) -> None:
    module, tree = made(attention=attention), ProbabilisticTree(SHAPE, 16)
    tokens = torch.randn(2, 7, 20)
    repeated = torch.stack([mean.repeat_interleave(2**level, 0) for level, mean in enumerate(tree.moments()[0])])
    few, few_maps = module(tree.eval()(2)[0], tokens, return_maps=True)
    many, many_maps = module(repeated, tokens, return_maps=True)
    assert torch.allclose(few, many, atol=1e-5) and torch.allclose(few_maps, many_maps, atol=1e-6)


@KINDS
@pytest.mark.parametrize("sampled", [False, True])
def test_maps_are_the_attention_that_is_used(attention: str, sampled: bool) -> None:
    module = made(attention=attention)
    queries, tokens = torch.randn(3, 8, 16) if sampled else torch.randn(14, 16), torch.randn(2, 7, 20)
    fast, _ = module(queries, tokens)
    plain, maps = module(queries, tokens, return_maps=True)
    assert torch.allclose(fast, plain, atol=1e-5)
    assert maps.shape == (2, 14, 7) and (maps.sum(-1) - 1).abs().max() < 1e-5 and maps.min() >= 0
    assert maps.std() > 0.01


def test_no_row_looks_at_another_level() -> None:
    """What the leaves ask does not change what their ancestors find."""
    module, tokens = made(), torch.randn(2, 7, 20)
    for queries in (torch.randn(14, 16), torch.randn(3, 8, 16)):
        other = queries.clone()
        leaves = other[: 8 if other.dim() == 2 else 1]
        leaves += torch.randn_like(leaves)
        (a, _), (b, _) = module(queries, tokens), module(other, tokens)
        assert torch.allclose(a[:, 8:], b[:, 8:], atol=1e-6) and not torch.allclose(a[:, :8], b[:, :8], atol=1e-2)


def test_temperature_starts_sharp_and_stays_bounded() -> None:
    module = Decomposition(SHAPE, 20, 16)
    assert module.log_scale is not None and module.log_scale.exp().item() == pytest.approx(1 / 0.07)
    tokens, queries = torch.randn(2, 7, 20), torch.randn(14, 16)
    torch.nn.init.constant_(module.log_scale, 6.0)
    at_limit, _ = module(queries, tokens)
    torch.nn.init.constant_(module.log_scale, 9.0)
    assert torch.equal(at_limit, module(queries, tokens)[0])
    assert Decomposition(SHAPE, 20, 16, attention="scaled").log_scale is None


def test_encoding_is_the_loop_over_levels() -> None:
    """One product for the keys and values of all levels, against one attention after the other."""
    encode = Encoding(SHAPE, 20, 16, 4)
    torch.nn.init.normal_(encode.out_proj.weight)
    pooled, nodes = torch.randn(3, 20), torch.randn(3, 14, 16)
    x = encode.in_proj(encode.in_norm(pooled))
    weight, bias = encode.key_value.weight.chunk(3), encode.key_value.bias.chunk(3)
    for level, (layer, own) in enumerate(zip(encode.layers, SHAPE.split(nodes), strict=True)):
        key, value = F.linear(own, weight[level], bias[level]).chunk(2, -1)
        heads = []
        for a, k, v in zip(*(t.chunk(4, -1) for t in (layer.query(layer.norm(x)), key, value)), strict=True):
            heads.append(((k @ a[:, :, None] / 2).softmax(1) * v).sum(1))
        x = x + layer.out(torch.cat(heads, -1))
        x = x + layer.mlp(layer.mlp_norm(x))
    assert torch.allclose(encode(pooled, nodes), encode.out_proj(encode.out_norm(x)), atol=1e-5)
