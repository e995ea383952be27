"""Classification of pictures, with the hierarchy above the classes where the dataset knows one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.errors import UserError
from hyptree.evaluate.hierarchy.mistakes import hierarchy_scores
from hyptree.train.model import create_model, reduce_tokens, require_size
from hyptree.train.task import Gather, Task
from hyptree.tree import Tree

Batch = dict[str, Tensor]


class Classify(Task):
    """Cross entropy with label smoothing, Mixup and CutMix; top-1, top-5 and how bad the mistakes are."""

    metric = "top1"
    takes_plugin = True
    _mixer: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None
    _tree: Tree | None = None

    def describe(self, dataset: Any) -> dict[str, Any]:
        """Class names, and the hierarchy above them as parents (its first nodes are the classes)."""
        if not dataset.classes:
            raise UserError(f"data {self.recipe.data.name} has no classes of pictures to learn; choose another task")
        tree = getattr(dataset, "tree", None)
        description = super().describe(dataset)
        if tree is not None:
            description["tree"] = {
                "parent": tree.parent.tolist(),
                "label": list(tree.label) if tree.label is not None else None,
            }
        return description

    def build_model(self, data: dict[str, Any]) -> nn.Module:
        num_classes = self._num_classes = len(data["classes"])
        if data.get("tree") is not None:
            self._tree = Tree(np.asarray(data["tree"]["parent"]), label=data["tree"]["label"])
        augment = self.recipe.data.augment
        if augment.mixes:
            from hyptree.data.pictures.transforms import Mixer

            smoothing = self.recipe.loss.label_smoothing
            self._mixer = Mixer(augment, num_classes, smoothing=smoothing, seed=self.recipe.run.seed)
        model = require_size(create_model(self.recipe.model, num_classes=num_classes), self.recipe.data.size)
        if self.recipe.tokens is not None:
            reduce_tokens(model, self.recipe.tokens)
        if self.recipe.model.plugin is not None:
            from hyptree.train.plugin import plug_in

            model = plug_in(model, self.recipe.model.plugin, lr=self.recipe.optim.lr, size=self.recipe.data.size)
        return model

    def pack(self, images: Tensor, labels: Tensor) -> Batch:
        """The batch of pictures that lie in memory: (B, 3, S, S) and (B,)."""
        return {"image": images, "label": labels}

    def prepare_batch(self, batch: Batch, step: int) -> Batch:
        if self._mixer is None:
            return batch
        images, target = self._mixer(batch["image"], batch["label"], step)
        return {"image": images, "label": batch["label"], "target": target}

    def training_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        output = model(batch["image"])
        logits = (output if isinstance(output, Tensor) else output.logits).float()
        if "target" in batch:  # (B, K), smoothed by the mixer
            return self.with_plugin(model, output, F.cross_entropy(logits, batch["target"]), {})
        loss = F.cross_entropy(logits, batch["label"], label_smoothing=self.recipe.loss.label_smoothing)
        top1 = (logits.argmax(1) == batch["label"]).float().mean().detach()
        return self.with_plugin(model, output, loss, {"top1": top1})

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], gather: Gather) -> dict[str, float]:
        losses, guesses, labels = [], [], []
        ask: Any = model
        if self.recipe.model.plugin is not None:
            from hyptree.train.plugin import PluginNumbers

            ask = PluginNumbers(model)  # type: ignore[arg-type]
        for batch in batches:
            output = ask(batch["image"])
            logits = (output if isinstance(output, Tensor) else output.logits).float()
            losses.append(F.cross_entropy(logits, batch["label"], reduction="none"))
            guesses.append(logits.topk(min(5, logits.shape[1])).indices)
            labels.append(batch["label"])
        loss, guess, label = (gather(torch.cat(parts)).cpu() for parts in (losses, guesses, labels))
        right = guess == label[:, None]
        scores = {
            "loss": loss.double().mean().item(),
            "top1": right[:, 0].double().mean().item(),
            "top5": right.any(1).double().mean().item(),
        }
        if self._tree is not None:
            scores |= hierarchy_scores(self._tree, guess.numpy(), label.numpy(), self._num_classes)
        return scores if ask is model else scores | ask.means(gather)
