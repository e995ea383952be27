"""The feed-forward part of HELM: SwiGLU on space components, with the time of the hidden point derived in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.lm.ambient import AmbientLinear, lift_padded, padded_width
from hyptree.lm.fused.branches import swiglu_product
from hyptree.ops.rounding import wide
from hyptree.ops.swiglu import fits as swiglu_fits

if TYPE_CHECKING:
    from hyptree.lm.config import HelmConfig


class DenseFFN(nn.Module):
    """``W_2 lift(silu(W_1 x) * (W_3 x))`` of lifted points, two matrix products and one pass in between.

    Args:
        config: ``hidden_size`` n, ``intermediate_size``, ``curvature``, ``ffn_bias``.

    Shape:
        lifted (B, N, width), space (not needed here) -> (B, N, n), no loss of its own.
    """

    def __init__(self, config: HelmConfig):
        super().__init__()
        self.hidden, self.c, self.has_bias = config.intermediate_size, float(config.curvature), config.ffn_bias
        # Rows as wide as what the second product reads: zero rows of the first leave room for time and one.
        width = padded_width(self.hidden, self.has_bias)
        self.gate_up_proj = AmbientLinear(
            config.hidden_size, 2 * self.hidden, self.has_bias, row_groups=(2, self.hidden, width), fused=2
        )
        self.down_proj = AmbientLinear(self.hidden, config.hidden_size, self.has_bias)

    def forward(
        self, lifted: Tensor | None, space: Tensor | None = None, both: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """``both`` is the first product, gate and up, where it has been made already."""
        both = self.gate_up_proj(lifted) if both is None else both
        if type(self.down_proj) is AmbientLinear and swiglu_fits(both):
            return swiglu_product(both, self.down_proj, self.hidden, self.c, self.has_bias), None
        gate, up = wide(both).chunk(2, -1)
        hidden = lift_padded(F.silu(gate) * up, self.hidden, both.dtype, self.c, self.has_bias)
        return self.down_proj(hidden), None
