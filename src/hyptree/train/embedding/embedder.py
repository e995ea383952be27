"""The state of an embedding run: batches of a hierarchy, where points start, one step, saving and loading.

Every random choice is a function of (seed, epoch, step) alone, so a run can stop after any step and go on as if it had
not; the checkpoint needs the points, the moments of the optimiser and three counters.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.data.hierarchies.edges import Hierarchy
from hyptree.devices import find_device
from hyptree.errors import UserError
from hyptree.evaluate.hierarchy.embedding import Embedding, make_manifold
from hyptree.evaluate.hierarchy.reconstruction import ragged
from hyptree.geometry import Manifold, mark_manifold
from hyptree.optim import RiemannianAdam, RiemannianSGD
from hyptree.steps import load_steps, save_steps
from hyptree.train.embedding.objectives import cone_loss, distance_loss
from hyptree.train.run.settings import EmbedSettings

BURN_IN_FACTOR = 0.01
START_RADIUS = 3.0
LEVEL_DECAY = 0.3
CONE_NEGATIVE_WEIGHT = 100.0


class Batches:
    """Nodes of a hierarchy in random order, with their ancestors and negatives, as index tensors."""

    def __init__(self, hierarchy: Hierarchy, batch_size: int, negatives: int, seed: int):
        self.num_nodes = hierarchy.num_nodes
        self.ancestors = torch.from_numpy(np.ascontiguousarray(hierarchy.pairs[:, 1]))
        self.counts = torch.from_numpy(hierarchy.num_ancestors)
        self.offsets = torch.from_numpy(hierarchy.offsets)
        self.nodes = self.counts.nonzero().squeeze(1)
        self.frequency = torch.from_numpy(hierarchy.num_descendants).double().pow(0.75)
        self.batch_size = batch_size
        self.num_negatives = min(negatives, self.num_nodes)
        self.seed = seed
        self.num_steps = math.ceil(len(self.nodes) / batch_size)
        self._place = torch.full((self.num_nodes,), -1)  # scratch: where a node is among the columns

    def order(self, epoch: int) -> Tensor:
        """The nodes in the order of this epoch."""
        return self.nodes[torch.randperm(len(self.nodes), generator=self._generator(epoch, -1))]

    def draw_negatives(self, epoch: int, step: int, frequent: bool) -> Tensor:
        """(M,) different nodes, all equally likely, or ``frequent`` ancestors first."""
        generator = self._generator(epoch, step)
        if not frequent:
            return torch.randperm(self.num_nodes, generator=generator)[: self.num_negatives]
        num = min(self.num_negatives, int((self.frequency > 0).sum()))
        return torch.multinomial(self.frequency, num, replacement=False, generator=generator)

    def ancestors_of(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """(P,) row of each pair and (P,) its ancestor, over all ancestors of these nodes."""
        row, place = ragged(self.counts[nodes])
        return row, self.ancestors[self.offsets[nodes][row] + place]

    def related(self, nodes: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Entries of the (nodes, columns) matrix where the column is an ancestor of the node or the node itself."""
        self._place[columns] = torch.arange(len(columns))
        row, ancestor = self.ancestors_of(nodes)
        row = torch.cat([row, torch.arange(len(nodes))])
        column = self._place[torch.cat([ancestor, nodes])]
        self._place[columns] = -1
        is_related = column >= 0
        return row[is_related], column[is_related]

    def _generator(self, epoch: int, step: int) -> torch.Generator:
        mixed = np.random.SeedSequence([self.seed, epoch, step + 1]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(mixed) & (2**63 - 1))


