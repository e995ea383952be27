"""A table of points, one per index, on any manifold."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry import Manifold, PointModule


class ManifoldEmbedding(nn.Embedding, PointModule):
    """Look up points of a manifold by index, as in ``ManifoldEmbedding(1000, 5, Lorentz())``.

    The parameter is marked as points, so Riemannian optimisers move its rows along the manifold, and it stays marked
    through ``deepcopy``, ``pickle`` and ``to``. Initial points are ``expmap0`` of ``N(0, std^2)`` tangent vectors (on a
    sphere, spread evenly); in the ball they lie at the same distances as on the hyperboloid.

    Args:
        num_embeddings: number of points. embedding_dim: n, coordinates of each.
        manifold: Lorentz, Poincare, Euclidean, Sphere or Product.
        std: spread of the initial tangent vectors per component.
        padding_idx: index of a row that starts at the origin and gets no gradient.
        sparse: give a sparse gradient, for ``RiemannianAdam(..., sparse=True)`` and tables with many rows.

    It is an ``nn.Embedding`` because DDP asks only such tables whether their gradients are sparse.

    Shape:
        index (...) integers -> (..., n)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        manifold: Manifold,
        std: float = 0.05,
        padding_idx: int | None = None,
        sparse: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        if not isinstance(manifold, Manifold):
            raise ValueError(
                f"ManifoldEmbedding: expected a manifold such as Lorentz(c=1.0), got {type(manifold).__name__}"
            )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"ManifoldEmbedding: padding_idx must be below {num_embeddings} rows, got {padding_idx}")
        empty = torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse=sparse, _weight=empty)
        self.manifold, self.std = manifold, std
        self.register_point("weight", empty, manifold)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new points."""
        weight, shape = self.weight, (self.num_embeddings, self.embedding_dim)
        weight.copy_(self.manifold.random(*shape, std=self.std, dtype=weight.dtype, device=weight.device))
        if self.padding_idx is not None:
            origin = self.manifold.origin(1, self.embedding_dim, dtype=weight.dtype, device=weight.device)
            weight[self.padding_idx] = origin[0]

    def forward(self, index: Tensor) -> Tensor:
        if index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(
                f"ManifoldEmbedding: expected integer indices, got dtype {index.dtype}; call .long() on them"
            )
        if not torch.compiler.is_compiling():
            self.mark_points()  # before any step: libraries that load or move weights put new parameters in place
        return F.embedding(index, self.weight, self.padding_idx, sparse=self.sparse)

    def extra_repr(self) -> str:
        extra = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{extra}, sparse={self.sparse}"
