"""What the training loop asks of a task. One file in ``hyptree/train/tasks`` per task; the loop knows none of them.

How to write one, and the three promises that it makes: docs/training.md, adding a task. Its methods are called in the
order below.

Losses and evaluation run under autocast when the recipe says bf16: make logits ``float()`` before a softmax.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hyptree.errors import UserError

if TYPE_CHECKING:
    from hyptree.train.run.recipe import Recipe


Gather = Callable[[Tensor], Tensor]
"""Concatenates a tensor (n, ...) over processes, in their order (the identity on one)."""


class Task(ABC):
    """Data, model, loss and numbers of one kind of job."""

    metric: ClassVar[str]
    """Key of ``evaluate``'s answer that chooses the best checkpoint; higher is better."""
    unit: ClassVar[str] = "img"
    """What a sample is called where throughput is shown."""
    units_per_sample: int = 1
    """Units in one sample of a batch: tokens in a sequence, for a task that counts tokens."""
    probes: ClassVar[bool] = False
    """Whether ``probe`` has something to say."""
    sees: ClassVar[Literal["classify", "segment", "detect"]] = "classify"
    """What the transform of pictures takes along: labels, label maps, or boxes."""
    takes_plugin: ClassVar[bool] = False
    """Whether ``build_model`` puts the recipe's ``model.plugin`` on (see ``hyptree.train.plugin``)."""
    pack: Callable[..., Any] | None = None
    """Optional method: the batch of pictures (B, 3, S, S) and labels (B,); pictures may then stay whole arrays."""
    before_training: Callable[[nn.Module], None] | None = None
    """Optional method: what the task wants to know of the model as a run begins, on its device, in eval mode, without
    gradients. A resumed run asks again, before its weights are filled in."""
    after_step: Callable[[nn.Module], None] | None = None
    """Optional method: what the model does to itself after each optimiser step, beside its gradients; no wrapper."""

    def __init__(self, recipe: Recipe):
        """The task of a recipe, whose data and model are built when they are asked for."""
        self.recipe = recipe
        self.on_gpu = torch.cuda.is_available() and recipe.run.device != "cpu"
        """Whether batches go to a GPU."""

    def build_dataset(self, split: str) -> Any:
        """The dataset of a split: train, val or test (``hyptree.data.sample.PictureDataset`` for pictures)."""
        from hyptree.data.build import build_dataset

        return build_dataset(self.recipe.data, split)

    def describe(self, dataset: Any) -> dict[str, Any]:
        """What the model must know of the data, in JSON's types.

        Kept in the run folder (``dataset.json``), so that the model can be built again where the data is not.
        """
        names = ("classes", "semantic_classes", "box_classes")
        return {name: list(getattr(dataset, name, ())) for name in names}

    @abstractmethod
    def build_model(self, data: dict[str, Any]) -> nn.Module:
        """The model with fresh weights, from what ``describe`` gave."""

    def transform(self, train: bool) -> Any:
        """What happens to each sample in the loader's workers: augmentation, resizing, normalisation of pictures."""
        from hyptree.data.pictures.transforms import Transform

        data = self.recipe.data
        how: dict[str, Any] = {"augment": data.augment} if train else {"crop_pct": data.crop_pct}
        return Transform(data.size, self.sees, data.mean, data.std, **how)

    def collate(self, samples: Sequence[Any], train: bool) -> Any:
        """A batch (tensors in dicts, lists, tuples) from transformed samples. Runs in the loader's workers."""
        assert self.pack is not None, "a task says how to pack pictures and labels, or how to collate"
        labels = [-1 if sample.label is None else sample.label for sample in samples]
        return self.pack(torch.stack([sample.image for sample in samples]), torch.tensor(labels))

    def build_loader(
        self, dataset: Any, train: bool, *, rank: int = 0, world_size: int = 1, skipped: dict[str, str] | None = None
    ) -> Any:
        """Batches of a dataset for this process: ``set_epoch(epoch, start_batch)``, ``len``, iteration, ``close``.

        A training batch is what goes through the model at once: a batch of the recipe, or its share of accumulation.
        """
        from hyptree.data.loader import build_loader

        data, run = self.recipe.data, self.recipe.run
        share = data.batch_size // run.accumulate // world_size
        if train and data.augment.mixes and share % 2:
            raise UserError(
                f"mixup and cutmix need an even number of pictures at once, got {share} (data.batch_size "
                f"{data.batch_size} over {run.accumulate} parts and {world_size} processes)"
            )
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        return build_loader(
            dataset,
            functools.partial(self.collate, train=train),
            batch_size=self.batch_size(train),
            seed=run.seed,
            train=train,
            workers=data.workers,
            transform=self.transform(train),
            rank=rank,
            world_size=world_size,
            strict=data.strict,
            skipped=skipped,
            pack=self.pack,
            pin_memory=self.on_gpu,
            resident=device if data.resident else None,
            channels_last=run.channels_last,
        )

    def batch_size(self, train: bool) -> int:
        """Samples of a batch of the loader, over all processes; in training those of a part."""
        data = self.recipe.data
        return data.batch_size // self.recipe.run.accumulate if train else data.eval_batch_size or data.batch_size

    def prepare_batch(self, batch: Any, step: int) -> Any:
        """The training batch after it reached the device: Mixup and CutMix live here, seeded by the step."""
        return batch

    @abstractmethod
    def training_loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the batch, and numbers worth a curve (detached scalars, the same names for every batch)."""

    def with_plugin(
        self, model: nn.Module, output: Any, loss: Tensor, numbers: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and numbers, together with those of the plug-in where the recipe has one; ``output`` may have them."""
        if self.recipe.model.plugin is None:
            return loss, numbers
        from hyptree.train.plugin import with_plugin_loss

        return with_plugin_loss(model, output, loss, numbers)

    def count(self, batch: Any) -> Tensor | None:
        """Over how many pixels or tokens of a training batch the loss is a mean; None where all batches have as many.

        A batch that processes share, or that goes through the model in parts, has one mean over all of it, not one of
        means: ``training_loss`` then finds the number to divide its sum by under ``count`` in the batch.
        """
        return None

    def probe(self, model: nn.Module, batch: Any) -> dict[str, float]:
        """Numbers on the inside of the model for a line of metrics, e.g. norms; asked every ``run.log_steps`` steps.

        Only for tasks that set ``probes``. The bare model, uncompiled and in eval mode, without gradients; ``batch`` is
        the last one it was trained on.
        """
        return {}

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[Any], gather: Gather) -> dict[str, float]:
        """Numbers over the validation set. The model is in eval mode, batches are on its device, no gradients."""

    def autocast(self, device: torch.device) -> torch.autocast:
        """The recipe's precision."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.run.precision == "bf16")

    def score(
        self, model: nn.Module, loader: Any, device: torch.device, gather: Gather = lambda own: own
    ) -> dict[str, float]:
        """What ``evaluate`` gives over a loader, the model left in the mode it was in."""
        was_training = model.training
        model.eval()
        loader.set_epoch(0)
        batches = (move(batch, device, self.recipe.run.channels_last) for batch in loader)
        try:
            with torch.no_grad(), self.autocast(device):
                scores = self.evaluate(model, batches, gather)
        finally:
            model.train(was_training)
        return {name: float(value) for name, value in scores.items()}


def move(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """Tensors in nested dicts, lists and tuples on ``device``; everything else as it is."""
    if isinstance(batch, Tensor):
        # Only pictures have four axes and a floating dtype; masks and labels stay as they are.
        picture = channels_last and batch.dim() == 4 and batch.is_floating_point()
        form = torch.channels_last if picture else torch.preserve_format
        return batch.to(device, non_blocking=True, memory_format=form)
    if isinstance(batch, dict):
        return {key: move(value, device, channels_last) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device, channels_last) for value in batch)
    return batch
