"""Settings of few-shot learning with a latent hierarchy: a plain dataclass, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyptree.checks import require_numbers

Part = Literal["atr", "va", "at", "h"]

PARTS: tuple[Part, ...] = ("atr", "va", "at", "h")
"""What can be switched: the refinement of classes, the two hierarchy losses, the hyperbolic classification loss."""

_TEST_BATCH = 256


@dataclass
class FewShotSettings:
    """How a head learns from few pictures per class, and what it is tested on: the section of the task ``fewshot``."""

    host: Literal["frozen", "prompt", "joint"] = "frozen"
    """frozen: the attributes alone learn (Adam). prompt: words of context too (SGD). joint: prompts in both towers, as
    in MaPLe (SGD). Rates, batches and epochs follow from it where they are not given."""
    parts: tuple[Part, ...] = PARTS
    """What is on: atr refines classes, va and at are the hierarchy losses, h classifies by distance. None at all is the
    host alone, which is zero-shot CLIP where it is frozen."""
    shots: int = 16
    """Training pictures per class, drawn by run.seed."""
    protocol: Literal["all", "base-to-new"] = "all"
    """all: train and test on all classes. base-to-new: train on the first half, test on both halves."""
    transfer: tuple[str, ...] = ()
    """Other data to test on, with its own classes (cross-dataset): world, a folder, an .npz file or NAME:ROOT."""
    shift: tuple[str, ...] = ()
    """The same classes in other pictures: grey, noise, blur, negative, upside-down, or data with these class names."""
    num_attributes: int | None = None
    """Attributes between classes and pictures; by default 2 sqrt(classes), from 4 to 24."""
    attribute_words: tuple[str, ...] = ()
    """Words at which attributes begin, one each, instead of the mean class."""
    attribute_lr: float | None = None
    """Learning rate of the attributes; by default optim.lr."""
    curvature: float = 0.1
    """c > 0, the curvature is -c."""
    beta: float = 0.1
    """How much of its neighbourhood is added to a class."""
    margin: float = 0.1
    """Of the hierarchy losses."""
    k: int = 3
    """Neighbours per picture and attribute."""
    affinity: Literal["relu", "softmax"] = "relu"
    """How cosines become weights of the neighbourhood."""
    lca_sampling: Literal["default", "paper", "argmin"] = "default"
    """How a common ancestor is chosen."""
    hyp_weight: float = 1.0
    """How much the hyperbolic distance counts beside the cosine."""
    lift: Literal["unit", "raw", "learned_scale"] = "unit"
    """Lengths of the features that go into hyperbolic space."""
    template: str = "a photo of a {}."
    """Text of a class, for the frozen host and for zero-shot."""
    context: str = "a photo of a"
    """Words that learned context begins with."""
    num_context: int | None = None
    """Learned vectors of context; by default as many as the words (prompt) or 2 (joint)."""
    depth: int = 9
    """joint: blocks with prompts of their own."""
    random_init: bool = False
    """An encoder with random weights, for smoke tests."""
    cache: Path = Path("runs/features")
    """Folder that keeps the encoder's features for the next run."""

    def __post_init__(self) -> None:
        require_numbers(self, "at least 1", "shots", "k", "depth", "num_context")
        require_numbers(self, "at least 0", "num_attributes")
        require_numbers(self, "a positive number", "curvature", "attribute_lr")
        if len(set(self.parts)) < len(self.parts):
            raise ValueError(f"parts must be different ones of {', '.join(PARTS)}, got {', '.join(self.parts)}")
        words = len(self.attribute_words)
        if words and self.num_attributes not in (None, words):
            raise ValueError(
                f"{words} attribute_words make {words} attributes, but num_attributes is {self.num_attributes}"
            )

    def common_defaults(self) -> dict[str, Any]:
        """The published settings of common keys. No picture is kept for validation, so the last weights count."""
        common = {"data.eval_batch_size": _TEST_BATCH, "optim.clip": None, "schedule.min_lr": 0.0, "run.eval_every": 0}
        if self.host == "frozen":
            return common | {
                "data.batch_size": 32,
                "optim.lr": 0.01,
                "optim.weight_decay": 0.0,
                "schedule.epochs": 30,
                "run.save_every": 5,  # an epoch takes no longer than writing it down
            }
        return common | {
            "data.batch_size": 4,
            "optim.name": "sgd",
            "optim.lr": 0.0035,
            "optim.weight_decay": 5e-4,
            "schedule.epochs": 5,
            "schedule.warmup": 1,
            "schedule.warmup_lr": 1e-5 / 0.0035,
        }
