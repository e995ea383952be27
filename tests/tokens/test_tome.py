"""Bipartite matching against ToMe as its paper describes it (arXiv 2210.09461), on whole sequences with their prefix.

Written from the description: tokens at even places of the sequence (A), each but the class token proposes to the most
similar token at an odd place (B), which may not be a distillation token either; the r best proposals are taken; what
is left of A comes first, then B, both in their order, and the class token in front.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hyptree import tokens
from hyptree.cluster import bipartite_match
from tests.tokens.small_models import NUM_PATCHES, images, small_model


def groups_of(keys: Tensor, r: int, num_protected: int) -> list[list[int]]:
    """Which places (T) of the sequence make each token of the next one."""
    direction = torch.nn.functional.normalize(keys.double(), dim=-1)
    alike = (direction @ direction.T).tolist()
    places = range(num_protected, len(keys))
    sources, targets = [i for i in places if i % 2 == 0], [j for j in places if j % 2 == 1]
    best = {i: max(targets, key=lambda j: (alike[i][j], -j)) for i in sources}
    gone = sorted(sources, key=lambda i: (-alike[i][best[i]], i))[: min(r, (len(keys) - num_protected) // 2)]
    front = [[i] for i in range(num_protected)]
    return front + [[i] for i in sources if i not in gone] + [[i for i in gone if best[i] == j] + [j] for j in targets]


def definition(model: Any, image: Tensor, r: tuple[int, ...], num_protected: int) -> tuple[Tensor, Tensor]:
    """Logits (1, classes) of an image (3, H, W) with r[i] tokens fewer in block i, and the sizes at the end."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]  # (T, C)
    size = torch.ones(len(x), dtype=x.dtype)
    for block, num_removed in zip(model.blocks, r, strict=True):
        attn = block.attn
        q, k, v = attn.qkv(block.norm1(x)).reshape(len(x), 3, attn.num_heads, -1).permute(1, 2, 0, 3)
        q, k = attn.q_norm(q), attn.k_norm(k)
        mixed = (attn.scale * q @ k.mT + size.log()).softmax(-1) @ v
        x = x + block.ls1(attn.proj(mixed.transpose(0, 1).reshape(x.shape)))
        if num_removed:
            groups = groups_of(k.mean(0), num_removed, num_protected)
            x = torch.stack([(x[g] * size[g, None]).sum(0) / size[g].sum() for g in groups])
            size = torch.stack([size[g].sum() for g in groups])
        x = x + block.ls2(block.mlp(block.norm2(x)))
    patches, weight = model.norm(x)[num_protected:], size[num_protected:, None]
    if model.global_pool == "avg":
        return model.head(model.fc_norm((patches * weight).sum(0) / weight.sum()))[None], size[num_protected:]
    return model.forward_head(model.norm(x)[None]), size[num_protected:]


@pytest.mark.parametrize("r", [(1, 1, 1, 1), (5, 5, 5, 5), (18, 9, 4, 2), (3, 0, 16, 8)])
@pytest.mark.parametrize(
    ("kind", "num_protected"), [("vit", 1), ("avg", 0), ("avg_with_class", 1), ("distilled", 2), ("registers", 5)]
)
def test_a_patched_model_is_tome(kind: str, num_protected: int, r: tuple[int, ...]) -> None:
    model, x = small_model(kind).double(), images(3).double()
    with tokens.patched(model, "tome", r=list(r)) as handle, torch.no_grad():
        actual = model(x)
        sizes = handle.sizes[-1]
        for i, image in enumerate(x):
            logits, size = definition(model, image, r, num_protected)
            assert sizes[i].tolist() == size.tolist()
            assert torch.allclose(actual[i], logits[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_protected", [0, 1, 2, 5])
@pytest.mark.parametrize("num_patches", [2, 9, NUM_PATCHES])
def test_labels_count_the_tokens_in_front(num_patches: int, num_protected: int) -> None:
    keys = torch.randn(4, num_protected + num_patches, 8)
    for r in range(1, num_patches // 2 + 1):
        labels = bipartite_match(keys[:, num_protected:], num_patches - r, num_before=num_protected)
        for image, row in zip(keys, labels.tolist(), strict=True):
            groups = groups_of(image, r, num_protected)[num_protected:]
            assert [sorted(g) for g in groups] == [
                [num_protected + i for i, label in enumerate(row) if label == k] for k in range(num_patches - r)
            ]


def test_closures_count_the_protected_tokens() -> None:
    features = torch.randn(2, 12, 6)
    merge, _ = tokens.matcher(features, 6, "tome", protected=3)
    for merged, image in zip(merge(features), features, strict=True):
        expected = torch.stack([image[g].mean(0) for g in groups_of(image, 3, 3)])
        assert torch.allclose(merged, expected, atol=1e-6)
