"""The last layer of a HELM: logits from rows ``[s, t]`` of hidden points, and the loss without all logits at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.geometry.core.numerics import sqnorm
from hyptree.lm.loss import linear_cross_entropy
from hyptree.ops.bare import is_bare, readable, report_unfused
from hyptree.ops.heads.reference import excess_of
from hyptree.ops.rounding import wide


@readable
class LorentzHead(nn.Module):
    """Minkowski products of rows with one point per token, but for a shift that all tokens of the vocabulary share.

    No ``nn.Linear``: a change of ``weight`` by low-rank factors or rounding moves the points' times too.

    Shape:
        rows (..., n + 1) -> (..., V)
    """

    bias = None

    def __init__(self, features: int, vocab_size: int, c: float = 1.0):
        super().__init__()
        self.c, self.weight = c, nn.Parameter(torch.empty(vocab_size, features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the points as ``nn.Linear`` draws its rows."""
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.matrix().to(rows.dtype))

    def matrix(self) -> Tensor:
        """``[s, -(t - 1/sqrt(c))]`` of the points: (V, n + 1), in float32 at least."""
        point = wide(self.weight)
        return torch.cat([point, -excess_of(sqnorm(point), 1 / self.c)], -1)


def head_matrix(head: Any, rows: Tensor) -> Tensor:
    """What stands in a bare head, (V, w) in the dtype and width of ``rows``."""
    matrix: Tensor = head.weight if isinstance(head, nn.Linear) else head.matrix()
    matrix, short = matrix.to(rows.dtype), rows.shape[-1] - matrix.shape[1]
    return F.pad(matrix, (0, short)) if short else matrix


def next_token_loss(
    rows: Tensor,
    head: nn.Module,
    labels: Tensor | None,
    shift_labels: Tensor | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Cross-entropy of ``head(rows)`` for tokens that predict the next one: (B, N, w), (B, N) -> ().

    In chunks by :func:`linear_cross_entropy` where nothing but the head's weight has a say.

    Args:
        rows: what the head reads; zero columns may stand behind.
        labels: they are shifted, not the rows: a slice of those would be copied.
        shift_labels: of whoever cuts texts into pieces, as sequence parallelism does, and has to shift before; they
            stand above ``labels``.
        num_items: see :func:`linear_cross_entropy`.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels[..., 1:], (0, 1), value=-100)
    if is_bare(head):
        return linear_cross_entropy(rows, head_matrix(head, rows), shift_labels, num_items=num_items)
    report_unfused("next_token_loss", head)
    logits, labels = wide(head(rows)).flatten(0, -2), shift_labels.flatten()
    if num_items is None:
        num_items = (labels != -100).sum().clamp_min(1)
    return F.cross_entropy(logits, labels, reduction="sum") / num_items
