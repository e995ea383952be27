"""The feed-forward part of HELM: SwiGLU on space components, with the time of the hidden point derived in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from hyptree.lm.ambient import AmbientLinear, padded_width
from hyptree.ops.swiglu import swiglu_linear

if TYPE_CHECKING:
    from hyptree.lm.config import HelmConfig


class DenseFFN(nn.Module):
    """``W_2 (silu(W_1 x) * (W_3 x))`` of points, two matrix products and one pass in between.

    Args:
        config: ``hidden_size`` n, ``intermediate_size``, ``curvature``, ``ffn_bias``.

    Shape:
        both (B, N, 2 hidden), what :attr:`gate_up_proj` makes of the stream, padded columns or none -> (B, N, n), and
        no loss of its own.
    """

    def __init__(self, config: HelmConfig):
        super().__init__()
        n, self.hidden, bias, self.c = config.hidden_size, config.intermediate_size, config.ffn_bias, config.curvature
        groups = (2, self.hidden, padded_width(self.hidden, bias))  # rows as wide as what the second product reads
        self.gate_up_proj = AmbientLinear(n, 2 * self.hidden, bias, float(self.c), row_groups=groups, fused=2)
        self.down_proj = AmbientLinear(self.hidden, n, bias, float(self.c))

    def forward(self, both: Tensor) -> tuple[Tensor, None]:
        return swiglu_linear(both, self.down_proj, self.hidden, float(self.c)), None
