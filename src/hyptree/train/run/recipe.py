"""A recipe: everything that makes a training run what it is, as plain dataclasses. Imports no torch.

A YAML file fills it, flags override it (``hyptree train recipe.yaml --optim.lr 3e-4``), and the run folder keeps it as
``recipe.yaml``, so that a run can be repeated from its folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from hyptree.checks import require_numbers
from hyptree.config import build, section_class
from hyptree.data.settings import DataSettings
from hyptree.errors import UserError


@dataclass
class PluginSettings:
    """A module that is put on the model and trained with it: Hi-Mapper's tree of queries (``hyptree.models.HiMapper``).

    A tree that reads the model's last feature map, with two losses beside the task's own.
    """

    name: Literal["none", "himapper"] = "none"
    """Which one; none for the model alone."""
    enabled: bool = True
    """false trains exactly the model alone: the control of a recipe with a plug-in."""
    num_leaves: int = 32
    """Leaves of the tree, a multiple of 2^(depth - 1)."""
    depth: int = 4
    """Levels; each has half of the nodes of the one below it."""
    width: int = 128
    """Width of the plug-in's layers."""
    heads: int = 4
    """Heads of its attention."""
    hyp_dim: int | None = None
    """Dimension of the space in which the contrastive loss compares nodes; width by default."""
    geometry: Literal["lorentz", "euclidean"] = "lorentz"
    """That space: hyperbolic, or flat as a control."""
    probabilistic: bool = True
    """While training, queries are drawn from the nodes' Gaussians; false takes their means."""
    sibling_std: float = 0.75
    """Spread of fresh sibling leaves; the released code has 0.01."""
    query_residual: bool = False
    """Nodes keep their query beside what they read; the released code does."""
    tau: float = 0.2
    """Temperature of the contrastive loss."""
    alpha: float = 0.1
    """Weight of the contrastive loss."""
    beta: float = 0.01
    """Weight of the divergence of the top level from a standard normal."""
    args: dict[str, Any] = field(default_factory=dict)
    """Passed on to the plug-in: whatever else it takes."""
    lr: float | None = None
    """Learning rate of the plug-in; optim.lr by default."""

    def __post_init__(self) -> None:
        require_numbers(self, "a positive number", "num_leaves", "depth", "width", "heads", "hyp_dim", "tau", "lr")
        for name in ("sibling_std", "alpha", "beta"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be 0 or a positive number, got {getattr(self, name)}")
        if self.num_leaves % 2 ** (self.depth - 1):
            raise ValueError(
                f"num_leaves must be a multiple of 2^(depth - 1) = {2 ** (self.depth - 1)}, got {self.num_leaves}"
            )


@dataclass
class ModelSettings:
    """Which model, and how it differs from its defaults."""

    name: str = "hcformer_pico"
    """Any name that timm.create_model knows, ours included (hyptree models lists them). Of the task language: a preset
    of hyptree.lm such as helm-d-pico, or twin:helm-d-pico for the Euclidean model of the same shape."""
    backbone: str | None = None
    """Another word for name, which it replaces: the model that a plug-in is put on."""
    args: dict[str, Any] = field(default_factory=dict)
    """Passed on to create_model: drop_path_rate, img_size, ... Language: to the preset, e.g. hidden_size."""
    head: dict[str, Any] = field(default_factory=dict)
    """Passed on to the head that a task puts on the backbone (segmentation, detection)."""
    pretrained: bool = False
    """Start from the weights that timm downloads for this name."""
    weights: Path | None = None
    """Start from these weights: a run folder or a .safetensors file. Layers whose shape differs start fresh."""
    plugin: PluginSettings | None = None
    """What is put on the model; none that is switched off."""

    def __post_init__(self) -> None:
        if self.backbone is not None:  # kept under one name, so that either word can override a saved recipe
            self.name, self.backbone = self.backbone, None
        if self.plugin is not None and (self.plugin.name == "none" or not self.plugin.enabled):
            self.plugin = None


@dataclass
class TokenSettings:
    """A vision transformer with fewer tokens, in training and in evaluation (``hyptree.tokens.patch``)."""

    keep: float = 1.0
    """Share of the tokens that is kept at each of the layers; 1 leaves the model as it is."""
    method: str = "atc"
    """How they are reduced: atc, tome, kmeans, kmedoids, dpcknn, topk or evit."""
    layers: tuple[int, ...] = ()
    """Blocks that reduce, from 0; by default those after each quarter of the depth."""
    linkage: Literal["average", "complete", "single", "ward"] = "average"
    """Of atc."""
    prop_attn: bool = True
    """Tokens attract attention in proportion to the patches they stand for."""

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {self.keep:g}; 1 keeps all tokens")
        if self.method == "random":
            raise ValueError("method random draws anew in every pass, which a resumed run cannot repeat; take another")


@dataclass
class LossSettings:
    """What the loss does to its targets."""

    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""


_OF_OTHERS = {"adamw": ("momentum",), "sgd": ("betas", "eps")}
"""By optimiser, what only the other one reads."""


@dataclass
class OptimSettings:
    """AdamW or SGD; their Riemannian form when the model has points among its parameters."""

    name: Literal["adamw", "sgd"] = "adamw"
    """sgd reads momentum, adamw reads betas and eps."""
    lr: float = 1e-3
    """Learning rate at the top of the schedule."""
    weight_decay: float = 0.05
    """Of matrices and kernels; biases, norms, points, curvatures and what the model excludes are not decayed."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Memory of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    momentum: float = 0.9
    """Of sgd."""
    layer_decay: float | None = None
    """Learning rate of a layer relative to the one above it, e.g. 0.75 for fine-tuning."""
    clip: float | None = 1.0
    """Largest norm of the gradient; null for no limit."""
    point_lr: float | None = None
    """Learning rate of points on a manifold; lr by default."""
    curvature_lr: float | None = None
    """Learning rate of learned curvatures; lr by default."""
    max_step: float | None = None
    """Longest move of a point on a manifold in one step; null for no limit."""

    def __post_init__(self) -> None:
        positive = ("lr", "eps", "layer_decay", "clip", "point_lr", "curvature_lr", "max_step")
        require_numbers(self, "a positive number", *positive)
        require_numbers(self, "at least 0", "weight_decay", "momentum")
        for key in _OF_OTHERS[self.name]:
            if getattr(self, key) != getattr(OptimSettings, key):
                raise ValueError(f"{key} means nothing to {self.name}; leave it out")
        if self.layer_decay is not None and self.layer_decay > 1:
            raise ValueError(f"layer_decay must be in (0, 1], got {self.layer_decay}")


@dataclass
class ScheduleSettings:
    """How long, and how the learning rate moves. The unit is epochs, or steps where ``steps`` is given."""

    name: Literal["cosine", "poly", "constant"] = "cosine"
    """Shape after the warm-up."""
    epochs: float = 30
    """Passes over the training set."""
    steps: int | None = None
    """Optimiser steps; wins over epochs."""
    warmup: float = 0
    """Length of the linear warm-up, in the same unit."""
    warmup_lr: float | None = None
    """Constant learning rate of the warm-up, as a share of optim.lr, instead of a linear rise."""
    min_lr: float = 0.01
    """Where the learning rate ends, as a share of optim.lr."""
    power: float = 0.9
    """Of poly."""

    def __post_init__(self) -> None:
        require_numbers(self, "a positive number", "epochs", "steps", "power", "warmup_lr")
        length = self.epochs if self.steps is None else self.steps
        if not 0 <= self.warmup <= length:
            raise ValueError(f"warmup must be from 0 to the length of the run ({length:g}), got {self.warmup:g}")
        if self.warmup_lr is not None and self.warmup == length:
            raise ValueError(f"warmup {self.warmup:g} at a constant rate is all of the run; 0 switches it off")
        if not 0 <= self.min_lr <= 1:
            raise ValueError(f"min_lr is a share of optim.lr, from 0 to 1, got {self.min_lr}")


@dataclass
class RunSettings:
    """How the run is carried out: numbers, files, processes."""

    seed: int = 0
    """Same seed, same device, same number of processes: same weights, bit for bit."""
    accumulate: int = 1
    """Parts in which a batch (data.batch_size) goes through the model, to save memory."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products in bfloat16 (autocast), weights in float32."""
    ema: float | None = None
    """Decay of the running average of the weights, e.g. 0.999; that average is then evaluated and kept as best."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    compile: bool | Literal["graphs"] = False
    """Compile the model with torch.compile. graphs: and record the training step as a CUDA graph, for small models
    that otherwise wait for the host; training batches must have one shape."""
    channels_last: bool = False
    """Keep images and kernels in channels-last order."""
    device: str = "auto"
    """auto takes a GPU if there is one; cpu or cuda to insist."""
    threads: int | None = None
    """CPU threads per process; by default as many as find a free core, on a GPU as torch decides. Kept in the folder,
    since the last bits depend on it."""
    deterministic: bool = True
    """Use algorithms that give the same bits every time, all but the gradient of attention on a GPU; false may be
    faster there."""
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto"
    """With several processes (torchrun): ddp copies the model into each (auto does), fsdp2 shards it."""
    eval_every: float = 1
    """Epochs between evaluations; 0 for only at the end."""
    eval_first: bool = False
    """Evaluate before the first step too: where fine-tuning starts from. Those weights are never the best."""
    save_every: float = 1
    """Epochs between checkpoints; 0 for only after evaluations."""
    save_steps: int | None = None
    """Steps between checkpoints, in addition."""
    log_steps: int = 20
    """Steps between lines of metrics."""
    tensorboard: bool | Literal["auto"] = "auto"
    """Also write curves for TensorBoard; auto where it is installed, true insists."""
    max_skipped_steps: int = 0
    """Steps in a row whose gradient is not finite that are left out and counted; 0 stops the run at the first one."""

    def __post_init__(self) -> None:
        require_numbers(self, "a positive number", "accumulate", "threads", "save_steps", "log_steps")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must be between 0 and 1, got {self.ema}; null for no average")
        if self.eval_every < 0 or self.save_every < 0:
            raise ValueError("eval_every and save_every must be at least 0 epochs")
        require_numbers(self, "at least 0", "max_skipped_steps")
        if self.compile == "graphs" and self.parallel == "fsdp2":
            raise ValueError(
                "compile graphs needs weights that stay in their place, and parallel fsdp2 moves them; use ddp"
            )
        require_numbers(self, "from 0 to 2^31 - 1", "seed")


@dataclass
class Recipe:
    """One training run. Sections that a recipe need not have are None; that of its own task is always there.

    The class of a section that one task reads is imported where a recipe has it (``config.section_class``).
    """

    task: str = "classify"
    """What is learned: classify, segment, detect, language, contrast, openvocab, openvocab_detect, radial, fewshot or
    embed."""
    data: DataSettings = field(default_factory=DataSettings)
    """Where the samples come from, and how they are augmented."""
    text: Any = field(default=None, metadata={"section": "hyptree.data.text.settings:TextSettings"})
    """Where the text comes from, for the task language; data.batch_size then counts blocks of text."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """What is trained."""
    radial: Any = field(default=None, metadata={"section": "hyptree.vlm.radial.settings:RadialSettings"})
    """Which chains of captions train a text encoder and how, for the task radial; data then counts chains."""
    fewshot: Any = field(default=None, metadata={"section": "hyptree.vlm.lathadapter.settings:FewShotSettings"})
    """How a head learns from few pictures and what it is tested on, for the task fewshot."""
    tokens: TokenSettings | None = None
    """How many of its tokens a vision transformer keeps."""
    embed: Any = field(default=None, metadata={"section": "hyptree.train.run.settings:EmbedSettings"})
    """Which hierarchy is embedded and how, for the task embed; data.batch_size then counts nodes."""
    loss: LossSettings = field(default_factory=LossSettings)
    """What is made small."""
    optim: OptimSettings = field(default_factory=OptimSettings)
    """How."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """How long."""
    run: RunSettings = field(default_factory=RunSettings)
    """Precision, files, processes."""

    @classmethod
    def fill_in(cls, data: Mapping[str, Any], source: str) -> Mapping[str, Any]:
        """What a file and flags say, and for common keys that they leave out the task's own defaults.

        A task names them in the class of its section: ``common_defaults()`` of ``radial: RadialSettings`` gives dotted
        keys and values, e.g. ``{"optim.lr": 1e-7}``, which may depend on the section's other keys. Keys of another
        optimiser than the given one are left out.
        """
        task = str(data.get("task"))
        section = cls._section(task)
        if not hasattr(section, "common_defaults"):
            return data
        for key, value in build(section, data.get(task), task, source).common_defaults().items():
            place, name = key.split(".")
            keys = data.get(place) or {}
            if not isinstance(keys, Mapping):  # which is refused when it is read
                continue
            if place != "optim" or name not in _OF_OTHERS.get(str(keys.get("name", "adamw")), ()):
                data = {**data, place: {name: value, **keys}}
        return data

    @classmethod
    def _section(cls, name: str) -> Any:
        """The class of a section; None where there is no such one."""
        hints = get_type_hints(cls)
        return next((section_class(f, hints[name]) for f in fields(cls) if f.name == name), None)

    def __post_init__(self) -> None:
        own = "text" if self.task == "language" else self.task
        if getattr(self, own, self) is None:
            setattr(self, own, self._section(own)())
        reduces = self.tokens is not None and self.tokens.keep < 1
        if reduces and self.task != "classify":
            raise ValueError(f"tokens.keep below 1 is for the task classify, the task is {self.task}")
        if reduces and self.model.plugin is not None:
            raise ValueError("model.plugin reads a whole feature map, and tokens.keep below 1 leaves none; choose one")
        if self.data.resident and self.task != "classify":
            raise ValueError(f"data.resident is for the task classify, the task is {self.task}; leave it out")
        if self.data.batch_size % self.run.accumulate:
            raise ValueError(
                f"data.batch_size {self.data.batch_size} must be a multiple of run.accumulate {self.run.accumulate}"
            )


_MIXES = ("data.augment.mixup", "data.augment.cutmix", "data.augment.mix_prob")
_OF_TEXT = ("batch_size", "eval_batch_size", "workers", "cache", "strict", "resident")
"""What language and embed read of ``data``, or may be left there from a recipe of pictures."""
_OF_CHAINS = ("batch_size", "eval_batch_size", "num_train", "num_val", "seed")
"""What the task radial reads of it."""
_SECTIONS = {"text": "language", "radial": "radial", "embed": "embed", "fewshot": "fewshot"}
"""Sections of one task, which the others do not read."""
_NOT_READ = {
    "classify": ("model.head", "data.augment.scale_jitter"),
    "segment": ("data.crop_pct", *_MIXES),
    "detect": ("loss", "data.crop_pct", *_MIXES),
    "openvocab_detect": ("loss", "data.crop_pct", *_MIXES),
    "openvocab": ("loss", "data.crop_pct", "data.mean", "data.std", "model.pretrained", *_MIXES),
    "contrast": ("loss", "data.augment.scale_jitter", *_MIXES),
    "fewshot": (
        *("loss", "model.args", "model.head", "model.pretrained", "run.accumulate", "run.compile", "run.channels_last"),
        *(f"data.{name}" for name in ("workers", "resident", "crop_pct", "mean", "std", "augment")),
    ),
    "language": ("loss", "model.head", *(f"data.{f.name}" for f in fields(DataSettings) if f.name not in _OF_TEXT)),
    "radial": (
        *("loss", "model.args", "model.head", "model.pretrained", "optim.layer_decay", "run.accumulate"),
        *(f"data.{f.name}" for f in fields(DataSettings) if f.name not in _OF_CHAINS),
    ),
    "embed": (
        *("loss", "optim.weight_decay", "optim.layer_decay", "optim.curvature_lr"),
        *("run.precision", "run.grad_checkpointing", "run.compile", "run.channels_last"),
        *(f"model.{f.name}" for f in fields(ModelSettings) if f.name not in ("name", "backbone")),
        *(f"data.{f.name}" for f in fields(DataSettings) if f.name not in _OF_TEXT),
    ),
}
"""Other keys and sections that mean nothing to a task."""


def require_read(recipe: Recipe) -> None:
    """Raise if a key was set that the recipe's task does not read: the run would not be what the recipe says."""
    others = [name for name, task in _SECTIONS.items() if task != recipe.task]
    there = {name: type(section)() for name in others if (section := getattr(recipe, name)) is not None}
    standard, own = flatten(Recipe(task=recipe.task, **there)), flatten(recipe)
    for name in (*others, *_NOT_READ.get(recipe.task, ())):
        for key, value in own.items():
            if (key == name or key.startswith(f"{name}.")) and value != standard.get(key):
                raise UserError(f"{key} {value} means nothing to the task {recipe.task}; leave it out")


# What may change between the two halves of a run without changing its numbers.
FREE_TO_CHANGE = {
    "data.workers",
    "data.root",
    "data.cache",
    "data.eval_batch_size",
    "data.strict",
    "text.path",
    "text.val_path",
    "text.cache",
    "radial.chains",
    "radial.held_out",
    "embed.edges",
    "embed.num_ranked",
    "fewshot.cache",
    "run.device",
    "run.threads",
    "run.parallel",
    "run.log_steps",
    "run.save_every",
    "run.save_steps",
    "run.tensorboard",
}


def check_resumable(saved: Recipe, recipe: Recipe, where: Path) -> None:
    """Refuse to go on with a recipe that would have given another run, naming the first key that differs."""
    before, now = flatten(saved), flatten(recipe)
    for key in [*now, *(key for key in before if key not in now)]:
        if key not in FREE_TO_CHANGE and before.get(key) != now.get(key):
            raise UserError(
                f"cannot resume {where}: it was made with {key} = {before.get(key)}, now it is {now.get(key)}; "
                "give the same recipe, or another --out for a new run"
            )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key to value, for every field of nested dataclasses (dicts count as sections)."""
    items: dict[str, Any] = {}
    for name, value in (vars(config) if is_dataclass(config) else config).items():
        key = f"{prefix}{name}"
        if is_dataclass(value) or (isinstance(value, dict) and value):
            items |= flatten(value, f"{key}.")
        else:
            items[key] = list(value) if isinstance(value, tuple) else value
    return items
