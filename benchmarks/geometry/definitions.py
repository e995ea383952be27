"""What each operation should give, by the textbook formula in float64: short, slow and independent of the library.

Lorentz points are their space components. Inputs are moderate (a few units from the origin), where these formulas lose
nothing that matters in float64.
"""

import torch
from torch import Tensor

ADAM_EPS = 1e-8
"""Everybody's default."""


def lorentz_time(x: Tensor, c: float) -> Tensor:
    return (1 / c + (x * x).sum(-1, keepdim=True)).sqrt()


def lorentz_expmap0(v: Tensor, c: float) -> Tensor:
    z = c**0.5 * v.norm(dim=-1, keepdim=True)
    return torch.sinh(z) / z * v


def lorentz_logmap0(x: Tensor, c: float) -> Tensor:
    z = c**0.5 * x.norm(dim=-1, keepdim=True)
    return torch.asinh(z) / z * x


def lorentz_dist(x: Tensor, y: Tensor, c: float) -> Tensor:
    step = lorentz_time(x, c) - lorentz_time(y, c)
    chord = ((x - y).square().sum(-1) - step.squeeze(-1).square()).sqrt()
    return 2 / c**0.5 * torch.asinh(c**0.5 / 2 * chord)


def lorentz_expmap(x: Tensor, v: Tensor, c: float) -> Tensor:
    along = (x * v).sum(-1, keepdim=True) / lorentz_time(x, c)
    z = c**0.5 * (v.square().sum(-1, keepdim=True) - along.square()).sqrt()
    return torch.cosh(z) * x + torch.sinh(z) / z * v


def lorentz_logmap(x: Tensor, y: Tensor, c: float) -> Tensor:
    z = c**0.5 * lorentz_dist(x, y, c).unsqueeze(-1)
    return z / torch.sinh(z) * (y - torch.cosh(z) * x)


def lorentz_transport(x: Tensor, y: Tensor, v: Tensor, c: float) -> Tensor:
    tx, ty = lorentz_time(x, c), lorentz_time(y, c)
    xy, xv, yv = (x * y).sum(-1, keepdim=True), (x * v).sum(-1, keepdim=True), (y * v).sum(-1, keepdim=True)
    return v + c * (yv - ty * xv / tx) / (1 + c * (tx * ty - xy)) * (x + y)


def lorentz_pairwise(x: Tensor, y: Tensor, c: float) -> Tensor:
    product = lorentz_time(x, c) * lorentz_time(y, c).mT - x @ y.mT
    return torch.acosh(c * product) / c**0.5


def lorentz_centroid(x: Tensor, weights: Tensor, c: float) -> Tensor:
    w = weights.unsqueeze(-1)
    mean, time = (w * x).sum(-2), (w * lorentz_time(x, c)).sum(-2)
    return mean / (c * (time.square() - mean.square().sum(-1, keepdim=True))).sqrt()


def lorentz_linear(x: Tensor, weight: Tensor, weight_time: Tensor, bias: Tensor, c: float) -> Tensor:
    full = torch.cat([weight_time.unsqueeze(-1), weight], -1)
    return torch.cat([lorentz_time(x, c), x], -1) @ full.mT + bias


def lorentz_mlr(x: Tensor, weight: Tensor, offset: Tensor, c: float) -> Tensor:
    s, length = c**0.5, weight.norm(dim=-1)
    alpha = torch.cosh(s * offset) * (x @ weight.mT) - torch.sinh(s * offset) * length * lorentz_time(x, c)
    return length / s * torch.asinh(s * alpha / length)


def lorentz_attention(q: Tensor, k: Tensor, v: Tensor, c: float) -> Tensor:
    minkowski = q @ k.mT - lorentz_time(q, c) * lorentz_time(k, c).mT
    weights = ((2 / c + 2 * minkowski) / q.shape[-1] ** 0.5).softmax(-1)
    mean, time = weights @ v, weights @ lorentz_time(v, c)
    return mean / (c * (time.square() - mean.square().sum(-1, keepdim=True))).sqrt()


