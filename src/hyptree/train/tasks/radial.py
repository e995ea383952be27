"""Chains of captions pull a text encoder straight: general near the embedding of "", specific behind it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hyptree.data.hierarchies.hierarcaps import (
    NUM_LEVELS,
    Chain,
    distinct_texts,
    first_of_each_image,
    read_hierarcaps,
    without_images_of,
)
from hyptree.data.plan import Loader, Plan
from hyptree.errors import UserError
from hyptree.geometry import lorentz
from hyptree.train.optimizer.build import Schedule
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Gather, Task
from hyptree.vlm.encoders.encoder import Encoder, load_encoder
from hyptree.vlm.encoders.texts import TextTable
from hyptree.vlm.radial.loss import ConeLoss, RadialLoss, exterior_angle, root_distance
from hyptree.vlm.radial.order import order_of_levels
from hyptree.vlm.radial.tuned_text import TunedText

Batch = dict[str, Any]
NUM_CHAINS = {"train": 2000, "val": 1000, "test": 1000}
"""Of the built-in world where a recipe says nothing; of files, training takes all."""


class Radial(Task):
    """The loss of Radial Embeddings; on other chains, whether the next caption is straighter on than a wrong one.

    A sample is a chain with its contradictions, eight texts. The root is embedded anew in every step, with gradient.
    """

    metric = "told_apart"
    unit = "text"
    units_per_sample = 2 * NUM_LEVELS

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.settings = s = recipe.radial
        weights = (s.entail_weight, s.hard_weight, s.keep_weight)
        self.encoder: Encoder
        self.c = s.curvature or 1.0
        self.loss = RadialLoss(weights, s.geometry, s.hard_weight > 0)
        if s.objective == "cones":
            self.loss = ConeLoss(weights, s.geometry, s.hard_weight > 0, size=s.cone_size, margin=s.cone_margin)
        self._first: TextTable | None = None
        self._batches: ChainBatches | None = None

    # -------------------------------------------------------------------------------------------------------- data

    def build_dataset(self, split: str) -> list[Chain]:
        """The chains of a split; validation and test are the same where chains come from a file."""
        data, settings = self.recipe.data, self.settings
        limit = data.num_train if split == "train" else data.num_val
        if settings.chains == "world":
            from hyptree.vlm.radial.hierarchy_report import world_chains

            return world_chains(split, limit or NUM_CHAINS[split], data.seed)
        train, val = self._parts
        chains = train[:limit] if split == "train" else val[: limit or NUM_CHAINS[split]]
        if not chains:
            raise UserError(f"{settings.chains} leaves no chains for {split}; give more of them, or another held_out")
        for i, chain in enumerate(chains):
            if not chain.negatives:
                raise UserError(
                    f"chain {i} of {settings.chains} has no negatives, expected {NUM_LEVELS}, one for each caption"
                )
        return chains

    @functools.cached_property
    def _parts(self) -> tuple[list[Chain], list[Chain]]:
        """Chains of the file to train on, and others of other pictures."""
        settings, path = self.settings, Path(self.settings.chains)
        every = read_hierarcaps(path, settings.part)
        held_out = [] if settings.held_out is None else read_hierarcaps(settings.held_out)
        if path.is_dir() and settings.part != "sample":  # the sample knows no pictures
            held_out += read_hierarcaps(path, "test")
        train = without_images_of(every, held_out)
        if len(train) == len(every):  # none is held out: pictures spread evenly over the file
            images = list(dict.fromkeys(chain.image or chain for chain in every))
            count = max(1, round(settings.val_share * len(images)))
            chosen = {images[(2 * i + 1) * len(images) // (2 * count)] for i in range(count)}
            train = [chain for chain in every if (chain.image or chain) not in chosen]
        kept = set(train)
        return train, first_of_each_image(chain for chain in every if chain not in kept)

    def describe(self, dataset: list[Chain]) -> dict[str, Any]:
        """By which other chains are told from these."""
        whole = hashlib.sha256("\n".join(text for chain in dataset for text in chain.texts).encode())
        return {"num_chains": len(dataset), "chains": whole.hexdigest()[:16]}

    def build_model(self, data: dict[str, Any]) -> TunedText:
        settings, run = self.settings, self.recipe.run
        self.encoder = load_encoder(self.recipe.model.name, random_init=settings.random_init, seed=run.seed)
        own = self.encoder.curvature
        if settings.curvature is not None and own is not None and settings.curvature != own:
            raise UserError(f"radial.curvature {settings.curvature:g} is not the encoder's own, {own:g}; leave it out")
        self.c = self.loss.c = settings.curvature or own or 1.0
        return TunedText(self.encoder, settings)

    def build_loader(
        self, dataset: list[Chain], train: bool, *, rank: int = 0, world_size: int = 1, skipped: Any = None
    ) -> ChainBatches:
        plan = Plan(len(dataset), self.batch_size(train), self.recipe.run.seed, train, rank, world_size)
        batches = ChainBatches(plan, dataset, lambda texts: self.encoder.tokenize(texts))
        self._batches = batches if train else self._batches
        return batches

    def before_training(self, model: nn.Module) -> None:
        """Embed every text that the run will see: what ``keep`` holds on to."""
        assert self._batches is not None
        batches, device = self._batches, next(model.parameters()).device
        num_steps = Schedule(self.recipe.schedule, len(batches)).num_steps
        chains = [chain for step in range(min(num_steps, len(batches))) for chain in batches.chains(0, step)]
        table = TextTable(self.encoder.encode_text)
        with self.autocast(device):
            table.fill(["", *distinct_texts(batches.dataset if num_steps > len(batches) else chains)])
        self._first = table

    # -------------------------------------------------------------------------------------------------------- loss

    def training_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._first is not None
        root, texts = self._embed(model, batch)
        first = self._first.rows([text for chain in batch["chains"] for text in chain.texts])
        first = first.view(-1, *texts.shape[1:]).to(texts.device)
        if self._batches is not None and self._batches.plan.world_size > 1:
            texts = _of_all_processes(texts, batch["place"], len(first))
        positive, negative = self._points(texts).chunk(2, 1)
        terms = self.loss(positive, negative, root, *first.chunk(2, 1))
        numbers = {name: value.detach() for name, value in vars(terms).items() if name != "total"}
        return terms.total, numbers

    def _embed(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The root (d), and the texts of this process's chains (b, 2L, d)."""
        embedded = model(batch["tokens"])
        return embedded[0], embedded[batch["rows"]]

    def _points(self, texts: Tensor) -> Tensor:
        if self.settings.geometry == "lorentz":
            lifted: Tensor = lorentz.expmap0(texts.float(), self.c)
            return lifted
        return texts

    # ----------------------------------------------------------------------------------------------------- numbers

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], gather: Gather) -> dict[str, float]:
        """Angles to the next caption and to its contradiction; how well distances from the root rise along chains."""
        parts, root = [], torch.empty(0)
        for batch in batches:
            root, texts = self._embed(model, batch)
            parts.append(texts)
        points = self._points(gather(torch.cat(parts)).float())
        options: dict[str, Any] = {"geometry": self.settings.geometry, "c": self.c}
        if self.settings.geometry != "lorentz":
            points, root = (nn.functional.normalize(x.float(), dim=-1) for x in (points, root))
        positive, negative = points.chunk(2, 1)
        right, wrong = (
            exterior_angle(positive[:, :-1], other, root, **options) for other in (positive[:, 1:], negative[:, :-1])
        )
        order = order_of_levels(root_distance(positive, root, **options).cpu().numpy())
        return {
            "told_apart": ((right < wrong).double() + (right == wrong).double() / 2).mean().item(),
            "angle_next": right.double().mean().item(),
            "angle_wrong": wrong.double().mean().item(),
            "tau_d": order.tau_b,
            "order_of_first_two": order.first_two,
        }