def initial_points(hierarchy: Hierarchy, settings: EmbedSettings, manifold: Manifold) -> Tensor:
    """(N, n) where the points start, in float64.

    "ancestors": every node draws a random vector; a node starts in the direction of the sum over itself and its
    ancestors, each weighted by how specific it is and by ``LEVEL_DECAY`` to the power of its depth, at a distance that
    falls with the logarithm of its descendants. Relatives are then neighbours from the first step on, which is what a
    long burn-in is for. "random": tiny normal vectors.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    n = hierarchy.num_nodes
    noise = torch.randn(n, settings.dim, generator=generator, dtype=torch.float64)
    if settings.init == "random":
        return manifold.expmap0(1e-4 * noise)
    depth = torch.from_numpy(hierarchy.num_ancestors).double()
    descendants = torch.from_numpy(hierarchy.num_descendants).double()
    specific = 1 - torch.log1p(descendants) / math.log(n + 1)  # 0 at a root above all, 1 at a leaf
    own = noise * (specific * LEVEL_DECAY ** depth.clamp_max(60))[:, None]
    pairs = torch.from_numpy(hierarchy.pairs)
    direction = own.clone().index_add_(0, pairs[:, 0], own[pairs[:, 1]])
    # The unit of length of the ball at its origin is half of everybody else's.
    radius = START_RADIUS * specific * (0.5 if settings.manifold == "poincare" else 1.0)
    return manifold.expmap0(torch.nn.functional.normalize(direction, dim=1) * radius[:, None])


class Embedder:
    """The state of one embedding run, and a step of it."""

    def __init__(self, hierarchy: Hierarchy, settings: EmbedSettings):
        self.hierarchy, self.settings = hierarchy, settings
        self.device = find_device(settings.device)
        self.dtype = getattr(torch, settings.dtype)
        self.manifold = make_manifold(settings.manifold, settings.curvature)
        self.batches = Batches(hierarchy, settings.batch_size, settings.negatives, settings.seed)
        start = initial_points(hierarchy, settings, self.manifold).to(self.device, self.dtype)
        self.points = mark_manifold(torch.nn.Parameter(start), self.manifold)
        self.optimizer: RiemannianAdam | RiemannianSGD
        assert settings.lr is not None
        if settings.optimizer == "adam":
            self.optimizer = RiemannianAdam(
                [self.points], lr=settings.lr, betas=(0.9, 0.99), max_step=settings.max_step
            )
        else:
            self.optimizer = RiemannianSGD([self.points], lr=settings.lr, max_step=settings.max_step)
        _take_sparse_notice()
        self.epoch, self.step = 0, 0
        self.seconds = 0.0
        self.loss_sum, self.pair_count = 0.0, 0
        """Over the steps of this epoch so far."""
        self._order: tuple[int, Tensor] | None = None

    @property
    def num_steps(self) -> int:
        """Steps per epoch."""
        return self.batches.num_steps

    @property
    def is_done(self) -> bool:
        """Whether all epochs are done."""
        return self.epoch >= self.settings.epochs

    def lr(self) -> float:
        """Learning rate of the next step."""
        s = self.settings
        assert s.lr is not None
        if self.epoch < s.burn_in:
            return s.lr * BURN_IN_FACTOR
        if s.schedule == "constant":
            return s.lr
        done = ((self.epoch - s.burn_in) * self.num_steps + self.step) / ((s.epochs - s.burn_in) * self.num_steps)
        return s.lr * 0.5 * (1 + math.cos(math.pi * done))

    def advance(self) -> tuple[float, int]:
        """One step; after the last step of an epoch ``step`` is 0 again and the sums start anew.

        Returns:
            The learning rate, and how many pairs took part.
        """
        lr = self.lr()
        if self.step == 0:
            self.loss_sum, self.pair_count = 0.0, 0
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, self.batches.order(self.epoch))
        at = self.step * self.settings.batch_size
        nodes = self._order[1][at : at + self.settings.batch_size]
        negatives = self.batches.draw_negatives(self.epoch, self.step, frequent=self.epoch < self.settings.burn_in)
        row, ancestor = self.batches.ancestors_of(nodes)
        touched, where = torch.cat([nodes, negatives, ancestor]).unique(return_inverse=True)
        # Leaves of the graph are the touched rows alone, so a step costs the same in a table of a million nodes.
        index = touched.to(self.device)
        rows = self.points.detach()[index].requires_grad_()
        total, num_pairs = self._loss(rows, nodes, negatives, row, ancestor, where)
        (grad,) = torch.autograd.grad(total, rows)
        self.points.grad = torch.sparse_coo_tensor(
            index[None], grad, self.points.shape, is_coalesced=True, check_invariants=False
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.points.grad = None
        loss = float(total.detach())
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} in epoch {self.epoch + 1}, step {self.step + 1}; lower --lr or --max-step, "
                "or use --dtype float64"
            )
        self.loss_sum += loss
        self.pair_count += num_pairs
        self.step += 1
        if self.step == self.num_steps:
            self.epoch, self.step = self.epoch + 1, 0
        return lr, num_pairs

    def _loss(
        self, rows: Tensor, nodes: Tensor, negatives: Tensor, row: Tensor, ancestor: Tensor, where: Tensor
    ) -> tuple[Tensor, int]:
        """The sum of the losses of all pairs of a step, and how many there are."""
        s, device = self.settings, self.device
        node_at, negative_at, ancestor_at = where.to(device).split([len(nodes), len(negatives), len(ancestor)])
        x, other = rows[node_at], rows[negative_at]
        masked = _to(device, self.batches.related(nodes, negatives))
        row = row.to(device)
        if s.loss == "distance":
            dist = self.manifold.dist(x[row], rows[ancestor_at])
            return distance_loss(x, other, dist, row, masked, self.manifold).sum(), len(ancestor)
        inside = self.manifold.cone_energy(rows[ancestor_at], x[row], K=s.aperture)  # type: ignore[operator]
        # Both ends are replaced in turn: strangers above a node, and strangers below an ancestor.
        seen = ancestor.unique()[: len(negatives)]
        place = torch.full((self.batches.num_nodes,), -1)
        place[ancestor] = where[len(nodes) + len(negatives) :]
        above = rows[place[seen].to(device)]
        column, hidden = self.batches.related(negatives, seen)
        outside = cone_loss(other, x, (masked[1], masked[0]), s.margin, s.aperture, self.manifold)
        below = cone_loss(above, other, _to(device, (hidden, column)), s.margin, s.aperture, self.manifold)
        # Means, so that a batch with many negatives weighs them no more than one with few.
        negative = outside.mean() + below.mean()
        return len(ancestor) * (inside.mean() + CONE_NEGATIVE_WEIGHT * negative), len(ancestor)

    # ------------------------------------------------------------------------------------------------- saving, loading

    def save(self, path: Path) -> None:
        """Write everything needed to go on from here."""
        save_steps(path, {"points": self.points}, self.optimizer, self._state())

    def load(self, path: Path) -> None:
        """Go on from what :meth:`save` wrote; another hierarchy or other settings are refused."""
        state = load_steps(path, {"points": self.points}, self.optimizer, self._state(), "edges")
        self.epoch, self.step, self.seconds = state["epoch"], state["step"], state["seconds"]
        # JSON keeps Python floats to the last bit.
        self.loss_sum, self.pair_count = state["loss_sum"], state["pair_count"]

    def _state(self) -> dict[str, Any]:
        settings = {
            key: value
            for key, value in asdict(self.settings).items()
            if key not in ("device", "threads", "closure", "header")
        }
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "loss_sum": self.loss_sum,
            "pair_count": self.pair_count,
            "settings": settings,
            "digest": self.hierarchy.digest(),
        }

    def embedding(self) -> Embedding:
        """The points as they are now."""
        return Embedding(
            self.points.detach(),
            self.hierarchy.names,
            torch.from_numpy(self.hierarchy.pairs),
            self.manifold,
            self.settings.loss,
        )


def _take_sparse_notice() -> None:
    """Let torch 2.11 say once, unheard, that it does not check sparse tensors; ours are right by construction."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1), (1,), check_invariants=False)


def _to(device: torch.device, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[0].to(device), tensors[1].to(device)
