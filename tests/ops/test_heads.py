"""Queries, keys and values with their times: the kernels against the definition, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.geometry import lorentz
from hyptree.ops.heads import Heads, lift_heads, lift_heads_grad
from hyptree.ops.heads.reference import rotate

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

SCALES: dict[str, Any] = {"score_scale": 1.3, "value_scale": 0.6, "c": 0.7}


def angles(batch: int, length: int, turned: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    angle = 3 * torch.randn(batch, length, turned // 2)
    cos, sin = angle.cos(), angle.sin()
    if interleaved:
        return cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def given(heads: Heads, B: int, N: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Projections as they come: zeros where nothing is, keys without their shared part, slices of wider rows."""
    H, W, d = heads.num_heads, heads.width, heads.key_dim
    query, key, value = torch.randn(3, B, N, H, W, device=device)
    query[..., d:] = key[..., d:] = value[..., heads.value_dim :] = 0.0
    if not heads.shared_dim:
        return {"rows": torch.stack([query, key, value], 2).flatten(2).to(dtype), "queries": None, "shared": None}
    key[..., : heads.shared_dim] = 0.0
    shared = torch.randn(B, N, heads.shared_dim, device=device)
    padded = -(-heads.shared_dim // 8) * 8
    wide = torch.cat(
        [query.flatten(2), torch.randn(B, N, 5, device=device), F.pad(shared, (0, padded - shared.shape[-1]))], -1
    )
    wide = wide.to(dtype)
    rows = torch.stack([key, value], 2).flatten(2).to(dtype)
    return {"rows": rows, "queries": wide[..., : H * W].unflatten(-1, (H, W)), "shared": wide[..., -padded:]}


CASES = [
    (Heads(3, 8, 7, 7, **SCALES), 6, 2, 2, 5),
    (Heads(2, 64, 63, 63, **SCALES), 62, 1, 2, 3),
    (Heads(5, 24, 18, 20, interleaved=False, **SCALES), 12, 2, 1, 3),
    (Heads(40, 64, 60, 61, **SCALES), 60, 1, 1, 2),  # more heads than one tile holds
    (Heads(3, 16, 11, 9, shared_dim=5, **SCALES), 4, 2, 2, 3),
    (Heads(2, 24, 11, 17, shared_dim=6, interleaved=False, **SCALES), 6, 1, 2, 3),
    (Heads(40, 64, 48, 60, shared_dim=16, **SCALES), 16, 1, 1, 2),
    (Heads(3, 8, 7, 7, **SCALES), 6, 1, 0, 4),
]


def test_the_definition_scores_pairs_by_their_minkowski_product() -> None:
    heads = Heads(2, 8, 5, 6, **SCALES)
    parts = given(heads, 2, 3, torch.float64, "cpu")
    cos, sin = (table.double() for table in angles(2, 3, 4, True))
    log_tau = torch.tensor([0.4], dtype=torch.float64)
    q, k, v = lift_heads(parts["rows"].double(), cos, sin, log_tau, heads)
    query, key, value = parts["rows"].unflatten(-1, (3, 2, 8)).unbind(2)
    query, key = (rotate(x[..., :5], cos[:, :, None], sin[:, :, None]) for x in (query, key))
    scores = 2 * 1.3 * lorentz.minkowski(query[:, :, None], key[:, None], 0.7) / math.exp(0.4)
    actual = torch.einsum("bnhw,bmhw->bnmh", q, k)
    shift = q[..., 5] / math.sqrt(0.7)  # of a row, from the excess in place of the time
    torch.testing.assert_close(actual + shift[:, :, None], scores, rtol=1e-12, atol=1e-12)
    point = 0.6 * value[..., :6]
    torch.testing.assert_close(v[..., :6], point)
    torch.testing.assert_close(v[..., 6], lorentz.time(point, 0.7) - 1 / math.sqrt(0.7), rtol=1e-12, atol=1e-12)
    assert torch.equal(v[..., 7], torch.zeros(2, 3, 2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "turned", "tables", "B", "N"), CASES)
def test_kernels_equal_the_definition(
    heads: Heads, turned: int, tables: int, B: int, N: int, dtype: torch.dtype, device: str
) -> None:
    parts = given(heads, B, N, dtype, device)
    cos, sin = (table.to(device) for table in angles(min(B, tables) or 1, N, turned, heads.interleaved))
    log_tau = torch.randn(1, device=device)
    built = lift_heads(**parts, cos=cos, sin=sin, log_tau=log_tau, heads=heads, backend="triton")
    grads = tuple(torch.randn(x.shape, device=device).to(dtype) for x in built)
    padded = 0 if parts["shared"] is None else parts["shared"].shape[-1]
    actual = lift_heads_grad(built, grads, cos, sin, log_tau, heads, shared_width=padded)

    exact = {name: None if x is None else x.detach().double().requires_grad_() for name, x in parts.items()}
    leaf = log_tau.double().requires_grad_()
    want = lift_heads(**exact, cos=cos.double(), sin=sin.double(), log_tau=leaf, heads=heads)
    leaves = [exact["rows"], exact["queries"], exact["shared"], leaf]
    held = [x for x in leaves if x is not None]
    expected = iter(torch.autograd.grad(want, held, [grad.double() for grad in grads]))
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for one, other in zip(built, want, strict=True):
        torch.testing.assert_close(one.double(), other.detach(), **close)
    for one, x in zip(actual, leaves, strict=True):
        assert (one is None) == (x is None)
        if one is not None:
            other = next(expected)
            # the temperature's is a sum over everything, of either sign: as exact as its terms are, not as itself
            terms = grads[0].double() * want[0].detach() if one is actual[3] else other
            scale = max(1.0, terms.norm().item() if one is actual[3] else terms.abs().max().item()) if B else 1.0
            torch.testing.assert_close(one.double() / scale, other / scale, **close)


def test_the_time_belongs_to_the_rounded_point(device: str) -> None:
    heads = Heads(2, 64, 60, 60)
    parts = given(heads, 1, 3, torch.bfloat16, device)
    cos, sin = (table.to(device) for table in angles(1, 3, 60, True))
    log_tau = torch.zeros(1, device=device)
    q, k, _ = lift_heads(**parts, cos=cos, sin=sin, log_tau=log_tau, heads=heads, backend="triton")
    q_time = torch.sqrt(q[..., :60].double().square().sum(-1) + 4)
    k_excess = torch.sqrt(k[..., :60].double().square().sum(-1) + 1) - 1
    unit = 2.0**-7 if device == "cpu" else 2.0**-8  # Triton's interpreter cuts where a GPU rounds
    assert ((q[..., 60].double() + q_time).abs() <= unit * q_time).all()
    assert ((k[..., 60].double() - k_excess).abs() <= unit * k_excess).all()


def test_a_bad_row_stays_alone(device: str) -> None:
    heads = Heads(2, 8, 7, 7)
    rows = given(heads, 1, 3, torch.float32, device)["rows"]
    rows[0, 1, 3] = torch.nan  # a query of the first head of the second token
    cos, sin = (table.to(device) for table in angles(1, 3, 6, True))
    log_tau = torch.zeros(1, device=device)
    built = lift_heads(rows, cos, sin, log_tau, heads, backend="triton")
    assert built[0][0, 1, 0].isnan().any()
    assert built[0][0, [0, 0, 1, 2, 2], [0, 1, 1, 0, 1]].isfinite().all()
    assert built[1].isfinite().all()
    actual, _, _, _ = lift_heads_grad(built, built, cos, sin, log_tau, heads)
    assert actual[0, 1, :8].isnan().any()
    assert actual[0, 1, 8:].isfinite().all()
    assert actual[0, [0, 2]].isfinite().all()
