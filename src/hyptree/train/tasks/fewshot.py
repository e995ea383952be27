"""Few-shot learning: attributes between classes and pictures from a few shots, on a frozen or prompted CLIP."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.data.build import build_dataset
from hyptree.data.plan import Loader, Plan
from hyptree.data.sample import PictureDataset
from hyptree.data.seeding import mix_bits
from hyptree.data.settings import read_data_flag
from hyptree.errors import UserError
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Task
from hyptree.vlm.adapters.base import samples
from hyptree.vlm.encoders.encoder import Encoder, load_encoder
from hyptree.vlm.encoders.features import SHIFTS, FeatureSet, PixelSet, encoder_fingerprint, labels_of, picture_features
from hyptree.vlm.encoders.spec import check_spec
from hyptree.vlm.encoders.texts import TextTable
from hyptree.vlm.lathadapter.fewshot import (
    FewShotModel,
    Tally,
    build_head,
    build_host,
    class_names,
    harmonic_mean,
    sample_shots,
    split_base_new,
)

Batch = dict[str, Any]
Pictures = FeatureSet | PixelSet

BASE, NEW = "base", "new"
"""Tests on the classes that are learned, and on the others of the same data."""


@dataclass
class Subset:
    """Pictures of some classes, to be told apart among these classes.

    Attributes:
        classes: places in the classes of the pictures.
        names: of these, in order.
    """

    pictures: Pictures
    classes: Sequence[int]
    names: tuple[str, ...]

    def targets(self) -> Tensor:
        """(n,) the place of each picture's class among the test's classes; -1 for others."""
        places = torch.full((len(self.pictures.classes),), -1)
        places[list(self.classes)] = torch.arange(len(self.classes))
        return places[self.pictures.labels.cpu()]


class ShotLoader(Loader):
    """Batches of the pictures at ``index`` in an order by (seed, epoch); the last one may be smaller."""

    def __init__(self, shots: Subset, index: Tensor, batch_size: int, seed: int):
        super().__init__(Plan(len(index), batch_size, seed, True, 0, 1))
        self.shots, self.index, self.targets = shots, index, shots.targets()

    def __len__(self) -> int:
        return math.ceil(len(self.index) / self.plan.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(mix_bits(self.plan.seed, self.epoch, 0xBA7C) >> 1)
        order = self.index[torch.randperm(len(self.index), generator=generator)]
        for batch in order.split(self.plan.batch_size)[self.start_batch :]:
            yield {"inputs": self.shots.pictures.inputs(batch), "label": self.targets[batch]}


class SubsetLoader(Loader):
    """Batches of one test after the other, each with the name of its test."""

    def __init__(self, tests: dict[str, Subset], batch_size: int):
        self.tests = tests
        self.batches = []
        for name, test in tests.items():
            targets = test.targets()
            index = (targets >= 0).nonzero()[:, 0]
            if len(index) == 0:
                raise UserError(f"no test picture is of {', '.join(test.names[:3])}")
            self.batches += [(name, batch, targets[batch]) for batch in index.split(batch_size)]
        super().__init__(Plan(len(self.batches), 1, 0, False, 0, 1))

    def __iter__(self) -> Iterator[Batch]:
        for name, index, targets in self.batches[self.start_batch :]:
            yield {"test": name, "inputs": self.tests[name].pictures.inputs(index), "label": targets}


class FewShot(Task):
    """Cosine, distance and hierarchy losses on a few shots; accuracy on the same, new, other and shifted classes.

    ``model.name`` is an encoder of ``hyptree.vlm`` (``hf:FOLDER``, ``open_clip:NAME:PRETRAINED``), whose features are
    made once and kept in ``fewshot.cache``. ``top1`` is on the classes that are learned; with protocol base-to-new it
    is called ``base`` too, beside ``new`` and the harmonic mean ``h``. ``cosine`` leaves the hyperbolic term out,
    ``zero_shot`` the head.
    """

    metric = "top1"

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.settings = recipe.fewshot
        check_spec(recipe.model.name)
        for data in (*self.settings.transfer, *(data for data in self.settings.shift if data not in SHIFTS)):
            read_data_flag(data, "fewshot.transfer or shift")
        self.names: tuple[str, ...] = ()
        """Of all classes, in order."""
        self._others: dict[str, tuple[PictureDataset, str, list[int]]] | None = None
        self._tests: dict[str, Subset] = {}

    @functools.cached_property
    def encoder(self) -> Encoder:
        """The CLIP that the recipe names, frozen and on its device."""
        device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        random_init, seed = self.settings.random_init, self.recipe.run.seed
        encoder = load_encoder(self.recipe.model.name, random_init=random_init, seed=seed, device=device)
        if encoder.image_tower is None:
            raise UserError(f"{encoder.name} reads text alone; few-shot learning needs a CLIP or SigLIP model")
        encoder.model.requires_grad_(False)
        return encoder

    @functools.cached_property
    def fingerprint(self) -> str:
        """What stands for the encoder's weights."""
        return encoder_fingerprint(self.encoder)

    @functools.cached_property
    def texts(self) -> TextTable:
        """Features of texts by the encoder, which stays as it is for the whole run."""
        return TextTable(self.encoder.encode_text)

    @property
    def base_new(self) -> tuple[list[int], list[int]]:
        """Classes to train on, and those that are tested apart."""
        is_split = self.settings.protocol == "base-to-new"
        return split_base_new(len(self.names)) if is_split else (list(range(len(self.names))), [])

    def _chosen(self, classes: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.names[label] for label in classes)

    # -------------------------------------------------------------------------------------------------------- data

    def build_dataset(self, split: str) -> PictureDataset:
        """The pictures; what cannot be is told here, before any feature is made."""
        dataset = self._dataset(split)
        names = class_names(dataset.classes)
        if self.names and names != self.names:
            raise UserError(
                f"data {self.recipe.data.name}: the {len(names)} classes of {split} are not the {len(self.names)} that "
                "were learned; fewshot.transfer tests on others"
            )
        self.names = names
        if split == "train" and hasattr(dataset, "labels"):
            sample_shots(labels_of(dataset), self.settings.shots, self.recipe.run.seed, self.base_new[0], names)
        if self._others is None:
            self._others = self._find_others()
        return dataset

    def _dataset(self, split: str, data: str = "") -> PictureDataset:
        """A split of the recipe's data, or of others."""
        settings = self.recipe.data
        if data:
            name, root = read_data_flag(data)
            settings = dataclasses.replace(settings, name=name, root=root, num_classes=None)
        dataset = build_dataset(settings, split)
        if not dataset.classes:
            raise UserError(f"data {data or settings.name} has no class per picture, as pets or world have it")
        return dataset

    def _find_others(self) -> dict[str, tuple[PictureDataset, str, list[int]]]:
        """Other tests: their name to the pictures, how these are shifted, and the classes tested on."""
        others: dict[str, tuple[PictureDataset, str, list[int]]] = {}
        for data, short in short_names(self.settings.transfer, "transfer").items():
            dataset = self._dataset("val", data)
            others[f"transfer_{short}"] = (dataset, "", list(range(len(dataset.classes))))
        for data, short in short_names(self.settings.shift, "shift").items():
            dataset = self._dataset("val", "" if data in SHIFTS else data)
            shared = [i for i, name in enumerate(class_names(dataset.classes)) if name in self.names]
            if not shared:
                raise UserError(f"fewshot.shift {data} has none of the {len(self.names)} classes; use fewshot.transfer")
            others[f"shift_{short}"] = (dataset, data if data in SHIFTS else "", shared)
        return others

    def _pictures(self, dataset: PictureDataset, what: str, shift: str = "") -> Pictures:
        """What the host takes for pictures: features, or pixels where its image tower learns."""
        change = SHIFTS[shift] if shift else None
        if self.settings.host == "joint":
            return PixelSet(self.encoder, dataset, change)
        features = picture_features(
            *(self.encoder, dataset, self.settings.cache),
            change=change,
            change_name=shift,
            shown_as=f"features of {what}",
            fingerprint=self.fingerprint,
        )
        if features.bad and self.recipe.data.strict:
            name, why = next(iter(features.bad.items()))
            raise UserError(f"cannot read picture {name}: {why}; repair it or switch strict off")
        return features

    def build_loader(
        self, dataset: Any, train: bool, *, rank: int = 0, world_size: int = 1, skipped: dict[str, str] | None = None
    ) -> Loader:
        """Shots, or every test in turn; one process alone, since the losses compare all pictures of a batch."""
        if world_size > 1:
            raise UserError(
                f"the task fewshot compares all pictures of a batch, which {world_size} processes cannot share; start "
                "one, and runs at the same time by hyptree compare --jobs"
            )
        base, new = self.base_new
        pictures = self._pictures(dataset, "train" if train else "test")
        loader: Loader
        if train:
            settings, seed = self.settings, self.recipe.run.seed
            index = sample_shots(pictures.labels, settings.shots, seed, base, self.names)
            loader = ShotLoader(Subset(pictures, base, self._chosen(base)), index, self.batch_size(True), seed)
            unreadable = dict(pictures.bad)
        else:
            tests = {BASE: Subset(pictures, base, self._chosen(base))}
            if new:
                tests[NEW] = Subset(pictures, new, self._chosen(new))
            for name, (other, shift, classes) in (self._others or {}).items():
                names = class_names(other.classes)
                tests[name] = Subset(self._pictures(other, name, shift), classes, tuple(names[i] for i in classes))
            self._tests = tests
            loader = SubsetLoader(tests, self.batch_size(False))
            unreadable = {name: why for test in tests.values() for name, why in test.pictures.bad.items()}
        if skipped is not None:
            skipped.update(unreadable)
        return loader

    def describe(self, dataset: Any) -> dict[str, Any]:
        """Names of all classes and how many of them are learned, the encoder's name, scale and some of its weights."""
        encoder = self.encoder
        return {
            "classes": list(class_names(dataset.classes)),
            "num_learned": len(self.base_new[0]),
            "logit_scale": float(encoder.logit_scale.detach()),
            "encoder": encoder.name,
            "encoder_weights": samples(encoder.model),
        }

    # ------------------------------------------------------------------------------------------------------- model

    def build_model(self, data: dict[str, Any]) -> FewShotModel:
        recipe, settings = self.recipe, self.settings
        self.names = tuple(data["classes"])
        names = self.names[: data["num_learned"]]
        self._fill_texts()
        host = build_host(settings, self.encoder, self.texts, recipe.run.seed)
        head = build_head(host, names, data["logit_scale"], settings, recipe.run.seed)
        for p in head.parameters():
            p._lr_scale = (settings.attribute_lr or recipe.optim.lr) / recipe.optim.lr  # type: ignore[attr-defined]
        for p in (*head.parameters(), *host.parameters()):
            p._no_weight_decay = False  # type: ignore[attr-defined]  # vectors are decayed too, as published
        self._is_checked = False
        return FewShotModel(head, host, names, self.fingerprint)

    def _fill_texts(self) -> None:
        """Texts of the frozen host, read from where the features are kept or written there."""
        settings = self.settings
        sentences = [settings.template.format(name) for name in self.names]
        path = settings.cache / f"{self.fingerprint}-texts.safetensors"
        self.texts.fill_from(path, [*sentences, *class_names(settings.attribute_words)], self.fingerprint)

    def training_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        self._check(model)
        _, losses = model(batch["inputs"], batch["label"])
        loss = losses.pop("total")
        if not loss.requires_grad:  # with these parts nothing that is learned reaches it
            loss = loss + 0 * model.head.attributes.sum()  # type: ignore[operator, union-attr]
        return loss, {name: value.detach() for name, value in losses.items()}

    # ----------------------------------------------------------------------------------------------------- numbers

    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], gather: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        self._check(model)
        assert isinstance(model, FewShotModel)
        tallies: dict[str, Tally] = {}
        for batch in batches:
            images, name = model.host.image_features(batch["inputs"]), batch["test"]
            with torch.autocast(images.device.type, enabled=False):
                if name not in tallies:
                    tallies[name] = Tally(model, self._tests[name].names)
                tallies[name].add(images.float(), batch["label"])
        numbers = tallies.pop(BASE).numbers()
        top1 = numbers["top1"]
        if NEW in tallies:
            new = tallies.pop(NEW).numbers()["top1"]
            numbers |= {"base": top1, "new": new, "h": harmonic_mean(top1, new)}
        return numbers | {name: tally.numbers()["top1"] for name, tally in tallies.items()}

    def _check(self, model: nn.Module) -> None:
        """Once, before the first batch: whether weights that were filled in belong to this encoder."""
        if not self._is_checked:
            model.check_base()  # type: ignore[operator]
            self._is_checked = True


def short_names(datas: Sequence[str], key: str) -> dict[str, str]:
    """A short name for each of several data; where two have the same, as much more of the path as tells them apart."""
    names = {data: _short(data) for data in datas}
    if len({data.rstrip("/") for data in datas}) < len(datas):
        raise UserError(f"fewshot.{key} names the same data twice: {' '.join(datas)}; give each once")
    for parts in range(2, 2 + max((data.count("/") + 1 for data in datas), default=0)):
        taken = list(names.values())
        names = {data: _short(data, parts) if taken.count(name) > 1 else name for data, name in names.items()}
    return names


def _short(data: str, parts: int = 1) -> str:
    """``pets`` of ``pets:some/folder``, the last part of a path otherwise; with more parts, more of the path.

    Parts are joined by an underscore: a slash in the name of a number means one of many that only files show.
    """
    name, colon, root = data.partition(":")
    path = (root if colon else data).rstrip("/").split("/")
    if colon:
        return "_".join([name, *path[max(0, len(path) + 1 - parts) :]])
    return "_".join(path[-parts:])
