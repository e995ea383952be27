"""What a HELM is stacked from: the table of tokens as points, a feed-forward part, and one layer of the stack."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from hyptree.geometry import Lorentz, PointModule, lorentz
from hyptree.lm.ambient import UNIT_WEIGHT, AmbientLinear, padded_width
from hyptree.lm.attention import HelmAttention
from hyptree.lm.config import HelmConfig
from hyptree.ops.residual_norm import join, norm_linear
from hyptree.ops.swiglu import swiglu_linear


class PointEmbedding(nn.Embedding, PointModule):
    """A table of Lorentz points: an ``nn.Embedding`` that Riemannian optimisers know as points."""

    def __init__(self, num_embeddings: int, embedding_dim: int, c: float = 1.0, padding_idx: int | None = None):
        self.c = c
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        with torch.device("cpu"):  # a model may be built without memory, a curvature not
            self._points["weight"] = Lorentz(c)
        self.mark_points()

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.mark_points()  # before any step: libraries that move weights put new parameters in place
        return super().forward(input)

    def reset_parameters(self) -> None:
        """Draw directions, and go one unit of length from the origin in each."""
        if getattr(self.weight, "_is_hf_initialized", False):  # transformers marks what it has loaded
            return
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.weight.copy_(lorentz.expmap0(F.normalize(self.weight, dim=-1), self.c))


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


class HelmBlock(GradientCheckpointingLayer):
    """One layer: attention and feed-forward part, each of the normed stream, each joined by a Lorentz residual."""

    def __init__(self, config: HelmConfig, layer_idx: int):
        super().__init__()
        self.c, self.eps, self.gain = float(config.curvature), config.rms_norm_eps, float(config.residual_gain or 1.0)
        self.is_latent = config.variant == "mice"
        self.is_mixture = self.is_latent and layer_idx >= config.num_dense_layers
        self.attention: Any
        self.ffn: Any
        if self.is_latent:
            from hyptree.lm.latent.attention import LatentAttention

            self.attention = LatentAttention(config, layer_idx)
        else:
            self.attention = HelmAttention(config, layer_idx)
        if self.is_mixture:
            from hyptree.lm.experts.mixture import Mice

            self.ffn = Mice(config)
        else:
            self.ffn = DenseFFN(config)
        self.attention_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.ffn_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.attention_weight = nn.Parameter(torch.empty(1))
        self.ffn_weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Unit gains, and weight 1 for both branches."""
        for gain in (self.attention_norm, self.ffn_norm):
            nn.init.ones_(gain)
        for weight in (self.attention_weight, self.ffn_weight):
            nn.init.constant_(weight, UNIT_WEIGHT)

    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The stream (B, N, n) after the layer, the experts' balance loss, the attention weights if asked for."""
        first = self.attention.down if self.is_latent else self.attention.qkv_proj
        x, rows = norm_linear(x, self.attention_norm, first, eps=self.eps, c=self.c)
        y, weights = self.attention(rows, position_embeddings, attention_mask, past_key_values, output_attentions)
        branch = (y, self.attention_weight, self.gain)
        first = None if self.is_mixture else self.ffn.gate_up_proj
        x, rows = norm_linear(x, self.ffn_norm, first, residual=branch, eps=self.eps, c=self.c)
        y, aux_loss = self.ffn(rows)
        return join(x, y, self.ffn_weight, self.gain, self.c), aux_loss, weights
