"""Parameter groups for a whole model: what decays, what does not, points, curvatures."""

from typing import Any

from torch import nn

from hyptree.geometry import curvature_parameters, manifold_of, mark_points


def param_groups(
    model: nn.Module,
    weight_decay: float = 0.0,
    lr: float | None = None,
    curvature_lr: float | None = None,
    *,
    point_lr: float | None = None,
    point_weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups of a model's trainable parameters for any optimiser of ``hyptree.optim``; empty groups are left out.

    * "decay": matrices and kernels, with ``weight_decay``;
    * "no_decay": biases, norms and other parameters of at most one axis, without;
    * "points": parameters whose rows are points, with ``point_weight_decay`` (towards the origin);
    * "curvature": raw parameters of learned curvatures, without.

    Calls ``mark_points(model)`` first, since ``fully_shard`` and the like replace parameters and drop their marks.

    Args:
        lr: learning rate of all groups; None leaves it to the optimiser.
        curvature_lr: learning rate of the curvatures, ``lr`` if None. point_lr: likewise for points.
    """
    mark_points(model)
    curvatures = {id(p) for p in curvature_parameters(model)}
    norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)}
    members: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "points": [], "curvature": []}
    for name, p in model.named_parameters():  # shared parameters appear once
        if not p.requires_grad:
            continue
        if id(p) in curvatures:
            members["curvature"].append(p)
        elif manifold_of(p) is not None:
            members["points"].append(p)
        elif p.dim() <= 1 or id(p) in norms or name.rsplit(".", 1)[-1] == "bias":
            members["no_decay"].append(p)
        else:
            members["decay"].append(p)
    rates = {"points": point_lr, "curvature": curvature_lr}
    decays = {"decay": weight_decay, "points": point_weight_decay}
    groups: list[dict[str, Any]] = []
    for name, params in members.items():
        if not params:
            continue
        group: dict[str, Any] = {"name": name, "params": params, "weight_decay": decays.get(name, 0.0)}
        rate = rates.get(name) if rates.get(name) is not None else lr
        if rate is not None:
            group["lr"] = rate
        groups.append(group)
    return groups