class ChainBatches(Loader):
    """Batches of chains as tokens; the last one of an epoch may be smaller, in training too."""

    def __init__(self, plan: Plan, dataset: Sequence[Chain], tokenize: Callable[[list[str]], dict[str, Tensor]]):
        super().__init__(plan)
        self.dataset, self.tokenize = dataset, tokenize
        self._latest: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.plan.batch_size)

    def chains(self, epoch: int, step: int) -> list[Chain]:
        """The chains of a batch, over all processes."""
        size = self.plan.batch_size
        return [self.dataset[i] for i in self._order(epoch)[step * size : (step + 1) * size]]

    def _order(self, epoch: int) -> np.ndarray:
        if self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, self.plan.order(epoch)
        return self._latest[1]

    def __iter__(self) -> Iterator[Batch]:
        """This process's share as ``tokens`` and ``rows`` (b, 2L), and ``chains``: all of the batch, to find it in."""
        for step in range(self.start_batch, len(self)):
            chains = self.chains(self.epoch, step)
            place = list(range(len(chains)))[self.plan.rank :: self.plan.world_size]
            # Each text once, so that equal captions have equal embeddings to the bit, whatever they are padded to.
            texts = list(dict.fromkeys(["", *distinct_texts(chains[i] for i in place)]))
            number = {text: i for i, text in enumerate(texts)}
            rows = torch.tensor([[number[text] for text in chains[i].texts] for i in place], dtype=torch.long)
            yield {
                "tokens": self.tokenize(texts),
                "rows": rows.view(len(place), len(chains[0].texts)),
                "place": torch.tensor(place, dtype=torch.long),
                "chains": chains,
            }


def _of_all_processes(rows: Tensor, place: Tensor, count: int) -> Tensor:
    """(count, ...) from the rows that every process has: the worst pairs are those of the whole batch.

    Each process then has the whole loss, and the mean over processes that gradients become is that of one process.
    """
    from torch.distributed.nn.functional import all_reduce

    whole: Tensor = all_reduce(rows.new_zeros((count, *rows.shape[1:])).index_copy(0, place, rows))
    return whole
