"""Overlap statistics of real heads: how close the directions of words are to what random ones would be.

Exact means over all pairs come from a ``width x width`` matrix in one pass over the rows, so a head of any length needs
the memory of one block. A direction that all rows share inflates the raw numbers (real heads have one), so everything
is given again after the mean row is taken away.

Heads on the hyperboloid have a number beside each row (:attr:`~hyptree.lab.lm_heads.checkpoint.LMHead.time`). Their
rows are measured as any others, and again as what they are: vectors ``(t, s)`` under Lorentz's product ``s s' - t t'``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyptree.errors import UserError
from hyptree.lab.fits import PowerFit, fit_power
from hyptree.lab.lm_heads.checkpoint import LMHead, find_lm_head
from hyptree.lab.theory import welch_bound


@dataclass(frozen=True)
class LMHeadOverlap:
    """The numbers of one head. ``mso`` is the mean squared overlap over all pairs; random directions have ``1 / m``."""

    path: str
    tensor: str
    tied: str
    num: int
    """Rows that count."""
    m: int
    num_zero: int
    """Rows of zeros, left out."""
    norm_mean: float
    norm_std: float
    norm_min: float
    norm_max: float
    norm_counts: list[int]
    norm_edges: list[float]
    """Histogram of the norms."""
    phi_half: float
    """Share of rows whose norm is above half the mean norm."""
    mso: float
    mso_m: float
    """``mso`` times m: 1 for random directions."""
    signed_mean: float
    mso_centred: float
    mso_centred_m: float
    """After the mean row, and the main directions that were asked for, are taken away."""
    removed: int
    """Main directions that were taken away."""
    welch: float
    """The least that the largest overlap can be."""
    effective_rank: float
    """Exponential of the entropy of the spectrum of directions; m where all are used alike."""
    sampled_pairs: int
    sampled_max: float
    sampled_mean: float
    sampled_std: float
    """Of the size of an overlap, over the pairs of some random rows."""
    quantiles: dict[str, float]
    exact_max: float
    """Largest overlap of all pairs; NaN unless asked for."""
    mso_lorentz: float
    mso_lorentz_m: float
    """Mean squared overlap under Lorentz's product over spacelike rows; NaN for heads without a time column."""
    num_spacelike: int
    """Rows with ``|s| > |t|``, each the normal of a hyperplane; the others have no overlap in this sense."""
    time_share: float
    """Mean of ``t^2 / (t^2 + |s|^2)`` over rows; NaN for heads without a time column."""


@dataclass
class _Sums:
    """What one pass over unit rows adds up, float64."""

    num: int
    total: Tensor
    gram: Tensor

    @property
    def mean_square(self) -> float:
        return max(0.0, (self.gram.square().sum().item() - self.num) / (self.num * (self.num - 1)))

    @property
    def signed_mean(self) -> float:
        return (self.total.square().sum().item() - self.num) / (self.num * (self.num - 1))


