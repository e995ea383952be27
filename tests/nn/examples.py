"""One small example of every layer, over which the contract tests run: a new layer cannot be forgotten by them.

A factory takes a dtype and a batch size and gives a layer and inputs for it. A name is that of the class, optionally
followed by a dot and a variant.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hyptree.geometry import Lorentz, Poincare
from hyptree.nn.attention import LorentzAttention
from hyptree.nn.classifier import LorentzMLR, PoincareMLR
from hyptree.nn.cluster.mixer import ClusterMixer
from hyptree.nn.embedding import ManifoldEmbedding
from hyptree.nn.fc import LorentzFC, PoincareFC
from hyptree.nn.linear import LorentzLinear, LorentzLinearBounded, MobiusLinear
from hyptree.nn.norm import LorentzBatchNorm, OnSpace
from hyptree.nn.residual import LorentzResidual

Example = tuple[nn.Module, tuple[Tensor, ...]]
Factory = Callable[[torch.dtype, int], Example]

LAYERS: dict[str, Factory] = {}


def _example(name: str) -> Callable[[Factory], Factory]:
    def add(factory: Factory) -> Factory:
        LAYERS[name] = factory
        return factory

    return add


def _lorentz(c: float = 0.7) -> Lorentz:
    return Lorentz(c, learnable=True)


def _space(batch: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, n, dtype=dtype)


def _ball(batch: int, n: int, dtype: torch.dtype) -> Tensor:
    return Poincare(0.7).random(batch, n, dtype=dtype, std=0.5)


@_example("LorentzLinear")
def _linear(dtype: torch.dtype, batch: int) -> Example:
    return LorentzLinear(5, 3, _lorentz(), _lorentz(1.3), dtype=dtype), (_space(batch, 5, dtype),)


@_example("LorentzLinear.no_bias")
def _linear_no_bias(dtype: torch.dtype, batch: int) -> Example:
    return LorentzLinear(5, 3, Lorentz(0.7), bias=False, dtype=dtype), (_space(batch, 5, dtype),)


@_example("LorentzLinearBounded")
def _linear_bounded(dtype: torch.dtype, batch: int) -> Example:
    return LorentzLinearBounded(5, 3, _lorentz(), _lorentz(1.3), lam=2.0, dtype=dtype), (_space(batch, 5, dtype),)


@_example("LorentzFC")
def _fc(dtype: torch.dtype, batch: int) -> Example:
    layer = LorentzFC(5, 3, _lorentz(), _lorentz(1.3), dtype=dtype)
    return _with_offsets(layer), (_space(batch, 5, dtype),)


@_example("PoincareFC")
def _poincare_fc(dtype: torch.dtype, batch: int) -> Example:
    layer = PoincareFC(5, 3, Poincare(0.7, learnable=True), Poincare(1.3, learnable=True), dtype=dtype)
    return _with_offsets(layer), (_ball(batch, 5, dtype),)


@_example("MobiusLinear")
def _mobius(dtype: torch.dtype, batch: int) -> Example:
    layer = MobiusLinear(5, 3, Poincare(0.7, learnable=True), Poincare(1.3, learnable=True), dtype=dtype)
    if layer.bias is not None:
        nn.init.normal_(layer.bias, std=0.1)
    return layer, (_ball(batch, 5, dtype),)


@_example("LorentzMLR")
def _mlr(dtype: torch.dtype, batch: int) -> Example:
    return _with_offsets(LorentzMLR(5, 4, _lorentz(), dtype=dtype)), (_space(batch, 5, dtype),)


@_example("PoincareMLR")
def _poincare_mlr(dtype: torch.dtype, batch: int) -> Example:
    return _with_offsets(PoincareMLR(5, 4, Poincare(0.7, learnable=True), dtype=dtype)), (_ball(batch, 5, dtype),)


@_example("OnSpace")
def _on_space(dtype: torch.dtype, batch: int) -> Example:
    return OnSpace(nn.RMSNorm(5, eps=1e-6, dtype=dtype), _lorentz(), _lorentz(1.3)), (_space(batch, 5, dtype),)


@_example("LorentzBatchNorm")
def _batch_norm(dtype: torch.dtype, batch: int) -> Example:
    # In evaluation mode: in training mode a row depends on its batch by design, and an empty batch has no statistics.
    return LorentzBatchNorm(5, dtype=dtype).eval(), (_space(batch, 5, dtype),)


@_example("LorentzResidual")
def _residual(dtype: torch.dtype, batch: int) -> Example:
    layer = LorentzResidual(_lorentz(), weight=0.5, gain=1.5, learnable=True)
    return layer, (_space(batch, 5, dtype), _space(batch, 5, dtype))


@_example("LorentzAttention")
def _attention(dtype: torch.dtype, batch: int) -> Example:
    heads = Lorentz(torch.tensor([0.5, 2.0]).reshape(2, 1, 1), learnable=True)
    layer = LorentzAttention(6, 2, _lorentz(), heads, learnable_tau=True, dtype=dtype)
    return layer, (torch.randn(batch, 4, 6, dtype=dtype),)


@_example("ClusterMixer")
def _cluster_mixer(dtype: torch.dtype, batch: int) -> Example:
    layer = ClusterMixer(3, 2, 2, (4, 4), 2, 2, 1, curvature=0.7, dtype=dtype)
    return _with_bias(layer), (torch.randn(batch, 4, 4, 3, dtype=dtype),)


@_example("ClusterMixer.padded")
def _cluster_mixer_padded(dtype: torch.dtype, batch: int) -> Example:
    # No window is one of the centres it is compared with: there the distance has a kink.
    layer = ClusterMixer(2, 1, 2, (5, 3), 3, 2, 2, dtype=dtype)
    return _with_bias(layer), (torch.randn(batch, 5, 3, 2, dtype=dtype),)


@_example("ManifoldEmbedding")
def _embedding(dtype: torch.dtype, batch: int) -> Example:
    return ManifoldEmbedding(7, 3, Lorentz(0.7), std=0.5, dtype=dtype), (torch.randint(0, 7, (batch,)),)


def _with_bias(layer: ClusterMixer) -> nn.Module:
    """The layer with position biases and points of a size that matters."""
    for level in (layer.patch, layer.window):
        if level is not None and level.position is not None:
            nn.init.normal_(level.position.bias, std=0.3)
    nn.init.normal_(layer.points_and_values.weight, std=0.5)
    return layer


def _with_offsets(layer: LorentzFC | PoincareFC | LorentzMLR | PoincareMLR) -> nn.Module:
    """The layer with hyperplanes away from the origin, so that every term counts."""
    nn.init.normal_(layer.offset, std=0.3)
    return layer
