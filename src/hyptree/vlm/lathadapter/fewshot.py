"""Few-shot learning: which shots, a head on a host, how often it is right, and the head of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.config import build
from hyptree.data.npz import name_some
from hyptree.data.seeding import mix_bits
from hyptree.data.settings import DataSettings
from hyptree.errors import UserError
from hyptree.runs import RunFolder, best_weights
from hyptree.vlm.adapters.base import warn_of_another_base
from hyptree.vlm.clip.contrast import similarity
from hyptree.vlm.encoders.encoder import Encoder
from hyptree.vlm.lathadapter.head import LatentHierarchyHead
from hyptree.vlm.lathadapter.hosts import Host, JointHost, PromptHost
from hyptree.vlm.lathadapter.settings import FewShotSettings

_SYNSET = re.compile(r"\.[nvars]\.\d+$")  # how WordNet ends a name


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


# ---------------------------------------------------------------------------------------------------------------- model


def build_host(settings: FewShotSettings, encoder: Encoder, texts: Callable[[list[str]], Tensor], seed: int) -> Host:
    """A fresh host on an encoder; ``texts`` gives features of texts by it."""
    if settings.host == "frozen":
        return Host(texts, settings.template)
    if settings.host == "prompt":
        return PromptHost(encoder, settings.num_context, settings.context, seed)
    return JointHost(encoder, settings.num_context or 2, settings.context, settings.depth, seed)


def head_options(settings: FewShotSettings, logit_scale: float, seed: int) -> dict[str, Any]:
    """Arguments of a ``LatentHierarchyHead``: what is not among the settings' parts is switched off."""
    parts = settings.parts
    return {
        "c": settings.curvature,
        "beta": settings.beta if "atr" in parts else 0.0,
        "margin": settings.margin,
        "k": settings.k,
        "affinity": settings.affinity,
        "lca_sampling": settings.lca_sampling,
        # Without any part there is no hyperbolic space: the host alone answers by cosine.
        "hyp_weight": settings.hyp_weight if parts else 0.0,
        "lift": settings.lift,
        "logit_scale": logit_scale,
        "weight_h": float("h" in parts),
        "weight_va": float("va" in parts),
        "weight_at": float("at" in parts),
        "seed": seed,
    }


def build_head(
    host: Host, names: Sequence[str], logit_scale: float, settings: FewShotSettings, seed: int
) -> LatentHierarchyHead:
    """A fresh head for classes of these names."""
    words = class_names(settings.attribute_words)
    with torch.no_grad():
        text = host.text_features(names)
        begin = host.encode_words(words).to(text) if words else None
    options = head_options(settings, logit_scale, seed)
    return LatentHierarchyHead.for_classes(
        text, settings.num_attributes, attribute_features=begin, attribute_names=words, **options
    )


class FewShotModel(nn.Module):
    """A head that learns classes of these names, and what its host learns; the encoder is none of its weights.

    ``base``, its fingerprint, stands for its weights, so that weights of a run are refused beside another encoder.
    """

    base: Tensor

    def __init__(self, head: LatentHierarchyHead, host: Host, names: Sequence[str], fingerprint: str):
        super().__init__()
        self.head, self.host, self.names = head, host, tuple(names)
        self.fingerprint = fingerprint
        self.register_buffer("base", torch.tensor(list(bytes.fromhex(fingerprint)), dtype=torch.uint8))

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (B, C) and the parts of the loss, from what the host takes for pictures and their places among C."""
        logits, losses = self.head(self.host.image_features(inputs), self.text_features(self.names), labels)
        return logits, losses

    def text_features(self, names: Sequence[str]) -> Tensor:
        """(C, D) features of classes, on the head's device."""
        return self.host.text_features(names).to(self.head.attributes.device)

    def check_base(self) -> None:
        """Refuse weights that were learned on another encoder than the one that is loaded."""
        if bytes(self.base.tolist()).hex() != self.fingerprint:
            raise UserError("these weights were learned on another encoder, or it has other weights now; give that one")


class Tally:
    """How often a model is right on one test with these classes: as it answers, by the cosine alone, without a head."""

    def __init__(self, model: FewShotModel, names: Sequence[str]):
        self.head, self.text = model.head, model.text_features(names)
        self.baked = self.head.bake(self.text)
        self._right = torch.zeros(3, dtype=torch.int64)
        self._slopes: list[float] = []
        self.count = 0

    def add(self, images: Tensor, labels: Tensor) -> None:
        """Features (B, D) of pictures and their places among the classes."""
        cosine, alone = self.head.compare(images, self.baked)[0], similarity(images, self.text)
        answers = (self.head.classify(images, self.baked), cosine, alone)
        self._right += torch.stack([(logits.argmax(1) == labels).sum() for logits in answers]).cpu()
        self._slopes.append(self.head.slope_ratio(images, self.text) if self.head.hyp_weight else 0.0)
        self.count += len(labels)

    def numbers(self) -> dict[str, float]:
        """``top1``, ``cosine`` and ``zero_shot`` of these, and how much the logits follow the distance as a share of
        how much they follow the cosine (``slope_ratio``)."""
        shares = [right / self.count for right in self._right.tolist()]
        return dict(zip(("top1", "cosine", "zero_shot"), shares, strict=True)) | {
            "slope_ratio": sum(self._slopes) / len(self._slopes)
        }


def load_head(
    run: Path | str, encoder: Encoder | None = None
) -> tuple[LatentHierarchyHead, dict[str, Tensor], dict[str, Any]]:
    """The head of a run in eval mode, the tensors of its host, and what is to be known of it.

    That is ``classes`` (names of those it learned), ``settings`` (``FewShotSettings``), ``data`` (``DataSettings``),
    ``encoder`` (its name) and ``numbers`` (of the last test). An encoder that is not the head's is an error or warning.
    """
    folder = RunFolder(run)
    recipe = folder.settings()
    if recipe.get("task") != "fewshot":
        raise UserError(f"{run} is a run of the task {recipe.get('task')} and holds no head; expected fewshot")
    settings = build(FewShotSettings, recipe.get("fewshot"), "fewshot", str(run))
    about = folder.dataset("classes", "num_learned", "logit_scale", "encoder", "encoder_weights")
    tensors = best_weights(run)
    count, width = tensors["head.attributes"].shape
    if encoder is not None:
        if width != encoder.width:
            raise UserError(f"{run} is for features of {width} numbers, {encoder.name} gives {encoder.width}")
        warn_of_another_base(encoder.model, about["encoder_weights"], f"the head in {run}", about["encoder"])
    head = LatentHierarchyHead(width, count, **head_options(settings, about["logit_scale"], recipe["run"]["seed"]))
    head.load_state_dict(_below("head.", tensors))
    head.attribute_names = class_names(settings.attribute_words) or head.attribute_names
    classes = about["classes"][: about["num_learned"]]
    tested = [line for line in folder.read_metrics() if line["split"] == "val"][-1:]
    numbers = {key: line[key] for line in tested for key in line if key not in ("step", "epoch", "split", "time")}
    data = build(DataSettings, recipe.get("data"), "data", str(run))
    about = {"classes": classes, "settings": settings, "data": data, "encoder": about["encoder"], "numbers": numbers}
    return head.eval(), _below("host.", tensors), about


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
