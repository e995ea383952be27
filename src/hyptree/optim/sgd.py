"""Stochastic gradient descent for models that have points among their parameters."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from hyptree.geometry.core.numerics import Scalar
from hyptree.optim.optimizer import RiemannianOptimizer, Rows, check_number, decay_factor, options, subset
from hyptree.optim.rows import Part, move_rows, row_gradient


class RiemannianSGD(RiemannianOptimizer):
    """SGD that follows geodesics where a parameter is a point, and is ``torch.optim.SGD`` bit for bit elsewhere.

    A parameter marked by :func:`hyptree.geometry.mark_manifold` moves on its manifold: ``x <- expmap(x, -lr * d)`` with
    ``d`` the Riemannian gradient or its momentum, which is parallel transported along each step. Momentum, dampening
    and Nesterov momentum are those of torch. Sparse gradients of points update the rows they touch. See
    :class:`RiemannianAdam` for the options both share; points are always decayed decoupled, towards the origin.

    State of a point: ``momentum_buffer`` (..., n), a tangent vector in the radial frame, if there is momentum.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        retraction: Literal["exp", "first_order"] = "exp",
        max_step: float | None = None,
        master_weights: bool = False,
        rescale_points: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        compile: bool = False,
    ):
        super().__init__(params, options(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_number("momentum", group["momentum"], 0.0)
        check_number("dampening", group["dampening"], -torch.finfo(torch.float32).max)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("nesterov needs momentum > 0 and dampening = 0")

    def _step_plain(self, group: dict[str, Any], params: list[Tensor]) -> None:
        masters, grads = self._plain_lists(group, params)
        has_sparse_grad = any(g.is_sparse for g in grads)
        if group["nesterov"] and group["foreach"] is not False and not has_sparse_grad:
            # torch's foreach path adds the momentum to the gradients themselves; ours must come back untouched.
            grads = [g.clone() if g is p.grad else g for g, p in zip(grads, params, strict=True)]
        has_momentum = group["momentum"] != 0
        buffers = [self.state[p].get("momentum_buffer") for p in params] if has_momentum else []
        sgd(
            masters,
            grads,
            buffers,
            has_sparse_grad=has_sparse_grad,
            **subset(group, "lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "foreach", "fused"),
        )
        for p, buffer in zip(params, buffers, strict=bool(buffers)):
            self.state[p]["momentum_buffer"] = buffer
        self._publish_plain(params, masters)

    def _step_points(self, group: dict[str, Any], params: list[Tensor]) -> None:
        has_momentum = group["momentum"] != 0
        fresh: set[Tensor] = set()
        if has_momentum:
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    fresh.add(p)
                    like = self._master(p, group).detach()
                    dtype = torch.promote_types(like.dtype, torch.float32)
                    self.state[p]["momentum_buffer"] = torch.zeros_like(like, dtype=dtype)
        rows = self._rows_of(params, group, ["momentum_buffer"] if has_momentum else [])

        def update(work: Rows, batch: list[Rows]) -> None:
            self._update_rows(
                sgd_rows,
                group,
                work,
                [work.state.get("momentum_buffer")],
                (group["lr"], decay_factor(group)),
                momentum=group["momentum"],
                dampening=0.0 if batch[0].param in fresh else group["dampening"],
                nesterov=group["nesterov"],
            )

        self._run(group, rows, lambda r: r.param in fresh, update)


def sgd_rows(
    x: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    lr: Scalar,
    decay: Scalar | None,
    cs: Sequence[Scalar],
    *,
    parts: Sequence[Part],
    momentum: float,
    dampening: float,
    nesterov: bool,
    max_step: float | None,
    first_order: bool,
    maximize: bool,
) -> None:
    """One step of SGD for rows of points, in place: x, grad, buffer (R, n).

    Args:
        buffer: zeros before the first step, which is not dampened. decay: ``1 - lr * weight_decay`` or None.
        cs: one curvature per part.
    """
    h = row_gradient(x, -grad if maximize else grad, parts, cs)
    direction = h
    if buffer is not None:
        buffer.mul_(momentum).add_(h, alpha=1 - dampening)
        direction = torch.add(h, buffer, alpha=momentum) if nesterov else buffer
    if decay is not None and direction is grad:
        direction = direction.clone()  # decay transports it in place, and gradients stay as they are
    move_rows(x, direction, lr, buffer, parts, cs, first_order, max_step, decay)