def overlap(
    path: Path | str | LMHead,
    *,
    tensor: str | None = None,
    remove_pcs: int = 0,
    pairs_sample: int = 2_000_000,
    exact: bool = False,
    block: int = 8192,
    seed: int = 0,
    allow_pickle: bool = False,
    curvature: float | None = None,
) -> LMHeadOverlap:
    """Measure the head of a checkpoint.

    Args:
        path: what :func:`hyptree.lab.lm_heads.checkpoint.find_lm_head` reads, or a head.
        remove_pcs: main directions of the centred rows to take away before the centred numbers.
        pairs_sample: about so many pairs for the largest overlap and the quantiles.
        exact: also the largest overlap of all pairs; costs rows squared.
        block: rows in memory at once.
        curvature: the ``c > 0`` of a head whose hyperplanes have offsets. Checkpoints do not hold it, and without it
            such a head has no numbers under Lorentz's product.
    """
    if block < 1 or pairs_sample < 1 or remove_pcs < 0:
        raise UserError(
            "block and pairs_sample must be 1 or more and remove_pcs 0 or more, "
            f"got {block}, {pairs_sample} and {remove_pcs}"
        )
    if curvature is not None and not 0 < curvature < math.inf:
        raise UserError(f"curvature must be positive and finite, got {curvature}")
    head = path if isinstance(path, LMHead) else find_lm_head(path, tensor, allow_pickle)
    if remove_pcs >= head.width:
        raise UserError(f"remove_pcs must be below the width {head.width}, got {remove_pcs}")
    norms, mean, raw = _first_pass(head, block)
    if lost := int((~torch.isfinite(norms)).sum()):
        rows = "1 row that is" if lost == 1 else f"{lost} rows that are"
        raise UserError(
            f"{head.name} in {head.path} has {rows} not finite (NaN or infinite); overlaps need finite rows"
        )
    kept = norms > 0
    num = int(kept.sum())
    if num < 2:
        raise UserError(f"{head.name} in {head.path} has {num} rows that are not zero; overlaps need two or more")
    basis = _main_directions(head, block, mean, remove_pcs)
    centred = _unit_sums(head, block, kept, mean, basis)
    sample = _sample(head, block, kept, pairs_sample, seed)
    order = _sizes(sample).sort().values
    lorentz = _lorentz(head, block, curvature)
    used = norms[kept]
    counts, edges = torch.histogram(used, 40)
    spectrum = torch.linalg.eigvalsh(raw.gram).clamp_min(0) / num
    entropy = -torch.special.xlogy(spectrum, spectrum).sum().item()
    return LMHeadOverlap(
        path=str(head.path),
        tensor=head.name,
        tied=head.tied,
        num=num,
        m=head.width,
        num_zero=head.num_rows - num,
        norm_mean=used.mean().item(),
        norm_std=used.std().item(),
        norm_min=used.min().item(),
        norm_max=used.max().item(),
        norm_counts=[int(count) for count in counts],
        norm_edges=edges.tolist(),
        phi_half=(used > 0.5 * used.mean()).double().mean().item(),
        mso=raw.mean_square,
        mso_m=raw.mean_square * head.width,
        signed_mean=raw.signed_mean,
        mso_centred=centred.mean_square,
        mso_centred_m=centred.mean_square * head.width,
        removed=remove_pcs,
        welch=welch_bound(num, head.width),
        effective_rank=math.exp(entropy),
        sampled_pairs=len(order),
        sampled_max=order[-1].item(),
        sampled_mean=order.mean().item(),
        sampled_std=order.std(correction=0).item(),
        quantiles={f"{q:g}": order[min(len(order) - 1, int(q * len(order)))].item() for q in (0.5, 0.9, 0.99, 0.999)},
        exact_max=_exact_max(head, block) if exact else math.nan,
        mso_lorentz=lorentz.mean_square,
        mso_lorentz_m=lorentz.mean_square * head.width,
        num_spacelike=lorentz.num,
        time_share=lorentz.time_share,
    )


def _first_pass(head: LMHead, block: int) -> tuple[Tensor, Tensor, _Sums]:
    """Norms (rows), the mean row (width) over rows that are not zero, and the sums of unit rows."""
    # Kept in one piece: small tensors that stay between large ones that go leave holes which the allocator cannot fill.
    norms = torch.empty(head.num_rows, dtype=torch.float64)
    total = torch.zeros(head.width, dtype=torch.float64)
    sums = _Sums(0, torch.zeros_like(total), torch.zeros(head.width, head.width, dtype=torch.float64))
    for rows, place in zip(head.rows(block), norms.split(block), strict=True):
        x = rows.double()
        torch.linalg.vector_norm(x, dim=1, out=place)
        total += x.sum(0)
        _add(sums, x)
    return norms, total / max(1, sums.num), sums


def _add(sums: _Sums, x: Tensor) -> None:
    """Add the directions of rows; ``x`` is overwritten, so that a block is in memory once."""
    norm = x.norm(dim=1, keepdim=True)
    x.div_(torch.where(norm > 0, norm, 1))  # rows of zeros add nothing
    sums.num += int((norm > 0).sum())
    sums.total += x.sum(0)
    sums.gram.addmm_(x.T, x)


def _unit_sums(head: LMHead, block: int, kept: Tensor, mean: Tensor, basis: Tensor) -> _Sums:
    """Sums of the directions that are left when the mean and the span of ``basis`` (width, k) are taken away."""
    sums = _Sums(0, torch.zeros_like(mean), torch.zeros(head.width, head.width, dtype=torch.float64))
    for rows, use in zip(head.rows(block), kept.split(block), strict=True):
        x = rows.double().sub_(mean).mul_(use[:, None])
        if basis.shape[1]:
            x.addmm_(x @ basis, basis.T, alpha=-1)
        _add(sums, x)
    return sums


@dataclass
class _Lorentz:
    num: int = 0
    mean_square: float = math.nan
    time_share: float = math.nan


