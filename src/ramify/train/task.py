"""What the training loop asks of a task. One file in ``ramify/train/tasks`` per task; the loop knows none of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from ramify.train.recipe import Recipe


class Task(ABC):
    """Data, model, loss and numbers of one kind of job."""

    metric: ClassVar[str]
    """Key of ``evaluate``'s answer that chooses the best checkpoint; higher is better."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    @abstractmethod
    def build_datasets(self) -> tuple[Any, Any]:
        """Training and validation dataset (``ramify.data.sample.PictureDataset`` for pictures)."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model with fresh weights, after ``build_datasets`` (so that the class count is known)."""

    @abstractmethod
    def collate(self, samples: Sequence[Any], train: bool) -> Any:
        """A batch from samples that were already augmented. Runs in the loader's workers."""

    def prepare_batch(self, batch: Any, step: int) -> Any:
        """The training batch after it reached the device: Mixup and CutMix live here, seeded by the step."""
        return batch

    @abstractmethod
    def training_loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the batch, and numbers worth a curve (detached scalars)."""

    @abstractmethod
    def evaluate(
        self, model: nn.Module, batches: Iterable[Any], gather: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """Numbers over the validation set. ``gather`` concatenates a tensor over processes (the identity on one)."""
