"""A hierarchy embedded in hyperbolic space: one point for each node, by distances or by entailment cones."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hyptree.data.hierarchies.edges import Hierarchy, make_hierarchy, read_hierarchy
from hyptree.data.plan import Plan
from hyptree.data.world.classes import class_tree
from hyptree.errors import UserError, require_one_of
from hyptree.evaluate.hierarchy.embedding import Embedding, make_manifold, measure, sample_size
from hyptree.nn import ManifoldEmbedding
from hyptree.train.embedding.batches import Batches, initial_points
from hyptree.train.embedding.objectives import cone_loss, distance_loss
from hyptree.train.optimizer.build import Schedule
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Gather, Task

Batch = dict[str, Any]

CONE_NEGATIVE_WEIGHT = 100.0


class Embed(Task):
    """One loss for all pairs of a batch of nodes and their ancestors; ranks of ancestors, distortion, radii."""

    metric = "map"
    unit = "nodes"

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        require_one_of("model.name", recipe.model.name, ("lorentz", "poincare", "euclidean"))
        if recipe.run.parallel == "fsdp2":
            raise UserError("run.parallel fsdp2 cannot cut the table of points of the task embed; use ddp")
        self.settings = recipe.embed
        if recipe.embed.loss == "cones" and recipe.model.name == "euclidean":
            raise UserError("embed.loss cones needs a hyperbolic space, got model.name euclidean; use lorentz")
        self.manifold = make_manifold(recipe.model.name, recipe.embed.curvature)
        self.hierarchy: Hierarchy | None = None
        self._is_read = False
        """Whether it comes from its file, not from the folder of a run."""
        self.shares = 1
        """Parts of a batch over all processes: the loss is a sum over them, and the loop takes their mean."""

    # -------------------------------------------------------------------------------------------------------- data

    def build_dataset(self, split: str) -> Hierarchy:
        """The hierarchy; all its nodes and pairs belong to every split."""
        path, kept = self.settings.edges, self.hierarchy
        if not self._is_read and (kept is None or path is None or path.exists()):
            self._is_read, self.hierarchy = True, self._read()
            if kept is not None and kept.digest() != self.hierarchy.digest():
                raise UserError(f"{path} is not the hierarchy that was embedded; give that one, or none to do without")
        assert self.hierarchy is not None
        return self.hierarchy

    def _read(self) -> Hierarchy:
        settings = self.settings
        if settings.edges is not None:
            return read_hierarchy(settings.edges, closure=settings.closure, header=settings.header)
        tree = class_tree()
        child = np.flatnonzero(tree.parent >= 0)
        return make_hierarchy(list(tree.label or ()), np.stack([child, tree.parent[child]], 1))

    def describe(self, dataset: Hierarchy) -> dict[str, Any]:
        """Names of the nodes, and all pairs."""
        packed = zlib.compress(dataset.pairs.T.astype("<i4").tobytes(), 1)
        return {"names": dataset.names, "pairs": base64.b64encode(packed).decode()}

    def build_loader(
        self, dataset: Hierarchy, train: bool, *, rank: int = 0, world_size: int = 1, skipped: Any = None
    ) -> Batches:
        recipe = self.recipe
        if world_size > 1 and self.on_gpu:
            raise UserError("GPUs share no sparse gradients: start the task embed on one, or with --run.device cpu")
        self.shares = recipe.run.accumulate * world_size
        plan = Plan(len(dataset), recipe.data.batch_size, recipe.run.seed, train, rank, world_size)
        plan.check_share()
        batches = Batches(dataset, plan, self.settings, recipe.run.accumulate)
        batches.burn_in = Schedule(recipe.schedule, batches.num_steps).num_warmup_steps
        return batches

    def build_model(self, data: dict[str, Any]) -> ManifoldEmbedding:
        if self.hierarchy is None:
            self.hierarchy = _unpack(data)
        settings, hierarchy = self.settings, self.hierarchy
        dtype = getattr(torch, settings.dtype)
        model = ManifoldEmbedding(hierarchy.num_nodes, settings.dim, self.manifold, sparse=True, dtype=dtype)
        with torch.no_grad():
            model.weight.copy_(initial_points(hierarchy, settings, self.manifold, self.recipe.run.seed))
        return model

    # -------------------------------------------------------------------------------------------------------- loss

    def training_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over all pairs, so that a rate of SGD is one per pair; ``loss`` in the numbers is their mean."""
        settings, manifold = self.settings, self.manifold
        rows = model(batch["touched"])  # with a sparse gradient: a step costs the same in a table of a million nodes
        x, other, ancestor = rows[batch["node"]], rows[batch["negative"]], rows[batch["ancestor"]]
        num_pairs, num_nodes, *num_above = batch["sizes"]
        masked = batch["masked"].unbind()
        if settings.loss == "distance":
            dist = manifold.dist(x[batch["row"]], ancestor)
            total = distance_loss(x, other, dist, batch["row"], masked, manifold).sum()
        else:
            inside = manifold.cone_energy(ancestor, x[batch["row"]], K=settings.aperture)  # type: ignore[operator]
            above, cones = rows[batch["above"]], (settings.margin, settings.aperture, manifold)
            outside = cone_loss(other, x, masked[::-1], *cones)
            below = cone_loss(above, other, batch["below"].unbind(), *cones)
            # Means, so that a batch with many negatives weighs them no more than one with few.
            negative = outside.sum() / (len(other) * num_nodes) + below.sum() / (num_above[0] * len(other))
            total = num_pairs * (inside.sum() / num_pairs + CONE_NEGATIVE_WEIGHT * negative)
        total = total * self.shares
        return total, {"loss": total.detach() / num_pairs}

    # ----------------------------------------------------------------------------------------------------- numbers

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], gather: Gather) -> dict[str, float]:
        """Every process measures the whole table."""
        embedding = self.embedding(model)
        return measure(embedding, num_samples=sample_size(len(embedding.names), self.settings.num_ranked))

    def embedding(self, model: nn.Module) -> Embedding:
        """The points as they are now."""
        assert self.hierarchy is not None
        points = model.get_parameter("weight").detach()
        pairs = torch.from_numpy(self.hierarchy.pairs).to(points.device)
        return Embedding(points, self.hierarchy.names, pairs, self.manifold, self.settings.loss)


def _unpack(data: dict[str, Any]) -> Hierarchy:
    try:
        names, flat = list(map(str, data["names"])), zlib.decompress(base64.b64decode(data["pairs"]))
        pairs = np.frombuffer(flat, "<i4").reshape(2, -1).T.astype(np.int64)
        if not 0 <= pairs.min() <= pairs.max() < len(names):
            raise ValueError("a pair of nodes without names")
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise UserError(f"the hierarchy in the run's dataset.json is damaged ({error}); train again") from error
    return Hierarchy(names, pairs, True)


def load_embedding(run: Path | str) -> Embedding:
    """The best points of a run of the task embed, with the hierarchy that the run keeps."""
    from hyptree.runs import RunFolder
    from hyptree.train.evaluate import load_task

    recipe = RunFolder(run).recipe(Recipe)
    if recipe.task != "embed":
        raise UserError(f"{run} is a run of the task {recipe.task}; give one of the task embed")
    task, model = load_task(run, recipe)
    assert isinstance(task, Embed)
    return task.embedding(model)
