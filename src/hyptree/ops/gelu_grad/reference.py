"""The gradient of GELU with what else an MLP's backward pass needs, in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.ops.rounding import wide


def gelu_grad(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of ``x``, ``gelu(x)``, column sums of the gradient; see ``ops.gelu_grad.gelu_grad``."""
    exact = wide(x)
    to_x = torch.ops.aten.gelu_backward(wide(grad), exact)
    return to_x.to(x.dtype), F.gelu(exact).to(x.dtype), to_x.flatten(0, -2).sum(0)
