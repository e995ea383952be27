"""The point updates written as loops over rows in float64, straight from the formulas, with tangents as coordinates."""

import math

import torch
from torch import Tensor


class LorentzPoint:
    """Textbook formulas on ambient vectors (time first) of the hyperboloid ``-t^2 + |x|^2 = -1/c``."""

    def __init__(self, c: float):
        self.c = c

    def lift(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sqrt(1 / self.c + x @ x).reshape(1), x])

    def inner(self, u: Tensor, v: Tensor) -> float:
        return float(u[1:] @ v[1:] - u[0] * v[0])

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        space = g + self.c * (x @ g) * x
        return torch.cat([(x @ space / self.lift(x)[0]).reshape(1), space])

    def norm(self, x: Tensor, v: Tensor) -> float:
        return math.sqrt(max(self.inner(v, v), 0.0))

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        z = math.sqrt(self.c) * self.norm(x, v)
        return (math.cosh(z) * self.lift(x) + (math.sinh(z) / z if z > 0 else 1.0) * v)[1:]

    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        X, Y = self.lift(x), self.lift(y)
        return v + self.c * self.inner(Y, v) / (1 - self.c * self.inner(X, Y)) * (X + Y)

    def retract(self, x: Tensor, v: Tensor) -> Tensor:
        return x + v[1:]

    def shrink(self, x: Tensor, factor: float) -> Tensor:
        s, r = math.sqrt(self.c), float(x.norm())
        return x * (math.sinh(factor * math.asinh(s * r)) / (s * r)) if r > 0 else x


class PoincarePoint:
    """Textbook formulas of the ball, transport by gyration of Möbius sums."""

    def __init__(self, c: float):
        self.c = c

    def factor(self, x: Tensor) -> float:
        return float(2 / (1 - self.c * x @ x))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        c, xy, x2, y2 = self.c, x @ y, x @ x, y @ y
        return ((1 + 2 * c * xy + c * y2) * x + (1 - c * x2) * y) / (1 + 2 * c * xy + c * c * x2 * y2)

    def gradient(self, x: Tensor, g: Tensor) -> Tensor:
        return g / self.factor(x) ** 2

    def norm(self, x: Tensor, v: Tensor) -> float:
        return self.factor(x) * float(v.norm())

    def exp(self, x: Tensor, v: Tensor) -> Tensor:
        s, r = math.sqrt(self.c), float(v.norm())
        return self.add(x, math.tanh(s * self.factor(x) * r / 2) * v / (s * r)) if r > 0 else x

    def transport(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        # gyr[y, -x] v = -(y + -x) + (y + (-x + v)), linear in v: scale v down to fit into the ball.
        r = float(v.norm())
        if r == 0:
            return v
        w = v * (1e-1 / (r * math.sqrt(self.c)))
        turned = self.add(-self.add(y, -x), self.add(y, self.add(-x, w)))
        return turned * (r / float(w.norm())) * (self.factor(x) / self.factor(y))

    def retract(self, x: Tensor, v: Tensor) -> Tensor:
        return x + v

    def shrink(self, x: Tensor, factor: float) -> Tensor:
        s, r = math.sqrt(self.c), float(x.norm())
        return x * (math.tanh(factor * math.atanh(s * r)) / (s * r)) if r > 0 else x


def adam_loop(
    space, x, grads, *, lr, betas=(0.9, 0.999), eps=1e-8, wd=0.0, amsgrad=False, first_order=False, max_step=None
):
    """Rows of ``x`` after ``len(grads)`` Adam steps."""
    x = x.clone()
    for i in range(x.shape[0]):
        p, m, v, v_max = x[i].clone(), None, 0.0, 0.0
        for t, g in enumerate(grads, start=1):
            h = space.gradient(p, g[i])
            m = (1 - betas[0]) * h if m is None else betas[0] * m + (1 - betas[0]) * h
            v = betas[1] * v + (1 - betas[1]) * space.norm(p, h) ** 2
            v_max = max(v_max, v)
            second = (v_max if amsgrad else v) / (1 - betas[1] ** t)
            if wd:
                q = space.shrink(p, 1 - lr * wd)
                p, m = q, space.transport(p, q, m)
            u = m * (-lr / (1 - betas[0] ** t) / (math.sqrt(second) + eps))
            if max_step is not None and space.norm(p, u) > max_step:
                u = u * (max_step / space.norm(p, u))
            q = space.retract(p, u) if first_order else space.exp(p, u)
            p, m = q, space.transport(p, q, m)
        x[i] = p
    return x


def sgd_loop(space, x, grads, *, lr, momentum=0.0, dampening=0.0, nesterov=False, wd=0.0, first_order=False):
    """Rows of ``x`` after ``len(grads)`` SGD steps."""
    x = x.clone()
    for i in range(x.shape[0]):
        p, b = x[i].clone(), None
        for g in grads:
            d = h = space.gradient(p, g[i])
            if momentum:
                b = h if b is None else momentum * b + (1 - dampening) * h
                d = h + momentum * b if nesterov else b
            if wd:
                q = space.shrink(p, 1 - lr * wd)
                d = space.transport(p, q, d)
                b = None if b is None else space.transport(p, q, b)
                p = q
            q = space.retract(p, -lr * d) if first_order else space.exp(p, -lr * d)
            p, b = q, None if b is None else space.transport(p, q, b)
        x[i] = p
    return x
