"""What the weights of a toy model show: how many features are represented, and how much they overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hyptree.lab.hyperbolic import excess
from hyptree.lab.theory import welch_bound

LARGEST_VALUE = 2.0
"""Of a feature: its values are even between 0 and 2."""


@dataclass(frozen=True)
class Overlap:
    """Overlaps ``u_i · u_j`` of the directions of rows, over all pairs; rows of zeros are left out."""

    num: int
    """Rows that count."""
    mean_square: float
    """Mean of the squared overlap; NaN with fewer than two rows."""
    signed_mean: float
    """Mean of the overlap itself: a direction that all rows share shows here."""
    variance: float
    """Variance of the squared overlap."""
    largest: float
    """Largest size of an overlap."""
    welch: float
    """The least that ``largest`` can be."""


def mean_square_overlap(U: Tensor) -> float:
    """Mean of ``(u_i · u_j)^2`` over pairs of unit rows (num, m): ``(|UᵀU|^2 - num) / (num (num - 1))``.

    Needs m x m numbers instead of num x num, in float64: the sum is close to ``num`` where overlaps are small.
    """
    num = len(U)
    if num < 2:
        return math.nan
    gram = U.double().T @ U.double()
    return max(0.0, (gram.square().sum().item() - num) / (num * (num - 1)))


def overlap(W: Tensor, block: int = 2048) -> Overlap:
    """Overlaps of the rows of ``W`` (n, m), exact, with at most ``block`` rows of the pairs' matrix in memory."""
    norm = torch.linalg.vector_norm(W.double(), dim=1)
    kept = norm > 0
    U = W.double()[kept] / norm[kept, None]
    num, m = U.shape
    if num < 2:
        return Overlap(num, math.nan, math.nan, math.nan, math.nan, welch_bound(num, m))
    fourth = largest = 0.0
    for start in range(0, num, block):
        square = (U[start : start + block] @ U.T).square_()
        square.diagonal(start).zero_()
        fourth += square.square().sum().item()
        largest = max(largest, square.max().item()) if torch.isfinite(square).all() else math.nan
    pairs = num * (num - 1)
    mean = mean_square_overlap(U)
    signed = (U.sum(0).square().sum().item() - num) / pairs
    return Overlap(num, mean, signed, max(0.0, fourth / pairs - mean**2), math.sqrt(largest), welch_bound(num, m))


def lorentz_overlap(W: Tensor, curvature: float, block: int = 2048) -> tuple[float, float]:
    """Mean squares of the overlaps that the readout sees, and of their positive part alone, which its relu lets pass.

    The overlap of two rows is their product ``z_ij = <W_i - o, W_j - o>_L`` over ``sqrt(z_ii z_jj)``: ``u_i · u_j`` for
    curvature 0. It is at most 1 for rows of one norm but has no lower bound: opposite rows of a curved space are
    farther apart than twice their distance from the origin tells.
    """
    W = W.double()
    norm = torch.linalg.vector_norm(W, dim=1, keepdim=True)
    kept = norm[:, 0] > 0
    W, norm = W[kept], norm[kept]
    num = len(W)
    if num < 2:
        return math.nan, math.nan
    time = excess(W, W.new_tensor(curvature).sqrt())
    own = (norm.square() - time.square()).sqrt()
    total = positive = 0.0
    for start in range(0, num, block):
        part = slice(start, start + block)
        z = (W[part] @ W.T - time[part] * time.T) / (own[part] * own.T)
        z.diagonal(start).zero_()
        total += z.square().sum().item()
        positive += z.clamp_(min=0).square_().sum().item()
    pairs = num * (num - 1)
    return total / pairs, positive / pairs


def regime(phi_half: float, n: int, m: int) -> str:
    """``weak`` where at most ``2 m`` features are represented, ``strong`` where 95 % are, else ``mixed``."""
    if phi_half >= 0.95:
        return "strong"
    return "weak" if phi_half * n <= 2 * m else "mixed"


def silent_features(W: Tensor, b: Tensor, curvature: float = 0.0) -> Tensor:
    """(n,) whether the relu gives zero for a feature alone at the largest value it has: it answers never.

    Such a feature has next to no gradient. Its row keeps the norm that growth gives it, so it counts as represented.
    """
    W, b = W.double(), b.double()
    root = W.new_tensor(curvature).sqrt()
    own = LARGEST_VALUE * W.square().sum(1) - (excess(W, root) * excess(LARGEST_VALUE * W, root)).squeeze(1)
    return own + b <= 0


def measure(W: Tensor, curvature: float = 0.0, b: Tensor | None = None) -> dict[str, float | str]:
    """The numbers of one model's weights (n, m) and biases (n,), by the names they have in the table of runs.

    Norms are those of space components, which the growth rule pulls to one, whatever the curvature.

    Weights that are not finite give NaN everywhere and the regime ``diverged``.
    """
    n, m = W.shape
    norm = torch.linalg.vector_norm(W.double(), dim=1)
    if not torch.isfinite(norm).all():
        names = ("phi_half", "phi_one", "mso_all", "mso_strong", "mso_lorentz", "mso_positive", "max_overlap", "welch")
        return {**dict.fromkeys((*names, "silent", "first_silent"), math.nan), "regime": "diverged"}
    every, strong = overlap(W), overlap(W[norm > 1])
    seen, positive = lorentz_overlap(W, curvature)
    phi_half = (norm > 0.5).double().mean().item()
    silent = None if b is None else silent_features(W, b, curvature).nonzero().squeeze(1)
    return {
        "phi_half": phi_half,
        "phi_one": (norm > 1).double().mean().item(),
        "mso_all": every.mean_square,
        "mso_strong": strong.mean_square,
        "mso_lorentz": seen,
        "mso_positive": positive,
        "max_overlap": every.largest,
        "welch": every.welch,
        "silent": math.nan if silent is None else float(len(silent)),
        "first_silent": math.nan if silent is None or not len(silent) else 1.0 + silent[0].item(),
        "regime": regime(phi_half, n, m),
    }
