"""Trains a whole grid of toy models at once, without autograd.

All models of one width lie in one tensor ``P`` (G, n, m + 1) whose last column is the bias, so that the bias and its
gradient ride inside the matrix products. Samples are sparse (about one active feature each), which leaves three
products per step instead of five: see :func:`gradients`. Models in hyperbolic space (:mod:`hyptree.lab.hyperbolic`)
have one column more in these products and are otherwise the same.

What a model computes depends on its own settings alone: its start comes from its own seed, its samples from the data
seed and the step. On a CPU models are worked on in chunks that share their samples, so the bits are the same whatever
else is in the grid; on a GPU a chunk holds many groups, and other chunks may round differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.errors import UserError
from hyptree.lab.definition import EPS, initial
from hyptree.lab.hyperbolic import excess, narrow, pull_back, widen
from hyptree.lab.sampler import EVAL, TRAIN, Batch, Sampler
from hyptree.lab.sweeps.grid import Grid, Model, schedule
from hyptree.lab.theory import frequencies

BETAS = (0.9, 0.999)


@dataclass
class Index:
    """Where the active cells of a batch lie in the flattened tensors of a chunk of G models with R padded rows."""

    num_rows: int
    """R: the most kept rows of any model of the chunk."""
    feature: Tensor
    """(T) row of P.view(G * n, m + 1); cells go by model, then row."""
    cell: Tensor
    """(T) place in Y.view(G * R * n)."""
    value: Tensor
    """(T) x at the cell."""
    row_starts: Tensor
    """(G * R) where each row's cells begin."""
    row_by_feature: Tensor
    """(T) row of H.view(G * R, m + 1), cells ordered by model, then feature."""
    value_by_feature: Tensor
    """(T)"""
    feature_starts: Tensor
    """(G * n) where each feature's cells begin in that order."""
    is_row: Tensor
    """(G, R) one on kept rows, zero on padding."""
    num_empty: Tensor
    """(G, 1) samples without an active feature."""


