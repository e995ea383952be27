"""Few-shot learning: choose shots, train a head on a host, test it on the same, on new and on shifted classes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hyptree.data.npz import name_some
from hyptree.data.seeding import mix_bits
from hyptree.errors import UserError
from hyptree.vlm.clip.contrast import similarity
from hyptree.vlm.lathadapter.head import LatentHierarchyHead
from hyptree.vlm.lathadapter.hosts import Host
from hyptree.vlm.lathadapter.settings import PARTS, FewShotSettings

_TEST_BATCH = 256
_SYNSET = re.compile(r"\.[nvars]\.\d+$")  # how WordNet ends a name
_WARM_LR = 1e-5  # the rate of the first epoch, where prompts are trained


class Pictures(Protocol):
    """``FeatureSet`` or ``PixelSet``."""

    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int: ...

    def inputs(self, index: Tensor) -> Tensor:
        """What the host's ``image_features`` takes."""
        ...


def class_names(classes: Sequence[str]) -> tuple[str, ...]:
    """Names as they are put into texts: ``tailed_frog.n.01`` is "tailed frog"; one line where one is empty or twice.

    Underscores become spaces, and WordNet's part of speech and number go.
    """
    names = tuple(" ".join(_SYNSET.sub("", name).replace("_", " ").split()) for name in classes)
    if empty := [i for i, name in enumerate(names) if not name]:
        raise UserError(f"class {empty[0]} of {len(names)} has an empty name; every class needs one")
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        if name.lower() in seen:
            raise UserError(
                f"classes {seen[name.lower()]} and {i} are both called {name!r}; a text cannot tell them apart: "
                "rename one of them"
            )
        seen[name.lower()] = i
    return names


def sample_shots(labels: Tensor, shots: int, seed: int, classes: Sequence[int], names: Sequence[str]) -> Tensor:
    """(C * shots,) pictures to train on, ``shots`` of each of ``classes``, drawn by ``seed``.

    With one seed, fewer shots are some of those of more shots.

    Raises:
        UserError: a class has fewer pictures.
    """
    generator = torch.Generator().manual_seed(mix_bits(seed, 0x5407) >> 1)
    order = torch.randperm(len(labels), generator=generator)
    chosen, short = [], []
    for label in classes:
        there = order[labels.cpu()[order] == label]
        if len(there) < shots:
            short.append(f"{names[label]} has {len(there)}")
        chosen.append(there[:shots])
    if short:
        raise UserError(f"{shots} shots need {shots} pictures of every class, but {name_some(short, 3)}; take fewer")
    return torch.cat(chosen)


def split_base_new(num_classes: int) -> tuple[list[int], list[int]]:
    """The first half of the classes (the larger one where odd) to train on, and the others."""
    if num_classes < 2:
        raise UserError(f"base-to-new needs at least 2 classes, got {num_classes}")
    half = math.ceil(num_classes / 2)
    return list(range(half)), list(range(half, num_classes))


def harmonic_mean(base: float, new: float) -> float:
    """``2 b n / (b + n)``, 0 where both are."""
    return 2 * base * new / (base + new) if base + new > 0 else 0.0


# ------------------------------------------------------------------------------------------------------------- training


def build_head(
    host: Host, names: Sequence[str], logit_scale: float, settings: FewShotSettings, parts: Sequence[str], seed: int
) -> LatentHierarchyHead:
    """A fresh head for classes, with some of its parts: what is not in ``parts`` is switched off."""
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    words = class_names(settings.attribute_words)
    with torch.no_grad():
        text = host.text_features(names)
        begin = host.encode_words(words).to(text) if words else None
    return LatentHierarchyHead.for_classes(
        text,
        settings.num_attributes,
        attribute_features=begin,
        attribute_names=words,
        c=settings.curvature,
        beta=settings.beta if "atr" in parts else 0.0,
        margin=settings.margin,
        k=settings.k,
        affinity=settings.affinity,
        lca_sampling=settings.lca_sampling,
        # Without any part there is no hyperbolic space: the host alone answers by cosine.
        hyp_weight=settings.hyp_weight if parts else 0.0,
        lift=settings.lift,
        logit_scale=logit_scale,
        weight_h=float("h" in parts),
        weight_va=float("va" in parts),
        weight_at=float("at" in parts),
        seed=seed,
    )


