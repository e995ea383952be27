"""Layers whose inputs and outputs are points. Lorentz points are their space components (..., n), ball points (..., n).

Every module has a function that it calls, and takes the manifold as an object: share one object between layers to share
a learned curvature. Matrix products follow autocast and the dtype of the parameters; time components, norms and logits
are float32 at least. ``nn.RMSNorm``, ``nn.GELU``, ``nn.Dropout`` and their like apply to Lorentz points as they are.
"""

from hyptree.nn.attention import LorentzAttention, lorentz_attention
from hyptree.nn.classifier import LorentzMLR, PoincareMLR, lorentz_mlr, poincare_mlr
from hyptree.nn.cluster.mixer import ClusterAssignment, ClusterMixer
from hyptree.nn.embedding import ManifoldEmbedding
from hyptree.nn.fc import LorentzFC, PoincareFC, lorentz_fc, poincare_fc
from hyptree.nn.linear import (
    LorentzLinear,
    LorentzLinearBounded,
    MobiusLinear,
    lorentz_linear,
    lorentz_linear_bounded,
    mobius_linear,
)
from hyptree.nn.norm import LorentzBatchNorm, OnSpace
from hyptree.nn.residual import LorentzResidual, change_curvature, concat, lorentz_residual, split

__all__ = [
    "ClusterAssignment",
    "ClusterMixer",
    "LorentzAttention",
    "LorentzBatchNorm",
    "LorentzFC",
    "LorentzLinear",
    "LorentzLinearBounded",
    "LorentzMLR",
    "LorentzResidual",
    "ManifoldEmbedding",
    "MobiusLinear",
    "OnSpace",
    "PoincareFC",
    "PoincareMLR",
    "change_curvature",
    "concat",
    "lorentz_attention",
    "lorentz_fc",
    "lorentz_linear",
    "lorentz_linear_bounded",
    "lorentz_mlr",
    "lorentz_residual",
    "mobius_linear",
    "poincare_fc",
    "poincare_mlr",
    "split",
]