def build_index(batch: Batch, groups: Sequence[int], n: int, piece: int = 0) -> Index:
    """The index of a chunk whose models see a piece of the frequency tables ``groups``."""
    device, dtype, size = batch.rows.device, batch.values.dtype, batch.sizes[piece]
    groups = [a * len(batch.sizes) + piece for a in groups]
    # Rounded up, so that every model's part of a tensor begins at a multiple of 16 bytes, whatever its place in the
    # chunk: on AMD's CPUs the last bit of a product depends on that.
    G, R = len(groups), -(-max(1, *(batch.num_rows[a] for a in groups)) // 4) * 4
    lengths = [batch.starts[a + 1] - batch.starts[a] for a in groups]
    total = sum(lengths)
    table = torch.tensor(
        [[batch.starts[a], length, batch.num_rows[a]] for a, length in zip(groups, lengths, strict=True)]
    )
    begin, length, num_rows = table.to(device, non_blocking=True).unbind(1)
    model = torch.repeat_interleave(torch.arange(G, device=device), length, output_size=total)
    place = torch.arange(total, device=device) + (begin - (length.cumsum(0) - length))[model]
    row, feature = model * R + batch.rows[place], model * n + batch.features[place]
    row_by_feature = model * R + batch.rows_by_feature[place]
    feature_by_feature = model * n + batch.features_by_feature[place]
    return Index(
        num_rows=R,
        feature=feature,
        cell=row * n + batch.features[place],
        value=batch.values[place],
        row_starts=torch.searchsorted(row, torch.arange(G * R, device=device)),
        row_by_feature=row_by_feature,
        value_by_feature=batch.values_by_feature[place],
        feature_starts=torch.searchsorted(feature_by_feature, torch.arange(G * n, device=device)),
        is_row=(torch.arange(R, device=device) < num_rows[:, None]).to(dtype),
        num_empty=(size - num_rows)[:, None].to(dtype),
    )


def outputs(P: Tensor, index: Index, root: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(H, Y): hidden states with a last column of ones (G, R, m + 1), and ``relu(W h + b)`` (G, R, n).

    Args:
        root: (G, 1, 1) square roots of curvatures; then ``P`` has the column of the excess, and ``H`` as well.
    """
    G, n, width = P.shape
    H = F.embedding_bag(
        index.feature, P.view(G * n, width), index.row_starts, mode="sum", per_sample_weights=index.value
    ).view(G, index.num_rows, width)
    H[..., -1] = index.is_row
    if root is not None:
        H[..., -2:-1] = -excess(H[..., :-2], root)
    return H, torch.bmm(H, P.transpose(1, 2)).relu_()


def losses(P: Tensor, Y: Tensor, index: Index, size: int) -> Tensor:
    """(G) float64: squared error summed over features, mean over all ``size`` samples.

    Turns the outputs at active cells into errors ``y - x``, in place; elsewhere the sample is zero.
    """
    Y.view(-1)[index.cell] -= index.value
    kept = torch.linalg.vector_norm(Y, dim=(1, 2)).double().square()
    empty = P[..., -1].relu().double().square().sum(1) * index.num_empty[:, 0].double()
    return (kept + empty) / size


def gradients(
    P: Tensor, pieces: Sequence[Index], size: int, with_loss: bool = False, root: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradient of the mean squared error over samples and features (G, n, m + 1); the losses (G) where wanted.

    The batch comes in pieces whose outputs fit a CPU's cache. No operation sums in an order that could change from run
    to run, on a GPU either.

    Args:
        root: (G, 1, 1) square roots of curvatures, none for flat models.
    """
    if root is not None:
        P = widen(P, root)
    G, n, width = P.shape
    grad = P.new_empty(0)
    loss: Tensor | None = None
    for k, index in enumerate(pieces):
        H, Y = outputs(P, index, root)
        y = Y.view(-1)[index.cell]
        if with_loss:
            now = losses(P, Y, index, size)
            loss = now if loss is None else loss + now
        # dL/dz is (y - x) [y > 0] up to a factor. Where x is zero that is y, so only active cells change.
        dZ = Y
        dZ.view(-1)[index.cell] = torch.where(y > 0, y - index.value, 0)
        # Through the decoder; the column of ones gives the bias.
        grad = grad.baddbmm_(dZ.transpose(1, 2), H) if k else torch.bmm(dZ.transpose(1, 2), H)
        dH = torch.bmm(dZ, P)
        if root is not None:
            pull_back(dH, H, root, sign=-1)
            dH[..., -2] = 0  # spent: rows reach h by their space components alone
        encoder = F.embedding_bag(
            index.row_by_feature,
            dH.view(-1, width),
            index.feature_starts,
            mode="sum",
            per_sample_weights=index.value_by_feature,
        ).view(G, n, width)
        encoder[..., -1] = P[..., -1].relu() * index.num_empty  # samples without active cells answer relu(b)
        grad += encoder
    if root is not None:
        pull_back(grad, P, root, sign=1)
        grad = narrow(grad)
    return grad.mul_(2 / (size * n)), loss


@dataclass
class Bucket:
    """Models of one width (or padded to it) and their Adam moments."""

    models: list[Model]
    groups: list[int]
    """(G) frequency table of each model."""
    P: Tensor
    first: Tensor
    second: Tensor
    gamma: Tensor
    """(G, 1, 1)"""
    lr: Tensor
    """(G, 1, m + 1) peak learning rate: weights, and the bias in the last column."""
    root: Tensor
    """(G, 1, 1) square root of the curvature."""

    def roots(self, part: slice) -> Tensor | None:
        """Those of some models that are all flat or all curved; none for flat ones, which need no further column."""
        return self.root[part] if self.models[part.start].curvature else None

    def update(self, part: slice, grad: Tensor, step: int, factor: float) -> None:
        """Decay and Adam for some of the models, in place; ``factor`` is the schedule's."""
        P, first, second = self.P[part], self.first[part], self.second[part]
        lr, gamma = self.lr[part] * factor, self.gamma[part]
        W, lr_weight = P[..., :-1], lr[..., :1]
        norm = torch.linalg.vector_norm(W, dim=-1, keepdim=True) + EPS
        W.mul_(torch.where(gamma < 0, 1 - lr_weight * gamma * (1 / norm - 1), 1 - lr_weight * gamma))
        first.lerp_(grad, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        correction1, correction2 = 1 - BETAS[0] ** (step + 1), 1 - BETAS[1] ** (step + 1)
        move = second.sqrt().div_(correction2**0.5).add_(EPS)
        torch.div(first, move, out=move)
        P.addcmul_(move, lr, value=-1 / correction1)

    def weights(self, i: int) -> tuple[Tensor, Tensor]:
        """W (n, m) and b (n) of one model, without padding."""
        return self.P[i, :, : self.models[i].m], self.P[i, :, -1]


class Engine:
    """The models of a grid, and how to move them one step.

    Args:
        chunk: models worked on at once; 0 chooses: few on a CPU (their outputs stay in its cache), many on a GPU.
        pad: put all widths into one tensor. Exact: columns of zeros stay zero.
        models: which of the grid's models to train; all by default.
    """

    def __init__(
        self,
        grid: Grid,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        chunk: int = 0,
        pad: bool = False,
        models: Sequence[Model] | None = None,
    ):
        if chunk < 0:
            raise UserError(f"chunk must be 0 (chosen) or more, got {chunk}")
        self.grid, self.device, self.dtype = grid, torch.device(device), dtype
        self.step = 0
        tables = grid.groups()
        p = [torch.from_numpy(frequencies(grid.n, alpha, density, grid.dist)) for alpha, density in tables]
        self.p = torch.stack(p).to(self.device)  # (A, n)
        # Most samples worked on at once: on a CPU so many that the outputs of a model take a megabyte.
        on_cpu = self.device.type == "cpu"
        self.piece = max(128, 2**20 // (4 * grid.n)) if on_cpu else grid.batch
        self.sampler = Sampler(self.p, grid.batch, grid.data_seed, dtype, self.piece)
        chosen = list(grid.models() if models is None else models)
        of_width = [chosen] if pad else [[model for model in chosen if model.m == m] for m in grid.m]
        number = {table: a for a, table in enumerate(tables)}
        self.buckets = [self._bucket(some, number) for some in of_width if some]
        self.chunk = chunk or max(1, (2**21 if on_cpu else 2**32) // (4 * min(self.piece, grid.batch) * grid.n))
        self._parts = [list(self._split(bucket)) for bucket in self.buckets]

    @property
    def models(self) -> list[Model]:
        """In the order in which losses are given."""
        return [model for bucket in self.buckets for model in bucket.models]

    def _bucket(self, models: list[Model], number: dict[tuple[float, float], int]) -> Bucket:
        # Models that share their samples stand together, so that a chunk needs few tables; flat ones come first.
        models = sorted(models, key=lambda model: (model.curvature > 0, number[model.alpha, model.density], model.m))
        width = max(model.m for model in models)
        P = torch.zeros(len(models), self.grid.n, width + 1, dtype=self.dtype)
        lr = torch.zeros(len(models), 1, width + 1, dtype=self.dtype)
        for i, model in enumerate(models):
            P[i, :, : model.m], P[i, :, -1] = initial(model, self.grid.bias_init, self.dtype)
            lr_weight, lr_bias = self.grid.learning_rates(model.m)
            lr[i, :, :-1], lr[i, :, -1] = lr_weight, lr_bias
        P = P.to(self.device)
        gamma = torch.tensor([model.gamma for model in models], dtype=self.dtype, device=self.device)
        root = torch.tensor([model.curvature**0.5 for model in models], dtype=self.dtype, device=self.device)
        return Bucket(
            models,
            [number[model.alpha, model.density] for model in models],
            P,
            torch.zeros_like(P),
            torch.zeros_like(P),
            gamma.view(-1, 1, 1),
            lr.to(self.device),
            root.view(-1, 1, 1),
        )

    def _split(self, bucket: Bucket) -> Iterator[slice]:
        """Slices of a bucket, each all flat or all curved; on a CPU all models of a slice share their samples."""
        start = 0
        for i in range(1, len(bucket.models) + 1):
            full = i - start == self.chunk
            end = i == len(bucket.models)
            bends = not end and (bucket.models[i].curvature > 0) != (bucket.models[start].curvature > 0)
            changes = self.device.type == "cpu" and not end and bucket.groups[i] != bucket.groups[start]
            if full or end or bends or changes:
                yield slice(start, i)
                start = i

    def _indexed(self, batch: Batch) -> Iterator[tuple[Bucket, slice, list[Index]]]:
        """Every chunk with the index of each piece; buckets whose chunks see the same tables share them."""
        known: dict[tuple[int, ...], list[Index]] = {}
        for bucket, parts in zip(self.buckets, self._parts, strict=True):
            for part in parts:
                key = tuple(bucket.groups[part])
                if key not in known:
                    known[key] = [build_index(batch, key, self.grid.n, piece) for piece in range(len(batch.sizes))]
                yield bucket, part, known[key]

    @torch.no_grad()
    def advance(self, with_loss: bool = False) -> Tensor | None:
        """One step of every model; gives the losses before it (float64, one per model) where wanted."""
        batch = self.sampler.draw(self.step, TRAIN)
        factor = schedule(self.step, self.grid.steps, self.grid.warmup)
        losses = []
        with exact_products(self.device):
            for bucket, part, pieces in self._indexed(batch):
                grad, loss = gradients(bucket.P[part], pieces, batch.size, with_loss, bucket.roots(part))
                bucket.update(part, grad, self.step, factor)
                losses.append(loss)
        self.step += 1
        return torch.cat([loss for loss in losses if loss is not None]) if with_loss else None

    @torch.no_grad()
    def evaluate(self, samples: int) -> tuple[Tensor, Tensor]:
        """Mean loss over at least ``samples`` fresh samples and its standard error, float64, one per model."""
        size = max(self.grid.batch, min(samples // 32, 2048))  # a few large batches cost less than many small ones
        rounds = max(2, -(-samples // size))
        sampler = Sampler(self.p, size, self.grid.data_seed, self.dtype, self.piece)
        per_round = []
        with exact_products(self.device):
            for i in range(rounds):
                batch = sampler.draw(i, EVAL)
                now = []
                for bucket, part, pieces in self._indexed(batch):
                    P, root = bucket.P[part], bucket.roots(part)
                    P = P if root is None else widen(P, root)
                    each_piece = [losses(P, outputs(P, index, root)[1], index, batch.size) for index in pieces]
                    now.append(torch.stack(each_piece).sum(0))
                per_round.append(torch.cat(now))
        each = torch.stack(per_round)  # (rounds, models)
        return each.mean(0), each.std(0) / rounds**0.5

    def state(self) -> dict[str, Tensor]:
        """Everything that changes while training, by name."""
        return {
            f"{i}.{name}": getattr(bucket, name)
            for i, bucket in enumerate(self.buckets)
            for name in ("P", "first", "second")
        }

    def load_state(self, state: dict[str, Tensor], step: int) -> None:
        """Go on from what :meth:`state` gave after ``step`` steps."""
        for name, tensor in self.state().items():
            if name not in state or state[name].shape != tensor.shape:
                raise ValueError(f"the checkpoint has no {name} of shape {tuple(tensor.shape)}")
            tensor.copy_(state[name])
        self.step = step


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Matrix products in full float32 whatever the program set: TF32's ten bits change small losses."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