def train(
    head: LatentHierarchyHead,
    host: Host,
    pictures: Pictures,
    index: Tensor,
    classes: Sequence[int],
    names: Sequence[str],
    settings: FewShotSettings,
    seed: int,
) -> dict[str, float]:
    """Train head and host on the pictures at ``index``; the losses of the last epoch, by name.

    Adam for a frozen host, whose attributes alone learn. SGD with momentum, a cosine schedule and a first epoch at
    1e-5 otherwise, as prompts are trained.

    Args:
        classes: labels that take part; their places in it are the targets.
        names: of these, in order.
    """
    own = [p for p in head.parameters() if p.requires_grad]
    learned = [p for p in host.parameters() if p.requires_grad]
    device = head.attributes.device
    target = torch.full((len(pictures.classes),), -1)
    target[list(classes)] = torch.arange(len(classes))
    targets = target[pictures.labels.cpu()]
    assert settings.lr is not None and settings.attribute_lr is not None, "settings fill them in"
    assert settings.epochs is not None and settings.batch_size is not None
    groups = [{"params": own, "lr": settings.attribute_lr}, {"params": learned, "lr": settings.lr}]
    groups = [group for group in groups if group["params"]]
    if not learned and (not any(head.weights[name] for name in ("L_h", "L_va", "L_at")) and head.beta == 0):
        return {}  # nothing that is learned reaches a loss
    optimizer: torch.optim.Optimizer
    if learned:
        optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=5e-4)
    else:
        optimizer = torch.optim.Adam(groups)
    peaks = [group["lr"] for group in optimizer.param_groups]
    steps = math.ceil(len(index) / settings.batch_size)
    last: dict[str, float] = {}
    fixed = None if learned else host.text_features(names).to(device)
    head.train()
    host.train()
    for epoch in range(settings.epochs):
        generator = torch.Generator().manual_seed(mix_bits(seed, epoch, 0xBA7C) >> 1)
        order = index[torch.randperm(len(index), generator=generator)]
        sums: dict[str, float] = {}
        for step, batch in enumerate(order.split(settings.batch_size)):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = _rate(peak, epoch + step / steps, settings.epochs, warm=bool(learned))
            images = host.image_features(pictures.inputs(batch).to(device))
            text = host.text_features(names).to(device) if fixed is None else fixed
            _, losses = head(images, text, targets[batch].to(device))
            optimizer.zero_grad(set_to_none=True)
            if losses["total"].requires_grad:
                losses["total"].backward()
            optimizer.step()
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        last = {name: value / steps for name, value in sums.items()}
        if not math.isfinite(last["total"]):
            raise UserError(f"the loss is {last['total']} in epoch {epoch + 1}; take a smaller --lr")
    head.eval()
    host.eval()
    return last


def _rate(peak: float, epoch: float, epochs: int, warm: bool) -> float:
    """Cosine from ``peak`` to 0; with ``warm`` and more than one epoch, the first one at 1e-5."""
    if warm and epochs > 1:
        if epoch < 1:
            return min(peak, _WARM_LR)
        epoch, epochs = epoch - 1, epochs - 1
    return peak * (1 + math.cos(math.pi * epoch / epochs)) / 2


# -------------------------------------------------------------------------------------------------------------- testing


@dataclass
class Score:
    """Top-1 accuracy of a head on pictures, and what its hyperbolic term has to do with it."""

    top1: float
    """By cosine and distance, as the head answers."""
    cosine: float
    """By the cosine to the refined classes alone."""
    zero_shot: float
    """By the cosine to the host's classes, without the head."""
    slope_ratio: float
    """How much the logits follow the distance, as a share of how much they follow the cosine."""
    num_pictures: int


@torch.no_grad()
def evaluate(
    head: LatentHierarchyHead,
    host: Host,
    pictures: Pictures,
    classes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Score:
    """How often the head is right on the pictures of ``classes`` (all by default), among these classes.

    Args:
        names: of the classes, in order; by default the names of the pictures' classes.
    """
    classes = range(len(pictures.classes)) if classes is None else classes
    names = [class_names(pictures.classes)[label] for label in classes] if names is None else names
    target = torch.full((len(pictures.classes),), -1)
    target[list(classes)] = torch.arange(len(classes))
    targets = target[pictures.labels.cpu()]
    index = (targets >= 0).nonzero()[:, 0]
    if len(index) == 0:
        raise UserError(f"no test picture is of {name_some(names, 3)}")
    device = head.attributes.device
    head.eval()
    text = host.text_features(names).to(device)
    baked = head.bake(text)
    right, slopes = torch.zeros(3), []
    for batch in index.split(_TEST_BATCH):
        images = host.image_features(pictures.inputs(batch).to(device))
        truth = targets[batch].to(device)
        # The host alone: its own classes, by cosine.
        answers = (head.classify(images, baked), head.compare(images, baked)[0], similarity(images, text))
        right += torch.stack([(logits.argmax(1) == truth).sum() for logits in answers]).cpu()
        slopes.append(head.slope_ratio(images, text) if head.hyp_weight else 0.0)
    top1, cosine, zero_shot = (right / len(index)).tolist()
    return Score(top1, cosine, zero_shot, sum(slopes) / len(slopes), len(index))


def freeze(module: nn.Module) -> None:
    """No gradients for the weights of an encoder; a host keeps its own."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
