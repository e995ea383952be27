"""Attention of HELM-D: the fused call against the naive formula, values and gradients, all masks and columns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from hyptree.geometry import lorentz
from hyptree.lm.attention import HelmAttention
from hyptree.lm.config import HelmConfig
from hyptree.lm.rotary import HelmRotary
from hyptree.ops.centroid.reference import centroid_space
from hyptree.ops.heads import lift_heads
from hyptree.ops.heads.reference import rotate

CURVATURES = [0.1, 1.0, 2.0]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def layer_of(dtype: torch.dtype = torch.float64, attn: str = "sdpa", **changes: Any) -> HelmAttention:
    settings = {"hidden_size": 20, "num_attention_heads": 3, "head_dim": 7, "attn_implementation": attn, **changes}
    layer = HelmAttention(HelmConfig(**settings), 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(dtype)


def inputs(layer: HelmAttention, batch: int = 2, length: int = 9) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    dtype = layer.log_tau.dtype
    s = (0.5 * torch.randn(batch, length, 20, dtype=dtype)).requires_grad_()
    return s, HelmRotary(layer.config)(s, torch.arange(length)[None])


def naive(layer: HelmAttention, s: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """All pairs, by the Minkowski product of ambient points; centroids by their definition."""
    c, d, heads = layer.heads.c, layer.heads.key_dim, layer.heads.num_heads
    whole = torch.cat([layer.qkv_proj.weight_time[:, None], layer.qkv_proj.weight], 1)
    qkv = F.linear(lorentz.to_ambient(s, c), whole, layer.qkv_proj.bias).unflatten(-1, (3, heads, d))
    q, k, v = qkv.transpose(1, 3).unbind(2)
    q, k = (rotate(x, *tables, layer.heads.interleaved) for x in (q, k))
    v = v * layer.heads.value_scale
    scores = (2 / c + 2 * lorentz.minkowski(q[..., :, None, :], k[..., None, :, :], c)) / layer.log_tau.exp()
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    mean = weights @ lorentz.to_ambient(v, c)
    form = mean[..., :1] ** 2 - mean[..., 1:].square().sum(-1, keepdim=True)
    assert float(form.detach().min()) >= (1 - 1e-5) / c  # the exact lower bound
    points = mean / (c * form).sqrt()  # (B, H, N, d + 1), time first
    out = layer.o_proj.bias
    for h in range(heads):
        block = torch.cat([layer.o_proj.weight_time[:, h, None], layer.o_proj.weight[:, h * d : (h + 1) * d]], 1)
        out = out + F.linear(points[:, h], block)
    return out


def masks(batch: int, length: int) -> dict[str, Tensor]:
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    padded = causal.expand(batch, 1, -1, -1).clone()
    padded[1, :, 2:, :2] = False  # two tokens of padding on the left
    packed = causal & torch.block_diag(torch.ones(4, 4), torch.ones(length - 4, length - 4)).bool()
    return {"causal": causal, "padded": padded, "packed": packed}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("kind", ["causal", "padded", "packed"])
def test_fused_is_naive(c: float, dtype: torch.dtype, kind: str) -> None:
    # Values near the origin: the gradient of a centroid grows with the square of their radius, and what the fused
    # kernel's backward rounds with it.
    layer = layer_of(dtype, curvature=c, value_scale=0.1)
    s, tables = inputs(layer)
    mask = masks(2, 9)[kind]
    out, _ = layer(layer.qkv_proj(s), tables, None if kind == "causal" else mask)
    exact, point = copy.deepcopy(layer).double(), s.detach().double().requires_grad_()
    expected = naive(exact, point, HelmRotary(layer.config)(point, torch.arange(9)[None]), mask)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, [s, *layer.parameters()], grad)
    leaves = {"point": point, **dict(exact.named_parameters())}
    theirs = dict(zip(leaves, torch.autograd.grad(expected, list(leaves.values()), grad.double()), strict=True))
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for (name, b), a in zip(theirs.items(), ours, strict=True):
        size = float(b.abs().max())
        if name == "log_tau":  # the temperature scales all queries; its gradient is a sum of terms that cancel
            size = float((exact.qkv_proj.weight.detach() * theirs["qkv_proj.weight"]).abs().sum())
        torch.testing.assert_close(a.double(), b, rtol=0, atol=TOLERANCE[dtype] * max(size, 1.0))


@pytest.mark.parametrize("changes", [{"time_columns": "split"}, {"rope_pairing": "half"}, {"head_dim": 8}])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_all_forms_agree(changes: dict[str, Any], attn: str) -> None:
    layer = layer_of(attn=attn, curvature=0.5, **changes)
    s, tables = inputs(layer)
    expected = naive(layer, s, tables, masks(2, 9)["causal"])
    torch.testing.assert_close(layer(layer.qkv_proj(s), tables)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("c", CURVATURES)
@pytest.mark.parametrize("kind", ["causal", "packed", "blocks"])
def test_flex_is_fused(c: float, kind: str) -> None:
    fused, flex = layer_of(curvature=c), layer_of(curvature=c, attn="flex_attention")
    flex.load_state_dict(fused.state_dict())
    s, tables = inputs(fused)
    packed = masks(2, 9)["packed"]
    settings: BlockMask | Tensor | None = packed.expand(2, 1, -1, -1) if kind == "packed" else None
    if kind == "blocks":
        settings = create_block_mask(lambda b, h, i, j: packed[0, 0][i, j], None, None, 9, 9, device="cpu")
    with torch.no_grad():
        expected = fused(fused.qkv_proj(s), tables, None if kind == "causal" else packed)
        out = flex(flex.qkv_proj(s), tables, settings)
    torch.testing.assert_close(out[0], expected[0], rtol=1e-12, atol=1e-12)


def test_scaled_rotary_sharpens_scores() -> None:
    plain = layer_of(max_position_embeddings=64)
    yarn = layer_of(
        max_position_embeddings=64,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    )
    assert plain.heads.score_scale == 1.0
    assert yarn.heads.score_scale == pytest.approx((0.1 * torch.tensor(4.0).log().item() + 1) ** 2, rel=1e-6)


@pytest.mark.parametrize(("norm", "single_at_least", "split_at_most"), [(8, 0.02, 2e-3), (20, 0.1, 1e-2)])
def test_split_times_keep_bfloat16_scores(norm: float, single_at_least: float, split_at_most: float) -> None:
    """The largest error of a score in units before the temperature, for queries and keys of the given norm."""
    errors = {}
    for columns in ("single", "split"):
        layer = layer_of(torch.float32, head_dim=60, time_columns=columns, hidden_size=20)
        heads = F.normalize(torch.randn(2, 30, 3, 3, 60), dim=-1) * norm
        heads[:, :, 1] = heads[:, :, 0] + 0.2 * torch.randn(2, 30, 3, 60)  # near keys: what cancels is large
        rows = heads.bfloat16().flatten(-3)
        with torch.no_grad():
            layer.log_tau.fill_(torch.tensor(2.0).log())  # scores are <q, k>_L
            tables = HelmRotary(layer.config)(rows.float(), torch.zeros(1, 30))
            q, k = (x.transpose(1, 2) for x in lift_heads(rows, *tables, layer.log_tau, layer.heads)[:2])
            scores = q.double() @ k.double().mT
            exact = q[..., :60].double(), k[..., :60].double()
            expected = exact[0] @ exact[1].mT - (
                (exact[0].square().sum(-1, keepdim=True) + 1).sqrt()
                * ((exact[1].square().sum(-1, keepdim=True) + 1).sqrt() - 1).mT
            )
        errors[columns] = float((scores - expected).abs().max())
    assert errors["single"] > single_at_least
    assert errors["split"] < split_at_most


def test_bfloat16_output_is_near_the_exact_one() -> None:
    layer = layer_of(torch.float32)
    s, tables = inputs(layer)
    with torch.no_grad():
        exact, _ = layer(layer.qkv_proj(s), tables)
        with torch.autocast("cpu", torch.bfloat16):
            low, _ = layer(layer.qkv_proj(s), tables)
    assert low.dtype == torch.bfloat16
    assert float((low - exact).norm() / exact.norm()) < 0.02


def test_centroids_stay_on_the_sheet_when_rounding_would_leave_it() -> None:
    mean = torch.zeros(50, 32, dtype=torch.bfloat16)
    mean[:, :31] = (5 * F.normalize(torch.randn(50, 31), dim=-1)).bfloat16()
    mean[:, 31] = 3.0  # less than any mean of points with this space part can have
    assert torch.equal(centroid_space(mean, 31), mean[:, :31])  # clamped: taken as a point
