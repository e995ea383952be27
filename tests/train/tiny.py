"""A task small enough to be trained hundreds of times: vectors in blobs, a two-layer net with dropout.

It stands on the real loader and loop; only what a task must say is here. ``python -m tests.train.tiny`` trains it.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyptree.data.sample import BadSample, Sample
from hyptree.geometry import Lorentz, PointModule
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Task
from hyptree.train.tasks import TASKS

CLASSES = 5
SIZE = 8


class Blobs:
    """Pictures of SIZE x SIZE pixels, each a noisy copy of its class's own."""

    classes = tuple(f"class {k}" for k in range(CLASSES))
    semantic_classes = box_classes = ()
    tree = None

    def __init__(self, num: int, seed: int, bad: frozenset[int] = frozenset()):
        generator = torch.Generator().manual_seed(12345)
        centres = torch.randn(CLASSES, 3, SIZE, SIZE, generator=generator)
        generator.manual_seed(seed)
        self.label = torch.randint(CLASSES, (num,), generator=generator)
        self.image = centres[self.label] + 1.5 * torch.randn(num, 3, SIZE, SIZE, generator=generator)
        self.bad = bad

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> Sample:
        if index in self.bad:
            raise BadSample(f"blob {index}", "it is bad")
        return Sample(self.image[index], f"blob {index}", label=int(self.label[index]))


class Centres(PointModule):
    """Closeness of (B, D) vectors to learned points of a hyperboloid of learned curvature, (B, CLASSES)."""

    def __init__(self, dim: int):
        super().__init__()
        self.space = Lorentz(c=1.0, learnable=True)
        self.register_point("points", self.space.expmap0(0.1 * torch.randn(CLASSES, dim)), self.space)

    def forward(self, x: Tensor) -> Tensor:
        return -self.space.pairwise_dist(self.space.expmap0(0.3 * x.float()), self.points)


class Net(nn.Module):
    """(B, 3, S, S) -> (B, CLASSES)."""

    def __init__(self, dropout: float = 0.2, norm: str = "layer", width: int = 16, points: bool = False):
        super().__init__()
        # Before a batch norm a bias changes nothing: its gradient is rounding, of which Adam makes steps.
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=norm == "layer")
        self.norm = nn.GroupNorm(1, width) if norm == "layer" else nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(1.0))  # a single number, which cannot be sharded
        self.blocks = nn.Sequential(nn.Linear(width * 16, width), nn.GELU(), nn.Linear(width, width))
        self.head = Centres(width) if points else nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).flatten(1)
        return self.head(self.scale * self.dropout(self.blocks(x)))


class Tiny(Task):
    """Classification of blobs; ``model.args`` reach the net, and ``model.head`` says what shall go wrong."""

    metric = "top1"

    def build_dataset(self, split: str) -> Blobs:
        head = self.recipe.model.head
        bad = frozenset(head.get("bad", ())) if split == "train" else frozenset()
        if head.get("missing_on") == int(os.environ.get("RANK", "0")):
            from hyptree.errors import UserError

            raise UserError("this rank has no data")
        return Blobs(self.recipe.data.num_train or 96 if split == "train" else 41, len(split), bad)

    def build_model(self, data: dict[str, Any]) -> nn.Module:
        assert len(data["classes"]) == CLASSES
        return Net(**self.recipe.model.args)

    def transform(self, train: bool) -> None:
        return None

    def collate(self, samples: Any, train: bool) -> dict[str, Tensor]:
        return {
            "image": torch.stack([s.image for s in samples]),
            "label": torch.tensor([s.label for s in samples]),
        }

    def prepare_batch(self, batch: Any, step: int) -> Any:
        head = self.recipe.model.head
        if step == head.get("nan_at"):
            batch["image"] = batch["image"] * float("nan")
        if step == head.get("signal_at") and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        if step == head.get("raise_at") and int(os.environ.get("RANK", "0")) == head.get("raise_on", 0):
            raise RuntimeError("a bug in one process")
        return batch

    def training_loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch["image"]).float()
        return F.cross_entropy(logits, batch["label"]), {"top1": (logits.argmax(1) == batch["label"]).float().mean()}

    def evaluate(self, model: nn.Module, batches: Any, gather: Any) -> dict[str, float]:
        right, loss = [], []
        for batch in batches:
            logits = model(batch["image"]).float()
            right.append(logits.argmax(1) == batch["label"])
            loss.append(F.cross_entropy(logits, batch["label"], reduction="none"))
        return {
            "top1": gather(torch.cat(right)).double().mean().item(),
            "loss": gather(torch.cat(loss)).double().mean().item(),
            "count": float(len(gather(torch.cat(right)))),
        }


TASKS["tiny"] = f"{__name__}:Tiny" if __name__ != "__main__" else "tests.train.tiny:Tiny"


def recipe(*overrides: str) -> Recipe:
    """Two epochs of six steps on a CPU."""
    from hyptree.config import load

    base = (
        "task=tiny",
        "data.batch_size=16",
        "schedule.epochs=2",
        "schedule.warmup=0.5",
        "run.ema=0.9",
        "run.device=cpu",
        "run.log_steps=2",
        "run.tensorboard=false",
        "optim.lr=0.01",
    )
    return load(Recipe, None, [*base, *overrides])


def train(out: str, overrides: tuple[str, ...] = (), resume: bool = False) -> None:
    """Train in this process; a target for processes that are started to be killed."""
    torch.set_num_threads(1)
    from hyptree.train.loop import fit

    fit(recipe(*overrides), out, resume=resume, quiet=True)


if __name__ == "__main__":
    import sys

    from hyptree.errors import UserError
    from hyptree.train.loop import fit

    torch.set_num_threads(1)
    given = sys.argv[2:]
    try:
        fit(recipe(*(a for a in given if a != "--resume")), sys.argv[1], resume="--resume" in given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