def lorentz_adam(x: Tensor, grad: Tensor, lr: float, c: float) -> Tensor:
    """The point after the first step of Riemannian Adam, whose length is ``lr |h| / (|h| + eps)``."""
    h = grad + c * (x * grad).sum(-1, keepdim=True) * x
    length = (h.square().sum(-1, keepdim=True) - ((x * h).sum(-1, keepdim=True) / lorentz_time(x, c)).square()).sqrt()
    z = c**0.5 * lr * length / (length + ADAM_EPS)
    return torch.cosh(z) * x - torch.sinh(z) / c**0.5 * h / length


def gap(x: Tensor, c: float) -> Tensor:
    return 1 - c * (x * x).sum(-1, keepdim=True)


def poincare_expmap0(v: Tensor, c: float) -> Tensor:
    z = c**0.5 * v.norm(dim=-1, keepdim=True)
    return torch.tanh(z) / z * v


def poincare_logmap0(x: Tensor, c: float) -> Tensor:
    z = c**0.5 * x.norm(dim=-1, keepdim=True)
    return torch.atanh(z) / z * x


def mobius_add(x: Tensor, y: Tensor, c: float) -> Tensor:
    xy, x2, y2 = (x * y).sum(-1, keepdim=True), (x * x).sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True)
    return ((1 + 2 * c * xy + c * y2) * x + (1 - c * x2) * y) / (1 + 2 * c * xy + c * c * x2 * y2)


def poincare_dist(x: Tensor, y: Tensor, c: float) -> Tensor:
    ratio = c * (x - y).square().sum(-1) / (gap(x, c) * gap(y, c)).squeeze(-1)
    return 2 / c**0.5 * torch.asinh(ratio.sqrt())


def poincare_expmap(x: Tensor, v: Tensor, c: float) -> Tensor:
    length = v.norm(dim=-1, keepdim=True)
    return mobius_add(x, torch.tanh(c**0.5 * length / gap(x, c)) / (c**0.5 * length) * v, c)


def poincare_logmap(x: Tensor, y: Tensor, c: float) -> Tensor:
    return gap(x, c) * poincare_logmap0(mobius_add(-x, y, c), c)


def poincare_pairwise(x: Tensor, y: Tensor, c: float) -> Tensor:
    square = (x * x).sum(-1, keepdim=True) + (y * y).sum(-1, keepdim=True).mT - 2 * x @ y.mT
    return 2 / c**0.5 * torch.asinh((c * square / (gap(x, c) * gap(y, c).mT)).sqrt())


def poincare_centroid(x: Tensor, weights: Tensor, c: float) -> Tensor:
    mean = lorentz_centroid(2 * x / gap(x, c), weights, c)
    return mean / (1 + c**0.5 * lorentz_time(mean, c))


def poincare_mlr(x: Tensor, weight: Tensor, offset: Tensor, c: float) -> Tensor:
    s, length, factor = c**0.5, weight.norm(dim=-1), 2 / gap(x, c)
    inside = s * factor * (x @ weight.mT) / length * torch.cosh(2 * s * offset)
    return 2 * length / s * torch.asinh(inside - (factor - 1) * torch.sinh(2 * s * offset))


def poincare_fc(x: Tensor, weight: Tensor, offset: Tensor, c: float) -> Tensor:
    w = torch.sinh(c**0.5 * poincare_mlr(x, weight, offset, c)) / c**0.5
    return w / (1 + (1 + c * w.square().sum(-1, keepdim=True)).sqrt())


def poincare_adam(x: Tensor, grad: Tensor, lr: float, c: float) -> Tensor:
    """The same in the ball, where the Riemannian gradient has length ``(1 - c|x|^2) |grad| / 2``."""
    direction = grad / grad.norm(dim=-1, keepdim=True)
    length = gap(x, c) / 2 * grad.norm(dim=-1, keepdim=True)
    z = c**0.5 * lr * length / (length + ADAM_EPS)
    return mobius_add(x, -torch.tanh(z / 2) / c**0.5 * direction, c)
