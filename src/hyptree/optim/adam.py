"""Adam for models that have points among their parameters."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam

from hyptree.geometry.core.numerics import Scalar, sqnorm
from hyptree.optim.optimizer import RiemannianOptimizer, Rows, check_number, decay_factor, options, subset
from hyptree.optim.rows import Part, move_rows, row_gradient


class RiemannianAdam(RiemannianOptimizer):
    """Adam that follows geodesics where a parameter is a point, and is ``torch.optim.Adam`` bit for bit elsewhere.

    A parameter marked by :func:`hyptree.geometry.mark_manifold` moves on its manifold. ``h`` is the Riemannian
    gradient, the second moment is one number per row (``v <- b2 v + (1 - b2) |h|^2``), the step is
    ``expmap(x, -lr * mhat / (sqrt(vhat) + eps))``, and the first moment is parallel transported along it. Points with
    the same space, size and curvature share their kernels.

    State of a point: ``step``, ``exp_avg`` (..., n), ``exp_avg_sq`` (..., 1), float32 at least. ``exp_avg`` is a
    tangent vector in the radial frame (see ``hyptree.optim.rows``): its Euclidean length is its Riemannian length.

    A sparse gradient of a point (``nn.Embedding(sparse=True)``) updates the rows it touches; the others rest, moments
    and weight decay included. Ordinary parameters with sparse gradients are refused, as ``torch.optim.Adam`` does.

    Args:
        weight_decay: of ordinary parameters as in ``torch.optim.Adam`` (AdamW if ``decoupled_weight_decay``). Points
            are always decayed decoupled, towards the origin: ``expmap0((1 - lr * weight_decay) * logmap0(x))``.
        retraction: "exp" follows the geodesic, "first_order" adds the step to the coordinates.
        max_step: longest step of a point, a hyperbolic length; None for no limit.
        master_weights: keep a float32 copy of every half-precision parameter in the state, update it, round on write.
        rescale_points: when a learned curvature changes, rescale its points such that ``sqrt(c) x`` stays.
        foreach: as in torch for ordinary parameters; False also updates points one tensor at a time.
        fused: as in torch, for ordinary parameters.
        capturable: keep ``step`` on the device, so that the whole step can be recorded in a CUDA graph.
        compile: compile the update of points with ``torch.compile``, which halves its cost on a CPU; on a GPU the
            step is bound by kernel launches without it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        retraction: Literal["exp", "first_order"] = "exp",
        max_step: float | None = None,
        master_weights: bool = False,
        rescale_points: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        compile: bool = False,
    ):
        super().__init__(params, options(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas must be a pair of numbers, got {betas!r}")
        check_number("betas[0]", betas[0], 0.0, 1.0)
        check_number("betas[1]", betas[1], 0.0, 1.0)
        check_number("eps", group["eps"], 0.0)

    def _init_state(self, p: Tensor, group: dict[str, Any], point: bool) -> dict[str, Tensor]:
        state = self.state[p]
        if "step" in state:
            return state
        on_device = group["capturable"] or group["fused"]
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group["fused"] else torch.float32
        state["step"] = torch.zeros((), dtype=dtype, device=p.device if on_device else "cpu")
        like = self._master(p, group).detach()
        # A table of points is no place to save bits on its moments: half precision keeps float32 ones.
        dtype = torch.promote_types(like.dtype, torch.float32) if point else like.dtype
        state["exp_avg"] = torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
        second = ["exp_avg_sq", "max_exp_avg_sq"] if group["amsgrad"] else ["exp_avg_sq"]
        for name in second:
            state[name] = torch.zeros_like(like[..., :1] if point else like, dtype=dtype)
        return state

    def _step_plain(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if p.grad is not None and p.grad.is_sparse:
                raise ValueError(
                    f"Adam takes sparse gradients for points only, got one for an ordinary parameter of shape "
                    f"{tuple(p.shape)}; use sparse=False, or torch.optim.SparseAdam for that parameter"
                )
        states = [self._init_state(p, group, point=False) for p in params]
        masters, grads = self._plain_lists(group, params)
        adam(
            masters,
            grads,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else [],
            [s["step"] for s in states],
            has_complex=any(p.is_complex() for p in params),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **subset(group, "lr", "weight_decay", "decoupled_weight_decay", "eps", "amsgrad", "maximize"),
            **subset(group, "foreach", "fused", "capturable"),
        )
        self._publish_plain(params, masters)

    def _step_points(self, group: dict[str, Any], params: list[Tensor]) -> None:
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        steps = [self._init_state(p, group, point=True)["step"] for p in params]
        torch._foreach_add_(steps, 1)
        rows = self._rows_of(params, group, names)
        counted = group["capturable"] or group["fused"]  # on the device: reading the number would wait for it

        def key(r: Rows) -> float | None:
            return None if counted else self.state[r.param]["step"].item()

        def update(work: Rows, batch: list[Rows]) -> None:
            step: Scalar
            if not counted:
                step = self.state[batch[0].param]["step"].item()
            elif len(batch) == 1:
                step = self.state[batch[0].param]["step"]
            else:
                each = torch.stack([self.state[r.param]["step"] for r in batch])
                counts = torch.tensor([r.x.shape[0] for r in batch], device=each.device)
                step = each.repeat_interleave(counts, output_size=work.x.shape[0]).unsqueeze(-1)
            self._update(group, work, step)

        self._run(group, rows, key, update)

    def _update(self, group: dict[str, Any], work: Rows, step: Scalar) -> None:
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        if isinstance(step, Tensor):
            step = step.double()  # as the Python float it is otherwise; a float32 power has lost digits of 1 - beta^t
        rate, correction = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
        if isinstance(rate, Tensor):
            rate = rate.to(work.x.dtype)
        if isinstance(correction, Tensor):
            correction = correction.to(work.x.dtype)
        tensors = [work.state.get(name) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
        numbers = rate, correction, decay_factor(group)
        self._update_rows(adam_rows, group, work, tensors, numbers, beta1=beta1, beta2=beta2, eps=group["eps"])


class RiemannianAdamW(RiemannianAdam):
    """:class:`RiemannianAdam` with the weight decay of ``torch.optim.AdamW`` for ordinary parameters, bit for bit."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=True, **options)


def adam_rows(
    x: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    rate: Scalar,
    correction: Scalar,
    decay: Scalar | None,
    cs: Sequence[Scalar],
    *,
    parts: Sequence[Part],
    beta1: float,
    beta2: float,
    eps: float,
    max_step: float | None,
    first_order: bool,
    maximize: bool,
) -> None:
    """One Adam step for rows of points, in place: x, grad, exp_avg (R, n), exp_avg_sq (R, 1).

    Args:
        rate: ``lr / (1 - beta1^t)``. correction: ``1 / sqrt(1 - beta2^t)``. decay: ``1 - lr * weight_decay`` or None.
        cs: one curvature per part.
    """
    h = row_gradient(x, -grad if maximize else grad, parts, cs)
    exp_avg.lerp_(h, 1 - beta1)
    # A point at the limit of its dtype has gradients whose square overflows; an infinite moment would stop it for good.
    square = sqnorm(h).clamp_max(torch.finfo(h.dtype).max)
    exp_avg_sq.mul_(beta2).add_(square, alpha=1 - beta2)
    second = exp_avg_sq if max_exp_avg_sq is None else max_exp_avg_sq.copy_(torch.maximum(max_exp_avg_sq, exp_avg_sq))
    step = rate / (second.sqrt() * correction + eps)
    move_rows(x, exp_avg, step, exp_avg, parts, cs, first_order, max_step, decay)