def _lorentz(head: LMHead, block: int, c: float | None) -> _Lorentz:
    """Overlaps under Lorentz's product, by the same trick: their squares add up to ``sum of J_a J_b G_ab^2``.

    ``G`` adds up the outer products of ``(t, s)``, each divided by the root of ``|s|^2 - t^2``; ``J`` is -1 for the
    time and 1 for the rest.
    """
    if head.time is None or (head.time_kind == "offset" and c is None):
        return _Lorentz()
    overlap, share = _Lorentz(), 0.0
    gram = torch.zeros(head.width + 1, head.width + 1, dtype=torch.float64)
    for rows, time in zip(head.rows(block), head.time.double().split(block), strict=True):
        s, t = rows.double(), time[:, None]
        if head.time_kind == "offset" and c is not None:  # normals of hyperplanes at a signed distance from the origin
            angle = math.sqrt(c) * t
            s, t = torch.nn.functional.normalize(s, dim=1, eps=1e-300) * torch.cosh(angle), torch.sinh(angle)
        square = s.square().sum(1, keepdim=True)
        share += (t.square() / (t.square() + square).clamp_min(1e-300)).sum().item()
        use = (square > t.square()).squeeze(1)
        x = torch.cat([t, s], 1)[use] / (square - t.square())[use].sqrt()
        overlap.num += len(x)
        gram.addmm_(x.T, x)
    sign = torch.ones(head.width + 1, dtype=torch.float64)
    sign[0] = -1
    if overlap.num > 1:
        total = (gram.square() * sign * sign[:, None]).sum().item()
        overlap.mean_square = max(0.0, (total - overlap.num) / (overlap.num * (overlap.num - 1)))
    overlap.time_share = share / head.num_rows
    return overlap


def _main_directions(head: LMHead, block: int, mean: Tensor, count: int) -> Tensor:
    """(width, count) the directions in which the centred rows vary most."""
    if count == 0:
        return torch.zeros(head.width, 0, dtype=torch.float64)
    scatter = torch.zeros(head.width, head.width, dtype=torch.float64)
    for rows in head.rows(block):
        x = rows.double()
        x = x[x.norm(dim=1) > 0] - mean
        scatter += x.T @ x
    return torch.linalg.eigh(scatter).eigenvectors[:, -count:]


def _sample(head: LMHead, block: int, kept: Tensor, pairs: int, seed: int) -> Tensor:
    """Unit rows, drawn without replacement, that have about so many pairs."""
    places = kept.nonzero().squeeze(1)
    count = min(len(places), max(2, round(0.5 + math.sqrt(0.25 + 2 * pairs))))
    generator = torch.Generator().manual_seed(seed)
    chosen = places[torch.randperm(len(places), generator=generator)[:count]]
    wanted = torch.zeros_like(kept)
    wanted[chosen] = True
    sample, at = torch.empty(count, head.width, dtype=torch.float64), 0
    for rows, use in zip(head.rows(block), wanted.split(block), strict=True):
        some = int(use.sum())
        sample[at : at + some] = rows[use]
        at += some
    return sample.div_(sample.norm(dim=1, keepdim=True))


def _sizes(sample: Tensor) -> Tensor:
    """Sizes of the overlaps of all pairs of unit rows, row by row, so that they are in memory once."""
    num = len(sample)
    sizes, at = torch.empty(num * (num - 1) // 2, dtype=torch.float64), 0
    for i in range(num - 1):
        sizes[at : at + num - 1 - i] = sample[i + 1 :] @ sample[i]
        at += num - 1 - i
    return sizes.abs_()


def _exact_max(head: LMHead, block: int) -> float:
    """Largest size of an overlap over all pairs, block against block."""
    largest = 0.0
    for i, left in enumerate(head.rows(block)):
        a = torch.nn.functional.normalize(left.double(), dim=1, eps=1e-300)
        for j, right in enumerate(head.rows(block)):
            if j < i:
                continue
            pairs = (a @ torch.nn.functional.normalize(right.double(), dim=1, eps=1e-300).T).abs_()
            if i == j:
                pairs.fill_diagonal_(0)
            largest = max(largest, pairs.max().item())
    return largest


def compare(overlaps: Sequence[LMHeadOverlap], centred: bool = False) -> PowerFit:
    """How the mean squared overlap falls with width over several heads: exponent 1 is that of random directions."""
    name = "mso_centred" if centred else "mso"
    return fit_power([one.m for one in overlaps], [getattr(one, name) for one in overlaps])
