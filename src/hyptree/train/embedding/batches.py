"""Batches of a hierarchy, and where its points start. Every draw is a function of (seed, epoch, step) alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyptree.data.hierarchies.edges import Hierarchy
from hyptree.data.plan import Loader, Plan
from hyptree.evaluate.hierarchy.reconstruction import ragged
from hyptree.geometry import Manifold, Poincare
from hyptree.train.run.settings import EmbedSettings

START_RADIUS = 3.0
LEVEL_DECAY = 0.3
_LARGE = 1 << 17
"""Nodes from which negatives are drawn without a permutation of all nodes, which would cost more than the step."""


class Batches(Loader):
    """Nodes of a hierarchy in random order, with their ancestors and negatives, as index tensors.

    The last batch of an epoch is a smaller one. A batch may come in ``parts``, and several processes share each part:
    every one gets its share of the nodes, of the sums that the loss consists of, and all negatives.

    Args:
        burn_in: steps at the beginning of the run whose negatives are frequent ancestors.
    """

    def __init__(self, hierarchy: Hierarchy, plan: Plan, settings: EmbedSettings, parts: int = 1, burn_in: int = 0):
        super().__init__(plan)
        self.parts, self.burn_in, self.loss = parts, burn_in, settings.loss
        self.num_nodes = hierarchy.num_nodes
        self.ancestors = torch.from_numpy(np.ascontiguousarray(hierarchy.pairs[:, 1]))
        self.counts = torch.from_numpy(hierarchy.num_ancestors)
        self.offsets = torch.from_numpy(hierarchy.offsets)
        self.nodes = self.counts.nonzero().squeeze(1)
        self.frequency = torch.from_numpy(hierarchy.num_descendants).double().pow(0.75)
        self.num_negatives = min(settings.negatives, self.num_nodes)
        self.num_steps = math.ceil(len(self.nodes) / plan.batch_size)
        self._place = torch.full((self.num_nodes,), -1)  # scratch: where a node is among the columns

    def __len__(self) -> int:
        return self.num_steps * self.parts

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order, size = self.order(self.epoch), self.plan.batch_size
        for i in range(self.start_batch, len(self)):
            step, part = divmod(i, self.parts)
            is_frequent = self.epoch * self.num_steps + step < self.burn_in
            negatives = self.draw_negatives(self.epoch, step, is_frequent)
            yield self.batch(order[step * size : (step + 1) * size], negatives, part)

    def batch(self, nodes: Tensor, negatives: Tensor, part: int = 0) -> dict[str, Any]:
        """What :meth:`hyptree.train.tasks.embed.Embed.training_loss` reads: this process's share of a part.

        ``touched`` are the rows of the table that take part, each once; ``node``, ``negative`` and ``ancestor`` are
        places among them, ``row`` says which node a pair belongs to, and ``masked`` are entries of (nodes, negatives)
        that are no negatives. For cones also ``above``, ancestors without repetition, and ``below``, the entries of
        (above, negatives) that are no negatives. ``sizes`` are the pairs, nodes and ancestors of the whole batch.
        """
        first, shares = part * self.plan.world_size + self.plan.rank, self.parts * self.plan.world_size
        whole, nodes = nodes, nodes[first::shares]
        row, ancestor = self.ancestors_of(nodes)
        groups = {"node": nodes, "negative": negatives, "ancestor": ancestor}
        sizes = [int(self.counts[whole].sum()), len(whole)]
        batch: dict[str, Any] = {"row": row, "masked": torch.stack(self.related(nodes, negatives))}
        if self.loss == "cones":  # both ends are replaced in turn: strangers above a node, and below an ancestor
            above = self.ancestors_of(whole)[1].unique()[: len(negatives)]
            groups["above"] = above[first::shares]
            sizes.append(len(above))
            column, hidden = self.related(negatives, groups["above"])
            batch["below"] = torch.stack([hidden, column])
        touched, place = torch.cat([*groups.values()]).unique(return_inverse=True)
        places = zip(groups, place.split([*map(len, groups.values())]), strict=True)
        return batch | dict(places) | {"touched": touched, "sizes": sizes}

    def order(self, epoch: int) -> Tensor:
        """The nodes in the order of this epoch."""
        return self.nodes[torch.randperm(len(self.nodes), generator=self._generator(epoch, -1))]

    def draw_negatives(self, epoch: int, step: int, frequent: bool) -> Tensor:
        """(M,) different nodes, all equally likely, or ``frequent`` ancestors first."""
        if frequent:
            num = min(self.num_negatives, int((self.frequency > 0).sum()))
            generator = self._generator(epoch, step)
            return torch.multinomial(self.frequency, num, replacement=False, generator=generator)
        if self.num_nodes > _LARGE:
            random = np.random.default_rng(self._words(epoch, step))
            return torch.from_numpy(random.choice(self.num_nodes, self.num_negatives, replace=False))
        return torch.randperm(self.num_nodes, generator=self._generator(epoch, step))[: self.num_negatives]

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

    def _words(self, epoch: int, step: int) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.plan.seed, epoch, step + 1])

    def _generator(self, epoch: int, step: int) -> torch.Generator:
        mixed = self._words(epoch, step).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(mixed) & (2**63 - 1))


def initial_points(hierarchy: Hierarchy, settings: EmbedSettings, manifold: Manifold, seed: int) -> Tensor:
    """(N, n) where the points start, in float64.

    "ancestors": every node draws a random vector; a node starts in the direction of the sum over itself and its
    ancestors, each weighted by how specific it is and by ``LEVEL_DECAY`` to the power of its depth, at a distance that
    falls with the logarithm of its descendants. Relatives are then neighbours from the first step on, which is what a
    long burn-in is for. "random": tiny normal vectors.
    """
    generator = torch.Generator().manual_seed(seed)
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
    radius = START_RADIUS * specific * (0.5 if isinstance(manifold, Poincare) else 1.0)
    return manifold.expmap0(torch.nn.functional.normalize(direction, dim=1) * radius[:, None])
