"""Every layer once more, as its definition reads: ambient coordinates, loops, geodesic distances, explicit weights.

Slow on purpose, meant for float64. Nothing here calls hyptree.nn.
"""

import torch
from torch import Tensor

from hyptree.geometry import lorentz, poincare


def time(x: Tensor, c: Tensor) -> Tensor:
    return torch.sqrt(1 / c + (x * x).sum(-1, keepdim=True))


def minkowski(a: Tensor, b: Tensor) -> Tensor:
    """Product of ambient vectors, time first."""
    return (a[..., 1:] * b[..., 1:]).sum(-1) - a[..., 0] * b[..., 0]


def linear(x: Tensor, weight: Tensor, weight_time: Tensor, bias: Tensor | None, c: Tensor, c_out: Tensor) -> Tensor:
    ambient = torch.cat([time(x, c), x], -1)
    matrix = torch.cat([weight_time[:, None], weight], 1)
    y = torch.stack([ambient @ row for row in matrix], -1)
    if bias is not None:
        y = y + bias
    return y * torch.sqrt(c / c_out)


def linear_bounded(x, weight, weight_time, bias, lam, c, c_out, eps_t) -> Tensor:
    u = linear(x, weight, weight_time, bias, c, c)
    T = lam * torch.sigmoid(u[..., :1]) + 1 / torch.sqrt(c_out) + eps_t
    space = u[..., 1:]
    return torch.sqrt(T**2 - 1 / c_out) * space / space.norm(dim=-1, keepdim=True)


def hyperplane_foot(x: Tensor, z: Tensor, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Foot of the perpendicular from ``x`` on the hyperplane ``(z, a)``, ambient, and the side on which ``x`` is.

    The hyperplane goes through ``p = exp_o(a z/|z|)``, orthogonal to ``z/|z|`` transported there.
    """
    direction = z / z.norm()
    p = lorentz.expmap0(a * direction, c)
    normal = lorentz.transport_from_origin(p, direction, c)
    w = torch.cat([(p @ normal / time(p, c).squeeze(-1)).reshape(1), normal])
    X = torch.cat([time(x, c), x], -1)
    height = minkowski(X, w)
    foot = X - height[..., None] * w
    return foot / torch.sqrt(-c * minkowski(foot, foot))[..., None], height.sign()


def lorentz_mlr(x: Tensor, weight: Tensor, offset: Tensor, c: Tensor) -> Tensor:
    """Length of the normal times the signed geodesic distance to the foot, one class at a time."""
    logits = []
    for z, a in zip(weight, offset, strict=True):
        foot, side = hyperplane_foot(x, z, a, c)
        logits.append(z.norm() * side * lorentz.dist(x, foot[..., 1:], c))
    return torch.stack(logits, -1)


def poincare_mlr(x: Tensor, weight: Tensor, offset: Tensor, c: Tensor) -> Tensor:
    """The closed formula of Shimizu et al., one class at a time."""
    s = torch.sqrt(c)
    lam = 2 / (1 - c * (x * x).sum(-1))
    logits = []
    for z, r in zip(weight, offset, strict=True):
        inside = s * lam * (x @ (z / z.norm())) * torch.cosh(2 * s * r) - (lam - 1) * torch.sinh(2 * s * r)
        logits.append(2 * z.norm() / s * torch.asinh(inside))
    return torch.stack(logits, -1)


def lorentz_fc(x, weight, offset, c, c_out) -> Tensor:
    s = torch.sqrt(c)
    return torch.sinh(s * lorentz_mlr(x, weight, offset, c)) / s * torch.sqrt(c / c_out)


def poincare_fc(x, weight, offset, c, c_out) -> Tensor:
    s = torch.sqrt(c)
    w = torch.sinh(s * poincare_mlr(x, weight, offset, c)) / s
    y = w / (1 + torch.sqrt(1 + c * (w * w).sum(-1, keepdim=True)))
    return y * torch.sqrt(c / c_out)


def mobius_linear(x, weight, bias, c, c_out) -> Tensor:
    y = poincare.mobius_matvec(weight, x, c)
    if bias is not None:
        y = poincare.mobius_add(y, poincare.expmap0(bias, c), c)
    return y * torch.sqrt(c / c_out)


def attention(q, k, v, c, tau, bias=None, is_causal=False) -> Tensor:
    """Explicit (N, M) weights and the accurate centroid."""
    Q, K = torch.cat([time(q, c), q], -1), torch.cat([time(k, c), k], -1)
    products = minkowski(Q[..., :, None, :], K[..., None, :, :])
    scores = (2 / c + 2 * products) / tau
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
    if is_causal:
        N, M = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(N, M, dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(-1)
    points = v.unsqueeze(-3).expand(*weights.shape, v.shape[-1])
    return lorentz.centroid(points, weights, c if c.dim() == 0 else c.unsqueeze(-1))
