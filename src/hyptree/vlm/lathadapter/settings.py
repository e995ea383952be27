"""Settings of few-shot learning with a latent hierarchy: plain dataclasses, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyptree.checks import require_numbers

HostName = Literal["frozen", "prompt", "joint"]

PARTS = ("atr", "va", "at", "h")
"""What can be switched: the refinement of classes, the two hierarchy losses, the hyperbolic classification loss."""

ZERO_SHOT = "zero-shot"
"""The encoder as it is, without head or training."""


@dataclass(kw_only=True)
class FewShotSettings:
    """How a head learns from few pictures per class. What is None follows from the host."""

    host: HostName = "frozen"
    """frozen: the attributes alone learn. prompt: words of context too. joint: prompts in both towers (MaPLe-like)."""
    num_attributes: int | None = None
    """Attributes between classes and pictures; by default 2 sqrt(classes), from 4 to 24."""
    attribute_words: tuple[str, ...] = ()
    """Words at which attributes begin, one each, instead of the mean class."""
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
    epochs: int | None = None
    """Passes over the shots. [30 for frozen, 5 otherwise]"""
    batch_size: int | None = None
    """Pictures per step. [32 for frozen, 4 otherwise]"""
    lr: float | None = None
    """Learning rate at its peak. [Adam 0.01 for frozen, SGD 0.0035 otherwise]"""
    attribute_lr: float | None = None
    """Learning rate of the attributes; by default lr."""

    def __post_init__(self) -> None:
        frozen = self.host == "frozen"
        self.epochs = self.epochs if self.epochs is not None else (30 if frozen else 5)
        self.batch_size = self.batch_size if self.batch_size is not None else (32 if frozen else 4)
        self.lr = self.lr if self.lr is not None else (0.01 if frozen else 0.0035)
        self.attribute_lr = self.attribute_lr if self.attribute_lr is not None else self.lr
        require_numbers(self, "at least 1", "epochs", "batch_size", "k", "depth", flag="--")
        require_numbers(self, "a positive number", "curvature", "lr", "attribute_lr", flag="--")
        if self.num_attributes is not None and self.num_attributes < 0:
            raise ValueError(f"--num-attributes must be 0 or more, got {self.num_attributes}")
        words = len(self.attribute_words)
        if words and self.num_attributes not in (None, words):
            raise ValueError(
                f"{words} attribute words make {words} attributes, but --num-attributes is {self.num_attributes}"
            )


@dataclass(kw_only=True)
class FewShotJob(FewShotSettings):
    """``hyptree vlm train-fewshot``: which encoder, which pictures, how often."""

    model: str
    """open_clip:NAME:PRETRAINED, or hf:FOLDER_OR_ID with a CLIP or SigLIP model."""
    data: str
    """Pictures: world, a folder with one folder per class, a .npz file, or NAME:ROOT as in recipes (pets:DIR, ...)."""
    shots: tuple[int, ...] = (16,)
    """Training pictures per class, one run for each number."""
    protocol: Literal["all", "base-to-new"] = "all"
    """all: train and test on all classes. base-to-new: train on the first half, test on both halves."""
    transfer: tuple[str, ...] = ()
    """Other data to test on, with its own classes (cross-dataset)."""
    shift: tuple[str, ...] = ()
    """The same classes in other pictures: grey, noise, blur, negative, upside-down, or data with these class names."""
    ablate: bool = False
    """Each part (ATR, L_va, L_at, L_h) on and off, beside zero-shot and the host alone."""
    seeds: int = 3
    """Runs of everything, each with other shots, attributes and batches."""
    seed: int = 0
    """The first one."""
    num_train: int | None = None
    """Training pictures to choose shots from; by default all."""
    num_val: int | None = None
    """Test pictures; by default all."""
    size: int = 64
    """Side of the built-in world's pictures; the encoder resizes them."""
    random_init: bool = False
    """Random weights, for smoke tests."""
    device: str = "cpu"
    """cpu, cuda, ..."""
    cache: Path = Path("runs/features")
    """Folder that keeps features for the next run."""
    out: Path = Path("runs/fewshot")
    """Folder for results.json, results.txt and the heads."""
    resume: bool = False
    """Go on with the results in the folder."""
    overwrite: bool = False
    """Replace the results in the folder."""
    quiet: bool = False
    """No progress."""
    json: bool = False
    """Print the results as JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shots or min(self.shots) < 1 or len(set(self.shots)) < len(self.shots):
            raise ValueError(f"--shots must be different numbers from 1 on, got {' '.join(map(str, self.shots))}")
        require_numbers(self, "at least 1", "seeds", flag="--")
        require_numbers(self, "from 0 to 2^31 - 1", "seed", flag="--")

    def variants(self) -> dict[str, tuple[str, ...]]:
        """Rows of the table: their names and the parts that are on."""
        full = {ZERO_SHOT: (), "full": PARTS}
        if not self.ablate:
            return full
        without = {f"without {part}": tuple(other for other in PARTS if other != part) for part in PARTS}
        only = {f"only {part}": (part,) for part in PARTS}
        return {ZERO_SHOT: (), "host alone": (), **only, **without, "full": PARTS}
