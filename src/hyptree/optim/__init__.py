"""Optimisers for models with points among their parameters; ordinary parameters get ``torch.optim``, bit for bit."""

from .adam import RiemannianAdam, RiemannianAdamW
from .groups import param_groups
from .sgd import RiemannianSGD

__all__ = ["RiemannianAdam", "RiemannianAdamW", "RiemannianSGD", "param_groups"]
