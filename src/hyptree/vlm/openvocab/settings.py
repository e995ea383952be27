"""What a recipe of the task ``openvocab`` says under ``model.args``: plain data, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hyptree.errors import UserError, require_known

Method = Literal["frozen", "scale", "lora", "diagonal", "orthogonal", "full"]
METHODS: tuple[str, ...] = get_args(Method)
TEMPLATE = "A photo of a {} in the scene"


@dataclass
class OpenVocabSettings:
    """How CLIP is tuned, which classes stay unseen, and how a picture is looked at."""

    method: Method = "scale"
    """Adapter of both towers: scale (HyperCLIP's blocks), lora, diagonal, orthogonal, full (q and v), or frozen."""
    adapter: dict[str, Any] = field(default_factory=dict)
    """Options of the adapter, e.g. {block_size: 128} for scale, {rank: 8} for lora."""
    adapter_lr: float = 0.075
    """Learning rate of the adapter as a share of the head's, optim.lr."""
    unseen: tuple[str, ...] = ()
    """Classes that training never sees: their pixels count nowhere and their names are not among the texts."""
    template: str = TEMPLATE
    """Sentence for a class; {} is its name."""
    rename: dict[str, str] = field(default_factory=dict)
    """Other words for some classes in the sentence, e.g. {background: landscape}."""
    random_init: bool = False
    """Take random weights for the CLIP, for smoke tests."""
    blocks: tuple[int, ...] = ()
    """Two blocks of the image tower that guide the up-sampling, from 1; by default at a third and two thirds."""
    eval_size: int | None = None
    """Side that pictures are brought to for scoring, in pixels; by default data.size."""
    window: int | None = None
    """Side of the windows they are looked at by; by default data.size."""
    overlap: float = 1 / 3
    """Share of a window that neighbours have in common, at least."""
    global_view: bool = True
    """Also look at the whole picture at once, where it is larger than a window."""

    def __post_init__(self) -> None:
        if "{}" not in self.template:
            raise ValueError(f"template must hold {{}} for the name of the class, got {self.template!r}")
        if not self.adapter_lr > 0:
            raise ValueError(f"adapter_lr must be positive, got {self.adapter_lr:g}; method frozen trains no adapter")
        if self.blocks and len(self.blocks) != 2:
            raise ValueError(f"blocks must be two numbers, got {list(self.blocks)}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"overlap must be from 0 to below 1, got {self.overlap:g}")
        for name in ("eval_size", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if (double := _double(self.unseen)) is not None:
            raise ValueError(f"unseen names the class {double!r} twice")
        if self.method == "frozen" and self.adapter:
            raise ValueError("method frozen takes no adapter options")

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> OpenVocabSettings:
        """From a recipe's ``model.args``; unknown keys and wrong types are one line."""
        from hyptree.config import load

        return load(cls, None, [f"{key}={json.dumps(value)}" for key, value in options.items()])

    def split(self, classes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The seen and the unseen ones of the data's classes, in their order."""
        _check_classes(classes)
        for where, names in (("unseen", self.unseen), ("rename", self.rename)):
            some = "the data has " + ", ".join(list(classes)[:12])
            require_known(f"model.args.{where}: there is no class {{!r}}", names, classes, some)
        seen = tuple(name for name in classes if name not in self.unseen)
        if not seen:
            raise UserError("model.args.unseen names all classes; at least one must be left to learn from")
        return seen, tuple(name for name in classes if name in self.unseen)

    def prompts(self, classes: Sequence[str]) -> list[str]:
        """The sentence of each class."""
        _check_classes(classes)
        sentences = [self.template.replace("{}", self.rename.get(name, name).replace("_", " ")) for name in classes]
        if (double := _double(sentences)) is not None:
            same = [name for name, sentence in zip(classes, sentences, strict=True) if sentence == double]
            raise UserError(
                f"the classes {same[0]!r} and {same[1]!r} have one sentence, {double!r}; rename one of them"
            )
        return sentences


def _check_classes(classes: Sequence[str]) -> None:
    if not classes:
        raise UserError("the list of classes is empty")
    if any(not name.strip() for name in classes):
        raise UserError("a class has an empty name")
    if (double := _double(classes)) is not None:
        raise UserError(f"the class {double!r} is in the list twice; names are what tells classes apart")


def _double(names: Sequence[str]) -> str | None:
    """The first name that was there before."""
    return next((name for i, name in enumerate(names) if name in names[:i]), None)
