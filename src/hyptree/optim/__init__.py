"""Optimisers for models with points among their parameters; ordinary parameters get ``torch.optim``, bit for bit."""

from hyptree.optim.adam import RiemannianAdam, RiemannianAdamW
from hyptree.optim.groups import param_groups
from hyptree.optim.sgd import RiemannianSGD

__all__ = ["RiemannianAdam", "RiemannianAdamW", "RiemannianSGD", "param_groups"]
